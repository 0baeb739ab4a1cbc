"""Processes that have ended and that nobody reaps, as children of a script or of ``zico run`` are for a while."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from process.support.broker_process import N_REGIONS, Broker, job
from support.harness import ANSWER_S, LIMIT_S, TRIES, LightJob, Nursery, Pool, until

from zico.broker.notes import read_head
from zico.broker.starting import start_broker

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable


def end(process: subprocess.Popen[str], number: int) -> None:
    """End a child of this process, and leave it a zombie."""
    process.send_signal(number)
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    until(lambda: os.waitid(os.P_PID, process.pid, flags), ANSWER_S, "it has ended")


def began_after_s(one: LightJob, other: LightJob) -> float:
    """Let one job come to its boundary while another is inside; returns how long it stands there."""
    assert other.ask("mark") == "began"
    began_s = time.monotonic()
    assert one.ask("mark") == "began"
    return time.monotonic() - began_s


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_jobs_go_on_when_their_broker_has_ended_and_nobody_reaps_it(
    start: Callable[..., Broker], nursery: Nursery, number: int
) -> None:
    """Invariants 5 and 7: killed or told to end, it is gone although its number is not."""
    broker = start("--policy", "serial")
    made = cast("Pool", broker)
    with nursery.job(made, "a") as a, nursery.job(made, "b") as b:
        for one in (a, b):
            assert one.ask("train 3 2") == "lost 0"
        end(broker.process, number)
        assert min(began_after_s(*pair) for pair in [(a, b), (b, a)] * TRIES) < LIMIT_S
        assert a.ask("train 3 2") == "lost 0"


def test_what_a_dead_job_held_comes_back_although_nobody_reaps_job_or_broker(
    start: Callable[..., Broker], nursery: Nursery
) -> None:
    """Invariant 5: a waiting allocation gets it, by itself."""
    broker = start("--policy", "none")
    with nursery.job(cast("Pool", broker), "waits") as waits, job(broker, "victim", hold=N_REGIONS - 2) as victim:
        assert waits.ask("hold 1") == "1"
        waits.tell("hold 4")
        end(broker.process, signal.SIGKILL)
        assert not waits.has_answered(0.2)
        end(victim, signal.SIGKILL)
        assert waits.answer() == "1"


def test_who_has_started_a_broker_reaps_it(tmp_path: Path) -> None:
    """A process that goes on for long has no zombie of it."""
    socket = tmp_path / "zico" / "s"
    words = ["--socket", str(socket), "--budget", "16MiB", "--until", str(os.getpid())]
    with tempfile.TemporaryFile() as said:
        assert start_broker(words, said, print) is None
    head = read_head(socket)
    assert head is not None
    os.kill(head.broker.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{head.broker.pid}").exists(), ANSWER_S, "nobody has its number")
