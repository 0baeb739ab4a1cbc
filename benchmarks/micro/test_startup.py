"""What does ``zico run`` add to the start of a job?

From the start of the command to the first line of user code after the framework's import. A probe
in another job then says where the time goes. One start with an empty cache says what the first one
on a machine costs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from micro.conftest import Measure

FRAMEWORKS = ("torch", "tensorflow")
STARTS = 9
PROBES = 3
GOAL_FIRST_NS = 45e9
DEADLINE_S = 300.0
FIRST_S = 900.0
"""Of the start that compiles."""
PROBE = Path(__file__).parents[1] / "startup_probe.py"
RUN = (*common.ZICO, "run", "--quiet", "--budget", "1GiB", "--")
CODE = "import time; began = time.monotonic(); import {0}; print(began, flush=True)"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}


class Starts:
    """Starts commands and waits for the first line that each prints."""

    def __init__(self) -> None:
        """Begin with none."""
        self.processes: list[subprocess.Popen[str]] = []
        self.launch_s: list[float] = []
        """From the start of each command to its job's first statement."""

    def start(self, argv: Sequence[str]) -> None:
        """Start a command and return once its job has imported the framework."""
        began_s = time.monotonic()
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | QUIET)
        self.processes.append(process)
        assert process.stdout is not None
        self.launch_s.append(float(process.stdout.readline().split()[-1]) - began_s)

    def end(self) -> None:
        """Wait for the end of all of them, outside of what is timed."""
        for process in self.processes:
            process.wait(timeout=DEADLINE_S)

    def kill(self) -> None:
        """Kill those that have not ended."""
        for process in self.processes:
            process.kill()
            with process:
                pass  # waits, and closes its output


@pytest.fixture
def starts() -> Iterator[Starts]:
    """Return what starts commands; none survives the test."""
    made = Starts()
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.parametrize("command", ["plain", "zico run"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_start(measure: Measure, starts: Starts, framework: str, command: str) -> None:
    """Seconds until user code runs, the framework imported; in one warm-up files and machine code come into caches."""
    pytest.importorskip(framework)
    prefix = RUN if command == "zico run" else ()
    argv = (*prefix, sys.executable, "-c", CODE.format(framework))
    measure.figures["name"] = command
    if command == "plain":
        measure.is_baseline(command)
    how: dict[str, Any] = {"teardown": lambda *_: starts.end(), "rounds": STARTS, "warmup_rounds": 1}
    measure(f"start of a job with {framework}", starts.start, argv, **how)
    starts.end()
    measure.figures["before the job, s"] = statistics.median(starts.launch_s[-STARTS:])
    if command == "zico run" and measure.enabled:
        measure.figures |= {f"{name}, s": spent_s for name, spent_s in probe(framework).items()}


def probe(framework: str) -> dict[str, float]:
    """Return the median seconds of each step by which a job joins the pool after its framework's import."""
    steps: dict[str, list[float]] = {}
    argv = (*RUN, sys.executable, str(PROBE), framework)
    for _ in range(PROBES):
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S, env=os.environ | QUIET
        )
        for line in done.stdout.splitlines():
            name, bar, seconds = line.rpartition(": ")
            if bar:
                steps.setdefault(name.rpartition(" | ")[2], []).append(float(seconds))
    return {name: statistics.median(values) for name, values in steps.items()}


def test_first_start(measure: Measure, tmp_path: Path) -> None:
    """The start that finds no compiled code."""
    if not measure.enabled:
        pytest.skip("compiles for a minute")
    argv = ("env", f"ZICO_CACHE_DIR={tmp_path}", *RUN, sys.executable, "-c", "pass")
    how: dict[str, Any] = {"args": argv, "check": True, "timeout": FIRST_S}
    measure("start with an empty cache", subprocess.run, kwargs=how, goal_ns=GOAL_FIRST_NS)
