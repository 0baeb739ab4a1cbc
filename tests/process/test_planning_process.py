"""Plans are made in a process beside the job: it starts when it is needed, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from cpu.support.broker_messages import no_descriptor_left
from process.support.planning_jobs import ENDLESS, LIMIT_BYTES, RATES, trained
from support.harness import ANSWER_S, PATIENCE_S, TESTS, clean_environment

from zico.base import background
from zico.base.errors import ConfigError
from zico.swap import learning as swap_learning
from zico.swap import planning_process
from zico.swap import schedule as swap_schedule
from zico.swap.planning_process import MANY_EVENTS, NICENESS, PlanningProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.swap.schedule import Chosen


@pytest.fixture
def make() -> Iterator[Callable[..., PlanningProcess]]:
    """Give a function that makes planning processes; they are closed afterwards, and no descriptor stays open."""
    with no_descriptor_left(), contextlib.ExitStack() as stack:

        def made(begin: str = planning_process._BEGIN, idle_s: float = PATIENCE_S) -> PlanningProcess:
            process = PlanningProcess(answer_s=PATIENCE_S, idle_s=idle_s, begin=begin)
            stack.callback(process.close)
            return process

        yield made


def asked(process: PlanningProcess, planner: str = "doa") -> Chosen | None:
    """Ask for a small plan."""
    return process.choose(trained(), LIMIT_BYTES, RATES, planner)


@contextlib.contextmanager
def ends(*pids: int) -> Iterator[None]:
    """Fail if a process does not end, at the latest soon after the block; kills it then."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        assert all(select.select([pidfd], [], [], ANSWER_S)[0] for pidfd in pidfds), "it lives on"
    finally:
        for pidfd in pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


# -- it works --------------------------------------------------------------------------------------


