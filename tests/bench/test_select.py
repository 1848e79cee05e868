"""``ringprune bench select``: rows as documented, honest about exactness, clear about what cannot be measured."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ringprune as rp
from ringprune import __main__, ops
from ringprune.bench import measure, resnet50, select
from ringprune.bench.baselines import Memory, SampledThreshold, TorchTopk, exact_positions
from ringprune.bench.bucket import WARMUP, Bucket, Case
from ringprune.bench.measure import Budget
from ringprune.bench.stopwatch import Sample, Times

CPU = torch.device("cpu")
SMALL = ((16, 8, 3, 3), (16,), (2048, 3), (10, 32), (10,))
TINY = Case("flat", ((4000,),), 0.05)
NUMBERS = {
    "n": int,
    "density": float,
    "threads": int,
    "ns_per_element": float,
    "gb_per_s": float,
    "ratio_to_pass1": float,
    "ratio_to_triad": float,
    "speedup_vs_torch_topk": float,
    "speedup_vs_dgc_sampling": float,
    "fused_ms": float,
    "full_step_ms": float,
    "pass1_ms": float,
    "triad_gb_per_s": float,
    "kept": int,
    "of": int,
    "read_again": float,
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few entries, a small array for the memory, and torch's threads as they were."""
    monkeypatch.setattr(measure.resnet50, "SHAPES", SMALL)
    monkeypatch.setattr(select, "_budget", lambda options: Budget(options.repetitions or 2, memory=10_000))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bench(*arguments: str) -> int:
    return __main__.main(["bench", "select", "--allow-reference", *arguments])


def trained(case: Case = TINY, steps: int = WARMUP) -> Bucket:
    bucket = Bucket(case, CPU, seed=1)
    for _ in range(steps):
        bucket.draw()
        bucket.step()
    bucket.draw()
    bucket.restore()
    return bucket


# -- the command ------------------------------------------------------------------------------------------------------


def test_rows_hold_what_is_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert bench("--sizes", "1e4", "20000", "--densities", "0.01", "0.1", "--threads", "1", "--json", str(out)) == 0
    rows = json.loads(out.read_text())
    flat, small = [("flat", n, d) for n in (10000, 20000) for d in (0.01, 0.1)], sum(Case("", SMALL, 0.1).numels)
    cold, resnet = [("cold", n, 0.01) for n in (10000, 20000)], [("resnet50", small, d) for d in (0.01, 0.1)]
    assert [(row["case"], row["n"], row["density"]) for row in rows] == [*flat, *cold, *resnet]
    for row in rows:
        assert {key: type(row[key]) for key in NUMBERS} == NUMBERS
        assert row["exact"] is True
        assert (row["device"], row["threads"], row["of"], row["backend"]) == ("cpu", 1, 2, ops.backend())
        assert all(row[key] > 0 for key in NUMBERS if key not in ("kept", "read_again"))
        assert ("step_overhead_ms" in row) is (row["case"] == "resnet50")
    assert documented() >= set(rows[-1])
    shown = capsys.readouterr().out
    assert "20,000" in shown
    assert "the wrapper adds" in shown


