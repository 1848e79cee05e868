"""Recording real training: layers, parameters and steps as they are, and training as it is without."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import ringprune as rp
from ringprune.profiles import record
from ringprune.profiles.format import Profile
from ringprune.profiles.record import Enough, Recorder
from ringprune.profiles.summary import profile_of
from ringprune.profiles.timeline import Kind

Optimizer = torch.optim.Optimizer


class Ticks:
    """A clock that goes on by one millisecond whenever somebody looks."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        self._now += 1
        return self._now

    def since(self, start: int, moments: Iterable[int]) -> list[float]:
        return [float(moment - start) for moment in moments]


@pytest.fixture(autouse=True)
def _ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "clock_for", lambda devices: Ticks())


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, batch: Callable[[], Tensor], optimizer: Optimizer | None = None, steps: int = 6) -> None:
    """A loop as scripts have it."""
    optimizer = optimizer or sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).float().square().mean().backward()
        optimizer.step()


def recorded(work: Callable[[], Any], iterations: int = 3) -> tuple[Recorder, Profile]:
    recorder = Recorder(2, iterations, stop=True)
    with suppress(Enough), recorder:
        work()
    return recorder, profile_of(recorder, "model", "made here")


def layers(profile: Profile) -> dict[str, tuple[int, ...]]:
    return {layer.name: layer.parameters for layer in profile.layers}


def numbers() -> Tensor:
    return torch.randn(4, 3, 8, 8)


def words() -> Tensor:
    return torch.randint(0, 50, (4, 7))


def convolutions() -> nn.Module:
    torch.manual_seed(3)
    seen = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    told = [nn.Dropout(0.3), nn.Linear(36, 8), nn.LeakyReLU(inplace=True), nn.Linear(8, 2)]
    return nn.Sequential(*seen, nn.Flatten(), *told)


# -- layers -----------------------------------------------------------------------------------------------------------


def test_layers_in_the_order_of_the_forward_pass_with_their_entries() -> None:
    recorder, profile = recorded(lambda: train(convolutions(), numbers))
    assert list(layers(profile).items()) == [("0", (108, 4)), ("1", (4, 4)), ("6", (288, 8)), ("8", (16, 2))]
    assert (recorder.steps, len(recorder.iterations)) == (5, 3)
    assert recorder.batch == "4 x 3 x 8 x 8 of float32"


def test_layers_add_up_to_what_was_measured() -> None:
    recorder, profile = recorded(lambda: train(convolutions(), numbers))
    for one in recorder.iterations:
        kinds = [mark.kind for mark in one.marks]
        middle, end = one.marks[kinds.index(Kind.BACKWARD)].when, one.marks[kinds.index(Kind.DONE)].when
        assert profile.forward_ms == pytest.approx(middle)
        assert profile.backward_ms == pytest.approx(end - middle)


def test_the_order_is_that_of_calls_not_of_construction() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(5, 2), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(relu(self.first(x)))

    _, profile = recorded(lambda: train(Backwards(), lambda: torch.randn(4, 3)))
    assert list(layers(profile)) == ["first", "last"]


