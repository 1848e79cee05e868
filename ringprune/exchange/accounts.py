"""What an exchange has sent and found, for people: bytes by parameter, how selection went, what a guard has seen."""

import logging
from collections.abc import Sequence
from typing import Any

from ringprune import ops
from ringprune.exchange.kept import KeptLane
from ringprune.exchange.lane import Lane, Setting
from ringprune.exchange.lanes import exchanging
from ringprune.exchange.packed import PackedLane
from ringprune.exchange.rows import RowsLane
from ringprune.exchange.watch import Watch
from ringprune.metrics import Content
from ringprune.plan import Plan

__all__ = ["Accounts"]

_log = logging.getLogger("ringprune")


class Accounts:
    """Reads the lanes of an exchange, and changes nothing that is exchanged.

    Args:
        plan: what is exchanged.
        setting: what the lanes share.
        lanes: one for each bucket; none once the exchange has let go of them.
    """

    def __init__(self, plan: Plan, setting: Setting, lanes: Sequence[Lane]) -> None:
        self._plan, self._setting, self._lanes = plan, setting, lanes

    def stats(self) -> dict[str, Any]:
        """All of it, as plain numbers and words."""
        return {
            "selection": self.tally(),
            "reduction": self._setting.ring.reason,
            "guard": self._guarded(),
            "rows": self._ways(),
            "parameters": self.bytes_by_parameter(),
        }

    def tally(self) -> dict[str, int]:
        """How selection went on this rank: see :class:`ringprune.ops.Hints`."""
        total = dict.fromkeys(ops.TALLY, 0)
        for lane in map(exchanging, self._lanes):
            if isinstance(lane, PackedLane):
                total = {name: total[name] + count for name, count in lane.residual.hints.counts().items()}
        return total

    def bytes_by_parameter(self) -> dict[str, dict[Content, float]]:
        """Bytes sent of each parameter, by content; they add up to those of all, less statistics of BatchNorm.

        A bucket's bytes are divided by the entries that were sent of its tensors, dense ones by all, headers evenly.
        """
        metrics, params = self._setting.metrics, self._plan.params
        shares: dict[str, dict[Content, float]] = {spec.name: metrics.of_parameter(spec.name) for spec in params}
        for lane in map(exchanging, self._lanes):
            sent = lane.sent.tolist() if isinstance(lane, KeptLane) else lane.bucket.numels
            for member, part in zip(lane.bucket.members, sent, strict=True):
                for content, total in metrics.of_bucket(lane.bucket.index).items():
                    numels = content == "dense" or not sum(sent)
                    whole = lane.bucket.numel if numels else sum(sent)
                    share = params[member].numel if numels else part
                    shares[params[member].name][content] += total * share / max(1, whole)
        for share in shares.values():
            share["headers"] = metrics.headers / len(params)
        return shares

    def report(self, exchanges: int) -> None:
        """Say which tensors are sent whole from now on, why, and what that costs; once, on rank 0.

        Args:
            exchanges: how many were made, by another one too.
        """
        for watch in self._watches():
            news, watch.news = watch.news, []
            for member in news if self._setting.comm.rank == 0 else ():
                name = self._plan.params[member].name
                sent = self.bytes_by_parameter()[name]
                cost = (sent["values"] + sent["indices"]) / exchanges
                _log.warning("%r is sent whole from now on: %s", name, watch.reason(member, cost))

    def _ways(self) -> dict[str, dict[str, int]]:
        """How many steps the rows of each table have gone each way."""
        lanes = [lane for lane in self._lanes if isinstance(lane, RowsLane)]
        return {self._plan.params[lane.bucket.members[0]].name: dict(lane.taken) for lane in lanes}

    def _guarded(self) -> dict[str, dict[str, float]]:
        """What a guard has found of each packed tensor at its last check, and whether it is sent whole."""
        return {self._plan.params[i].name: told for watch in self._watches() for i, told in watch.told().items()}

    def _watches(self) -> list[Watch]:
        return [each.watch for each in map(exchanging, self._lanes) if isinstance(each, PackedLane) and each.watch]
