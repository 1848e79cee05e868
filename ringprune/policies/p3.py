"""P3: dense gradients, cut into slices, and first those that the next forward pass needs first."""

from dataclasses import replace

from ringprune.policies.dense import Dense
from ringprune.policies.policy import Policy
from ringprune.schedule import LayerPriority

__all__ = ["P3"]


def P3(
    slice_bytes: int = 4 << 20, credit_bytes: int = 8 << 20, *, fuse_bytes: int = 1 << 20, values: str = "fp32"
) -> Policy:
    """Priority-based Parameter Propagation (Jayarajan and others, MLSys 2019, arXiv 1905.03960), on an allreduce.

    Every gradient is sent whole, as with :func:`ringprune.Dense`, and the weights are the same. What changes is when:

    1. Tensors are cut into slices of at most ``slice_bytes``, each of which is averaged by itself.
    2. Slices of layers that the forward pass uses first go first, however late their gradients came, with at most
       ``credit_bytes`` outstanding.
    3. ``step()`` returns at once. Before a layer runs, the next forward pass waits for that layer's slices, and the
       wrapped optimizer steps on its parameters alone.

    So sending overlaps with backward and with forward, where plain data parallelism has to be done with it between the
    two. That helps where communication takes about as long as computing; where it takes much less there is nothing to
    gain, and where it takes much more nothing is hidden by it.

    Parameters read outside the forward pass (a moving average of weights, weight clipping, a checkpoint by hand) are
    those of before the step until ``optimizer.synchronize()``. Gradients are gone after ``step()``.

    Over Horovod's own communicator it is slower than Horovod: give the wrapper ``comm="torch"`` or ``"mpi"``.

    Differs from the paper: an allreduce instead of a parameter server; larger slices, since an allreduce of N ranks is
    2(N-1) messages one after the other; small tensors go together; a bound of what is outstanding (ByteScheduler, SOSP
    2019) in place of one slice at a time; rank 0 decides the order on the way and tells it in 4 bytes per bucket.

    Args:
        slice_bytes: largest slice, as float32.
        credit_bytes: bytes outstanding at a time.
        fuse_bytes: neighbouring small tensors travel together up to this size; 0 sends each by itself.
        values: ``"fp32"``, or fewer bits on the wire, as with :func:`ringprune.Dense`.

    Returns:
        The policy. ``replace(rp.IWP(...), schedule=rp.LayerPriority())`` schedules a compressed exchange likewise.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument cannot work.
    """
    return replace(Dense(values), name="p3", schedule=LayerPriority(slice_bytes, credit_bytes, fuse_bytes))
