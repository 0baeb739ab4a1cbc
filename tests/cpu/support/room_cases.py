"""Jobs that may begin, and how much room there is."""

from __future__ import annotations

import numpy as np

from zico.launch.sweep import SweepJob
from zico.report.model import Record

REGION = 1 << 20
JOBS = [SweepJob(f"x={x}", ("python", "train.py", f"--x={x}")) for x in range(4)]
OTHER = SweepJob("other", ("python", "other.py"))


def record(curves: dict[str, list[int]], budget: int, joined: tuple[str, ...] = ()) -> Record:
    """Return a record of jobs that hold so many regions in each tenth of a second; others have only joined."""
    names = (*curves, *joined)
    held = [curves.get(name, []) for name in names]
    nothing, none = np.zeros(0), np.zeros(0, np.int64)
    return Record(
        names=names,
        peak_bytes=np.array([max(curve, default=0) for curve in held]) * REGION,
        budget_t_s=np.zeros(1),
        budget_bytes=np.array([budget * REGION]),
        t_s=nothing,
        held_bytes=np.zeros((0, len(names)), np.int64),
        out_bytes=np.zeros((0, len(names)), np.int64),
        physical_bytes=none,
        boundary_job=none,
        boundary_t_s=nothing,
        wait_job=none,
        wait_t_s=np.zeros((0, 2)),
        wait_kind=none,
        blocker_wait=none,
        blocker_job=none,
        iteration_s=np.array([len(each) / 10 for each in held]),
        persistent_bytes=np.array([min(each, default=0) * REGION for each in held]),
        profile_job=np.array([job for job, each in enumerate(held) for _ in each], np.int64),
        profile_t_s=np.array([bin_ / 10 for each in held for bin_ in range(len(each))]),
        profile_bytes=np.array([regions * REGION for each in held for regions in each], np.int64),
    )


ALWAYS_HIGH = [8, 8, 8, 8, 8, 8, 8, 8, 8, 2]
