"""MIPD (doi 10.1109/tpds.2022.3154387): budgets by relevance, the estimate of what is dropped, turns, and all off."""

import copy
import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import ringprune as rp
from ringprune import selection
from ringprune.exchange.relevance import REFRESH
from ringprune.importance import Product
from ringprune.wire import index_code, value_code
from tests.policies.one_layer import NUMEL, OneLayer, gradient_of, sent_at
from tests.training import batches, loss_of, make_model, nesterov, run, same_bytes, sgd, train, weights, wrap

DENSITY = 0.05
OFF: dict[str, Any] = {"layers": "even", "smoothing": 0.0, "turns": 1, "explore": 0.0, "values": "fp32"}
KINDS = ("relevance", "estimate", "age")
BIG = {"0.weight": 64 * 64, "2.weight": 48 * 64}
"""The packed tensors of the model, and their entries."""


def kept(optimizer: rp.DistributedOptimizer, name: str, kind: str) -> Tensor:
    tensor: Tensor = optimizer.state_dict()["ringprune"]["parameters"][name][kind]
    return tensor.clone()


def moved(model: nn.Module) -> dict[str, Tensor]:
    """What the packed tensors moved by at the last step."""
    grads = {name: model.get_parameter(name).grad for name in BIG}
    return {name: grad.clone() for name, grad in grads.items() if grad is not None}


def history(
    comm: rp.comm.Communicator, policy: rp.Policy, steps: int, make: Any = sgd, **options: Any
) -> list[dict[str, Tensor]]:
    """What the packed tensors moved by at each step."""
    model, found = make_model(), []
    optimizer = wrap(model, comm, policy, make, **options)
    for batch in batches(comm.rank, steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        found.append(moved(model))
    return found


# -- all off ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_with_all_off_it_is_plain_error_feedback(size: int) -> None:
    """By hand: p = residual + gradient; the root's top k of |w p| is sent of all ranks' p, and leaves it."""
    policy = rp.MIPD(DENSITY, **OFF)

    def rank(comm: rp.comm.Communicator) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        layer, before, found = OneLayer(comm, policy, lr=0.1), torch.zeros(NUMEL), []
        for step in range(6):
            weight = layer.weight.detach().flatten().clone()
            p = before + gradient_of(comm.rank, step)
            sent = layer.step(gradient_of(comm.rank, step))
            before = layer.kept()
            found.append((weight, p, sent, before))
        return found

    histories = rp.simulate(size, rank)
    for step in range(6):
        root = policy.roots.of(0, step, 0, size)[0]
        weight, p, _, _ = histories[root][step]
        chosen = torch.zeros(NUMEL, dtype=torch.bool)
        chosen[(weight * p).abs().topk(round(DENSITY * NUMEL)).indices] = True
        total = torch.zeros(NUMEL)
        for each in histories:
            total += torch.where(chosen, each[step][1], 0.0)
            assert same_bytes(each[step][3], torch.where(chosen, 0.0, each[step][1]))
        assert all(same_bytes(each[step][2], total * (1 / size)) for each in histories)


@pytest.mark.parametrize("off", [OFF, {"smoothing": 0.0, "layers": "even", "turns": 1}])
def test_what_is_off_leaves_no_trace(off: dict[str, Any]) -> None:
    """The same bytes in weights and on the wire as a policy made without these slots, and nothing more is kept."""
    policy = rp.MIPD(DENSITY, **off)
    plain = dataclasses.replace(
        rp.IWP(DENSITY, correction="global", explore=policy.explore, values=policy.values), score=Product()
    )

    def rank(comm: rp.comm.Communicator, policy: rp.Policy) -> tuple[Tensor, float]:
        result, optimizer = train(comm, policy, sgd, 8)
        entries = optimizer.state_dict()["ringprune"]["parameters"].values()
        assert not any(kind in entry for entry in entries for kind in KINDS)
        return result, optimizer.stats()["bytes_sent"]

    (got, sent), (expected, plain_sent) = (rp.simulate(3, lambda comm, p=p: rank(comm, p))[0] for p in (policy, plain))
    assert same_bytes(got, expected) and sent == plain_sent


def test_its_parts_go_with_other_policies() -> None:
    replaced = dataclasses.replace(rp.IWP(0.05), layers="relevance", smoothing=0.1, turns=2, values="book4")
    assert (replaced.score, replaced.name) == (rp.IWP().score, "iwp")


# -- budgets by relevance ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**44), st.integers(0, 10**6)), min_size=1, max_size=30), st.floats(0, 1))
@example([(0, 4), (0, 2)], 0.5)
@example([(0, 14), (1, 9), (1, 12), (1, 20)], 0.5)  # one of three equal ones was rounded up twice
def test_a_budget_is_divided_whole_within_bounds(tensors: list[tuple[int, int]], share: float) -> None:
    heavy, numels = [weight for weight, _ in tensors], [numel for _, numel in tensors]
    least, most = sum(numel > 0 for numel in numels), sum(numels)
    total = least + round(share * (most - least))
    budget = selection.divide(total, heavy, numels)
    assert sum(budget) == total
    assert all(min(1, numel) <= k <= numel for k, numel in zip(budget, numels, strict=True))
    free = [i for i, (k, numel) in enumerate(zip(budget, numels, strict=True)) if k < numel]
    roomy = [0] * len(heavy) if any(heavy) else numels  # without weights in proportion to the room there is
    most_to = [weight or room for weight, room in zip(heavy, roomy, strict=True)]
    assert all(budget[i] >= budget[j] - 1 for i in free for j in free if most_to[i] >= most_to[j] > 0)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 10**6))
