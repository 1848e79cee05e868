"""A first job for mpirun: Horovod and mpi4py share the ranks, each sums over them."""

import horovod.torch as hvd
import torch

hvd.init()
from mpi4py import MPI  # noqa: E402  after hvd.init(), which starts MPI with the thread level Horovod needs

comm = MPI.COMM_WORLD.Dup()
expected = sum(range(comm.size))
assert hvd.size() == comm.size > 1, f"Horovod sees {hvd.size()} ranks, mpi4py {comm.size}"
assert comm.allreduce(hvd.rank()) == expected, "mpi4py's sum is wrong"
comm.Free()
print(f"rank {hvd.rank()} of {hvd.size()} is up: {MPI.Get_library_version().split(',')[0]}")

# Horovod comes last: the first rank that ends shuts Horovod, and with it MPI, down on all ranks. Nobody gets past this
# sum before all ranks are done with mpi4py.
total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum)
assert total.item() == expected, "Horovod's sum is wrong"
