"""Run a training script and time each of its iterations: ``swap_job.py ROWS SCRIPT ...``.

Run as a job of a pool. Each row is an iteration: its time, the processor's, and what the job's
record says has been moved and waited for since the last one. Between iterations, a job waits for a plan
that is being made, so that few iterations show what plans cost. Jobs that are compared take turns: each
runs some iterations while the others wait, so that a drift of the machine's speed falls on all.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from zico.job.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = (
    "out_bytes",
    "in_bytes",
    "faults",
    "late",
    "copy_waited_ns",
    "copy_hidden_ns",
    "need_waited_ns",
    "spilled_bytes",
    "dropped_bytes",
    "making_ns",
)

TURNS = "ZICO_BENCHMARK_TURNS"
"""Of the environment: what ``Turns`` takes, separated by blanks. Unset: the job waits for no other."""
PLAN_S = 400.0
"""Longest that a plan takes: a planner is asked up to 16 times for some 5 s each."""
TURN_S = 900.0
"""Longest that a job waits for its turn: all others have their first one before, which is the longest."""


class Turns:
    """A job's place in a ring of jobs, of which one runs at a time."""

    def __init__(self, mine: str, following: str, first: str, block: str) -> None:
        """Take the paths of two pipes with names, and how many iterations the first turn and later ones have."""
        self._mine, self._following = (os.open(path, os.O_RDWR) for path in (mine, following))
        self._next, self._block = int(first), int(block)
        self._left = 0
        """Iterations of the turn, with the one that runs; 0: it is another job's turn."""

    def is_mine(self) -> bool:
        """Wait for a turn if the last one is over; returns whether this iteration is the first of a turn.

        Raises:
            TimeoutError: No turn has come, so another job has died in its own.
        """
        if self._left > 1:
            self._left -= 1
            return False
        self.pass_on()
        if not select.select([self._mine], [], [], TURN_S)[0]:
            message = f"no turn within {TURN_S:g} s: another job of the ring has died in its own"
            raise TimeoutError(message)
        os.read(self._mine, 1)
        self._left, self._next = self._next, self._block
        return True

    def pass_on(self) -> None:
        """Let the next job run, if it is this one's turn."""
        if self._left:
            self._left = 0
            os.write(self._following, b".")


def _timed(
    mark: Callable[[Session], None], rows: list[dict[str, float]], turns: Turns | None
) -> Callable[[Session], None]:
    """Wrap ``Session.mark``: enter what the iteration that ends has taken and moved."""
    begun_s = cpu_begun_s = 0.0
    before = dict.fromkeys(FIELDS, 0)
    is_first = False

    def marked(session: Session) -> None:
        nonlocal begun_s, cpu_begun_s, before, is_first
        now_s, cpu_s = time.perf_counter(), time.process_time()
        record = session.record
        swapper = session.swapper
        after = {field: int(record[field]) for field in FIELDS}
        if begun_s:
            moved = {field: after[field] - before[field] for field in after}
            planned = swapper.planned_iterations if swapper is not None else 0
            rows.append({"wall_s": now_s - begun_s, "cpu_s": cpu_s - cpu_begun_s, "planned": planned, **moved})
            rows[-1]["is_first"] = is_first
        before = after
        mark(session)
        planning = None if swapper is None else swapper._learner.planning  # noqa: SLF001 - nobody else waits for it
        if planning is not None:
            planning.join(PLAN_S)
        is_first = turns is not None and turns.is_mine()
        begun_s, cpu_begun_s = time.perf_counter(), time.process_time()

    return marked


def main() -> None:
    """Run the script as ``__main__`` and write the rows."""
    path, script, *arguments = sys.argv[1:]
    rows: list[dict[str, float]] = []
    turns = Turns(*os.environ[TURNS].split()) if TURNS in os.environ else None
    Session.mark = _timed(Session.mark, rows, turns)  # type: ignore[assignment, method-assign]
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if turns is not None:
            turns.pass_on()
        Path(path).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
