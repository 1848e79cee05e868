"""``ringprune bench step``: rows of every method, means over whole intervals, and refusals before anything is timed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ringprune as rp
from ringprune import __main__
from ringprune.bench import step
from ringprune.bench.local_step import OPTIMIZERS, step_costs
from ringprune.prediction import flat
from tests.bench.test_select import documented

SMALL = flat("small", [[(16, 8, 3, 3), (16,)], [(2048, 3)], [(10, 32), (10,)]], 1.0, "for a test")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small model, and torch's threads as they were."""
    monkeypatch.setattr(step, "workload", lambda name: SMALL)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bench(*arguments: str) -> int:
    return __main__.main(["bench", "step", "--repetitions", "2", *arguments])


def test_rows_hold_what_is_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert bench("--optimizer", "sgd", "adamw", "--json", str(out)) == 0
    rows = json.loads(out.read_text())
    expected = [(kind, method) for kind in ("sgd", "adamw") for method in ("dense", "iwp:density=0.01", "recommended")]
    assert [(row["optimizer"], row["method"]) for row in rows] == expected
    assert [row["steps"] for row in rows] == [1, 1, 4, 1, 1, 2]
    for row in rows:
        assert row["n"] == 16 * 8 * 9 + 16 + 2048 * 3 + 330
        assert min(row[key] for key in ("plain_step_ms", "wrapped_step_ms", "communicator_ms")) > 0
        parts = row["wrapped_step_ms"] - row["plain_step_ms"] - row["communicator_ms"]
        assert row["step_overhead_ms"] == pytest.approx(parts)
        assert 0 <= row["steps_kept"] <= row["steps_of"] == 2
        assert documented() >= set(row)
    assert "every 4 steps" in capsys.readouterr().out


def test_standard_output_can_be_the_rows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--methods", "dgc", "--json", "-") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["method"] == "dgc"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--methods", "iwq"], "iwq"), (["--methods", "iwp:densty=0.1"], "densty"), (["--methods", "p3"], "model=")],
)
def test_what_cannot_be_measured_is_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 3])
def test_every_time_is_of_whole_intervals(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """The warm-up ends with an exchange, and so does what is timed."""
    seen: list[tuple[int, int]] = []
    close = rp.DistributedOptimizer.close

    def closing(self: rp.DistributedOptimizer) -> None:
        assert self._mode is not None
        seen.append((self._mode.exchange.step, self.stats()["steps"]))
        close(self)

    monkeypatch.setattr(rp.DistributedOptimizer, "close", closing)
    policy = rp.IWP(0.1, local_steps=steps if steps > 1 else None)
    step_costs([(40, 30)], torch.device("cpu"), 5, 0, lambda inner: policy, OPTIMIZERS["sgd"], steps)
    assert seen == [(12 // steps + 5, 12 + 5 * steps)]