def test_it_answers_as_the_functions_do(make: Callable[..., PlanningProcess]) -> None:
    """It starts for planners that take time and for long iterations only, and its answers are those in the job."""
    process, seen, long = make(), trained(), trained(MANY_EVENTS // 2 + 1)
    assert asked(process, "longest") is None
    assert process.ways(seen, RATES, 0.04) == swap_learning.ways(seen, RATES, 0.04)
    assert process.pid == 0
    assert process.ways(long, RATES, 0.04) == swap_learning.ways(long, RATES, 0.04)
    first = process.pid
    chosen = asked(process, "zico")
    assert chosen == swap_schedule.choose(seen, LIMIT_BYTES, RATES, "zico")
    assert chosen is not None
    assert chosen.leaves
    with pytest.raises(ConfigError, match=r"^'chance' is no planner: give one of"):
        asked(process, "chance")
    with pytest.raises(ConfigError, match=r"^it failed with TypeError: "):
        process.choose(seen, "little", RATES, "doa")  # type: ignore[arg-type]
    assert asked(process)
    assert process.pid == first


def test_it_is_no_job_and_no_child(
    make: Callable[..., PlanningProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has the job's session and a lower priority, and runs nothing of the user's; signals to a job do not end it."""
    for name in ("sitecustomize", "usercustomize", "struct"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ZICO_SOCKET", str(tmp_path / "socket"))
    process = make()
    assert asked(process)
    own = psutil.Process(process.pid)
    assert own.ppid() != os.getpid()
    assert (os.getsid(process.pid), own.nice()) == (os.getsid(0), min(19, os.nice(0) + NICENESS))
    assert "ZICO_SOCKET" not in own.environ()
    assert not (tmp_path / "ran").exists()
    first = process.pid
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process.pid, signum)
    assert asked(process)
    assert process.pid == first


def test_it_ends_without_work(make: Callable[..., PlanningProcess]) -> None:
    """Another one starts with the next question."""
    process = make(idle_s=0.5)
    assert asked(process)
    first = process.pid
    with contextlib.suppress(ProcessLookupError), ends(first):
        pass
    assert asked(process)
    assert process.pid != first


# -- it fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("python", "begin", "reason"),
    [
        ("/no/python", "", "could not be started"),
        (sys.executable, "raise SystemExit('no NumPy')", "ended before it answered, its last line is 'no NumPy'"),
    ],
)
def test_it_cannot_start(
    make: Callable[..., PlanningProcess], monkeypatch: pytest.MonkeyPatch, python: str, begin: str, reason: str
) -> None:
    """That is the answer from then on; operating points are worked out in the job."""
    monkeypatch.setattr(sys, "executable", python)
    process, long = make(begin), trained(MANY_EVENTS)
    assert process.ways(long, RATES, 0.04) == swap_learning.ways(long, RATES, 0.04)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"the process that plans {reason}.*: --save swap needs none"):
            asked(process)


@pytest.mark.parametrize("is_killed", [True, False])
def test_it_dies_or_is_late(make: Callable[..., PlanningProcess], *, is_killed: bool) -> None:
    """That is the answer from then on; it is killed if it lives, and no other one starts."""
    process = make()
    assert asked(process)
    first = process.pid
    os.kill(first, signal.SIGSTOP)
    with ends(first):
        if is_killed:
            killing = threading.Timer(0.1, os.kill, (first, signal.SIGKILL))  # before or after the question, all one
            killing.start()
            with pytest.raises(ConfigError, match="the process that plans ended before it answered: "):
                asked(process)
            killing.join()
        else:
            process._answer_s = 1.0
            with pytest.raises(ConfigError, match="the process that plans gave no answer within 1 s: "):
                asked(process)
    with pytest.raises(ConfigError, match="the process that plans "):
        asked(process)
    assert process.pid == first


# -- the job ends, or forks ------------------------------------------------------------------------


@contextlib.contextmanager
def job(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run a job of ``planning_jobs.py``, and give the numbers that it writes."""
    with subprocess.Popen(
        [sys.executable, "-m", "process.support.planning_jobs", *arguments],
        env=clean_environment() | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as popen:
        try:
            assert popen.stdout is not None
            assert select.select([popen.stdout], [], [], PATIENCE_S)[0], "it writes nothing"
            yield popen, [int(word) for word in popen.stdout.readline().split()]
        finally:
            popen.kill()


def test_a_killed_job_takes_it_along_while_it_waits(tmp_path: Path) -> None:
    """Also where C code has forked a process that keeps the job's descriptors."""
    with job("stay", str(tmp_path / "marker")) as (popen, (planning, holder)):
        try:
            with ends(planning):
                popen.kill()
        finally:
            os.kill(holder, signal.SIGKILL)


def test_a_killed_job_takes_it_along_while_it_plans(tmp_path: Path) -> None:
    """Also where the planner is machine code that lets no other thread run."""
    with job("plan on", str(tmp_path / "marker")) as (popen, [planning]), ends(planning):
        popen.kill()


def test_a_job_that_ends_does_not_wait_for_it(tmp_path: Path) -> None:
    """The thread that waits for the answer is let go ahead of the interpreter's end, and nothing is said."""
    with job("plan", str(tmp_path / "marker")) as (popen, [planning]), ends(planning):
        began_s = time.monotonic()
        said = popen.communicate(timeout=PATIENCE_S)
        assert (popen.returncode, *said) == (0, "", "")
        assert time.monotonic() - began_s < background.PATIENCE_S


def test_a_forked_child_has_none(make: Callable[..., PlanningProcess]) -> None:
    """The child chooses nothing, and keeps no descriptor of it; the parent goes on asking."""
    process = make(ENDLESS.replace("sum(iter(int, 1))", "None"))
    marker = "/dev/null"
    asked(process, marker)
    ends_of = process._ends
    assert ends_of is not None
    assert ends_of.pidfd is not None
    numbers = (ends_of.connection.fileno(), ends_of.said, ends_of.pidfd)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            if asked(process, marker) is None and not any(
                Path(f"/proc/self/fd/{number}").exists() for number in numbers
            ):
                os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert asked(process, marker) is not None