def documented() -> set[str]:
    """Keys of the table in the API page."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text().partition("## Command line")[2]
    lines = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    return {key for line in lines for key in re.findall(r"`(\w+)`", line)}


def test_standard_output_can_be_the_rows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--cases", "flat", "--sizes", "1000", "--densities", "0.1", "--json", "-") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["n"] == 1000


def test_what_was_measured_before_an_interrupt_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = measure.measure

    def interrupted(case: Case, *rest: Any) -> dict[str, Any]:
        if case.numel == 2000:
            raise KeyboardInterrupt
        return measured(case, *rest)

    monkeypatch.setattr(select, "measure", interrupted)
    status = bench("--cases", "flat", "--sizes", "1000", "2000", "--densities", "0.1", "--json", "-")
    told = capsys.readouterr()
    assert status == 130
    assert [row["n"] for row in json.loads(told.out)] == [1000]
    assert "stopped" in told.err


def test_an_interrupt_before_the_first_row_leaves_an_earlier_file_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(select, "measure", interrupted)
    (earlier := tmp_path / "rows.json").write_text("earlier")
    assert bench("--cases", "flat", "--sizes", "1000", "--json", str(earlier)) == 130
    assert earlier.read_text() == "earlier"
    assert "before any case was done" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["missing/rows.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    where: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench("--quick", "--json", str(tmp_path / where))
    assert "a file in a folder that exists" in capsys.readouterr().err


def test_a_short_run_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--quick", "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["case"], row["n"], row["density"]) for row in rows] == [
        ("flat", 100_000, 0.01),
        ("cold", 100_000, 0.01),
    ]


def test_it_is_part_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench", "--help"], ["bench", "select", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            __main__.main(arguments)
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert "--sizes" in shown


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sizes", "0"], "'0': a whole number of at least 1 and below 2**31"),
        (["--sizes", "1e10"], "'1e10': a whole number of at least 1 and below 2**31"),
        (["--sizes", "1.5"], "'1.5': a whole number"),
        (["--sizes", "many"], "'many': a whole number"),
        (["--densities", "0"], "'0': a number above 0 and at most 1"),
        (["--densities", "1 %"], "'1 %': a number above 0 and at most 1"),
        (["--densities", "nan"], "'nan': a number above 0 and at most 1"),
        (["--threads", "0"], "'0': a whole number of at least 1"),
        (["--seconds", "-1"], "'-1'"),
        (["--seconds", "1", "--repetitions", "1"], "not allowed with"),
        (["--cases", "warm"], "'warm'"),
        (["--device", "tpu"], "'tpu'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench(*arguments)
    assert complaint in capsys.readouterr().err


def test_without_compiled_kernels_it_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "backend", lambda: "reference")
    assert __main__.main(["bench", "select"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"ringprune bench select: no compiled cpu kernels .* --allow-reference\n", told.err)
    assert bench("--cases", "flat", "--sizes", "1000", "--json", "-") == 0
    assert "the torch reference computes" in capsys.readouterr().err


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("--device", "cuda") == 2
    assert capsys.readouterr().err == "ringprune bench select: --device cuda: torch finds no CUDA device here\n"


# -- exactness --------------------------------------------------------------------------------------------------------


def last_but_one(positions: torch.Tensor) -> torch.Tensor:
    """Select another entry in place of the last."""
    changed = positions.clone()
    changed[-1] -= 1 if len(positions) < 2 or positions[-1] - 1 != positions[-2] else -1
    return changed


@pytest.mark.parametrize(
    "spoil",
    [last_but_one, lambda positions: positions[:-1], lambda positions: positions.flip(0)],
    ids=["one wrong", "one missing", "order"],
)
def test_a_wrong_selection_is_told(
    spoil: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = Bucket.fused
    monkeypatch.setattr(Bucket, "fused", lambda self: spoil(fused(self)))
    monkeypatch.setattr(Bucket, "full", fused)
    assert bench("--cases", "flat", "--sizes", "5000", "--densities", "0.01", "--json", "-") == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["exact"] is False


@pytest.mark.parametrize("shapes", [((4000,),), SMALL], ids=["one tensor", "several"])
def test_the_check_is_that_of_select(shapes: tuple[tuple[int, ...], ...]) -> None:
    bucket = trained(Case("flat", shapes, 0.05))
    velocity = bucket.velocity * 0.9 + bucket.fresh
    scores = ops.importance(bucket.residual + velocity, bucket.weights, score="ratio", parameters=bucket.parameters)
    assert torch.equal(exact_positions(bucket), ops.select(scores, bucket.offsets, bucket.counts))


def test_the_check_gives_ties_to_the_lowest() -> None:
    bucket = trained(Case("flat", ((100,),), 0.05), steps=0)
    bucket.fresh.fill_(1.0)
    bucket.weight.fill_(1.0)
    assert exact_positions(bucket).tolist() == [0, 1, 2, 3, 4]


# -- what is timed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [((4000,),), SMALL], ids=["one tensor", "several"])
def test_torch_makes_the_same_step(shapes: tuple[tuple[int, ...], ...]) -> None:
    bucket = trained(Case("flat", shapes, 0.05))
    bucket.full()
    bucket.settle()
    ours = [tensor.clone() for tensor in (bucket.out_residual, bucket.grad)]
    bucket.restore()
    indices = TorchTopk(bucket)()
    assert torch.equal(indices.int(), exact_positions(bucket))
    assert torch.equal(bucket.out_residual, ours[0])
    assert torch.equal(bucket.grad, ours[1])


def test_the_sampled_threshold_selects_about_as_many_and_nothing_small() -> None:
    bucket = trained(Case("flat", ((200_000,),), 0.01), steps=2)
    sampled = SampledThreshold(bucket)
    (indices,) = sampled()
    assert 0.8 * 2000 <= indices.numel() <= 2000
    assert float(sampled.score[indices].min()) >= float(sampled.score.topk(4000).values.min())


def test_pass1_leaves_the_state_of_the_fused_step() -> None:
    bucket = trained(Case("flat", SMALL, 0.05))
    bucket.pass1()
    ours = [tensor.clone() for tensor in (bucket.out_residual, bucket.out_velocity)]
    for other in (bucket.fused, bucket.beside):
        bucket.restore()
        other()
        assert torch.equal(bucket.out_residual, ours[0])
        assert torch.equal(bucket.out_velocity, ours[1])


def test_every_call_finds_the_same_state() -> None:
    bucket = trained()
    before = [tensor.clone() for tensor in (bucket.out_residual, bucket.out_velocity, bucket.grad, bucket.hints.keys)]
    for call in (bucket.pass1, bucket.fused, bucket.beside, bucket.full, TorchTopk(bucket), SampledThreshold(bucket)):
        call()
        bucket.restore()
        after = (bucket.out_residual, bucket.out_velocity, bucket.grad, bucket.hints.keys)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_cold_has_no_hints() -> None:
    bucket = trained(Case("cold", ((4000,),), 0.01))
    assert not bucket.hints.keys.any()


def test_gradients_change_and_state_evolves() -> None:
    bucket = trained()
    fresh, residual = bucket.fresh.clone(), bucket.residual.clone()
    bucket.step()
    bucket.draw()
    assert not torch.equal(bucket.fresh, fresh)
    assert not torch.equal(bucket.residual, residual)


def test_the_memory_is_moved() -> None:
    memory = Memory(1000, CPU)
    memory()
    assert memory.bytes == 16000
    assert torch.equal(memory.a, torch.full((1000,), 4.0))


def test_the_local_step_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper is called as autograd calls it: every bucket is exchanged, no step is skipped."""
    seen: list[dict[str, Any]] = []
    close = rp.DistributedOptimizer.close

    def closing(self: rp.DistributedOptimizer) -> None:
        seen.append(self.stats())
        close(self)

    monkeypatch.setattr(rp.DistributedOptimizer, "close", closing)
    row = measure.local_step(Case("resnet50", SMALL, 0.01), CPU, 2, seed=0)
    assert seen[0]["steps"] == WARMUP + 2
    assert seen[0]["skipped_steps"] == 0
    assert seen[0]["realised_density"] == pytest.approx(0.01, rel=0.1)
    assert row["communicator_ms"] > 0
    parts = row["wrapped_step_ms"] - row["sgd_step_ms"] - row["communicator_ms"]
    assert row["step_overhead_ms"] == pytest.approx(parts)


