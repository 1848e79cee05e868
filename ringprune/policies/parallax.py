"""Parallax: dense gradients by an allreduce, and the rows of sparse ones by whichever way sends the fewest bytes."""

from dataclasses import replace

from ringprune.policies.dense import Dense
from ringprune.policies.policy import Policy
from ringprune.routing import Rows

__all__ = ["Parallax"]


def Parallax(way: str = "auto", *, values: str = "fp32", dense_values: str = "fp32") -> Policy:
    """Parallax (Kim and others, EuroSys 2019, arXiv 1808.02621), without servers.

    A batch touches few rows of a large embedding. With ``nn.Embedding(sparse=True)`` or
    ``nn.EmbeddingBag(sparse=True)`` its gradient has these rows only, and so has what the ranks exchange, and the
    average that the wrapped optimizer sees: ``torch.optim.SGD``, ``Adagrad`` and ``SparseAdam`` step on sparse
    gradients. All others travel dense, as with :func:`ringprune.Dense`.

    Of a table of ``n`` rows of ``R`` bytes, each of ``P`` ranks has ``u`` rows on average, and all ranks together have
    ``U``. With 4 bytes for the number of a row, and in units of ``(P-1)/P`` bytes per rank:

    * ``"gather"``, an allgather of all ranks' rows: ``(R + 4) P u``;
    * ``"dense"``, an allreduce of the table: ``4 P u + 2 R n``;
    * ``"union"``, an allreduce of the rows that some rank has: ``4 P u + 2 R U``;
    * ``"owners"``, each row to rank ``row mod P``, whose sums go to all: ``(R + 4) (u + U) + 8 P``.

    ``"auto"`` takes the smallest at each step, by ``u_r``, which all ranks tell, and the ``U`` that is to be expected:
    the ranks overlap as at the step before. By these bytes that is ``"gather"`` where they hardly overlap and
    ``"owners"`` where they do; the other two take fewer messages one after the other, for slow latencies.

    From the paper: which variables are sparse is known beforehand; dense ones by an allreduce, sparse ones by parameter
    servers, over which rows are spread; of a share ``alpha`` of ``m`` tables of ``w`` bytes a machine then transfers
    ``4 alpha w m (N-1)/N``, with an allgather ``2 alpha w m (N-1)``, both directions counted.

    Differs from the paper: the ranks are the servers, as ``"owners"`` has it, and keep no weights, so that any
    optimizer's state is where it was. The way is chosen by counts, where the paper measures times to choose the number
    of partitions. Rows are not summed inside a machine first.

    The wrapper needs ``model=``. ``dataclasses.replace(rp.IWP(0.01), rows=rp.Rows())`` compresses what is dense.

    Args:
        way: ``"auto"``, or one of the four always.
        values: of rows, ``"fp32"``, ``"fp16"`` or ``"bf16"`` on the wire; what rounding drops is lost.
        dense_values: of dense tensors, as with :func:`ringprune.Dense`.

    Returns:
        The policy.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument cannot work.
    """
    return replace(Dense(dense_values), name="parallax", rows=Rows(way, values))