class Twice(nn.Module):
    """One layer is called twice in a forward pass, or as often as it is said."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.inner, self.head = times, nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(x)
        return self.head(x)


def test_a_layer_that_is_called_twice_is_one_with_the_time_of_both() -> None:
    profiles = [recorded(lambda times=times: train(Twice(times), lambda: torch.randn(4, 6)))[1] for times in (1, 2)]
    assert layers(profiles[0]) == layers(profiles[1]) == {"inner": (36, 6), "head": (12, 2)}
    once, twice = (profile.layers[0].forward_ms for profile in profiles)
    assert twice == pytest.approx(once + 2)  # one more call, one more return
    assert profiles[0].layers[1] == profiles[1].layers[1]


class Words(nn.Module):
    """A language model, its head tied to its embedding or not."""

    def __init__(self, *, tied: bool, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=sparse)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 50)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


@pytest.mark.parametrize("tied", [False, True])
def test_tied_parameters_are_the_first_layers(tied: bool) -> None:
    model = Words(tied=tied)
    _, profile = recorded(lambda: train(model, words))
    assert layers(profile) == {
        "embedding": (400,),
        "lstm": (256, 256, 32, 32),
        "head": (50,) if tied else (400, 50),
    }
    assert profile.entries == sum(param.numel() for param in model.parameters())


def test_sparse_embeddings() -> None:
    model = Words(tied=False, sparse=True)
    _, profile = recorded(lambda: train(model, words, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert layers(profile)["embedding"] == (400,)
    assert profile.layers[0].backward_ms > 0


def test_parameters_of_modules_that_are_not_called_belong_to_the_one_around_them() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.head(self.attention(x, x, x)[0])

    _, profile = recorded(lambda: train(Attending(), lambda: torch.randn(4, 5, 8)))
    assert layers(profile) == {"Attending": (2,), "attention": (192, 24, 64, 8), "head": (16, 2)}


def test_frozen_layers_take_time_and_send_nothing() -> None:
    model = convolutions()
    for param in model[0].parameters():
        param.requires_grad_(False)
    _, profile = recorded(lambda: train(model, numbers))
    assert layers(profile)["0"] == ()
    assert profile.layers[0].forward_ms > 0
    assert profile.layers[0].backward_ms == 0


def test_a_model_in_parts_and_a_parameter_of_no_module() -> None:
    encoder, decoder, scale = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)), torch.ones(3, requires_grad=True)

    def work() -> None:
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters(), scale], lr=0.1)
        train(nn.Identity(), lambda: decoder(encoder(torch.randn(5, 3) * scale)), optimizer)

    _, profile = recorded(work)
    assert layers(profile) == {"Linear": (12, 4), "Sequential.0": (8, 2), "(outside of modules)": (3,)}


def test_what_is_computed_again_in_backward_is_backwards() -> None:
    inner, head = nn.Linear(6, 6), nn.Linear(6, 2)

    class Checkpointed(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.inner, self.head, self.again = inner, head, again

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
            return self.head(x)

    (plain, once), (recomputed, again) = (
        recorded(lambda again=again: train(Checkpointed(again), lambda: torch.randn(4, 6))) for again in (False, True)
    )
    assert once.forward_ms == again.forward_ms
    assert [one.kind for one in plain.iterations[0].marks] == [one.kind for one in recomputed.iterations[0].marks]


# -- steps ------------------------------------------------------------------------------------------------------------


def test_passes_of_one_step_add_up() -> None:
    def work(passes: int) -> None:
        model = convolutions()
        optimizer = sgd(model)
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(passes):
                model(numbers()).square().mean().backward()
            optimizer.step()

    (_, one), (recorder, three) = recorded(lambda: work(1)), recorded(lambda: work(3))
    assert [found.passes for found in recorder.iterations] == [3, 3, 3]
    assert three.forward_ms == pytest.approx(3 * one.forward_ms)
    assert three.backward_ms == pytest.approx(3 * one.backward_ms)


def test_validation_is_left_out() -> None:
    def work(validates: bool) -> None:
        model = convolutions()
        optimizer = sgd(model)
        for _ in range(6):
            train(model, numbers, optimizer, steps=1)
            if validates:
                with torch.no_grad():
                    model(numbers())

    assert recorded(lambda: work(True))[1] == recorded(lambda: work(False))[1]


def with_scaler(model: nn.Module) -> None:
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(model(numbers()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def with_two(model: nn.Module) -> None:
    first, *rest = model.parameters()
    one, two = torch.optim.SGD([first], lr=0.1), torch.optim.Adam(rest)
    for _ in range(6):
        model.zero_grad()
        model(numbers()).square().mean().backward()
        one.step()
        two.step()


def with_closure(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(numbers()).square().mean()
        value.backward()
        return value

    for _ in range(6):
        optimizer.step(loss)


@pytest.mark.parametrize("work", [with_scaler, with_two, with_closure])
def test_a_step_is_one_step(work: Callable[[nn.Module], None]) -> None:
    recorder, profile = recorded(lambda: work(convolutions()), iterations=4)
    assert (recorder.steps, [one.passes for one in recorder.iterations]) == (6, [1] * 4)
    assert profile.entries == sum(param.numel() for param in convolutions().parameters())


def test_optimizers_that_take_turns_make_one_iteration_together() -> None:
    def work() -> None:
        maker, judge = nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
        making, judging = sgd(maker), sgd(judge)
        for _ in range(7):
            train(judge, lambda: maker(torch.randn(2, 3)).detach(), judging, steps=1)
            train(nn.Sequential(maker, judge), lambda: torch.randn(2, 3), making, steps=1)

    recorder, profile = recorded(work, iterations=4)
    assert [one.passes for one in recorder.iterations] == [2] * 4
    assert sorted(layers(profile).values()) == [(4, 1), (15, 5), (20, 4)]


@pytest.mark.parametrize(
    "policy", [rp.IWP(0.1), rp.Dense(), rp.P3(), rp.IWP(0.1, local_steps=2)], ids=["iwp", "dense", "p3", "local"]
)
def test_a_step_of_a_wrapper_is_one_step(policy: Any) -> None:
    def rank(comm: Any) -> tuple[int, list[int]]:
        model = convolutions()
        optimizer = rp.DistributedOptimizer(
            sgd(model), named_parameters=model.named_parameters(), policy=policy, comm=comm, model=model
        )
        recorder = Recorder(2, 4, stop=False)
        with recorder:
            train(model, numbers, optimizer)
        optimizer.close()
        return recorder.steps, [one.passes for one in recorder.iterations]

    assert rp.simulate(1, rank, timeout=60) == [(6, [1] * 4)]


# -- nothing is changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "batch"), [(convolutions, numbers), (lambda: Words(tied=True), words)])
def test_training_has_the_same_bytes_when_it_is_watched(
    build: Callable[[], nn.Module], batch: Callable[[], Tensor]
) -> None:
    found = []
    for watched in (False, True):
        torch.manual_seed(1)
        model = build()
        recorder = Recorder(1, 100, stop=True)
        if watched:
            with recorder:
                train(model, batch)
            assert recorder.steps == 6
        else:
            train(model, batch)
        found.append({name: value.numpy().tobytes() for name, value in model.state_dict().items()})
    assert found[0] == found[1]


def test_nothing_is_left_behind() -> None:
    backward, model = torch.autograd.backward, convolutions()
    recorder, _ = recorded(lambda: train(model, numbers))
    assert torch.autograd.backward is backward
    assert not torch.nn.modules.module._has_any_global_hook(), "torch.compile would warn of them ever after"
    train(model, numbers)
    assert (recorder.steps, len(recorder.iterations)) == (5, 3)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_a_script_may_go_on_unwatched_with_hooks_of_its_own() -> None:
    recorder, own = Recorder(1, 2, stop=False), list[str]()
    with recorder:
        handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: own.append("stepped"))
        train(convolutions(), numbers)
        handle.remove()
    assert (recorder.steps, len(recorder.iterations)) == (3, 2)
    assert own == ["stepped"] * 6


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: None, "no step .* no module"),
        (lambda: convolutions()(numbers()), "no step"),
        (lambda: train(convolutions(), numbers, steps=2), "all of its 2 steps were warm-up"),
    ],
    ids=["nothing", "no step", "warm-up"],
)
def test_what_was_missing_is_said(work: Callable[[], Any], said: str) -> None:
    with pytest.raises(rp.UsageError, match=said):
        recorded(work)


def test_steps_on_frozen_parameters() -> None:
    """What was recorded had no entries, and the table of it divided by their number."""
    model = nn.Linear(4, 4).requires_grad_(False)
    batch = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(rp.UsageError, match="no parameters that are trained"):
        recorded(lambda: train(model, lambda: batch * 1, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_steps_without_a_module() -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(rp.UsageError, match="no module with parameters was called"):
        recorded(lambda: train(nn.Identity(), lambda: weight * 2, torch.optim.SGD([weight], lr=0.1)))
