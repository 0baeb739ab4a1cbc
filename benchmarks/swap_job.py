"""Run a training script and time each of its iterations: ``swap_job.py ROWS SCRIPT ...``.

Run as a job of a pool. Each row is an iteration: its time, the processor's, and what the job's
record says has been moved and waited for since the last one.
"""

from __future__ import annotations

import json
import runpy
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


def _timed(mark: Callable[[Session], None], rows: list[dict[str, float]]) -> Callable[[Session], None]:
    """Wrap ``Session.mark``: enter what the iteration that ends has taken and moved."""
    begun_s = cpu_begun_s = 0.0
    before = dict.fromkeys(FIELDS, 0)

    def marked(session: Session) -> None:
        nonlocal begun_s, cpu_begun_s, before
        now_s, cpu_s = time.perf_counter(), time.process_time()
        record = session.record
        swapper = session.swapper
        after = {field: int(record[field]) for field in FIELDS}
        if begun_s:
            moved = {field: after[field] - before[field] for field in after}
            planned = swapper.planned_iterations if swapper is not None else 0
            rows.append({"wall_s": now_s - begun_s, "cpu_s": cpu_s - cpu_begun_s, "planned": planned, **moved})
        before = after
        mark(session)
        begun_s, cpu_begun_s = time.perf_counter(), time.process_time()

    return marked


def main() -> None:
    """Run the script as ``__main__`` and write the rows."""
    path, script, *arguments = sys.argv[1:]
    rows: list[dict[str, float]] = []
    Session.mark = _timed(Session.mark, rows)  # type: ignore[assignment, method-assign]
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(path).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
