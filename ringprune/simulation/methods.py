"""The methods of the battery's table: each a policy with its settings, without what its budget decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringprune.errors import ConfigurationError
from ringprune.policies import POLICIES
from ringprune.simulation.makers import OWN, divided, is_own
from ringprune.simulation.spec import Spec, parse

__all__ = ["BUDGETS", "METHODS", "Method", "budget_name", "methods"]

BUDGETS = (1 / 50, 1 / 150, 1 / 300, 1 / 600)
"""Shares of the bytes that dense fp32 sends in a whole run."""


@dataclass(frozen=True)
class Method:
    """One line of the table.

    Attributes:
        name: what tables call it.
        spec: the policy's specification, without what is solved for.
        says: what it is, for people.
        solved: what is chosen so that the budget is used up: ``"density"``; ``"local_steps"``, the fewest that fit; or
            None for a method that sends what it sends.
        other: other specifications for a task, a budget or both, such as ``"gpt-adamw"``, ``"1/600"`` or
            ``"gpt-adamw 1/600"``; the narrowest counts. Where one has a density, local steps are solved for.
        fixed: where ``other`` says everything: nothing is solved for, and less may be sent than the budget.
    """

    name: str
    spec: str
    says: str
    solved: str | None = "density"
    other: Mapping[str, str] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()

    def at(self, task: str, budget: float) -> Spec:
        """The specification for a task and a budget."""
        where = self._where(task, budget)
        return parse(self.spec if where is None else self.other[where])

    def solved_at(self, task: str, budget: float) -> str | None:
        """What is chosen there: local steps where the specification has a density, nothing where it says everything."""
        if self._where(task, budget) in self.fixed:
            return None
        fixed = self.solved == "density" and self.at(task, budget).fixes_density
        return "local_steps" if fixed else self.solved

    def _where(self, task: str, budget: float) -> str | None:
        share = budget_name(budget)
        return next((key for key in (f"{task} {share}", share, task) if key in self.other), None)

    @property
    def solves(self) -> str:
        """What is solved for, for people."""
        given = [where for where, text in self.other.items() if parse(text).fixes_density]
        also = ", or local_steps where that is given" if self.solved == "density" and given else ""
        nothing = f"; {', '.join(sorted(self.fixed))}: nothing" if self.fixed else ""
        return f"{self.solved or 'nothing'}{also}{nothing}"

    @property
    def exists(self) -> bool:
        """Whether there is such a policy, with these arguments, in this version of RingPrune."""
        try:
            for text in (self.spec, *self.other.values()):
                if self.solved is not None and not parse(text).accepts(self.solved):
                    return False
        except ConfigurationError:
            return False
        return True


def budget_name(budget: float) -> str:
    """``1/50``, ``1/62.5``, or ``1`` for all the bytes of dense."""
    return "1" if budget == 1 else f"1/{1 / budget:.6g}"


_IWP = "iwp:roots=all,local_steps=4,local_steps.momentum=shared,values=book4,dense_values=int8"
_RAW = "iwp:roots=all,local_steps=4,local_steps.momentum=mean,values=book4,dense_values=int8,damping=0"
_WHOLE_SELDOM = "iwp:density=1,local_steps=160,values=book4,dense_values=int8"
_WHOLE = (
    "iwp:density=1,local_steps=2,local_steps.momentum=shared,local_steps.growth=1.3,values=book2,dense_values=book2"
)

METHODS = (
    Method("dense", "dense", "plain data parallelism, the reference", solved=None),
    Method(
        "iwp",
        _IWP,
        "IWP as recommended",
        other={"gpt-adamw": _WHOLE, "digits": _WHOLE_SELDOM},
        fixed=frozenset({"digits"}),
    ),
    Method("iwp-raw", _RAW, "the same pruning with the raw ratio g/w, and momentum as iwp had it until 2026-11-28"),
    Method("dgc", "dgc:dense_values=int8", "Deep Gradient Compression, allgather"),
    Method("scalecom", "scalecom:dense_values=int8", "ScaleCom: one root in turn, low-pass residual"),
    Method("random_k", "random_k:dense_values=int8", "shared random entries, no indices"),
    Method("slim_dp", "slim_dp:dense_values=int8", "Slim-DP: exploit and explore"),
    Method("mipd", "mipd:dense_values=int8", "MIPD: densities by layer, code books"),
    Method("oktopk", "oktopk:dense_values=int8", "balanced global top-k"),
    Method("local_sgd", "dense", "local steps, then all weights averaged", solved="local_steps"),
    Method("local_sgd-int8", "dense:values=int8", "the same in 8 bits, with error feedback", solved="local_steps"),
)
"""Every method of the table; one whose policy does not exist is left out."""


def methods(names: list[str] | None = None) -> list[Method]:
    """The methods named: of the table, or a specification of one's own; all of the table's where None is given.

    Raises:
        ConfigurationError: a name is neither.
    """
    known = {method.name: method for method in METHODS if method.exists}
    if names is None:
        return list(known.values())
    return [known[name] if name in known else _own(name, known) for name in names]


def _own(text: str, known: Mapping[str, Method]) -> Method:
    name, _ = divided(text)
    if name not in POLICIES and not is_own(name):
        raise ConfigurationError(
            f"policy {text!r}: neither a method of the table ({', '.join(known)}) nor a policy ({', '.join(POLICIES)}) "
            f"nor {OWN}"
        )
    spec = parse(text)
    if spec.fixes_density:
        raise ConfigurationError(f"{text!r}: the density is solved for; ringprune simulate run takes one")
    solved = "density" if spec.accepts("density") else None
    return Method(str(spec), str(spec), "as given", solved)
