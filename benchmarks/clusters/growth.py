"""What state and messages of brokers, and of a service that places jobs, grow with; from the code's records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusters.kinds import regions_of
from zico.pool.layout import JOB, MAX_JOBS, MEMBER, REGION, table_bytes
from zico.trace.profile import CURVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusters.kinds import Kind

BOUNDARY_WRITES, BOUNDARY_WAKES = 1, 1
"""Of an iteration whose start the broker decides: one write to its eventfd, one word for which the job sleeps.

An iteration that fits whatever the others do starts without either (``Header.self_admit``).
"""
SERVICE_MESSAGES = 3
"""Of a job: it is submitted, it is placed, it has ended."""


def growth(kinds: Sequence[Kind], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return bytes and messages, by what they grow with.

    Args:
        kinds: Of the jobs that boundaries are counted for.
        runs: Rows of results; each has devices, jobs, span in seconds, the most sets a placement looked at.
    """
    boundaries_per_s = sum(kind.share * 1e9 / kind.profile.duration_ns for kind in kinds) / sum(k.share for k in kinds)
    return {
        "table_bytes": table_bytes(regions_of(0)),
        "region_bytes": REGION.itemsize,
        "job_bytes": JOB.itemsize,
        "most_jobs": MAX_JOBS,
        "member_bytes": MEMBER.itemsize,
        "profile_bytes": CURVE.itemsize,
        "boundaries_per_s": boundaries_per_s,
        "writes_per_boundary": BOUNDARY_WRITES,
        "wakes_per_boundary": BOUNDARY_WAKES,
        "service": [
            {
                "devices": run["devices"],
                "jobs": run["jobs"],
                "messages_per_s": SERVICE_MESSAGES * run["jobs"] / run["span_s"],
                "device_boundaries_per_s": boundaries_per_s * run["devices"],
                "most_sets": run["most_sets"],
                "placement_us": run["placement_us"],
                "sets": run["sets"],
                "set_ms": run["set_ms"],
            }
            for run in runs
        ],
    }