def test_a_budget_is_divided_in_proportion(heavy: list[int], spare: int) -> None:
    """Where nothing is full: each gets one, and its share of the rest to within the one that whole numbers cost."""
    budget = selection.divide(len(heavy) + spare, heavy, [10**9] * len(heavy))
    for k, weight in zip(budget, heavy, strict=True):
        assert abs(k - 1 - spare * weight / sum(heavy)) < 1


@pytest.mark.parametrize(
    ("total", "heavy", "numels", "expected"),
    [
        (10, [0, 0], [100, 100], [5, 5]),  # nothing to go by
        (10, [0, 0], [2, 100], [1, 9]),
        (10, [1, 0], [100, 100], [9, 1]),  # at least one
        (10, [10**12, 1], [4, 100], [4, 6]),  # at most all
        (3, [5, 5, 5], [10, 10, 10], [1, 1, 1]),
        (5, [5, 5, 5], [10, 10, 10], [2, 2, 1]),  # ties to the first
        (4, [7, 7, 7], [0, 2, 2], [0, 2, 2]),
        (0, [], [], []),
    ],
)
def test_borders_of_dividing(total: int, heavy: list[int], numels: list[int], expected: list[int]) -> None:
    assert selection.divide(total, heavy, numels) == expected


@pytest.mark.parametrize("size", [1, 3])
def test_budgets_follow_the_relevance_that_all_ranks_agreed_on(size: int) -> None:
    """Even at the first step, at which |w v| is read; from the second on each tensor's share of it."""
    policy = rp.MIPD(DENSITY, **OFF | {"layers": "relevance"})

    def rank(comm: rp.comm.Communicator) -> tuple[list[float], list[dict[str, int]], list[Tensor]]:
        model, sent = make_model(), []
        with torch.no_grad():
            model[2].weight.mul_(7.0)
        optimizer = wrap(model, comm, policy)
        for step, batch in enumerate(batches(comm.rank, 4)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if step == 0:
                products = [model.get_parameter(name).detach() * model.get_parameter(name).grad for name in BIG]
                own = [float(product.double().abs().sum()) for product in products]
            optimizer.step()
            sent.append({name: int(grad.count_nonzero()) for name, grad in moved(model).items()})
        return own, sent, [kept(optimizer, name, "relevance") for name in BIG]

    results = rp.simulate(size, rank)
    even = {name: round(DENSITY * numel) for name, numel in BIG.items()}
    shares = [sum(own[i] / sum(own) for own, _, _ in results) / size for i in range(2)]
    for _, sent, agreed in results:
        assert all(torch.equal(a, b) for a, b in zip(agreed, results[0][2], strict=True))
        assert [float(share) / 2**40 / size for share in agreed] == pytest.approx(shares, rel=1e-5)
        assert sent[0] == even
        for each in sent[1:]:
            assert sum(each.values()) == sum(even.values()), "the total is kept"
            assert list(each.values()) == pytest.approx([share * sum(even.values()) for share in shares], abs=2)
            assert each != even


def test_relevance_is_read_every_50_steps_and_costs_8_bytes_per_tensor() -> None:
    policy = dataclasses.replace(rp.IWP(DENSITY), layers="relevance")

    def rank(comm: rp.comm.Communicator, policy: rp.Policy) -> tuple[list[float], list[Tensor]]:
        model, headers, shares = make_model(), [], []
        optimizer = wrap(model, comm, policy)
        for batch in batches(comm.rank, 2 * REFRESH + 1):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            headers.append(optimizer.stats()["bytes_headers"])
            shares.append(kept(optimizer, "0.weight", "relevance") if policy.layers == "relevance" else torch.ones(1))
        return headers, shares

    size = 3
    (headers, shares), (plain, _) = (rp.simulate(size, lambda c, p=p: rank(c, p))[0] for p in (policy, rp.IWP(DENSITY)))
    more = [a - b for a, b in zip(headers, plain, strict=True)]
    once = 2 * (size - 1) / size * 8 * len(BIG)
    assert more == pytest.approx([once * (1 + step // REFRESH) for step in range(2 * REFRESH + 1)])
    changed = [step for step in range(1, len(shares)) if not torch.equal(shares[step], shares[step - 1])]
    assert changed == [REFRESH, 2 * REFRESH]


@pytest.mark.parametrize("strange", [0.0, float("inf")])
def test_a_rank_without_relevance_has_no_say(strange: float) -> None:
    """Weights of zero, or infinite ones; where no rank has one, budgets are even."""
    policy = dataclasses.replace(rp.IWP(DENSITY), layers="relevance")

    def rank(comm: rp.comm.Communicator) -> Tensor:
        layer = OneLayer(comm, policy)
        with torch.no_grad():
            layer.weight.fill_(strange)
        for step in range(2):
            layer.step(gradient_of(comm.rank, step))
        return layer.kept("relevance")

    assert not any(share.any() for share in rp.simulate(2, rank))


# -- the estimate of what is dropped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 4])
def test_on_a_constant_gradient_the_estimate_converges_to_it(smoothing: float, size: int) -> None:
    """Each sending after ``age`` steps leaves c / (age + c) of the error, c = (1 - a) / a.

    Every entry is drawn about ``density`` times the steps; the product over its sendings is known from their ages.
    """
    policy = dataclasses.replace(rp.RandomK(0.1), smoothing=smoothing)
    gradients = [gradient_of(rank, 0) for rank in range(size)]
    mean = torch.stack(gradients).double().mean(0)
    steps, prior = 200, (1 - smoothing) / smoothing

    def rank(comm: rp.comm.Communicator) -> None:
        layer, left, age = OneLayer(comm, policy), torch.ones(NUMEL, dtype=torch.float64), torch.zeros(NUMEL)
        for step in range(steps):
            layer.step(gradients[comm.rank])
            age += 1
            sent = selection.explore([round(0.1 * NUMEL)], [0, NUMEL], 0, step, 0).long()
            left[sent] *= prior / (age[sent] + prior)
            age[sent] = 0
        assert torch.equal(layer.kept("age"), age.int())
        error = (layer.kept("estimate").double() - mean).abs()
        # What is sent rounds by an EPS of what was accumulated since, which is at most the age times the gradient.
        assert bool((error <= left * mean.abs() + 1e-4 * (1 + mean.abs())).all())
        assert float(left.max()) < 0.9, "every entry was sent"

    rp.simulate(size, rank)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_of_what_is_all_sent_only_what_rounding_drops_is_kept(smoothing: float, size: int) -> None:
    """With an estimate the sums were kept instead, and the residual grew at each step.

    bfloat16 drops at most 2^-9 of a value, and on the rank that sums as much of the sum of all ranks' values. A value
    is a gradient less the estimate, and what was kept before: 2.1 times the largest gradient covers it.
    """
    policy = dataclasses.replace(rp.MIPD(1.0, layers="even", turns=1, explore=0.0, values="bf16"), smoothing=smoothing)
    gradients = [gradient_of(rank, 0) for rank in range(size)]
    largest = max(float(gradient.abs().max()) for gradient in gradients)

    def rank(comm: rp.comm.Communicator) -> None:
        layer = OneLayer(comm, policy)
        for _ in range(6):
            layer.step(gradients[comm.rank])
            assert float(layer.kept("residual").abs().max()) <= 2.0**-9 * (1 + size) * 2.1 * largest

    rp.simulate(size, rank)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sums", [True, False])
def test_recurrence_of_the_estimate(overlap: bool, sums: bool) -> None:
    """By hand, to the bit: p = v - s + g; all move by s, the sent by the mean of p besides; s += mean / (age + c)."""
    smoothing, size = 0.25, 3
    policy = dataclasses.replace(rp.IWP(DENSITY, correction="global"), smoothing=smoothing)
    options = {"overlap": overlap, "op": "sum" if sums else "average"}

    def rank(comm: rp.comm.Communicator) -> list[dict[str, Tensor]]:
        weight = nn.Parameter(torch.randn(64, 80, generator=torch.Generator().manual_seed(99)))
        inner = torch.optim.SGD([weight], lr=0.01)
        optimizer = rp.DistributedOptimizer(inner, [("w", weight)], policy=policy, comm=comm, **options)
        found = []
        for step in range(12):
            optimizer.zero_grad()
            gradient = gradient_of(comm.rank, step)
            (weight * gradient.view(64, 80)).sum().backward()
            optimizer.step()
            assert weight.grad is not None
            state = {kind: kept(optimizer, "w", kind).flatten() for kind in ("residual", "estimate", "age")}
            found.append(state | {"gradient": gradient, "moved": weight.grad.flatten().clone()})
        return found

    histories = rp.simulate(size, rank)
    residuals = [torch.zeros(NUMEL)] * size
    estimate, age = torch.zeros(NUMEL), torch.zeros(NUMEL, dtype=torch.int32)
    scale = size if sums else 1
    for step in range(12):
        ps = [v - estimate + each[step]["gradient"] for v, each in zip(residuals, histories, strict=True)]
        age = age + 1
        sent = histories[0][step]["age"] == 0
        assert int(sent.sum()) == round(DENSITY * NUMEL)
        total = torch.zeros(NUMEL)
        for p in ps:
            total += p
        values = (total if sums else total * (1 / size)) * sent
        expected = estimate * scale + values
        estimate = estimate + torch.where(sent, values / ((age.float() + (1 - smoothing) / smoothing) * scale), 0.0)
        age = torch.where(sent, 0, age)
        residuals = [torch.where(sent, 0.0, p) for p in ps]
        for each, residual in zip(histories, residuals, strict=True):
            assert same_bytes(each[step]["moved"], expected)
            assert same_bytes(each[step]["residual"], residual)
            assert same_bytes(each[step]["estimate"], estimate)
            assert same_bytes(each[step]["age"], age)


@pytest.mark.parametrize("options", [{"smoothing": 1e-300}, {"smoothing": 5e-324}])
def test_a_weight_that_rounds_to_nothing_estimates_nothing(options: dict[str, float]) -> None:
    policies = (dataclasses.replace(rp.IWP(DENSITY), **options), rp.IWP(DENSITY))
    runs = [rp.simulate(2, lambda comm, p=p: train(comm, p, sgd, 6)[0])[0] for p in policies]
    assert same_bytes(*runs)


def test_a_flush_sends_what_is_left_over_and_keeps_the_estimate() -> None:
    """The estimate is no mass: what it has moved has left the residuals."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = make_model()
        optimizer = wrap(model, comm, rp.MIPD(DENSITY), lambda p: torch.optim.SGD(p, lr=1.0))
        run(model, optimizer, comm.rank, 5)
        before, estimate = weights(model), kept(optimizer, "0.weight", "estimate")
        residual = kept(optimizer, "0.weight", "residual")
        optimizer.flush()
        state = optimizer.state_dict()["ringprune"]["parameters"]["0.weight"]
        assert same_bytes(state["estimate"], estimate) and estimate.any()
        assert not state["age"].any() and not state["residual"].any()
        return residual, (before - weights(model))[: 64 * 64].view(64, 64), state

    results = rp.simulate(3, rank)
    mean = sum(residual.double() for residual, _, _ in results) / 3
    assert torch.allclose(results[0][1].double(), mean, atol=1e-6)
    for kind in KINDS:
        assert all(same_bytes(state[kind], results[0][2][kind]) for _, _, state in results)


# -- turns ------------------------------------------------------------------------------------------------------------


def deep_model() -> nn.Module:
    """Seven packed tensors of unlike sizes."""
    sizes = [64, 96, 48, 80, 64, 64, 48, 128]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 25 << 20])
@pytest.mark.parametrize("density", [DENSITY, 1.0])
def test_every_parameter_is_updated_exactly_every_so_many_steps(turns: int, bucket_bytes: int, density: float) -> None:
    policy = dataclasses.replace(rp.IWP(density), turns=turns)

    def rank(comm: rp.comm.Communicator) -> dict[str, list[int]]:
        model = deep_model()
        for param in model.parameters():
            nn.init.constant_(param, 0.02)
        optimizer = wrap(model, comm, policy, lambda p: torch.optim.SGD(p, lr=1e-3), bucket_bytes=bucket_bytes)
        updated: dict[str, list[int]] = {name: [] for name, p in model.named_parameters() if p.dim() > 1}
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            for name, steps in updated.items():
                count = int(model.get_parameter(name).grad.count_nonzero())
                numel = model.get_parameter(name).numel()
                assert count in (0, round(density * numel))
                if count:
                    steps.append(step)
        return updated

    first, other = rp.simulate(2, rank)
    assert first == other
    groups: dict[int, int] = dict.fromkeys(range(turns), 0)
    for name, steps in first.items():
        assert steps == list(range(steps[0], 12, turns)) and steps[0] < turns
        groups[steps[0]] += deep_model().get_parameter(name).numel()
    largest = max(deep_model().get_parameter(name).numel() for name in first)
    assert max(groups.values()) - min(groups.values()) <= largest, "balanced by entries"


def test_others_keep_accumulating_and_their_outputs_are_zero() -> None:
    policy = dataclasses.replace(rp.IWP(DENSITY, correction="global"), turns=2)

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy, lambda p: torch.optim.SGD(p, lr=0.01))
        before = dict.fromkeys(BIG, torch.zeros(()))
        for batch in batches(comm.rank, 4):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            grads = torch.autograd.grad(loss, [model.get_parameter(name) for name in BIG], retain_graph=True)
            loss.backward()
            optimizer.step()
            for (name, grad), own in zip(moved(model).items(), grads, strict=True):
                residual = kept(optimizer, name, "residual")
                if not grad.any():
                    assert same_bytes(residual, before[name] + own)
                before[name] = residual

    rp.simulate(2, rank)


@pytest.mark.parametrize("layers", ["even", "relevance"])
def test_with_the_estimate_others_move_by_it(layers: Any) -> None:
    policy = dataclasses.replace(rp.IWP(DENSITY), turns=2, smoothing=0.5, layers=layers)

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        for batch in batches(comm.rank, 5):
            before = {n: kept(optimizer, n, "estimate") for n in BIG}
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            sent = set()
            for name, grad in moved(model).items():
                age = kept(optimizer, name, "age")
                assert same_bytes(grad[age > 0], before[name][age > 0])
                sent |= {name} if bool((age == 0).any()) else set()
            assert len(sent) == len(BIG) // 2, "tensors take turns"

    rp.simulate(2, rank)


@pytest.mark.parametrize("refresh", [2, 3])
def test_a_core_is_proposed_of_all_tensors_and_sent_of_those_whose_turn_it_is(refresh: int) -> None:
    """With refresh=2 and turns=2 the second group would never be proposed at a step of its own."""
    policy = dataclasses.replace(rp.IWP(DENSITY, refresh=refresh), turns=2)
    for found in rp.simulate(2, lambda comm: history(comm, policy, 8)):
        for step in range(1, 8):
            counts = [int(grad.count_nonzero()) for grad in found[step].values()]
            assert sorted(counts)[0] == 0 and counts in ([round(DENSITY * 4096), 0], [0, round(DENSITY * 3072)])


def test_bytes_are_those_of_the_formula() -> None:
    """Of one tensor at each step: its proposals, and its values twice, a message for each region; relevance once."""
    size, steps, numels = 4, 6, list(BIG.values())
    policy = dataclasses.replace(rp.IWP(DENSITY), turns=2, layers="relevance", values="book4")

    def rank(comm: rp.comm.Communicator) -> tuple[dict[str, Any], list[int]]:
        optimizer = train(comm, policy, sgd, steps)[1]
        return optimizer.stats(), [int(kept(optimizer, name, "relevance")) for name in BIG]

    results = rp.simulate(size, rank)
    share, code, indices, values = (size - 1) / size, value_code("book4"), 0.0, 0.0
    assert code is not None
    even = selection.budgets(numels, DENSITY)
    # The flat range has the tensors in reverse order; the larger one has the first turn.
    later = selection.divide(sum(even), results[0][1][::-1], numels[::-1])[::-1]
    for step in range(steps):
        k = (later if step else even)[step % 2]
        indices += share * index_code(k, sum(numels)).size
        values += 2 * share * sum(code.size(k * (r + 1) // size - k * r // size) for r in range(size))
    mean = {key: sum(stats[key] for stats, _ in results) / size for key in results[0][0] if key.startswith("bytes")}
    assert mean["bytes_indices"] == pytest.approx(indices)
    assert mean["bytes_values"] == pytest.approx(values)
    headers = steps * 2 * share * 12 + (size - 1) * (4 + 8 * (6 + 2)) + 2 * share * 8 * len(BIG)
    assert mean["bytes_headers"] == pytest.approx(headers)


# -- steps not made, checkpoints, modes -------------------------------------------------------------------------------


ALL_ON = {
    "mipd": rp.MIPD(DENSITY, smoothing=0.2),
    "with look-ahead": dataclasses.replace(rp.MIPD(DENSITY, smoothing=0.2), lookahead=True),
    "with a core": dataclasses.replace(rp.MIPD(DENSITY, smoothing=0.2, turns=3), refresh=2),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ALL_ON)
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_step_that_is_skipped_teaches_nothing(policy: str, overlap: bool, bad: int) -> None:
    """Also the first, at which relevance is read."""

    def rank(comm: rp.comm.Communicator, skipped: bool) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, ALL_ON[policy], nonfinite="skip", overlap=overlap)
        run(model, optimizer, comm.rank, bad)
        if skipped:
            before = copy.deepcopy(optimizer.state_dict()["ringprune"]["parameters"])
            optimizer.zero_grad()
            factor = float("nan") if comm.rank == 1 else 1.0
            (factor * loss_of(model, next(iter(batches(comm.rank, 1, 70))))).backward()
            optimizer.step()
            after = optimizer.state_dict()["ringprune"]["parameters"]
            for name, entry in before.items():
                assert all(same_bytes(tensor, after[name][kind]) for kind, tensor in entry.items())
        run(model, optimizer, comm.rank, 4, start=50)
        return weights(model)

    expected, got = (rp.simulate(3, lambda comm, s=skipped: rank(comm, s)) for skipped in (False, True))
    assert same_bytes(expected[0], got[0])


@pytest.mark.parametrize("stop", [1, 6])
@pytest.mark.parametrize("policy", ALL_ON)
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"hierarchical": True}])
def test_resuming_is_the_same_as_not_stopping(policy: str, stop: int, options: dict[str, Any]) -> None:
    def straight(comm: rp.comm.Communicator) -> Tensor:
        return train(comm, ALL_ON[policy], nesterov, 11, **options)[0]

    def resumed(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, ALL_ON[policy], nesterov, **options)
        run(model, optimizer, comm.rank, stop)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        again = make_model(seed=5)
        other = wrap(again, comm, ALL_ON[policy], nesterov, **options)
        again.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        run(again, other, comm.rank, 11 - stop, start=stop)
        return weights(again)

    nodes = {"ranks_per_node": 2} if options.get("hierarchical") else {}
    expected, got = rp.simulate(4, straight, **nodes), rp.simulate(4, resumed, **nodes)
    assert all(same_bytes(a, b) for a, b in zip(expected, got, strict=True))


def test_a_flushed_checkpoint_of_any_rank_serves_any_number_of_ranks() -> None:
    def save(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = wrap(model, comm, ALL_ON["mipd"])
        run(model, optimizer, comm.rank, 6)
        optimizer.flush()
        return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    saved = rp.simulate(4, save, ranks_per_node=2)

    def load(comm: rp.comm.Communicator) -> Tensor:
        model = make_model(seed=9)
        optimizer = wrap(model, comm, ALL_ON["mipd"], hierarchical=True)
        model.load_state_dict(saved[3 - comm.rank]["model"])
        optimizer.load_state_dict(saved[3 - comm.rank]["optimizer"])
        run(model, optimizer, comm.rank, 4)
        return weights(model)

    results = rp.simulate(3, load, ranks_per_node=2)
    assert all(same_bytes(result, results[0]) for result in results)


@pytest.mark.parametrize("policy", ALL_ON)
def test_update_mode_exchanges_updates_in_the_same_way(policy: str) -> None:
    """Conservation: what the shared weights moved by and what is left over is what the ranks' own steps made."""
    chosen = dataclasses.replace(ALL_ON[policy], local_steps=rp.LocalSteps(3))

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, chosen)
        start, came_in = weights(model)[:4096].double(), torch.zeros(4096, dtype=torch.float64)
        for interval in range(5):
            shared = weights(model)[:4096].double()
            run(model, optimizer, comm.rank, 2, start=3 * interval)
            optimizer.zero_grad()
            loss_of(model, next(iter(batches(comm.rank, 1, 3 * interval + 2)))).backward()
            own = model[0].weight.grad.detach().flatten().clone()
            buffer = optimizer.state[model[0].weight]["momentum_buffer"].flatten().double()
            moved_to = weights(model)[:4096].double() - 0.05 * (0.9 * buffer + own.double())
            came_in += shared - moved_to
            optimizer.step()
        return came_in, start - weights(model)[:4096].double(), kept(optimizer, "0.weight", "residual").flatten()

    results = rp.simulate(3, rank)
    assert all(same_bytes(went, results[0][1]) for _, went, _ in results)
    mean_in = sum(came_in for came_in, _, _ in results) / 3
    mean_left = sum(left.double() for _, _, left in results) / 3
    assert torch.allclose(mean_in, results[0][1] + mean_left, atol=1e-6)


# -- on the ring, and bad input ---------------------------------------------------------------------------------------


def test_books_go_round_the_ring_where_it_is_asked_for() -> None:
    assert "shift" in rp.MIPD(reduction="ring").needs
    assert "shift" not in rp.MIPD().needs
    results = rp.simulate(4, lambda comm: train(comm, rp.MIPD(DENSITY, reduction="ring"), sgd, 8)[0])
    assert all(same_bytes(result, results[0]) for result in results)


def test_the_ring_needs_a_communicator_that_can_shift() -> None:
    class NoShift:
        kind, size, abilities = "horovod", 2, frozenset({"broadcast", "allreduce", "allgather", "alltoall"})

    with pytest.raises(rp.ConfigurationError, match="'mipd' needs shift, which the horovod communicator cannot do"):
        rp.policies.check_abilities(rp.MIPD(reduction="ring"), NoShift())


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ({"layers": "relevent"}, "did you mean 'relevance'"),
        ({"smoothing": -0.1}, "smoothing=-0.1"),
        ({"smoothing": 1.1}, "smoothing=1.1"),
        ({"smoothing": float("nan")}, "smoothing=nan"),
        ({"turns": 0}, "turns=0: a whole number of at least 1"),
        ({"density": 0.0}, "density="),
        ({"explore": 1.5}, "explore="),
        ({"values": "book3"}, "did you mean 'book"),
    ],
)
def test_arguments_out_of_range_are_refused(slots: dict[str, Any], said: str) -> None:
    with pytest.raises(rp.ConfigurationError, match=said):
        rp.MIPD(**slots)


@pytest.mark.parametrize("slots", [{"turns": 2.0}, {"turns": True}, {"smoothing": "a"}, {"layers": None}])
def test_arguments_of_another_type_are_refused(slots: dict[str, Any]) -> None:
    with pytest.raises(rp.ArgumentTypeError):
        rp.MIPD(**slots)


@pytest.mark.parametrize(
    ("policy", "slots", "said"),
    [
        (rp.DGC(), {"layers": "relevance"}, "layers='even'"),
        (rp.DGC(), {"smoothing": 0.1}, "smoothing=0.0"),
        (rp.DGC(), {"turns": 2}, "turns=1"),
        (rp.ScaleCom(), {"smoothing": 0.1}, "low_pass=1.0"),
        (rp.SlimDP(explore_by="rank"), {"smoothing": 0.1}, "explore_by='seed'"),
    ],
)
def test_combinations_that_cannot_work_are_refused(policy: rp.Policy, slots: dict[str, Any], said: str) -> None:
    with pytest.raises(rp.ConfigurationError, match=said):
        dataclasses.replace(policy, **slots)


@pytest.mark.parametrize("turns", [1, 2, 50])
def test_a_density_that_rounds_to_nothing_sends_one_entry_at_its_turn(turns: int) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        layer = OneLayer(comm, rp.MIPD(1e-9, turns=turns, smoothing=0.0))
        counts = [len(sent_at(layer.step(gradient_of(comm.rank, step)))) for step in range(4)]
        assert counts == [1 if step % turns == 0 else 0 for step in range(4)]

    rp.simulate(2, rank)


def test_more_turns_than_tensors_leave_some_steps_without_any() -> None:
    results = rp.simulate(3, lambda comm: train(comm, rp.MIPD(DENSITY, turns=5), sgd, 12)[0])
    assert all(same_bytes(result, results[0]) for result in results)
