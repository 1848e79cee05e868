#!/bin/sh
# Starts a command on all slots of a host file with horovodrun over ssh:
#     INTERFACE=eth0 mpi_scripts/launch/horovodrun.sh hosts python train.py
# STACK=gloo needs no MPI; STACK=mpi (the default) goes through mpirun. Host file, paths and ssh: as for mpirun.sh.
set -eu
if [ $# -lt 2 ]; then echo "usage: INTERFACE=eth0 $0 HOSTFILE COMMAND" >&2; exit 2; fi
hosts=$1
shift
# horovodrun reads no comments in a host file: its hosts are given by name. None is left out in silence.
named=$(awk -v file="$hosts" '
    { sub(/[#\r].*/, "") }
    !NF { next }
    !match($0, /[ \t]slots=[0-9]+/) { print file ": write node1 slots=4, not " $0 > "/dev/stderr"; exit 1 }
    { printf "%s%s:%s", comma, $1, substr($0, RSTART + 7, RLENGTH - 7); comma = "," }
' "$hosts")
ranks=$(echo "$named" | tr , '\n' | awk -F : '{ ranks += $2 } END { print +ranks }')
if [ "$ranks" -eq 0 ]; then echo "$hosts: no host with slots" >&2; exit 1; fi

# ssh brings no environment along: tells where Open MPI lies on the other hosts.
if [ "${STACK:=mpi}" = mpi ] && [ -n "${OPAL_PREFIX:-}" ]; then set -- --mpi-args="--prefix '$OPAL_PREFIX'" "$@"; fi

# horovodrun tells the network to MPI, Horovod's Gloo and NCCL. It hands on what is exported; torch's Gloo reads this.
export GLOO_SOCKET_IFNAME="${INTERFACE:-${GLOO_SOCKET_IFNAME:-eth0}}"

exec horovodrun --"$STACK" -np "$ranks" -H "$named" --network-interfaces "${INTERFACE:-eth0}" "$@"
