"""Rows of bench_exchange.py: medians, ratios and floors are what docs/api.md says, on figures made up here."""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from exchanges import figure, interfaces, processors, rows, simulated, table
from exchanges.choice import Choice
from exchanges.exchange import Account, allreduce_bytes
from exchanges.measure import Seen, Step
from exchanges.methods import METHODS
from exchanges.processors import Busy
from exchanges.rows import Row
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
CHOICE = Choice("tiny", "ringprune:iwp", rate="1gbit", steps=3)
NUMELS = [4000, 1000]
DENSE = 2 * 3 / 4 * 4 * 5000  # 4 ranks, float32


def seen(host: str, seconds: Sequence[float], sent: float | None = 300.0, **transmitted: int) -> Seen:
    """A rank whose steps took these seconds and were all alike otherwise."""
    values = None if sent is None else sent / 2
    computing = [None if sent is None else each / 4 for each in seconds]
    busy = Busy(wall=10.0, own=3.0, machine=15.0)
    steps = [Step(each, transmitted, sent, values, part, busy) for each, part in zip(seconds, computing, strict=True)]
    return Seen(host, "here", steps, Account(sent, values, density=0.01, realised_density=0.0101))


def row(ranks: Sequence[Seen], choice: Choice = CHOICE) -> Row:
    return rows.row_of(choice, "mpi", NUMELS, ranks) | {"emulated": True} | rows.facts("an MPI", 0.5)


FOUR = [seen(f"h{i}", [1.0 + i, 2.0, 9.0], lo=7, eth0=100 * (i + 1)) for i in range(4)]


def test_seconds_are_the_median_over_steps_of_the_slowest_rank() -> None:
    made = row(FOUR)
    assert made["seconds_each"] == [4.0, 2.0, 9.0]
    assert made["seconds"] == 4.0
    assert made["spread"] == (9.0 - 2.0) / 4.0
    assert made["steps"] == 3
    assert made["compute_seconds"] == sum([1.0, 2.0, 3.0, 4.0]) / 4 / 4  # means of the ranks: 0.625, 0.5, 2.25


def test_ratios_compare_with_dense_float32() -> None:
    made = row(FOUR)
    assert made["dense_bytes_per_rank"] == DENSE == allreduce_bytes(5000, 4, 4)
    assert made["wire_ratio"] == DENSE / 300
    assert made["value_ratio"] == DENSE / 150
    assert made["nic_ratio"] == DENSE / 250
    assert (made["density"], made["realised_density"]) == (0.01, 0.0101)


def test_the_kernels_bytes_are_shared_by_the_ranks_of_a_host() -> None:
    assert row(FOUR)["nic_bytes_per_rank"] == 250.0
    assert row(FOUR)["interfaces"] == ["eth0"]
    pairs = [seen(f"h{i // 2}", [1.0], lo=7, eth0=100 + i, eth1=10) for i in range(4)]
    assert row(pairs)["nic_bytes_per_rank"] == (111 + 113) / 4
    assert row(pairs)["hosts"] == 2
    alone = [seen("h0", [1.0], lo=7, eth0=100) for _ in range(2)]
    assert row(alone)["nic_bytes_per_rank"] == 3.5
    assert row(alone)["interfaces"] == ["lo"]
    assert row([seen("h0", [1.0])] * 2)["nic_bytes_per_rank"] is None


def test_an_exchange_without_an_account_has_no_ratios() -> None:
    made = row([seen(f"h{i}", [1.0], None, eth0=100) for i in range(2)])
    for key in ("counted_bytes_per_rank", "wire_ratio", "value_ratio", "compute_seconds", "seconds_floor"):
        assert made[key] is None
    assert made["nic_ratio"] == 4 * 5000 / 100


def test_the_floor_is_payload_and_headers_at_the_rate() -> None:
    assert rows.floor_seconds(125e6, "1gbit") == 1514 / 1448
    assert rows.floor_seconds(125e6, "100mbit") == 10 * 1514 / 1448
    assert rows.floor_seconds(125e6, "unlimited") is None
    assert rows.floor_seconds(125e6, rows.AS_IT_IS) is None
    assert rows.floor_seconds(None, "1gbit") is None
    # ResNet-50 on 4 ranks: what an allreduce of 100 MB takes, by arithmetic of its own
    assert rows.floor_seconds(allreduce_bytes(25_557_032, 4, 4), "1gbit") == pytest.approx(1.2827, abs=1e-4)


def test_other_peoples_work_is_what_the_ranks_did_not_do() -> None:
    assert row(FOUR)["foreign_cores"] == (15.0 - 4 * 3.0) / 10.0
    apart = [replace(one, machine=one.host) for one in FOUR]
    assert row(apart)["foreign_cores"] == (15.0 - 3.0) / 10.0
    start = processors.now()
    sum(range(100_000))
    spent = processors.now().since(start)
    assert min(spent.wall, spent.own) > 0
    assert spent.machine is None or spent.machine >= 0