# -- times ------------------------------------------------------------------------------------------------------------


def times(*pairs: tuple[float, float]) -> Times:
    return Times([Sample(seconds, waited) for seconds, waited in pairs])


@pytest.mark.parametrize(
    ("timed", "seconds", "kept", "disturbed"),
    [
        pytest.param(times((1, 0), (2, 0), (9, 0)), 2, 3, False, id="all calm"),
        pytest.param(times((1, 0), (2, 0), (3, 0.02), (9, 0.5), (8, 0.04)), 2, 3, False, id="disturbed ones left out"),
        pytest.param(times((1, 0), (5, 0.2), (9, 0.5), (6, 0.3)), 5, 1, True, id="too few: the calmest"),
        pytest.param(times((4, 0)), 4, 1, False, id="one"),
    ],
)
def test_the_median_is_of_calm_times(timed: Times, seconds: float, kept: int, disturbed: bool) -> None:
    assert (timed.seconds, timed.kept, timed.disturbed) == (seconds, kept, disturbed)


@pytest.mark.parametrize(
    ("budget", "ends"),
    [
        (Budget(repetitions=3), [(0, 0, True), (2, 9, True), (3, 0, False)]),
        (Budget(seconds=2.0), [(4, 5, True), (5, 5, False), (5, 4, True), (6, 4, False)]),
        (Budget(seconds=1e6), [(5, 5, True), (99, 5, True), (100, 5, False), (100, 4, True)]),
    ],
)
def test_repetitions_end(budget: Budget, ends: Sequence[tuple[int, int, bool]]) -> None:
    for done, kept, goes_on in ends:
        assert budget.goes_on(done, spent=float(done), kept=kept) is goes_on


def test_a_slow_call_pauses_once_it_has_been_timed() -> None:
    budget = Budget(seconds=10.0)
    assert budget.is_due(times((9, 0), (9, 0)), spent=18.5)
    assert not budget.is_due(times((9, 0), (9, 0), (9, 0)), spent=28.0)
    assert budget.is_due(times((1, 0), (1, 0), (1, 0)), spent=28.0)


# -- ResNet-50 --------------------------------------------------------------------------------------------------------


def test_the_shapes_are_those_of_resnet50(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = Case("resnet50", resnet50.SHAPES, 0.01)
    assert len(case.shapes) == 161
    assert case.numel == 25_557_032
    assert case.shapes[0] == (64, 3, 7, 7)
    assert case.shapes[-2:] == ((1000, 2048), (1000,))
    assert sum(len(shape) == 4 for shape in case.shapes) == 53
    assert all(conv[:1] == scale == shift for conv, scale, shift in zip(*[iter(case.shapes[:-2])] * 3, strict=True))
