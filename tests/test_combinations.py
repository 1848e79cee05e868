"""Random walks: policies, optimizers and options in combination, and whatever a program may do between two steps.

Each walk is made twice, the second time without what must leave no trace: checkpoints that are saved and loaded, steps
that are refused, calls at the wrong time, looks at weights and statistics. Both end with the same bytes, on all ranks.
"""

import copy
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp

WIDTH = 12
STEPS_OF_LOCAL = rp.LocalSteps(2, momentum="shared", outer_momentum=0.5, growth=1)
POLICIES = {
    "dense": rp.Dense(),
    "dense in 8 bits": rp.Dense("int8"),
    "iwp": rp.IWP(0.1, min_numel=50, warmup=rp.Warmup(2)),
    "iwp, look-ahead": rp.IWP(0.1, min_numel=50, roots="all", lookahead=True, refresh=2, values="int8"),
    "iwp, clipped": rp.IWP(0.1, min_numel=50, clip_norm=0.5, dense_values="book2", reduction="ring"),
    "dgc": rp.DGC(0.1, min_numel=50, clip_norm_per_tensor=0.2),
    "dgc, scattered": rp.DGC(0.1, min_numel=50, index_sets="scattered", selection="sampled", correction="global"),
    "scalecom": rp.ScaleCom(0.1, min_numel=50, correction="local", dense_values="bf16"),
    "slim dp": rp.SlimDP(0.1, min_numel=50, refresh=2, explore_by="rank", correction="local"),
    "mipd": rp.MIPD(0.1, min_numel=50, smoothing=0.2),
    "oktopk": rp.OkTopk(0.1, min_numel=50, values="fp16"),
    "random": rp.RandomK(0.1, min_numel=50, values="int4"),
    "p3": rp.P3(400, 2000, fuse_bytes=100),
    "p3 with iwp": replace(rp.IWP(0.1, min_numel=50), schedule=rp.LayerPriority(400, 1)),
    "parallax": rp.Parallax(),
    "iwp with rows": replace(rp.IWP(0.1, min_numel=50), rows=rp.Rows("owners")),
    "local steps": rp.IWP(0.1, min_numel=50, values="bf16", local_steps=2),
    "local steps, shared momentum": rp.IWP(0.1, min_numel=50, local_steps=STEPS_OF_LOCAL),
    "local steps, scattered": rp.DGC(0.1, min_numel=50, index_sets="scattered", local_steps=3),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.125),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.5),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.9, nesterov=True, foreach=True),
    "maximize": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.9, maximize=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, eps=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-3, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, eps=1e-3, momentum=0.5),
}
TRACELESS = ("save and load", "load itself", "look", "new memory", "nan", "too many passes", "no backward", "bad file")
UNDER_WAY = ("zero_grad", "flush", "load")
CALLS = ("absent", "clip", "flush", "rate", "freeze", "wrap again", "save and load", *TRACELESS, *UNDER_WAY)


