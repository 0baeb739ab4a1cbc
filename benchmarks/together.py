"""Run training jobs together, with and without Zico, and measure their iterations per second alike.

Theory of operation
    Each job prints a line when an iteration has ended; the line's arrival in this process is the
    iteration's time, so plain processes and jobs under ``zico run`` are measured by the same clock
    at the same place. Rates are taken over the *common window*: from when the last of the jobs has
    ended its warm-up iterations to when the first of them ends its last iteration. In between all
    jobs iterate, so nobody has the machine for itself::

        job A   |start|1|2|3|  warm   |=======window=======|
        job B   |  start   |1|2|3|warm|=======window=======|...|

    Within the window the count of ended iterations is taken as piecewise linear between two ends,
    so that the window's edges cost no quantisation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import common
import numpy as np
from common import ROOT, ZICO

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Watch = Callable[[dict[str, list[float]]], None]
    """Is shown again and again when each job's iterations have ended, and may raise to end the run."""

WARM_UP = 8
"""Iterations of each job before its steady state: profiles are learned in the first few, one job after the other."""
MARGIN_S = 240.0
"""How much longer than its training time a run may take; the first one on a machine compiles for a minute."""
END_S = 10.0
LOOK_S = 0.05
"""Between two looks of who watches."""
ENDLESS = ("--iterations", "1000000")
"""Arguments of a job that is to end by time, or by a signal."""

_LINE = re.compile(rb"^(?:(?P<name>\S+) +\| )?iteration (?P<number>\d+) ")
_NOT_INHERITED = ("ZICO_SOCKET", "ZICO_OWNER_PID", "ZICO_BUDGET", "ZICO_POLICY", "ZICO_REGION")


@dataclasses.dataclass(frozen=True)
class Job:
    """One training command."""

    name: str
    script: str
    """Relative to ``ROOT``."""
    arguments: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """What stands before the interpreter: ``env NAME=VALUE``."""

    def argv(self, losses: Path | None = None, *extra: str) -> tuple[str, ...]:
        """Return the command, to be run in ``ROOT``; it writes its losses to ``losses``."""
        to_file = () if losses is None else ("--losses", str(losses))
        return (*self.before, sys.executable, self.script, *self.arguments, *extra, *to_file)

    def work(self) -> tuple[str, ...]:
        """Return the command without its seed: jobs that differ in nothing else are as large and as fast."""
        argv = list(self.argv())
        if "--seed" in argv:
            at = argv.index("--seed")
            del argv[at : at + 2]
        return tuple(argv)


@dataclasses.dataclass(frozen=True)
class Together:
    """How jobs that ran together went."""

    ends_s: tuple[tuple[float, ...], ...]
    """Per job: when its iterations ended, since the start."""
    losses: tuple[tuple[str, ...], ...]
    """Per job: every loss in hexadecimal."""
    report: dict[str, Any] | None
    """What ``zico run --json`` wrote; ``None`` for plain processes."""

    def window_s(self, warm_up: int = WARM_UP) -> tuple[float, float]:
        """Return the common window, which begins after so many iterations of each job.

        Raises:
            ValueError: It is empty: the jobs never iterated together.
        """
        if not all(self.ends_s):
            message = "a job ended no iteration"
            raise ValueError(message)
        begin = max(ends[min(warm_up, len(ends)) - 1] for ends in self.ends_s)
        end = min(ends[-1] for ends in self.ends_s)
        if end <= begin:
            message = "the jobs never iterated together after their warm-up: raise --seconds"
            raise ValueError(message)
        return begin, end

    def rates(self, warm_up: int = WARM_UP) -> list[float]:
        """Return each job's iterations per second over the common window."""
        begin, end = self.window_s(warm_up)
        return [(count_at(ends, end) - count_at(ends, begin)) / (end - begin) for ends in self.ends_s]


def parser(description: str | None, *, seconds: float, repeat: int) -> argparse.ArgumentParser:
    """Return a parser with the options of benchmarks in which jobs train for some time, in rounds."""
    made = common.parser(description)
    made.add_argument("--seconds", type=float, default=seconds, help="how long each job trains in each run")
    made.add_argument("--repeat", type=int, default=repeat, help="rounds of each budget")
    made.add_argument("--warm-up", type=int, default=WARM_UP, help="iterations of each job left out")
    return made


