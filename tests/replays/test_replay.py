"""replay.py: rows on figures made up here, its command line, and jobs in which every method waits as it should."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import replay
import torch
from emulated_cluster import why_not_here
from exchanges.processors import Busy
from replays import timeline
from replays.inside import add, turns
from replays.measure import Seen
from replays.methods import Outputs, Wrapped, named, policy_of
from replays.model import Nothing, Waiting, still_sgd
from replays.rows import Timing, row_of

import ringprune as rp
from ringprune.auto import pilot
from ringprune.comm.communicator import Communicator
from ringprune.profiles.format import Layer, Profile, write
from tests.auto.made_up import follow, quick
from tests.mpi.launch import run_job

PROFILE = Profile(
    "tiny", "made up", tuple(Layer(f"layer {i}", (30_000, 100), forward_ms=4.0, backward_ms=8.0) for i in range(3))
)


def test_overlap_bound_and_gain() -> None:
    timing = Timing([10.0, 12.0, 11.0], [8.0, 8.0, 8.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    row = row_of("p3", PROFILE, timing, compute=6.0, reference=[12.0, 15.0, 16.5])
    assert (row["seconds"], row["bound_seconds"], row["over_bound"]) == (11.0, 8.0, 11 / 8 - 1)
    assert row["overlap"] == pytest.approx((6 + 8 - 11) / 6)
    assert row["gain_over_horovod"] == pytest.approx(0.25)  # medians of pairs, not a pair of medians
    assert row["gain_each"] == pytest.approx([0.2, 0.25, 0.5])


def test_nothing_to_hide_has_no_overlap() -> None:
    timing = Timing([1.0], [0.0], [0.0], [0.0])
    row = row_of("dense", PROFILE, timing, compute=1.0, reference=None)
    assert row["overlap"] is None
    assert row["gain_over_horovod"] is None
    assert row["gain_error"] is None


def test_methods_take_turns_to_and_fro() -> None:
    """Replayed last in every round, auto was 4 % slower than the same exchange before it (benchmarks.md)."""
    methods = named(["horovod", "dense", "p3"])
    assert [[method.name for method in turns(methods, number)] for number in range(3)] == [
        ["horovod", "dense", "p3"],
        ["p3", "dense", "horovod"],
        ["horovod", "dense", "p3"],
    ]


def test_layers_wait_in_their_order_and_hand_out_gradients_of_their_size() -> None:
    model = Waiting(PROFILE, scale=0.1)
    optimizer = Nothing(model.parameters())
    for _ in range(2):
        model().backward()
        assert [p.grad.numel() for p in model.parameters() if p.grad is not None] == [30_000, 100] * 3
        optimizer.step()
        optimizer.zero_grad()
    names = [layer.name for layer in PROFILE.layers]
    one = [("forward", name) for name in names] + [("backward", name) for name in reversed(names)]
    assert [(what, name) for what, name, _, _ in model.events] == 2 * one
    for what, _, start, end in model.events:
        assert end - start >= 1e-4 * (4 if what == "forward" else 8)


def test_gradients_change_as_those_of_batches_do() -> None:
    """They were the same at every step: what was left of them grew with the momentum, all in step.

    So the last step's threshold let far more through than there was room for, for ten steps: those that were timed, and
    predicted to take a half to four fifths of that.
    """

    def rank(comm: Communicator) -> list[int]:
        model = Waiting(PROFILE, 0.0, comm.rank)
        optimizer = rp.DistributedOptimizer(
            still_sgd(model.parameters()), model.named_parameters(), policy=rp.IWP(0.01), comm=comm
        )
        replayed, overflowed = Wrapped(optimizer, outputs=Outputs(model)), []
        before = None
        for _ in range(12):
            model().backward()
            grad = next(model.parameters()).grad
            assert grad is not None
            assert before is None or not torch.equal(grad, before)
            before = grad.clone()
            replayed.step()
            overflowed.append(optimizer.stats()["selection"]["overflowed"])
        optimizer.close()
        return overflowed

    overflowed = rp.simulate(2, rank, timeout=60)[0]
    assert overflowed[5] == overflowed[-1]


def test_policies_pack_large_tensors_alone() -> None:
    def rank(comm: Communicator) -> dict[str, Any]:
        model = Waiting(PROFILE, scale=0.0)
        optimizer = rp.DistributedOptimizer(
            Nothing(model.parameters()), model.named_parameters(), policy=rp.IWP(0.01), comm=comm
        )
        model().backward()
        optimizer.step()
        return optimizer.stats()

    stats = rp.simulate(2, rank, timeout=60)[0]
    assert stats["bytes_dense"] == 4 * 3 * 100
    assert stats["bytes_values"] == 4 * 3 * 300


@pytest.mark.parametrize("text", ["iwp:density=0.02,roots=all", "iwp:density=0.02,roots=all@priority"])
def test_what_is_chosen_by_value_has_values_to_choose_from(text: str) -> None:
    """Gradients were alike in every entry and on every rank, and from the second step on what the exchange had left.

    So ranks that each propose a share proposed the same, and a quarter of the density was sent on four of them.
    """

    def rank(comm: Communicator) -> dict[str, Any]:
        model = Waiting(PROFILE, 0.0, comm.rank)
        optimizer = rp.DistributedOptimizer(
            Nothing(model.parameters()), model.named_parameters(), policy=policy_of(text), comm=comm, model=model
        )
        replayed = Wrapped(optimizer, outputs=Outputs(model))
        for _ in range(60):  # what an exchange has left behind takes over slowly
            model().backward()
            replayed.step()
        if "@" in text:
            optimizer.synchronize()  # makes what a schedule has left of the last step
        stats = optimizer.stats()
        optimizer.close()
        return stats

    stats = rp.simulate(4, rank, timeout=60)[0]
    assert 0.8 * 0.02 < stats["realised_density"] <= 0.02


def test_what_is_chosen_after_dense_has_values_to_choose_from_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of dense gradients lie where the gradients were: ranks that then chose by value all chose the same.

    So ``auto`` sent half of what the same policy sent beside it, and was said to be faster than what it had chosen.
    """
    quick(monkeypatch)
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 1000)
    follow(monkeypatch, [1])
    packed, steps = policy_of("iwp:density=0.02,roots=all"), 60

    def sent(policy: Any) -> list[int]:
        return rp.simulate(4, lambda comm: rank(comm, policy), timeout=60)[0]

    def rank(comm: Communicator, policy: Any) -> list[int]:
        model = Waiting(PROFILE, 0.0, comm.rank)
        optimizer = rp.DistributedOptimizer(
            Nothing(model.parameters()), model.named_parameters(), policy=policy, comm=comm, model=model
        )
        replayed, values = Wrapped(optimizer, outputs=Outputs(model)), []
        for _ in range(steps):
            model().backward()
            replayed.step()
            values.append(optimizer.stats()["bytes_values"])
        optimizer.close()
        return values

    chosen, alone = sent(rp.Auto((rp.Dense(), packed))), sent(packed)
    assert 0 in chosen, "it begins with dense"
    assert chosen[-1] - chosen[steps // 2] > 0.8 * (alone[-1] - alone[steps // 2])


def test_ranks_of_one_host_count_its_bytes_once_and_other_machines_are_not_theirs() -> None:
    """Each rank's bytes were those of all ranks beside it; others' processes were averaged away over machines."""
    timing = Timing([], [], [], [])
    seen = [
        Seen(1.0, {"eth0": 4e6, "lo": 7.0}, Busy(1.0, 0.5, 2.5), f"host {i // 2}", f"machine {i // 2}", [], {})
        for i in range(4)
    ]
    add(timing, seen, [], 1.0)
    assert timing.transmitted == [2e6]
    assert timing.foreign == [1.5]
    add(timing, [replace(one, busy=Busy(1.0, 0.5, None)) for one in seen], [], 1.0)
    assert timing.foreign == [1.5, None]


def test_policies_may_be_scheduled() -> None:
    policy = policy_of("iwp:density=0.02@priority")
    assert (policy.density.target, policy.schedule) == (0.02, rp.LayerPriority())
    with pytest.raises(ValueError, match="did you mean horovod"):
        named(["horovd"])


def test_momentum_is_corrected_as_in_training() -> None:
    """An optimizer of our own has none that RingPrune knows: what was replayed read and wrote no velocity."""

    def rank(comm: Communicator) -> tuple[set[str], bool]:
        model = Waiting(PROFILE, 0.0, comm.rank)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = rp.DistributedOptimizer(
            still_sgd(model.parameters()), model.named_parameters(), policy=rp.IWP(0.02), comm=comm
        )
        for _ in range(2):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = {kind for kinds in optimizer.state_dict()["ringprune"]["parameters"].values() for kind in kinds}
        return kept, all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    kept, still = rp.simulate(2, rank, timeout=60)[0]
    assert {"residual", "velocity"} <= kept
    assert still


def test_auto_has_something_to_choose_from() -> None:
    """Of one candidate it was that one itself, and found to be as fast."""
    with pytest.raises(ValueError, match=r"auto would be iwp:density=0\.02 itself: give it another"):
        named(["iwp:density=0.02", "horovod", "auto"])
    assert [method.name for method in named(["dense", "iwp", "auto"])] == ["dense", "iwp", "auto"]


def test_a_trace_and_a_picture(tmp_path: Path) -> None:
    events = {"p3": [("forward", "a", 0.0, 1.0), ("network", "bucket 0 dense", 0.5, 2.0)], "horovod": []}
    timeline.write_trace(events, tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in trace if e["ph"] == "M"] == ["p3", "horovod"]
    assert [(e["name"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"] == [
        ("forward a", 0.0, 1e6),
        ("network bucket 0 dense", 5e5, 1.5e6),
    ]
    timeline.draw(events, "title", tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.json"], "No such file"),
        (["resnet51"], "or a file that ends in .json; did you mean resnet50?"),
        (["resnet50", "--rates", "fast"], "fast"),
        (["resnet50", "--methods", "p4"], "p4"),
        (["resnet50", "--methods", "iwp:flush=1@priority"], "flush is what ringprune simulate does"),
        (["resnet50", "--methods", "no_such_module:mine"], "no_such_module"),
        (["resnet50", "--ranks", "1"], "at least 2"),
        (["resnet50", "--time-scale", "0"], "above 0"),
        (["resnet50", "--iterations", "-3"], "whole number"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        replay.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_hosts_that_cannot_be_made_are_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["resnet50", "--ranks", "300"]) == replay.NOTHING_MEASURED
    assert capsys.readouterr().err == "replay: hosts is 300: allowed are 1 to 200\n"


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty minutes of rates that were done were thrown away with the one that was not."""

    def job(cluster: Any, path: Path, rate: str, options: Any) -> list[dict[str, Any]]:
        if rate == "2gbit":
            raise KeyboardInterrupt
        return [{"model": path.stem, "rate": rate}]

    shown: list[Any] = []
    monkeypatch.setattr(replay, "_job", job)
    monkeypatch.setattr(
        replay.Cluster, "temporary", lambda *hosts: nullcontext(SimpleNamespace(rate=lambda rate: None))
    )
    monkeypatch.setattr(replay.table, "show", lambda rows, console: shown.extend(rows))
    file = tmp_path / "rows.json"
    assert replay.main(["resnet50", "--rates", "1gbit,2gbit,4gbit", "--json", str(file)]) == replay.INTERRUPTED
    assert json.loads(file.read_text()) == shown == [{"model": "resnet50", "rate": "1gbit"}]


@pytest.mark.ranks
def test_methods_are_replayed_in_a_job(tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    write(PROFILE, tmp_path / "tiny.json")
    methods = ["horovod", "dense", "p3", "iwp:density=0.05@priority"]
    run_job(
        "mpi_scripts.replay",
        str(tmp_path / "tiny.json"),
        "--methods",
        *methods,
        "--rounds",
        "2",
        "--iterations",
        "2",
        "--json",
        str(tmp_path / "rows.json"),
        "--trace",
        str(tmp_path / "trace.json"),
        timeout=120,
        environment={"OMP_NUM_THREADS": "1"},
    )
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == methods
    for row in rows.values():
        # Waits are kept, whatever is exchanged; how much longer it takes is a matter of who else uses the machine.
        assert min(row["compute_seconds"], row["seconds"]) >= 0.036
        assert (row["ranks"], row["entries"], len(row["seconds_each"])) == (2, PROFILE.entries, 2)
    assert rows["horovod"]["gain_over_horovod"] is None
    assert len(rows["p3"]["gain_each"]) == 2
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(e["name"].startswith("network order") for e in trace)


@pytest.mark.ranks
def test_a_cluster_is_made_for_a_replay(tmp_path: Path) -> None:
    if reason := why_not_here():
        pytest.skip(reason)
    write(PROFILE, tmp_path / "tiny.json")
    job = run_job(
        "mpi_scripts.replay",
        str(tmp_path / "tiny.json"),
        "--methods",
        "p3",
        "--rates",
        "1gbit",
        "--ranks",
        "2",
        "--time-scale",
        "2",
        "--rounds",
        "1",
        "--iterations",
        "2",
        "--communicator",
        "torch",
        "--json",
        str(tmp_path / "rows.json"),
        launcher="alone",
        timeout=120,
    )
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["rate"], row["time_scale"], row["ranks"]) == ("1gbit", 2.0, 2), job.output
    sent = 4 * PROFILE.entries  # 2 ranks: 2 (P-1)/P = 1
    # Of two iterations: what the first finds under way and the last leaves may differ by all of one.
    assert 0.5 * sent < row["nic_bytes_per_rank"] < 1.5 * 1.2 * sent
