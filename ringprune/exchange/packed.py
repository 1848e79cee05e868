"""A bucket that travels packed: values at one index set, which roots propose and all ranks share."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringprune import agreement, importance, ops, packing, sampling, selection, wire
from ringprune.comm.communicator import CPU
from ringprune.devices import to_device
from ringprune.exchange.core import Core
from ringprune.exchange.kept import KeptLane
from ringprune.exchange.lane import Setting, StateOf, UnderWay
from ringprune.exchange.relevance import REFRESH, Relevance
from ringprune.exchange.smoothing import Smoothing
from ringprune.exchange.watch import Watch
from ringprune.plan import Bucket
from ringprune.residual import Correction, Selecting
from ringprune.routing import sent_whole

__all__ = ["PackedLane"]


class PackedLane(KeptLane):
    """Stages 1 to 7 of a bucket whose ranks agree on one index set.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.

    Attributes:
        watch: what a guard knows of it; None without one.
        passes_next: whether the next to read the state after values were taken is the pass of the next step.
    """

    passes_next = True

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting, "values", velocity=setting.velocity, low_pass=setting.policy.low_pass)
        self._rms = self._next_rms = torch.zeros(len(bucket.members), dtype=torch.float64, device="cpu")
        self._proposals: agreement.Proposals | None = None
        self._counts: list[int] = []
        self._divided: list[int] = []  # this step's budget, as if no tensor were sent whole
        self._positions: Tensor | None = None
        self._whole = False
        self._explored: Tensor | None = None
        self._index_code = wire.index_code(0, bucket.numel)
        self._roots = setting.policy.roots.number(setting.comm.size)
        policy = setting.policy
        self._core = None if policy.refresh == 1 else Core(policy, setting.first, bucket)
        self.watch = None if setting.guard is None else Watch(setting.guard, bucket, setting)
        self._step = 0
        self._chose, self._wait_before = -1, 0  # when this rank chose last, and how many steps after the time before
        self._relevance = Relevance(bucket.numels) if policy.layers == "relevance" else None
        self._smoothing = Smoothing(policy.smoothing, bucket.numel, bucket.device) if policy.smoothing else None
        if self._smoothing is not None:
            self.residual.expected = self._smoothing.estimate

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor:
        """Stages 1 to 3, where this rank is a root of the bucket; accumulate elsewhere."""
        metrics = self._setting.metrics
        self._prepare(step)
        if not self._is_root(step):
            with metrics.stage("accumulate"):
                return self.residual.accumulate(corrected, correction)
        with metrics.stage("select"):
            if self._setting.policy.selection == "sampled":
                nonfinite = self.residual.accumulate(corrected, correction)
                self._positions = self._sampled(step, self.residual.next_residual)
                return nonfinite
            self._aim(step)
            self._positions, nonfinite = self.residual.accumulate_select(
                corrected, correction, self._weights(), self._selecting()
            )
        return nonfinite

    def _aim(self, step: int) -> None:
        """Keep the hints only where this rank has waited for its turn as long as the last time: scores grow meanwhile.

        A CPU's kernel then takes a small sample, which costs less than a hint that does not fit; CUDA's takes none.
        """
        waited = step - self._chose
        if waited != self._wait_before and self.bucket.device.type == "cpu":
            self.residual.hints.forget()
        self._chose, self._wait_before = step, waited

    def _sampled(self, step: int, residual: Tensor) -> Tensor:
        """Stages 2 and 3 on ``residual``, approximately; each rank has a sample of its own."""
        selecting, setting = self._selecting(), self._setting
        scores = ops.importance(residual, self._weights(), score=selecting.score, parameters=selecting.parameters)
        key = (setting.seed, step, self.bucket.index, setting.comm.rank)
        return sampling.select_sampled(scores, self.bucket.offsets, self._counts, *key)

    def _prepare(self, step: int) -> None:
        """What every rank knows of a step: how many entries are sent of each tensor, which are drawn, and the rms."""
        policy = self._setting.policy
        with self._setting.metrics.stage("accumulate"):
            self._next_rms = self._rms
            if step % importance.RMS_REFRESH == 0 or step == self._setting.first:
                self._next_rms = importance.root_mean_square(self._weights())
        self._proposals = self._explored = self._positions = None
        density = policy.density.at(step)
        self._whole = sent_whole(density) or self._setting.whole or (self.watch is not None and all(self.watch.whole))
        self._counts = [] if self._whole else self._shares(step, density)

    def _shares(self, step: int, density: float) -> list[int]:
        """Entries that each root proposes of each tensor, none between refreshes; what is explored is drawn here."""
        rotation = self._setting.rotation
        drawn, counts = selection.shares(self._budgets(density), self._setting.policy.explore, self._roots)
        if rotation is not None:
            drawn = rotation.counts(self.bucket, drawn, step)
            counts = rotation.counts(self.bucket, counts, step) if self._core is None else counts
        if any(drawn):
            self._explored = self._draw(drawn, step)
        return counts if self._core is None or self._core.due(step) else []

    def _budgets(self, density: float) -> list[int]:
        """Entries to send of each tensor; none of those that are sent whole beside the others."""
        relevance, watch = self._relevance, self.watch
        budgets = selection.budgets(self.bucket.numels, density) if relevance is None else relevance.budgets(density)
        self._divided = budgets
        return budgets if watch is None else [0 if w else k for k, w in zip(budgets, watch.whole, strict=True)]

    def _draw(self, drawn: Sequence[int], step: int) -> Tensor | None:
        """Positions that all ranks explore, drawn with the shared seed."""
        positions = selection.explore(drawn, self.bucket.offsets, self._setting.seed, step, self.bucket.index)
        return to_device(positions, self.bucket.device)

    def _roots_of(self, step: int) -> tuple[int, ...]:
        setting = self._setting
        return setting.policy.roots.of(setting.seed, self._turn(step), self.bucket.index, setting.comm.size)

    def _turn(self, step: int) -> int:
        """Of those who choose: by it roots are drawn, or take turns."""
        policy = self._setting.policy
        if self._core is not None:  # between refreshes nobody chooses, in a warm-up somebody does at each step
            return step // policy.refresh if policy.density.steady(step) else step
        # Of a tensor that has its turn at each second step, every second rank would never choose.
        return step // policy.turns if policy.roots.order == "cyclic" else step

    def _is_root(self, step: int) -> bool:
        """Whether this rank selects; nobody does where nothing is proposed."""
        return any(self._counts) and self._setting.comm.rank in self._roots_of(step)

    def _selecting(self) -> Selecting:
        score = self._setting.policy.score
        return Selecting(score.name, score.parameters(self._next_rms), self._counts)

    def _send(self, step: int) -> None:
        """[4] Send this rank's proposal, or receive those of the roots; once."""
        bucket, setting, positions = self.bucket, self._setting, self._positions
        if not any(self._counts) or self._proposals is not None:
            return
        self._index_code = wire.index_code(sum(self._counts), bucket.numel, setting.policy.index_format)
        with setting.metrics.stage("agree"), setting.metrics.sending("indices", bucket.index):
            if positions is None:
                message = torch.empty(self._index_code.size, dtype=torch.uint8, device=CPU)
            else:
                message = self._index_code.encode(positions)
            name = f"bucket {bucket.index} indices"
            self._proposals = agreement.Proposals(setting.comm, self._roots_of(step), message, name=name)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        metrics = self._setting.metrics
        if self._relevance is not None and step % REFRESH == 0:
            self._read_relevance(self._relevance)
        self._send(step)
        if self._proposals is not None:
            yield self._proposals
        with metrics.stage("agree"):
            self._indices = self._agreed(step)
        with metrics.stage("pack"):
            values = self._pack()
        self._reduce_taken(values)
        yield from self._rounds()

    def _read_relevance(self, relevance: Relevance) -> None:
        """Begin to agree on how the next steps' budgets are divided; nobody waits for it during this step."""
        setting, name = self._setting, f"bucket {self.bucket.index} relevance"
        with setting.metrics.stage("agree"), setting.metrics.sending("headers"):
            relevance.read(self.residual.next_residual, self._weights(), setting.comm, name=name)

    def _agreed(self, step: int) -> Tensor | None:
        """[4] The index set of this step; None where the bucket is sent whole."""
        bucket, rotation = self.bucket, self._setting.rotation
        if self._whole:
            return None if rotation is None else rotation.everything(bucket, step)
        sets = self._proposed(step)
        if self._core is not None:
            core = self._core.of(step, sets)
            if self.watch is not None and any(self.watch.whole):  # turned so since the core was chosen
                core = selection.within(core, bucket.offsets, [not whole for whole in self.watch.whole])
            sets = [core if rotation is None else rotation.within(bucket, core, step)]
        if self._explored is not None:
            sets.append(self._explored)
        return agreement.union(sets, self.bucket.device)

    def _proposed(self, step: int) -> list[Tensor]:
        """What the roots have proposed, as one set; none where nobody proposes."""
        if self._proposals is None:
            return []
        code, device, index = self._index_code, self.bucket.device, self.bucket.index
        came = {f"bucket {index} indices from rank {r} at step {step}": sent for r, sent in self._proposals.wait()}
        if code.coding == "bitmap":  # which are one set before they are positions, and become these on the device
            return [code.decode_maps(came, device)]
        sets = [code.decode(message, name=name) for name, message in came.items()]
        return [to_device(agreement.union(sets, CPU), device)]

    def _pack(self) -> Tensor:
        """[5] Values leave the residual."""
        self._count(self._indices)
        if self._indices is None:
            return self.residual.take_all()
        return self._take(self._indices)

    def _take(self, indices: Tensor) -> Tensor:
        state = self.residual
        masked = state.next_velocity if self._setting.policy.mask_velocity else None
        lazily = self.passes_next and state.waits
        values, sent = packing.pack(state.next_residual, masked, indices, self.bucket.offsets, lazily=lazily)
        if sent is not None:
            state.leave(sent)
        return values

    # -- the guard ----------------------------------------------------------------------------------------------------

    def start(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor | None:
        """As every lane; with a guard, what that sends goes before the rest."""
        found = super().start(step, corrected, correction)
        if self.watch is not None and not self._whole:
            self._step, self._turns = step, self._watched(self.watch, step, self._turns)
        return found

    def _watched(self, watch: Watch, step: int, turns: Iterator[UnderWay | None]) -> Iterator[UnderWay | None]:
        watch.start(step, self.residual.next_residual)
        yield from turns

    def _complete(self, outputs: Sequence[Tensor]) -> None:
        if self.watch is not None and not self._whole:
            sent = self.watch.finish(self._step, outputs, self._divided)
            self.sent += torch.tensor(sent, device=self.sent.device)
            self._setting.metrics.selected(sum(sent), 0)
        super()._complete(outputs)

    def _roll_back(self) -> None:
        if self.watch is not None:
            self.watch.drop()
        super()._roll_back()

    # -- between steps ------------------------------------------------------------------------------------------------
    def _unpack(self, outputs: Sequence[Tensor], indices: Tensor | None, values: Tensor) -> None:
        if self._smoothing is None:
            super()._unpack(outputs, indices, values)
        else:
            scale = 1.0 if self._setting.mean.average else float(self._setting.comm.size)
            self._smoothing.apply(outputs, indices, values, scale)

    def _commit(self) -> None:
        super()._commit()
        self._rms = self._next_rms
        if self._core is not None:
            self._core.commit()
        if self._relevance is not None:
            self._relevance.commit()

    def abandon(self) -> None:
        """Wait for the last messages and forget them; the state is as it was before."""
        if self._relevance is not None:
            self._relevance.drain()
        super().abandon()

    def flush(self, outputs: Sequence[Tensor]) -> None:
        """Send residual and velocity whole; the residual is zero afterwards, the velocity its mean."""
        super().flush(outputs)
        if self._smoothing is not None:
            self._smoothing.age.zero_()  # nothing is left over of any step

    def resumed(self, *, flushed: bool) -> None:
        """The state is that of a checkpoint."""
        super().resumed(flushed=flushed)
        for beside in (self.watch, self._relevance):
            if beside is not None:
                beside.forget()

    def forget(self) -> None:
        """The state may have been overwritten: what was derived from it is derived again."""
        if self._core is not None:
            self._core.reread()

    def state(self) -> StateOf:
        """Residual, velocity and root mean squares, what the policy's choices keep besides, and what a guard knows."""
        state = super().state()
        for place, member in enumerate(self.bucket.members):
            part = slice(*self.bucket.offsets[place : place + 2])
            state[member]["rms"] = self._rms[place]
            if self._core is not None:
                state[member]["core"] = self._core.mask[part]
            if self._relevance is not None:
                state[member]["relevance"] = self._relevance.shares[place]
            if self._smoothing is not None:
                state[member]["estimate"] = self._smoothing.estimate[part]
                state[member]["age"] = self._smoothing.age[part]
            if self.watch is not None:
                state[member]["guard"] = self.watch.state[place]
        return state

    def _weights(self) -> list[Tensor]:
        weights = [self._setting.weights[i].detach().contiguous() for i in self.bucket.members]
        # A model that was converted since it was wrapped; all ranks refuse the step later.
        return [w.to(self.bucket.dtype) if w.dtype == torch.float64 else w for w in weights]
