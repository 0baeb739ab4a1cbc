"""Signals reach every job, and nothing is left behind, whatever way a run ends."""

import os
import signal
import sys
from pathlib import Path

import pytest
from cpu.support.zico_process import ZicoRun, descendants, is_alive, python, survivors

from zico.launch import watchdog

FOREVER = "import signal, os; print('pid', os.getpid(), flush=True); signal.pause()"
HEEDLESS = (
    "import signal, os; [signal.signal(s, signal.SIG_IGN) for s in (2, 1)]; print('pid', os.getpid(), flush=True)\n"
    "while True: signal.pause()"
)
DEAF = (
    "import signal, os; [signal.signal(s, signal.SIG_IGN) for s in (2, 1, 15)]; print('pid', os.getpid(), flush=True)\n"
    "while True: signal.pause()"
)
# The child has a process group of its own, as `timeout` and shells with job control give it.
PARENT = (
    "import os, signal, subprocess, sys\n"
    "code = 'import os, signal; signal.signal(2, signal.SIG_IGN); os.setpgid(0, 0);"
    ' print("child", os.getpid(), flush=True); signal.pause()\'\n'
    "subprocess.Popen([sys.executable, '-c', code])\n"
    "print('pid', os.getpid(), flush=True); signal.pause()"
)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_job_and_leaves_nothing(signum: signal.Signals) -> None:
    """Every job gets the signal that the run gets, the exit code says so, and no process or directory stays."""
    with ZicoRun("--name", "a", "--name", "b", python(FOREVER), python(FOREVER)) as run:
        pids = [run.number_after("a | pid "), run.number_after("b | pid ")]
        below = descendants(run.process.pid)
        assert set(pids) <= set(below)
        run.process.send_signal(signum)
        code = run.finish()
        left = survivors(below)
        assert (code, left, run.leftovers) == (128 + signum, [], [])