def tells_end(line: bytes) -> bool:
    """Tell whether a job's line says that an iteration has ended."""
    return _LINE.match(line) is not None


def count_at(ends: Sequence[float], t_s: float) -> float:
    """Return how many iterations had ended at a time, as if they went evenly between two ends."""
    return float(np.interp(t_s, ends, np.arange(1, len(ends) + 1)))


def run_plain(
    jobs: Sequence[Job],
    *extra: str,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    watch: Watch | None = None,
) -> Together:
    """Run the jobs as processes of their own, all at once, without Zico; ``environment`` is added to theirs."""
    with _scratch() as directory:
        with contextlib.ExitStack() as stack:  # which looks at exit codes, so before the losses are read
            processes = {
                job.name: stack.enter_context(
                    _process(job.argv(directory / f"{job.name}.json", *extra), directory, environment)
                )
                for job in jobs
            }
            ends = _ends(processes, [job.name for job in jobs], deadline_s, watch)
        return Together(ends, _losses(jobs, directory), None)


def run_zico(  # noqa: PLR0913 - the traits of a run
    jobs: Sequence[Job],
    *extra: str,
    policy: str,
    budget: str,
    deadline_s: float,
    device: str = "host",
    report_to: Path | None = None,
    told: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    watch: Watch | None = None,
) -> Together:
    """Run the jobs under one ``zico run``; what ``--report`` writes goes to ``report_to`` if that is given.

    Args:
        jobs: The jobs.
        extra: Arguments of each.
        policy: Who may go on.
        budget: Of all.
        deadline_s: How long that may take.
        device: Whose memory they share.
        report_to: A directory.
        told: Further options of ``zico run``.
        environment: Is added to that of ``zico run``.
        watch: Sees when iterations end.
    """
    with _scratch() as directory:
        report = directory / "report.json"
        names = [option for job in jobs for option in ("--name", job.name)]
        commands = [shlex.join(job.argv(directory / f"{job.name}.json", *extra)) for job in jobs]
        kept = () if report_to is None else ("--report", str(report_to))
        options = (
            "--quiet",
            "--device",
            device,
            "--policy",
            policy,
            "--budget",
            budget,
            "--json",
            str(report),
            *kept,
            *told,
        )
        with _process((*ZICO, "run", *options, *names, *commands), directory, environment) as process:
            ends = _ends({"": process}, [job.name for job in jobs], deadline_s, watch)
        return Together(ends, _losses(jobs, directory), json.loads(report.read_text()))


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="zico-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _process(
    argv: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command whose errors are told if it fails; it is gone when the block ends."""
    environ = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    with tempfile.TemporaryFile(dir=directory) as errors:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield process
            code = process.wait(timeout=END_S)
        finally:
            _end(process)
        if code != 0:
            errors.seek(0)
            sys.stderr.buffer.write(errors.read())
            raise subprocess.CalledProcessError(code, argv)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=END_S)
    cast("IO[bytes]", process.stdout).close()


def _ends(
    processes: dict[str, subprocess.Popen[bytes]], names: Sequence[str], deadline_s: float, watch: Watch | None = None
) -> tuple[tuple[float, ...], ...]:
    """Read all output to its end and return when each job's iterations ended."""
    ends: dict[str, list[float]] = {name: [] for name in names}
    began_s = time.monotonic()
    rest = dict.fromkeys(processes, b"")
    with selectors.DefaultSelector() as selector:
        for name, process in processes.items():
            selector.register(cast("IO[bytes]", process.stdout), selectors.EVENT_READ, name)
        while selector.get_map():
            if time.monotonic() - began_s > deadline_s:
                message = f"the jobs did not end within {deadline_s:.0f} s"
                raise TimeoutError(message)
            if watch is not None:
                watch(ends)
            for key, _ in selector.select(1.0 if watch is None else LOOK_S):
                now_s = time.monotonic() - began_s
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                *lines, rest[key.data] = (rest[key.data] + chunk).split(b"\n")
                for match in filter(None, map(_LINE.match, lines)):
                    name = (match["name"] or b"").decode() or key.data
                    ends[name].append(now_s)
    return tuple(tuple(ends[name]) for name in names)


def _losses(jobs: Sequence[Job], directory: Path) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(json.loads((directory / f"{job.name}.json").read_text())) for job in jobs)
