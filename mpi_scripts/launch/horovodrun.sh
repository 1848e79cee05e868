#!/bin/sh
# Starts a command on all slots of a host file with horovodrun over ssh:
#     INTERFACE=eth0 mpi_scripts/launch/horovodrun.sh hosts python train.py
# STACK=gloo needs no MPI; STACK=mpi (the default) goes through mpirun. Host file, paths and ssh: as for mpirun.sh.
set -eu
hosts=$1
shift
# horovodrun reads no comments in a host file: its hosts are given by name.
named=$(sed -n 's/^\([^# ][^ ]*\)  *slots=\([0-9]*\).*/\1:\2/p' "$hosts" | paste -sd, -)
ranks=$(awk -F 'slots=' '/^[^#]/ { ranks += $2 } END { print ranks + 0 }' "$hosts")

# ssh brings no environment along: tells where Open MPI lies on the other hosts.
if [ "${STACK:=mpi}" = mpi ] && [ -n "${OPAL_PREFIX:-}" ]; then set -- --mpi-args="--prefix $OPAL_PREFIX" "$@"; fi

exec horovodrun --"$STACK" -np "$ranks" -H "$named" --network-interfaces "${INTERFACE:-eth0}" "$@"
