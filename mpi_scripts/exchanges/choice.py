"""What one row of the comparison is measured on."""

from dataclasses import dataclass

__all__ = ["COMMUNICATORS", "FORMATS", "Choice"]

COMMUNICATORS = ("mpi", "horovod", "torch")
FORMATS = ("fp32", "bf16", "fp16", "int8", "int4", "book4", "book2")


@dataclass(frozen=True)
class Choice:
    """One exchange to be measured.

    Attributes:
        model: name of a model whose gradients are exchanged.
        method: name of a method.
        communicator: what carries RingPrune's messages; the others have their own.
        rate: of the links as the user wrote it; ``"as it is"`` where it was not told.
        density: share of entries that RingPrune's policies send.
        values: number format of RingPrune's packed values; None leaves it to the policy.
        dense_values: the same for tensors that travel whole.
        bucket_bytes: size of RingPrune's buckets; None leaves it to the wrapper.
        steps: steps that are timed.
        warmup: steps before them.
        seed: of weights, gradients and roots.
        peer: ``MODULE:FUNCTION`` of an outside exchange; None where there is none.
    """

    model: str
    method: str
    communicator: str = "mpi"
    rate: str = "as it is"
    density: float = 0.01
    values: str | None = None
    dense_values: str | None = None
    bucket_bytes: int | None = None
    steps: int = 5
    warmup: int = 2
    seed: int = 0
    peer: str | None = None