class Model(nn.Module):
    """A table whose rows are looked up, parameters of several dtypes and layouts, a layer that some passes skip."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, sparse=True)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.zeros(WIDTH, WIDTH).t())
        self.coarse = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16))
        self.fine = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.gain, self.nothing = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.left_out = nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.15)

    def forward(self, words: Tensor, x: Tensor, all_layers: bool) -> Tensor:
        h = torch.tanh(self.tied(x + self.words(words)))
        h = h + self.conv(h.view(-1, 3, 2, 2)).reshape(-1, WIDTH) + h @ self.turned + h @ self.coarse.float()
        h = (1 + self.gain) * h + self.fine.float() + self.nothing.sum() + self.frozen
        return torch.tanh(h + self.left_out(h) if all_layers else h) @ self.tied.weight


@dataclass(frozen=True)
class Walk:
    """What is wrapped how, on how many ranks, and the calls that are made, each with a number to choose by."""

    policy: str
    optimizer: str
    ranks: int
    options: dict[str, Any]
    calls: list[tuple[str, int]]


def drawn(name: str, seed: int) -> Walk:
    """A walk under a policy; evenly, as hypothesis does not draw: a few policies and calls would be most of it."""
    generator, policy = random.Random(f"{name} {seed}"), POLICIES[name]
    # Some take no sparse gradients.
    fit = [kind for kind in OPTIMIZERS if policy.rows is None or kind not in ("adamw", "rmsprop")]
    options: dict[str, Any] = {
        "overlap": generator.random() < 0.5,
        "bucket_bytes": generator.choice([1, 1000, 1 << 20]),
        "check_every": generator.choice([0, 2]),
        "backward_passes_per_step": generator.choice([1, 1, 2]),
    }
    if policy.schedule is None:
        options["nonfinite"] = generator.choice(["raise", "skip"])
        options["hierarchical"] = policy.rows is None and generator.random() < 0.5
    if policy.local_steps is None:
        options["op"] = generator.choice(["average", "sum"])
    calls = [(call, generator.randrange(100)) for _ in range(8) for call in ("step", generator.choice(CALLS))]
    return Walk(name, generator.choice(fit), generator.choice([1, 2, 3]), options, [*calls, ("step", 0)])


class Program:
    """One rank's training loop, which makes the calls of a walk."""

    def __init__(self, walk: Walk, comm: rp.comm.Communicator) -> None:
        self.walk, self.comm, self.policy = walk, comm, POLICIES[walk.policy]
        self.passes: int = walk.options["backward_passes_per_step"]
        self.local, self.scheduled = self.policy.local_steps is not None, self.policy.schedule is not None
        self.frozen: set[str] = set()
        self.start(Model())

    def start(self, model: Model) -> None:
        params = list(model.parameters())
        self.model = model
        self.inner = OPTIMIZERS[self.walk.optimizer]([{"params": params[:4]}, {"params": params[4:]}])
        self.wrap()

    def wrap(self) -> None:
        comm, names = self.comm.duplicate(), self.model.named_parameters()
        options = self.walk.options | {"policy": self.policy, "comm": comm, "model": self.model}
        self.optimizer = rp.DistributedOptimizer(self.inner, names, **options)

    def backward(self, number: int, *, more: int = 0, bad: bool = False) -> None:
        for i in range(self.passes + more):
            generator = torch.Generator().manual_seed(1009 * number + 31 * i + self.comm.rank)
            words, x = torch.randint(0, 20, (4,), generator=generator), torch.randn(4, WIDTH, generator=generator)
            loss = self.model(words, x, number % 3 > 0).square().mean()
            (loss * float("nan") if bad else loss).backward()

    def chosen(self, number: int) -> bool:
        """Whether it is this rank that something happens on."""
        return number % self.comm.size == self.comm.rank

    # -- what moves weights -------------------------------------------------------------------------------------------

    def step(self, call: str, number: int) -> None:
        self.optimizer.zero_grad()
        if call != "absent" or self.comm.size == 1 or not self.chosen(number):
            self.backward(number)
        if call == "clip" and not self.local:
            self.optimizer.synchronize()
            dense = [p for p in self.model.parameters() if p.grad is not None and not p.grad.is_sparse]
            nn.utils.clip_grad_norm_(dense, 0.5)
        self.optimizer.step()

    def between(self, call: str, number: int) -> None:
        if call == "flush":
            self.optimizer.flush()
        elif call == "rate":
            for group in self.inner.param_groups:
                group["lr"] *= 0.5 + number / 100
        elif call == "freeze":
            name = ("turned", "conv.weight", "fine")[number % 3]
            self.frozen ^= {name}
            self.model.get_parameter(name).requires_grad_(name not in self.frozen)
        elif call == "wrap again" and not self.frozen:
            self.optimizer.flush()
            self.optimizer.close()
            self.wrap()

    # -- what leaves no trace -----------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded

    def leave_no_trace(self, call: str, number: int) -> None:
        if call == "save and load":
            saved, model = self.saved(), Model()
            if not self.local:  # there the optimizer's checkpoint holds the weights
                model.load_state_dict(copy.deepcopy(self.model.state_dict()))
            self.optimizer.close()
            self.start(model)
            self.optimizer.load_state_dict(saved)
            for name in self.frozen:
                model.get_parameter(name).requires_grad_(False)
        elif call == "load itself":
            self.optimizer.load_state_dict(self.saved())
        elif call == "bad file":
            saved = self.saved()
            saved["ringprune"]["parameters"]["nobody"] = {"shared": torch.zeros(1)}
            with pytest.raises(rp.CheckpointError, match=r"Unexpected: nobody\.shared"):
                self.optimizer.load_state_dict(saved)
        elif call == "look":
            stats = self.optimizer.stats()
            parts = [sum(stats["parameters"][name].values()) for name in stats["parameters"]]
            assert sum(parts) == pytest.approx(stats["bytes_sent"])
            with self.optimizer.shared_weights(), torch.no_grad():
                self.model(torch.zeros(4, dtype=torch.int64), torch.zeros(4, WIDTH), True)
        elif call == "new memory":
            self.optimizer.synchronize() if self.scheduled else None
            for param in self.model.parameters():
                param.data, param.grad = param.data.clone(), None
        elif not self.local and not self.scheduled:  # there it comes to light when steps were made
            self.be_refused(call, number)

    def be_refused(self, call: str, number: int) -> None:
        self.optimizer.zero_grad()
        error: type[Exception] = rp.UsageError
        if call == "nan":
            self.backward(number, bad=self.chosen(number))
            error = rp.NonFiniteGradientError
        elif call == "too many passes":
            self.backward(number, more=int(self.chosen(number)))
        if call == "nan" and self.walk.options["nonfinite"] == "skip":
            self.optimizer.step()
        else:
            with pytest.raises(error):
                self.optimizer.step()

    def step_disturbed(self, call: str, number: int) -> None:
        """A step, and before it a call that comes at the wrong time; with local steps it is the right one."""
        self.optimizer.zero_grad()
        saved = self.saved() if call == "load" else {}
        self.backward(number)
        with pytest.raises(rp.UsageError):
            {
                "zero_grad": self.optimizer.zero_grad,
                "flush": self.optimizer.flush,
                "load": lambda: self.optimizer.load_state_dict(saved),
            }[call]()
        self.optimizer.step()


