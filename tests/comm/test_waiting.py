"""The wait shared by the real communicators: time limits, the library's errors, and SIGTERM."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringprune.comm import waiting
from ringprune.comm.call import Call
from ringprune.comm.waiting import Waiter
from ringprune.errors import CommunicatorError

CALL = Call("allreduce", "bucket 3 values", torch.float32, (1200,))
TENSOR = torch.ones(1200)


def waiter(timeout: float | None = 5.0, eager: float = 0.0) -> Waiter:
    return Waiter(0, timeout, eager, (ValueError,))


@pytest.mark.parametrize("eager", [0.0, 1.0], ids=["pausing", "eager"])
def test_it_asks_until_done(eager: float) -> None:
    answers = iter([False] * 20 + [True])
    handle = waiter(eager=eager).handle(CALL, done=lambda: next(answers), result=lambda: TENSOR, kept=TENSOR)
    assert handle.wait() is TENSOR
    assert handle.wait() is TENSOR  # without asking again
    assert next(answers, "asked exactly as often as needed") == "asked exactly as often as needed"


def test_the_time_limit_names_the_collective_every_time() -> None:
    handle = waiter(timeout=0.05).handle(CALL, done=lambda: False, result=lambda: TENSOR, kept=TENSOR)
    for _ in range(2):
        with pytest.raises(CommunicatorError) as raised:
            handle.wait()
        assert str(raised.value).startswith(
            '"bucket 3 values" (allreduce of 1200 float32) was not done after 0.05 s on rank 0: '
        )


def test_a_long_wait_is_told_again_and_again_at_twice_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks with one batch more than the others waited in silence until somebody killed them."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(waiting, "WARN_SECONDS", 10.0)
    handle = waiter(None).handle(CALL, done=lambda: now > 100, result=lambda: TENSOR, kept=TENSOR)
    handle.wait()
    told = [record.getMessage() for record in caplog.records]
    named = 'rank 0 has waited for "bucket 3 values" (allreduce of 1200 float32) for '
    assert [
        text.startswith(f"{named}{seconds} s") for text, seconds in zip(told, (10, 20, 40, 80), strict=True)
    ] == 4 * [True]
    assert "All ranks call step() equally often" in told[0] and "timeout=" in told[0]
    assert "all or none load_state_dict()" in told[0]


def test_a_rank_that_has_ended_is_answered_with_what_to_look_for() -> None:
    """A rank with one step more than the others was told nothing but that Horovod had been shut down."""

    def refused() -> bool:
        raise ValueError("Horovod has been shut down. This was caused by an exception on one of the ranks.")

    handle = waiter().handle(CALL, done=refused, result=lambda: TENSOR, kept=TENSOR)
    with pytest.raises(CommunicatorError, match=r"all ranks call step\(\) equally often"):
        handle.wait()


def test_horovods_join_is_answered_with_what_to_do() -> None:
    def refused() -> bool:
        raise ValueError("Broadcast is not supported with Join at this time.")

    handle = waiter().handle(CALL, done=refused, result=lambda: TENSOR, kept=TENSOR)
    with pytest.raises(CommunicatorError, match=r"every rank calls step\(\) equally often"):
        handle.wait()


def test_the_librarys_errors_become_ours() -> None:
    def broken() -> bool:
        raise ValueError("connection reset")

    for done, result in ((broken, lambda: TENSOR), (lambda: True, broken)):
        handle = waiter().handle(CALL, done=done, result=result, kept=TENSOR)
        with pytest.raises(
            CommunicatorError, match=r"\(allreduce of 1200 float32\) failed on rank 0: connection reset"
        ):
            handle.wait()


WAITING_PROGRAM = """
import signal, sys
from tests.comm.test_waiting import CALL, TENSOR, waiter
{before}
asked = []
def done():
    asked.append(True)
    if len(asked) == 2:  # the first time is before it waits, and before it takes SIGTERM
        print("waiting", flush=True)
    return {until}
waiter(timeout=None).handle(CALL, done=done, result=lambda: TENSOR, kept=TENSOR).wait()
{after}
"""


def stopped_program(before: str = "", until: str = "False", after: str = "", says: str = "waiting") -> tuple[int, str]:
    """Run a process that waits, send it SIGTERM when it ``says`` so, and return its exit status and stderr."""
    program = WAITING_PROGRAM.format(before=before, until=until, after=after)
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    )
    with process:
        assert process.stdout is not None
        said = any(line == f"{says}\n" for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert said, stderr
    return process.returncode, stderr


def test_sigterm_while_waiting_names_the_collective_and_ends_the_process() -> None:
    status, stderr = stopped_program()
    assert status == -signal.SIGTERM
    assert stderr == ('ringprune: rank 0 stopped while waiting for "bucket 3 values" (allreduce of 1200 float32)\n')


def test_a_script_that_handles_sigterm_keeps_its_handler() -> None:
    status, stderr = stopped_program(before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))")
    assert (status, stderr) == (5, "")


def test_sigterm_after_the_wait_only_ends_the_process() -> None:
    after = "print('waited', flush=True); import time; time.sleep(30)"
    status, stderr = stopped_program(until="len(asked) > 1", after=after, says="waited")
    assert (status, stderr) == (-signal.SIGTERM, "")


def test_a_wait_in_another_thread_changes_no_signal_handler() -> None:
    program = (
        "import signal, threading\n"
        "from tests.comm.test_waiting import CALL, TENSOR, waiter\n"
        "answers = iter([False, False, True])\n"
        "handle = waiter().handle(CALL, done=lambda: next(answers), result=lambda: TENSOR, kept=TENSOR)\n"
        "thread = threading.Thread(target=handle.wait); thread.start(); thread.join()\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "assert next(answers, None) is None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
