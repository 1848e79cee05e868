"""A communication hook for DistributedDataParallel: RingPrune's policies without its optimizer wrapper.

DDP keeps its buckets and its overlap with backward; each of them becomes one bucket of a Plan for the tensors that
travel packed and one for those that travel dense. What a policy holds back enters a later gradient (error feedback).
Momentum correction needs the optimizer and is left out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

from ringprune import checkpoint, wire
from ringprune.arguments import warn_of_keeping_back
from ringprune.comm import connect
from ringprune.comm.communicator import CPU, Communicator, is_communicator
from ringprune.ddp_copy import LeftBehind
from ringprune.ddp_plan import Arrived, in_order, plan_of_ddp
from ringprune.ddp_steps import FirstStep, Steps
from ringprune.errors import ArgumentTypeError, CheckpointError, ConfigurationError, UsageError
from ringprune.exchange import Exchange
from ringprune.metrics import Metrics
from ringprune.other_wrappers import ranks_of_ddp
from ringprune.plan import shake_hands
from ringprune.policies import Policy, as_policy, check_abilities
from ringprune.reduction import Mean
from ringprune.residual import Correction
from ringprune.scaling import LossScale, check_halves
from ringprune.validation import whole_number
from ringprune.verdict import Verdict

__all__ = ["DDPHook", "ddp_hook"]

_GIVEN_UP = (
    "an error has ended a backward pass of which this hook had sent a part: make a new ringprune.ddp_hook with the new "
    "DistributedDataParallel, and with a new communicator where you gave one, and hand it what this one keeps back: "
    "new_hook.load_state_dict(hook.state_dict())"
)
_INSTEAD = 'wrap the plain model\'s optimizer in ringprune.DistributedOptimizer with policy="iwp"'


def ddp_hook(
    policy: Policy | str = "iwp",
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    comm: Communicator | str | None = None,
    scaler: Any = None,
    seed: int = 0,
) -> "DDPHook":
    """A hook for ``model.register_comm_hook(None, ringprune.ddp_hook(policy))``; all ranks make it together.

    Args:
        policy: a policy, or its name with its function's defaults, ``IWP()`` for ``"iwp"``; its momentum correction
            and look-ahead are left out.
        named_parameters: ``model.named_parameters()``, for errors and checkpoints; None numbers them by DDP's buckets.
        comm: a communicator, the name of one, or None for ``connect("torch")``: a group of all ranks.
        scaler: the loop's ``torch.amp.GradScaler``; an overflow on any rank then skips the step on all.
        seed: decides roots and exploration; the same on all ranks.

    Raises:
        ConfigurationError, ArgumentTypeError, DependencyError: an argument cannot work, or what it needs is missing.
        UsageError: torch.distributed is not initialised.
    """
    given = as_policy(policy)
    if given.local_steps is not None:
        raise ConfigurationError(
            "local_steps with ddp_hook: DistributedDataParallel exchanges gradients at every step; use "
            "ringprune.DistributedOptimizer with the plain model"
        )
    if given.rows is not None:
        raise ConfigurationError(
            "rows with ddp_hook: DistributedDataParallel hands sparse gradients to no hook as rows; use "
            "ringprune.DistributedOptimizer with the plain model"
        )
    if given.schedule is not None:
        raise ConfigurationError(
            "schedule with ddp_hook: DistributedDataParallel decides when a bucket is sent; use "
            "ringprune.DistributedOptimizer with the plain model"
        )
    chosen = replace(given, correction="global", mask_velocity=False, lookahead=False)
    communicator = connect(comm or "torch") if comm is None or isinstance(comm, str) else comm
    if not is_communicator(communicator):
        raise ArgumentTypeError(f"comm={comm!r}: a communicator from ringprune.connect, its kind as a string, or None")
    check_abilities(chosen, communicator)
    names = {id(param): name for name, param in named_parameters or ()}
    return DDPHook(chosen, communicator, LossScale(scaler), whole_number("seed", seed, 0), names)


def _at_the_end(call: Callable[[], None]) -> None:
    """Call it at the end of the backward pass that is under way, after what else was put off until then."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _give(averages: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for param, average in averages:
            param.grad = average if param.grad is None else param.grad.copy_(average)