Tensors = dict[str, Tensor]


def trained(walk: Walk, *, all_calls: bool) -> list[tuple[Tensors, Tensors]]:
    """Of each rank the weights at the end that all share, and what it would save besides."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensors, Tensors]:
        program = Program(walk, comm)
        for call, number in walk.calls:
            if call in TRACELESS:
                if all_calls:
                    program.leave_no_trace(call, number)
            elif call in UNDER_WAY and all_calls and not program.local:
                program.step_disturbed(call, number)
            elif call in UNDER_WAY or call in ("step", "absent", "clip"):
                program.step(call, number)
            else:
                program.between(call, number)
        with program.optimizer.shared_weights():
            weights = {name: bits(param) for name, param in program.model.named_parameters()}
        saved = program.saved()["ringprune"]
        kept = {f"{name}.{kind}": bits(t) for name, entry in saved["parameters"].items() for kind, t in entry.items()}
        program.optimizer.close()
        return weights, kept | {"steps": torch.tensor([saved["step"], saved["local_steps"]])}

    return rp.simulate(walk.ranks, rank, timeout=120, ranks_per_node=2, one_at_a_time=True)


def bits(tensor: Tensor) -> Tensor:
    """A copy of them."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad, once in a process
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
def test_what_leaves_no_trace_does_not_in_any_combination(policy: str, seed: int) -> None:
    walk = drawn(policy, seed)
    calm, disturbed = trained(walk, all_calls=False), trained(walk, all_calls=True)
    for weights, _ in [*calm, *disturbed]:
        assert differing(calm[0][0], weights) == []
    for (_, expected), (_, kept) in zip(calm, disturbed, strict=True):
        assert differing(expected, kept) == []


def differing(expected: Tensors, got: Tensors) -> list[str]:
    """The names of what is not the same to the bit, or missing."""
    both = sorted(expected.keys() & got.keys())
    return [
        *sorted(expected.keys() ^ got.keys()),
        *(name for name in both if not torch.equal(expected[name], got[name])),
    ]
