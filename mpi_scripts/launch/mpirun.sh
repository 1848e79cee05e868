#!/bin/sh
# Starts a command on all slots of a host file with Open MPI over ssh:
#     INTERFACE=eth0 mpi_scripts/launch/mpirun.sh hosts python train.py
# Checkout and environment lie under the same path on every host; ssh asks for no password.
set -eu
if [ $# -lt 2 ]; then echo "usage: INTERFACE=eth0 $0 HOSTFILE COMMAND" >&2; exit 2; fi
hosts=$1
shift
# The network that all hosts share. Without it Open MPI may try a bridge of containers, and hang.
interface=${INTERFACE:-eth0}

# ssh brings no environment along: name what ranks need. --prefix tells where Open MPI lies on the other hosts.
ours=$(env | sed -n '/^HOROVOD_GLOO_IFACE=/d; s/^\(HOROVOD_[A-Z0-9_]*\)=.*/\1/p')  # the interface is named below
for name in PATH LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV OMP_NUM_THREADS $ours; do
    if printenv "$name" > /dev/null; then set -- -x "$name" "$@"; fi
done
if [ -n "${OPAL_PREFIX:-}" ]; then set -- --prefix "$OPAL_PREFIX" "$@"; fi

# On InfiniBand with UCX leave the two btl lines out; NCCL_SOCKET_IFNAME counts for GPUs.
exec mpirun --hostfile "$hosts" --bind-to none --map-by slot \
    --mca btl tcp,self,vader --mca pml ob1 \
    --mca btl_tcp_if_include "$interface" --mca oob_tcp_if_include "$interface" \
    -x HOROVOD_GLOO_IFACE="$interface" -x GLOO_SOCKET_IFNAME="$interface" -x NCCL_SOCKET_IFNAME="$interface" "$@"
