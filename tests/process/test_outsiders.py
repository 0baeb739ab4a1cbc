"""Processes of a job that have loaded a framework and are in no pool are found, each once, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from cpu.support.zico_process import DEADLINE_S, ZicoRun, descendants, survivors
from process.support.broker_process import read_line

from zico.broker.protocol import messages as m
from zico.launch.jobs import INJECT
from zico.launch.outsiders import NO_SOCKET, UNKNOWN, UNKNOWN_AFTER_S, Outsiders

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zico.report.model import OutsideProcess

LOADED = """
import mmap, os, sys
with open({library!r}, "r+b") as file:
    loaded = mmap.mmap(file.fileno(), 4096)
"""
"""Maps a file that is called as PyTorch's library is."""
WAIT = "print(os.getpid(), flush=True)\nsys.stdin.read()\n"
IN_CHILD = "if os.fork():\n    os.wait()\n    sys.exit()\n"
WATCHED = {"ZICO_SOCKET": "/s", "PYTHONPATH": str(INJECT)}
LONG_S = 1000.0
STATUS = m.Status(
    schema_version=m.STATUS_SCHEMA,
    policy="none",
    uptime_s=1.0,
    region_bytes=1,
    budget_bytes=1,
    granted_bytes=0,
    physical_bytes=0,
    peak_granted_bytes=0,
    peak_physical_bytes=0,
    jobs=(),
)
REPORT = m.Report(pool=m.PoolReport(), jobs=(), jobs_left_out=0)


class Job:
    """A command's process, and what brokers know of it and of its descendants."""

    def __init__(self, library: Path, code: str, environ: dict[str, str], *words: str) -> None:
        """Start it, and wait until it has loaded what it loads."""
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", code.format(library=str(library)), *words],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.last = int(read_line(self.process))
        self.members: list[int] = []
        self.launchers: list[int] = []
        self.told: dict[int, str] = {}
        self.asked = 0
        self.outsiders = Outsiders(self._ask)
        self._now_s = 100.0

    def _ask(self) -> tuple[list[m.Status], list[m.Report]]:
        self.asked += 1
        joined = tuple(
            m.JobReport(job=0, name="a", pid=pid, framework="torch", state="running") for pid in self.members
        )
        outside = tuple(
            m.Outside(name="a", pid=pid, framework="torch", reason=reason) for pid, reason in self.told.items()
        )
        status = msgspec.structs.replace(STATUS, jobs=joined, launchers=tuple(self.launchers))
        return [status], [msgspec.structs.replace(REPORT, outside=outside)]

    def look(self, after_s: float = LONG_S) -> list[OutsideProcess]:
        """Look once more, so much later."""
        self._now_s += after_s
        return [found for _, found in self.outsiders.look({self.process.pid: "a"}, self._now_s)]

    def end(self) -> None:
        """Kill what is left."""
        below = descendants(self.process.pid)
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)
        survivors(below, timeout_s=0)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file called as PyTorch's library is."""
    path = tmp_path / "libc10.so"
    path.write_bytes(bytes(4096))
    return path


