"""The command line of bench_exchange.py: what is wrong is said in one line that helps; what is missing is left out."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import bench_exchange
import pytest
from exchanges import job, options, outside
from exchanges.choice import Choice
from exchanges.errors import CannotRun
from exchanges.methods import DEFAULTS, METHODS, Unknown, mca_flags, named
from exchanges.ours import made

from ringprune.policies import POLICIES


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str, inside: bool = False) -> str:
    with pytest.raises(SystemExit) as ended:
        options.parsed(arguments, inside=inside)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "resnet5O"], "did you mean resnet50?"),
        (["--methods", "ringprune:iwq"], "did you mean ringprune:iwp?"),
        (["--methods", "horovod-fp61"], "did you mean horovod-fp16?"),
        (["--rates", "1 gb"], "100mbit"),
        (["--ranks", "1"], "at least 2; one alone sends nothing"),
        (["--ranks", "2,x"], "a whole number"),
        (["--density", "1.5"], "at most 1"),
        (["--values", "fp8"], "fp32"),
        (["--steps", "0"], "at least 1"),
        (["--bucket-bytes", "0"], "at least 1"),
        (["--peer", "mine"], "MODULE:FUNCTION"),
        (["--methods", "peer"], "--peer MODULE:FUNCTION is missing"),
        (["--plot", "rows.doc"], "ends in .png, .pdf, .svg"),
        (["--time-limit", "-3"], "above 0"),
        (["--within", "nan"], "above 0"),
        (["--seed", "-1"], "at least 0"),
        (["--json", "no/such/folder/rows.json"], "a folder that exists"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in complaint(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "4"], "this is a job already"),
        (["--simulate-ranks", "4"], "without mpirun"),
        (["--rates", "1gbit,unlimited"], "one rate"),
    ],
)
def test_what_a_job_cannot_choose(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in complaint(capsys, *arguments, inside=True)
    options.parsed(arguments, inside=False)


def test_defaults_and_lists() -> None:
    plain = options.parsed([], inside=False)
    assert (plain.models, plain.ranks, plain.methods, plain.jobs) == (["resnet50"], [4], DEFAULTS, True)
    given = options.parsed(["--models", "alexnet,vgg19", "--rates", "1gbit,unlimited", "--ranks", "2,4"], inside=False)
    assert (given.models, given.rates, given.ranks) == (["alexnet", "vgg19"], ["1gbit", "unlimited"], [2, 4])
    assert outside.total(given) == 2 * 2 * 2 * len(DEFAULTS)
    simulated = options.parsed(["--simulate-ranks", "2,4"], inside=False)
    assert not simulated.jobs
    assert options.parsed(["--simulate-ranks", "2,4", "--rates", "1gbit"], inside=False).jobs
    assert options.parsed(["--peer", "a.b:c"], inside=False).methods == [*DEFAULTS, "peer"]


def test_a_job_is_told_all_that_was_chosen() -> None:
    words = "--models alexnet --methods ringprune:iwp --rates 1gbit --density 0.02 --communicator torch --values int8"
    words += " --dense-values fp16 --bucket-bytes 1000 --steps 3 --warmup 4 --seed 5"
    chosen = options.choice_of(options.parsed(words.split(), inside=False), "alexnet", "ringprune:iwp", "1gbit")
    told = options.parsed(outside._arguments(chosen), inside=True)
    assert options.choice_of(told, told.models[0], told.methods[0], told.rates[0]) == chosen
    assert (chosen.bucket_bytes, chosen.values, chosen.seed) == (1000, "int8", 5)


def test_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parsed(["--list-methods"], inside=False)
    assert ended.value.code == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*METHODS, "ringprune:POLICY"]


def test_every_policy_is_a_method() -> None:
    assert [method.name for method in named([f"ringprune:{name}-ring" for name in POLICIES])]
    with pytest.raises(Unknown, match="--list-methods"):
        named(["nothing of the kind"])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_settings_that_its_policy_takes(name: str) -> None:
    METHODS[name].check(Choice("tiny", name))


def test_what_is_missing_is_said_before_a_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(POLICIES, "dgc", raising=False)
    with pytest.raises(CannotRun, match=r"ringprune:dgc: this RingPrune has no policy 'dgc', only .*iwp"):
        METHODS["ringprune:dgc"].check(Choice("tiny", "ringprune:dgc"))
    with pytest.raises(CannotRun, match="no communicator 'pigeon'"):
        METHODS["ringprune:iwp"].check(Choice("tiny", "ringprune:iwp", communicator="pigeon"))
    monkeypatch.setitem(POLICIES, "iwp", lambda density=0.01: None)
    with pytest.raises(CannotRun, match="of this RingPrune takes no values="):
        METHODS["ringprune:iwp"].check(Choice("tiny", "ringprune:iwp", values="int8"))
    METHODS["horovod-fp32"].check(Choice("tiny", "horovod-fp32", values="int8"))


def test_formats_are_for_every_method_or_it_says_what_it_takes() -> None:
    """Dense was left out beside others with both formats; of dgc one was told what it does not take, and no more."""
    both = Choice("tiny", "", values="fp16", dense_values="int8")
    for method in named(["ringprune:iwp", "ringprune:random_k", "ringprune:dense"]):
        method.check(both)
        assert made(method.policy, both, method.settings).dense_values == "int8"
    assert made("dense", Choice("tiny", "", values="fp16"), {}).dense_values == "fp16"
    assert made("iwp", both, {}).values == "fp16"
    for name in ("ringprune:dgc", "ringprune:dgc-scattered"):
        with pytest.raises(
            CannotRun, match=rf"{name}: policy 'dgc' .* takes no values=, only density=, dense_values=$"
        ):
            METHODS[name].check(both)
        METHODS[name].check(Choice("tiny", "", dense_values="int8"))


def test_the_ring_is_forced_by_mpirun_and_seen_inside() -> None:
    flags = mca_flags(ring=True)
    variables = {f"OMPI_MCA_{name}": value for name, value in zip(flags[1::3], flags[2::3], strict=True)}
    assert job.forced_ring(variables)
    assert not job.forced_ring({})
    assert mca_flags(ring=False) == []
    assert [METHODS[name].ring for name in ("horovod-fp16-ring", "horovod-fp16", "gloo-fp16")] == [True, False, False]


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "RANK": "0"}, "mpi"),
        ({"PMI_RANK": "1"}, "mpi"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h0"}, "torch"),
        ({"RANK": "0"}, None),
    ],
)
def test_who_started_this_process(variables: dict[str, str], kind: str | None) -> None:
    assert job.started_by(variables) == kind


def test_where_no_cluster_can_be_made_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    rows = tmp_path / "rows.json"
    assert bench_exchange.main(["--ranks", "2", "--json", str(rows)]) == 3
    said = capsys.readouterr()
    assert said.err.startswith("bench_exchange: nothing measured: the emulated cluster needs root")
    assert (said.err.count("\n"), said.out, rows.exists()) == (1, "", False)


def test_simulated_rows_without_a_cluster(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    wanted = ["--simulate-ranks", "2,3", "--simulate-entries", "1e4", "--steps", "1", "--warmup", "1"]
    methods = ["--methods", "gloo-fp32,ringprune:iwp", "--plot", str(tmp_path / "rows.png")]
    assert bench_exchange.main(["--models", "lstm_lm", *wanted, *methods, "--json", str(rows)]) == 0
    assert rows.read_text().count('"sliced_from": 66034000') == 4
    assert (tmp_path / "rows.png").exists()


def test_where_no_method_can_run_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    arguments = ["--simulate-ranks", "2", "--methods", "peer", "--peer", "a.b:c", "--json", str(rows)]
    assert bench_exchange.main(arguments) == 3
    said = capsys.readouterr().err
    assert "skipped: peer: cannot be simulated" in said
    assert "bench_exchange: nothing measured: none of the methods can run here" in said
    assert not rows.exists()


def test_no_job_begins_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "Cluster", SimpleNamespace(temporary=lambda *_: nullcontext(MagicMock())))
    monkeypatch.setattr(outside.time, "monotonic", iter([0.0, 1.0, 30.0]).__next__)
    said: list[str] = []
    given = options.parsed(["--within", "20", "--methods", "gloo-fp32,gloo-fp16"], inside=False)
    assert list(outside.rows(given, said.append, lambda what: None)) == []
    assert said == ["skipped: this and the rest, the time of --within 20 is over"]