def test_every_row_begins_with_the_documented_keys() -> None:
    assert tuple(row(FOUR))[: len(rows.KEYS)] == rows.KEYS


def test_counters_of_the_kernel_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "dev"
    file.write_text(
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
        "    lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
        "  eth0:970837510   27470    0    0    0     0          0         0  1433250   12865    0    0    0  0  0  0\n"
    )
    monkeypatch.setattr(interfaces, "COUNTERS", file)
    assert interfaces.sent() == {"lo": 9, "eth0": 1433250}
    monkeypatch.setattr(interfaces, "COUNTERS", tmp_path / "none")
    assert interfaces.sent() == {}


# -- simulated ranks --------------------------------------------------------------------------------------------------

SHAPES = {"a": (128, 64), "b": (128,), "c": (40, 64)}


def test_a_slice_keeps_every_tensor_on_its_side_of_the_smallest_matrix() -> None:
    assert simulated.sliced(SHAPES, 1_000_000) == SHAPES
    part = simulated.sliced(SHAPES, 1000)
    assert list(part) == list(SHAPES)
    assert part == {"a": (32, 64), "b": (12,), "c": (32, 64)}


@pytest.mark.parametrize("ranks", [2, 5])
def test_simulated_bytes_are_those_of_the_formulas(ranks: int) -> None:
    numel = sum(map(math.prod, SHAPES.values()))
    choice = Choice("tiny", "", density=0.05, steps=2, warmup=1)
    dense = simulated.simulated_row(METHODS["horovod-fp32"], choice, ranks, SHAPES)
    half = simulated.simulated_row(METHODS["gloo-fp16"], choice, ranks, SHAPES)
    assert dense["counted_bytes_per_rank"] == 2 * half["counted_bytes_per_rank"] == allreduce_bytes(numel, 4, ranks)
    assert (dense["wire_ratio"], half["wire_ratio"]) == (1.0, 2.0)
    ours = simulated.simulated_row(METHODS["ringprune:random_k"], choice, ranks, SHAPES)
    chosen = round(0.05 * 128 * 64) + round(0.05 * 40 * 64)
    rest = ours["counted_bytes_per_rank"] - allreduce_bytes(chosen + 128, 4, ranks)  # values, and the dense tensor
    assert 0 <= rest < 100  # the verdict
    assert ours["wire_ratio"] == dense["counted_bytes_per_rank"] / ours["counted_bytes_per_rank"]
    assert (ours["seconds"], ours["nic_bytes_per_rank"], ours["ranks"]) == (None, None, ranks)


# -- for people -------------------------------------------------------------------------------------------------------


def several() -> list[Row]:
    choice = Choice("tiny", "horovod-fp32", rate="unlimited")
    made = [row(FOUR), row(FOUR, choice), row(FOUR, Choice("tiny", "peer")) | {"counted_bytes_per_rank": None}]
    dense = simulated.simulated_row(METHODS["horovod-fp32"], choice, 8, SHAPES)
    return [*made, dense | {"sliced_from": 1000, "emulated": False} | rows.facts(None, 0.1)]


def test_the_table_shows_all_rows_and_what_to_think_of_them() -> None:
    console = Console(width=60, record=True, file=io.StringIO())
    table.show(several(), console)
    text = console.export_text()
    for wanted in ("horovod-fp32", "ringprune:iwp", "simulated", "as it is", "load average before the jobs: 0.5"):
        assert wanted in text
    (shown,) = (line.split() for line in text.splitlines() if "ringprune:iwp" in line)
    assert shown[-3:] == ["100.0", "200.0", "1.010%"]  # 30,000 bytes over 300 and 150
    assert console.width == 60


@pytest.mark.parametrize("cores", [2, 64])
def test_the_footer_says_that_ranks_share_cores(cores: int) -> None:
    text = "\n".join(table.footer([made | {"cores": cores} for made in several()]))
    assert ("4 ranks share the 2 cores of this machine: seconds and compute are inflated" in text) == (cores == 2)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_figures_are_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    figure.draw(several(), path)
    assert path.stat().st_size > 5000
    figure.draw([several()[-1]], path)  # simulated ranks alone
    assert path.stat().st_size > 5000


def test_every_key_is_documented() -> None:
    part = (ROOT / "docs" / "api.md").read_text().partition("## Comparing exchanges")[2].partition("\n## ")[0]
    documented = {key for line in part.splitlines() for key in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    made = row(FOUR) | {"sliced_from": None}
    assert documented == set(made)