class DDPHook(LeftBehind):
    """What :func:`ddp_hook` makes; ``state_dict()`` holds what this rank keeps back, save it on every rank."""

    def __init__(self, policy: Policy, comm: Communicator, scale: LossScale, seed: int, names: dict[int, str]) -> None:
        self._policy, self._comm, self._scale, self._seed, self._names = policy, comm, scale, seed, names
        # register_comm_hook asks for these, and refuses annotations other than its own.
        self.__name__ = self.__qualname__ = "ringprune.ddp_hook"
        kind = Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = Signature([Parameter("state", kind), Parameter("bucket", kind)])
        self._params: list[Tensor] = []
        self._arrived: list[Arrived] = []
        self._open = False  # buckets of a backward pass have come, but not the last one
        self._pass = -1  # torch's number of it; none where join() plays a rank that is done
        self._touched: set[int] = set()  # ids of parameters that have got a gradient here since the last pass
        self._watched: set[int] = set()
        self._layout: list[tuple[int, ...]] = []
        self._steady, self._alike = False, 0  # how many passes in a row have had the layout of the one before
        self._exchange: Exchange | None = None
        self._tally: dict[str, int] = {}  # of selection, in exchanges before it
        self._steps = Steps()
        self._first_step: FirstStep | None = None
        self._saved: dict[str, Any] | None = None
        self._state: object = None  # what register_comm_hook was given; others take a process group there

    @torch._disable_dynamo  # type: ignore[attr-defined]  # private; torch.compile, of a whole loop, fails on what is here
    def __call__(self, state: object, bucket: Any) -> "torch.futures.Future[Tensor]":
        """Exchange one of DDP's buckets; called by DDP during backward, in the same order on all ranks.

        Raises:
            NonFiniteGradientError, RankMismatchError, UsageError, ConfigurationError: on all ranks, out of backward().
        """
        self._state = state
        params = list(bucket.parameters())
        if bucket.index() == 0:
            self._begin()
        if bucket.buffer().is_sparse:
            raise ConfigurationError(
                f"the gradient of {self._names.get(id(params[0]), 'a parameter')!r} is sparse: ddp_hook exchanges "
                "dense ones only. Use ringprune.DistributedOptimizer with the plain model, or leave sparse=True out"
            )
        grads = [in_order(grad, param) for grad, param in zip(bucket.gradients(), params, strict=True)]
        self._arrived.append(Arrived(bucket.buffer(), params, grads))
        if self._steady:
            self._start(len(self._arrived) - 1, None)
        if bucket.is_last():
            self._finish()
        return self._arrived[-1].future

    # -- one backward pass --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first bucket of a pass."""
        before, self._pass = self._pass, torch._C._current_graph_task_id()
        if self._open and self._pass == before != -1:
            self._open = False
            raise UsageError(
                "DistributedDataParallel hands over several buckets without telling which is the last, as it does in "
                "the first pass with static_graph=True and parameters of several dtypes: leave static_graph out"
            )
        if self._open and self._steady:  # ranks may have sent different numbers of messages, which are never to meet
            raise UsageError(_GIVEN_UP)
        self._steps.begin(self._params, tell=self._comm.rank == 0)
        if self._first_step is not None:
            self._first_step.settle()
        self._arrived, self._open = [], True

    def _start(self, position: int, factors: dict[int, float] | None) -> None:
        """Start the exchange of the DDP bucket at ``position``."""
        arrived = self._arrived[position]
        if arrived.layout != self._layout[position]:
            if position == 0:  # nothing of this pass was sent: as long as buckets change, all wait for the last one
                self._steady = False
                return
            raise UsageError("DistributedDataParallel changed its buckets in the middle of a backward pass")
        assert self._exchange is not None
        if position == 0:
            self._scale.read()
            self._exchange.begin()
        by_param = dict(zip(arrived.layout, arrived.grads, strict=True))
        for bucket in self._buckets[position]:
            grads = [by_param[id(self._params[i])].contiguous() for i in bucket.members]
            own = self._factors(grads) if factors is None else [factors[i] for i in bucket.members]
            correction = Correction(own, [0.0] * len(grads), [False] * len(grads))
            self._verdict.count(bucket.members, self._exchange.start(bucket.index, grads, correction))

    def _factors(self, grads: Sequence[Tensor]) -> list[float]:
        return self._policy.clipping.factors(grads, 1 / self._scale.value, self._comm.size)

    def _finish(self) -> None:
        """All buckets are there: start those that were not, decide together, and give DDP the averages."""
        self._open = False
        layout = [arrived.layout for arrived in self._arrived]
        if not self._steady:
            # DDP makes its first buckets anew after the first backward pass, or with a static graph after the second.
            self._alike = self._alike + 1 if layout == self._layout else 0
            if not self._alike:
                self._build(layout)
            self._steady = self._alike >= 2 and self._policy.clipping.norm is None
            self._start_all()
        assert self._exchange is not None
        self._verdict.note_counted()
        self._verdict.saw_gradient = True
        self._exchange.reduce(self._verdict.start)
        made = self._verdict.wait()
        try:
            if made:
                self._write()
            else:
                self._refuse()
        finally:
            self._verdict.clear()
        for arrived in self._arrived:
            arrived.future.set_result(arrived.buffer)
        if not self._steady:
            self._watch()

    def _start_all(self) -> None:
        self._scale.read()
        factors = None
        if self._policy.clipping.norm is not None:
            grads = [grad.contiguous() for arrived in self._arrived for grad in arrived.grads]
            factors = dict(enumerate(self._factors(grads)))
        for position in range(len(self._arrived)):
            self._start(position, factors)

    def _write(self) -> None:
        assert self._exchange is not None
        grads = [grad for arrived in self._arrived for grad in arrived.grads]
        outputs = [
            grad if grad.is_contiguous() else torch.empty_like(grad, memory_format=torch.contiguous_format)
            for grad in grads
        ]
        self._exchange.finish(outputs)
        check_halves((spec.name, output) for spec, output in zip(self._plan.params, outputs, strict=True))
        for grad, output in zip(grads, outputs, strict=True):
            if output is not grad:
                grad.copy_(output)
        if self._scale.enabled:  # the scaler divides by it
            for arrived in self._arrived:
                arrived.buffer.mul_(self._scale.value)
        self._give_unused()
        self._metrics.steps += 1
        self._steps.exchanged(self._params if self._exchange.groups_kept_back() else [])

    def _give_unused(self) -> None:
        """See that averages of parameters which this rank has not used in the pass come to them.

        Where no rank has, DDP leaves ``.grad`` as it was (``find_unused_parameters=True``): what was sent of earlier
        gradients would be lost.
        """
        if torch._C._current_graph_task_id() == -1:  # no backward pass: join() plays the part of a rank that is done
            return
        pairs = [pair for arrived in self._arrived for pair in zip(arrived.params, arrived.grads, strict=True)]
        unused = [
            (param, grad.clone())
            for param, grad in pairs
            if (param.grad is None or (id(param) in self._watched and id(param) not in self._touched)) and grad.any()
        ]
        self._touched.clear()
        if unused:
            _at_the_end(lambda: _at_the_end(partial(_give, unused)))  # of those, after DDP's own

    def _watch(self) -> None:
        """Note from now on which parameters get a gradient."""
        touched = self._touched
        for param in (param for arrived in self._arrived for param in arrived.params):
            if id(param) not in self._watched:
                self._watched.add(id(param))
                param.register_post_accumulate_grad_hook(torch.compiler.disable(lambda param: touched.add(id(param))))

    def _refuse(self) -> None:
        """A gradient is not finite: nothing of the pass is kept; all scalers skip the step, or all raise."""
        assert self._exchange is not None
        self._exchange.abandon()
        self._steps.exchanged([])
        self._touched.clear()
        self._verdict.raise_or_skip()
        self._metrics.skipped_steps += 1
        for arrived in self._arrived:
            arrived.buffer.fill_(float("inf"))

    # -- DDP's buckets as a Plan --------------------------------------------------------------------------------------

    def _build(self, layout: list[tuple[int, ...]]) -> None:
        """Make the Plan for DDP's buckets, and move what was kept back over to it."""
        kept, params = self.state_dict(), [param for arrived in self._arrived for param in arrived.params]
        if self._exchange is not None:
            self._check_same(params)
            self._tally = self._selection()
        self._params = params
        facts = [f"wire format {wire.WIRE_VERSION}", f"policy {self._policy}", f"seed={self._seed}", str(self._scale)]
        ddps = [arrived.params for arrived in self._arrived]
        self._plan, self._buckets = plan_of_ddp(ddps, self._names, self._policy, facts)
        if self._exchange is None:
            self._metrics = Metrics(self._comm.traffic, self._plan.numel)
        expected = self._scale.enabled
        nonfinite = "skip" if expected else "raise"
        self._verdict = Verdict(self._comm, self._plan.params, self._metrics, nonfinite, expected=expected)
        # spare: a pass that some rank refuses is taken back
        exchange = Exchange(
            self._plan,
            self._policy,
            self._comm,
            self._metrics,
            self._params,
            seed=self._seed,
            mean=Mean(),
            velocity=False,
            spare=True,
        )
        failure = self._other_ranks() if self._exchange is None else None
        if self._exchange is None and self._comm.rank == 0 and self._policy.density.target < 1:
            look = partial(warn_of_keeping_back, policy=self._policy, instead=_INSTEAD)
            self._first_step = FirstStep(params, look)
        try:
            self._restore(kept, exchange)
        except CheckpointError as error:
            failure = str(error)
        shake_hands(self._plan.facts, self._comm, CPU, failure)
        if self._exchange is not None:  # those that have run out of batches, in join(), need not have the same weights
            exchange.alike = self._exchange.checked
        self._exchange, self._saved, self._layout = exchange, None, layout

    def _check_same(self, params: Sequence[Tensor]) -> None:
        """Whether the new buckets are of the parameters of before."""
        before, now = ({id(param): param for param in those} for those in (self._params, params))
        if not before.keys() & now.keys():
            raise UsageError(
                "this hook serves another DistributedDataParallel: make a ringprune.ddp_hook for each model"
            )
        changed = sorted(self._names.get(key, "a parameter without a name") for key in before.keys() ^ now.keys())
        if changed:
            shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            raise UsageError(
                f"requires_grad of {shown} has changed since this hook's first pass: make a new ringprune.ddp_hook "
                "with the new DistributedDataParallel, without load_state_dict(). What this one keeps back is lost"
            )

    def _other_ranks(self) -> str | None:
        """What is wrong where DDP, or the hook's state, is of another number of ranks than the communicator."""
        size, sizes = self._comm.size, ranks_of_ddp(self._params)
        instead = 'ringprune.ddp_hook(..., comm=ringprune.connect("torch", process_group=...))'
        if self._state is not None and size != (self._state.size() if hasattr(self._state, "size") else None):
            return f"register_comm_hook({type(self._state).__name__}, ...): the hook takes no state; write {instead}"
        if not sizes or size in sizes:
            return None
        return f"DistributedDataParallel averages over {sizes[0]} ranks and this hook over {size}: write {instead}"

    # -- between passes -----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Steps, bytes by content, ratios, densities and seconds per stage; empty before the first backward pass."""
        return self._metrics.stats() | {"selection": self._selection()} if self._exchange is not None else {}

    def _selection(self) -> dict[str, int]:
        """The counts of all exchanges: each change of DDP's buckets has begun another one."""
        assert self._exchange is not None
        return {name: count + self._tally.get(name, 0) for name, count in self._exchange.accounts.tally().items()}

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps back, by parameter name; empty before the first backward pass."""
        if self._exchange is None:
            return dict(self._saved or {})
        self._exchange.damage.check_whole()
        origin = checkpoint.Origin(
            self._comm.rank,
            self._comm.size,
            keepers=self._comm.size,
            step=self._exchange.step,
            local_steps=0,
            flushed=False,
        )
        return checkpoint.save(origin, self._exchange.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, on every rank from its own; before or after the first backward pass.

        Raises:
            CheckpointError: it does not fit; before the first backward pass, whether its tensors fit is found there.
        """
        if state_dict:
            checkpoint.check_origin(state_dict, self._comm.rank, self._comm.size, self._comm.size, hook=True)
        if self._exchange is None:
            self._saved = dict(state_dict)
        else:
            self._restore(state_dict, self._exchange)

    def _restore(self, saved: dict[str, Any], exchange: Exchange) -> None:
        state = exchange.state()
        if saved:
            checkpoint.check_tensors(saved["parameters"], state)
            checkpoint.copy(saved["parameters"], state)
            exchange.resumed(saved["step"])
        elif exchange.step:  # back to before the first backward pass
            for tensor in (tensor for kinds in state.values() for tensor in kinds.values()):
                tensor.zero_()
            exchange.resumed(0)
