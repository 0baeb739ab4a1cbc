"""Run a training script that records every second iteration only, and time each: ``alternating.py TIMES SCRIPT ...``.

Run under ``zico trace``. Neighbouring iterations of one process differ in nothing but the
recording, so that what else the machine does falls on both alike. The trace it leaves behind is of
no use. With ``--ops`` all iterations are recorded, and those that have their operations recorded,
too, are the ones that a user's would.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zico.base.settings import OPS_VARIABLE
from zico.job.session import Session, current

if TYPE_CHECKING:
    from collections.abc import Callable


def alternating(mark: Callable[[Session], None], rows: list[tuple[bool, float, float]]) -> Callable[[Session], None]:
    """Wrap ``Session.mark``: enter the iteration that ends as (recorded, wall s, CPU s), then turn recording over."""
    address = 0
    begun_s = cpu_begun_s = 0.0

    def marked(session: Session) -> None:
        nonlocal address, begun_s, cpu_begun_s
        mark(session)
        heap = session.heap.record[0]
        address = address or int(heap["ring_address"])
        now_s, cpu_s = time.perf_counter(), time.process_time()
        if begun_s:
            rows.append((int(heap["ring_address"]) != 0, now_s - begun_s, cpu_s - cpu_begun_s))
        heap["ring_address"] = 0 if int(heap["ring_address"]) else address
        begun_s, cpu_begun_s = time.perf_counter(), time.process_time()

    return marked


def sampled(sampling: Any, rows: list[tuple[bool, float, float]]) -> Callable[[], None]:  # noqa: ANN401 - an adapter's
    """Wrap ``Sampling.at_boundary``: enter the iteration that ends as (operations recorded, wall s, CPU s)."""
    begun_s = cpu_begun_s = 0.0
    boundary = sampling.at_boundary

    def noted() -> None:
        nonlocal begun_s, cpu_begun_s
        if begun_s:
            rows.append((sampling.is_on, time.perf_counter() - begun_s, time.process_time() - cpu_begun_s))
        boundary()
        begun_s, cpu_begun_s = time.perf_counter(), time.process_time()

    return noted


def main() -> None:
    """Run the script as ``__main__`` and write the rows."""
    times, script, *arguments = sys.argv[1:]
    rows: list[tuple[bool, float, float]] = []
    if os.environ.get(OPS_VARIABLE):
        import torch  # noqa: F401 - joins the pool, and samples

        sampling = current().watchers[-1]  # type: ignore[union-attr]
        sampling.at_boundary = sampled(sampling, rows)  # type: ignore[method-assign]
    else:
        Session.mark = alternating(Session.mark, rows)  # type: ignore[assignment, method-assign]
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(times).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