@pytest.fixture
def started() -> Iterator[list[Job]]:
    """Jobs that were started; they are dead afterwards."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.end()


def start(started: list[Job], library: Path, code: str, environ: dict[str, str] | None = None) -> Job:
    """Start a job."""
    started.append(Job(library, code, environ or {}))
    return started[-1]


def test_a_process_that_cannot_join_is_reported_once(started: list[Job], library: Path) -> None:
    """Its environment says why at once; it is said a single time, and stays known with its memory."""
    job = start(started, library, LOADED + WAIT)
    assert job.look() == []  # it was seen this moment
    (found,) = job.look()
    assert (found.pid, found.framework, found.reason) == (job.process.pid, "torch", NO_SOCKET)
    assert found.memory_bytes > 1 << 20
    assert job.look() == []
    asked = job.asked
    assert job.look() == []
    assert job.asked == asked, "the brokers are asked although nothing is to be found out"
    assert [one.pid for one in job.outsiders.of("a")] == [job.process.pid]


def test_a_process_that_may_be_importing_is_left_time(started: list[Job], library: Path) -> None:
    """One that Zico may be watching is reported after a minute, and not if it joins before."""
    late, joins = (start(started, library, LOADED + WAIT, WATCHED) for _ in range(2))
    # -S keeps Zico out for certain: the process is looked at as it would be without that flag.
    for job in (late, joins):
        assert job.look() == []
        for process in job.outsiders._processes.values():
            process.reason = ""
    joins.members.append(joins.process.pid)
    assert joins.look(UNKNOWN_AFTER_S) == []
    (found,) = late.look(UNKNOWN_AFTER_S)
    assert found.reason == UNKNOWN
    assert joins.outsiders.of("a", ended_well=True) == ()


def test_what_a_process_has_told_is_said_at_once(started: list[Job], library: Path) -> None:
    """Its own reason counts before what its start looks like."""
    job = start(started, library, LOADED + WAIT)
    job.told[job.process.pid] = "numba is missing"
    (found,) = job.look()
    assert found.reason == "numba is missing"


def test_workers_are_not_reported_even_when_the_job_is_dead(started: list[Job], library: Path) -> None:
    """A descendant of a process in the pool, or of one that is reported, is taken for its worker."""
    member, stranger = (start(started, library, LOADED + IN_CHILD + WAIT) for _ in range(2))
    member.members.append(member.process.pid)
    assert member.look() == []
    member.members.clear()
    os.kill(member.process.pid, 9)
    assert member.look() == []
    stranger.look()
    assert [found.pid for found in stranger.look()] == [stranger.process.pid]
    assert stranger.look() == []


def test_what_a_launcher_starts_has_to_join(started: list[Job], library: Path) -> None:
    """A process that has left the pool to others is none of the pool; what it starts is a job."""
    job = start(started, library, LOADED + IN_CHILD + WAIT)
    job.launchers.append(job.process.pid)
    job.look()
    assert [found.pid for found in job.look()] == [job.last]


def test_one_that_ends_before_it_is_reported_is_in_the_closing_report(started: list[Job], library: Path) -> None:
    """Where its start says that it could not join, nobody has to have been told of it."""
    job = start(started, library, LOADED + IN_CHILD + WAIT)
    assert job.look() == []
    assert [found.pid for found in job.outsiders.of("a")] == [job.process.pid]
    os.kill(job.last, 9)
    job.process.communicate(timeout=DEADLINE_S)
    assert job.look() == []
    assert [found.pid for found in job.outsiders.of("a")] == [job.process.pid]


def test_a_run_says_so_at_once_in_the_table_and_in_the_json(library: Path, tmp_path: Path) -> None:
    """A command that loses Zico's variables is named while it runs, with the reason and the remedy."""
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    code = LOADED.format(library=str(library)) + f"open({str(fifo)!r}).read()"
    words = ["env", "-u", "ZICO_SOCKET", sys.executable, "-c", code]
    with ZicoRun("--json", str(tmp_path / "r.json"), "--name", "lost", "--", *words) as run:
        run.read_until("uses torch outside the budget")
        fifo.write_text("go")
        assert run.finish() == 0
    (job,) = json.loads((tmp_path / "r.json").read_text())["jobs"]
    (outside,) = job["outside"]
    assert (outside["framework"], outside["reason"]) == ("torch", NO_SOCKET)
    at_once, closing = (line for line in run.stderr.splitlines() if NO_SOCKET in line)
    assert at_once.startswith(f"zico: lost: process {outside['pid']} uses torch outside the budget")
    assert closing == f"lost: {job['note']}"


def test_why_an_adapter_failed_is_known_although_nobody_reads_standard_error(tmp_path: Path) -> None:
    """The process tells the broker why, and the run's report has the reason, also under pytest, say."""
    (tmp_path / "jax.py").write_text("VERSION = 3\n")
    code = (
        f"import os, sys; os.dup2(os.open(os.devnull, os.O_WRONLY), 2); sys.path.insert(0, {str(tmp_path)!r})\n"
        "import jax; print(jax.VERSION)"
    )
    with ZicoRun("--quiet", "--json", str(tmp_path / "r.json"), "--", sys.executable, "-c", code) as run:
        assert run.finish() == 0
    assert "3\n" in run.stdout
    (job,) = json.loads((tmp_path / "r.json").read_text())["jobs"]
    (outside,) = job["outside"]
    assert outside["framework"] == "jax"
    assert "import its framework first" in outside["reason"]
    assert f": process {outside['pid']} uses jax outside the budget: {outside['reason']}\n" in run.stderr
