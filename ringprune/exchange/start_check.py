"""Before the first step: all ranks start from the same weights and the same step, with the same momentum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune import ops
from ringprune.comm.communicator import Communicator
from ringprune.errors import RankMismatchError
from ringprune.exchange.lane import Setting
from ringprune.metrics import Metrics
from ringprune.plan import Plan

__all__ = ["check_place", "check_start"]

_OTHER_STATE = (
    "the wrapped optimizer has other momentum or moments on rank {} than on rank 0, and ranks would step away from "
    "each other: before the first step give all ranks the state of one (hvd.broadcast_optimizer_state, or a file that "
    "all load), or clear it on all (optimizer.state.clear()). After local steps each rank has its own"
)


def check_start(step: int, resumed: bool, setting: Setting, plan: Plan) -> None:
    """Compare where ranks continue, their weights, and what else has to be equal; costs 8 bytes per parameter.

    By sums of squares: one for each parameter, and one of all the rest.

    Args:
        step: exchanges made before.
        resumed: before the first of them, after local steps that a checkpoint told of. How many these are, then or
            later, need not be the same: each rank makes its own until the next exchange.
        setting: the ranks, the weights, the rest; its metrics count the bytes as headers.
        plan: the weights' names.

    Raises:
        RankMismatchError: they differ; on all ranks, naming the first parameter that does.
    """
    comm, weights = setting.comm, setting.weights
    # One after the other, so that all processors make the same sum.
    rest = torch.tensor([sum(_squares(setting.besides()).tolist())], dtype=torch.float64, device="cpu")
    place = torch.tensor([step or resumed / 2], dtype=torch.float64, device="cpu")
    row = torch.cat([place, _squares(weights), rest]).to(weights[0].device if weights else torch.device("cpu"))
    with setting.metrics.sending("headers"):
        comm.barrier(name="the check at the start")  # where some have loaded a checkpoint, others may be in a step
        gathered = comm.allgather(row, name="weights at the start").wait()
    # As bits, so that NaN equals NaN.
    rows = gathered.reshape(comm.size, -1).cpu().view(torch.int64)
    differs = (rows != rows[0]).nonzero()
    if not len(differs):
        return
    rank, column = min(((int(r), int(c)) for r, c in differs), key=lambda pair: pair[1])
    if column == 0:
        places = gathered.reshape(comm.size, -1)[:, 0].tolist()
        raise RankMismatchError(_elsewhere([_said(place) for place in places], rank))
    if column > len(weights):
        raise RankMismatchError(_OTHER_STATE.format(rank))
    raise RankMismatchError(
        f"parameter {plan.params[column - 1].name!r} has other weights on rank {rank} than on rank 0: call "
        "ringprune.broadcast_parameters(model.state_dict()) or hvd.broadcast_parameters before the first step, "
        "and change weights between steps alike on all ranks (max_norm of an Embedding changes those that one rank "
        "looks up)"
    )


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    return ops.square_sum([tensor.detach().contiguous() for tensor in tensors]).cpu()


def check_place(step: int, loaded: bool, comm: Communicator, metrics: Metrics, device: torch.device) -> None:
    """Compare where ranks continue; costs 16 bytes.

    Args:
        step: exchanges made before.
        loaded: from a checkpoint that is this rank's own.
        comm: the ranks.
        metrics: counts the bytes as headers.
        device: where messages live.

    Raises:
        RankMismatchError: they do not continue at the same step of such a checkpoint, or of none; on all ranks.
    """
    with metrics.sending("headers"):
        row = torch.tensor([step, loaded], dtype=torch.int64, device=device)
        rows = comm.allgather(row, name="step at the broadcast").wait().reshape(comm.size, 2).tolist()
    said = [f"at step {step}{' of its own checkpoint' if loaded else ''}" for step, loaded in rows]
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise RankMismatchError(
                f"{_elsewhere(said, rank)}. hvd.broadcast_optimizer_state gives other ranks nothing of what "
                "RingPrune keeps: where Horovod's rank 0 alone loads, all do here"
            )


def _elsewhere(said: Sequence[str], rank: int) -> str:
    return (
        f"rank 0 continues {said[0]}, rank {rank} {said[rank]}: load a checkpoint on all ranks, "
        "each its own, or one that was saved after flush()"
    )


def _said(place: float) -> str:
    return f"at step {place:.0f}" if place.is_integer() else "in the first interval"