IGNORING = (
    "import os, signal, sys; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 17)]\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
SHOW = "import signal; print('ignores', *(s for s in (1, 2, 15, 17) if signal.getsignal(s) is signal.SIG_IGN))\n"


def test_what_is_ignored_stays_so() -> None:
    """Where hang-ups, Ctrl-C and SIGCHLD are ignored, only SIGTERM ends the run, which waits for its jobs."""
    program = [sys.executable, "-c", IGNORING, "-m", "zico"]
    with ZicoRun("--name", "a", python(SHOW + FOREVER), program=program) as run:
        run.read_until("a | ignores 1 2\n")
        pid = run.number_after("a | pid ")
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            run.process.send_signal(signum)
        code = run.finish()
        assert (code, survivors([pid]), run.leftovers) == (128 + signal.SIGTERM, [], [])
        assert "zico: SIGTERM: ending the jobs" in run.stderr


def test_a_job_that_ignores_the_signal_is_terminated_after_the_grace_period() -> None:
    """After the grace period SIGTERM follows, so a job that ignores Ctrl-C ends by that."""
    with ZicoRun("--grace", "0.3", "--name", "a", python(HEEDLESS)) as run:
        pid = run.number_after("a | pid ")
        run.process.send_signal(signal.SIGINT)
        code = run.finish()
        assert (code, survivors([pid]), run.leftovers) == (128 + signal.SIGTERM, [], [])


def test_a_deaf_job_is_killed_in_the_end() -> None:
    """A job that ignores SIGINT and SIGTERM is killed after both grace periods."""
    with ZicoRun("--grace", "0.2", "--name", "a", python(DEAF)) as run:
        pid = run.number_after("a | pid ")
        run.process.send_signal(signal.SIGINT)
        code = run.finish()
        assert (code, survivors([pid]), run.leftovers) == (128 + signal.SIGKILL, [], [])


def test_a_second_signal_kills_at_once() -> None:
    """With an hour of grace, a second Ctrl-C still ends the run."""
    with ZicoRun("--grace", "3600", "--name", "a", python(DEAF)) as run:
        pid = run.number_after("a | pid ")
        run.process.send_signal(signal.SIGINT)
        run.read_until("a second signal kills them")
        run.process.send_signal(signal.SIGINT)
        code = run.finish()
        assert (code, survivors([pid]), run.leftovers) == (128 + signal.SIGKILL, [], [])


def test_children_in_process_groups_of_their_own_end_with_the_run() -> None:
    """A job's child that ignores SIGINT and has left the job's process group is ended as well."""
    with ZicoRun("--grace", "0.3", "--name", "a", python(PARENT)) as run:
        pids = [run.number_after("a | pid "), run.number_after("a | child ")]
        run.process.send_signal(signal.SIGINT)
        code = run.finish()
        assert (code, survivors(pids), run.leftovers) == (128 + signal.SIGINT, [], [])


def test_what_a_job_leaves_behind_is_ended_with_it() -> None:
    """A background process of a job that has ended by itself does not outlive the run."""
    with ZicoRun("--name", "a", "sh -c 'sleep 1000 & echo child $!'") as run:
        pid = run.number_after("a | child ")
        code = run.finish()
        assert (code, survivors([pid]), run.leftovers) == (0, [], [])
        assert "left 1 processes behind" in run.stderr


def test_a_killed_run_takes_its_jobs_and_its_broker_along() -> None:
    """When the run itself is killed by SIGKILL, jobs, their children, the broker and the directory go too."""
    with ZicoRun("--name", "a", python(PARENT)) as run:
        pids = [run.number_after("a | pid "), run.number_after("a | child ")]
        below = descendants(run.process.pid)
        assert set(pids) < set(below)
        run.process.kill()
        run.process.wait(timeout=10)
        assert survivors(below, timeout_s=15) == []
        assert run.leftovers == []


def test_a_guardian_that_ends_is_missed() -> None:
    """If the process that would end the jobs of a killed run ends before them, the run says so, also a quiet one."""
    with ZicoRun("--quiet", "--name", "a", python(FOREVER)) as run:
        run.read_until("a | pid ")
        (guardian,) = [pid for pid in descendants(run.process.pid) if is_guardian(pid)]
        os.kill(guardian, signal.SIGKILL)
        run.read_until("zico: if zico run is killed by SIGKILL, its jobs go on: ")
        run.read_until("the process that would end them has failed: it has ended\n")


def is_guardian(pid: int) -> bool:
    """Tell whether a process is a run's guardian."""
    return watchdog.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.parametrize("last", ["no library", ""])
def test_a_guardian_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """What it has written last is the reason, if it has written anything."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho {last}\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    guardian = watchdog.Watchdog(tmp_path)
    assert guardian.fault() == (last or "it has ended")
    guardian.close()


def test_the_search_for_survivors_finds_one() -> None:
    """The check that the tests above rely on reports a process that lives, and kills it."""
    with ZicoRun("--name", "a", python(DEAF)) as run:
        pid = run.number_after("a | pid ")
        assert survivors([pid], timeout_s=0) == [pid]
        run.finish()
        assert not is_alive(pid)


def test_a_signal_while_the_broker_starts_ends_the_run_cleanly() -> None:
    """A Ctrl-C before the broker is ready goes to the jobs, gives 130, no traceback of ours, and leaves nothing.

    The job is no Python: one that is still importing ``site`` ends with 1 at a signal.
    """
    with ZicoRun("--name", "a", "sleep 600") as run:
        run.read_until("zico: budget")
        below = descendants(run.process.pid)
        run.process.send_signal(signal.SIGINT)
        code = run.finish()
        assert (code, survivors(below), run.leftovers) == (130, [], [])
        assert not [line for line in run.stderr.splitlines() if "Traceback" in line and not line.startswith("a | ")]


AT_THE_LOOPS_BIRTH = """
import asyncio, os, signal, sys
from zico.cli import main
class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        os.kill(os.getpid(), signal.SIGINT)
        return super().new_event_loop()
asyncio.set_event_loop_policy(Policy())
sys.exit(main())
"""


def test_a_signal_while_the_loop_begins_ends_the_run_cleanly() -> None:
    """A Ctrl-C before anything could hear it is heard then: 130, no word of Python's, and nothing is left."""
    with ZicoRun("--name", "a", "sleep 600", program=(sys.executable, "-c", AT_THE_LOOPS_BIRTH)) as run:
        code = run.finish()
        assert (code, run.leftovers) == (130, [])
    assert "SIGINT: ending the jobs" in run.stderr
    assert not [line for line in run.stderr.splitlines() if "Traceback" in line or "Warning" in line]


def test_a_reader_that_goes_away_ends_the_run() -> None:
    """When whoever reads our output has gone, the jobs are ended as by SIGTERM, as `yes | head` would."""
    code = "import itertools, time\nfor i in itertools.count(): print('line', i); time.sleep(.001)"
    with ZicoRun("--quiet", "--name", "a", python(code)) as run:
        run.read_until("a | line 0")
        below = descendants(run.process.pid)
        run.close_stdout()
        assert run.finish() == 128 + signal.SIGTERM
        assert survivors(below) == []
        assert run.leftovers == []
