"""What the published scrooge scheduler predicts: feature maps that rise until the peak and fall after it.

Theory of operation
    A profile says how much is held and not what it is for. What is held from some time on until the peak, and from the
    peak until some later time, are feature maps; what comes and goes meanwhile is temporary, and its largest sum is
    kept apart for the whole iteration, as the paper's local regions are::

        profile          1 4 2 6 9 5 6 2
        feature maps     1 2 2 6 9 5 5 2    rises up to the peak, falls from there
        temporary        0 2 0 0 0 0 1 0    at most 2
        demand           3 4 4 8 11 7 7 4

    Time is the clock's since the iteration's real start, stretched to the length of the job's last iteration; what is
    live is known, and is held at least.

Source: G. Lim et al., "Zico: Efficient GPU Memory Sharing for Concurrent DNN Training", USENIX ATC 2021, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import compiled
from zico.scheduler.demand import added, job_at, level, profile_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import ProfileRecord, Scene, SceneJob

    Int64s = NDArray[np.int64]


@compiled
def _feature_maps(profile: ProfileRecord) -> Int64s:
    """Return for each step the regions held from then on until the peak, or from the peak until then."""
    n = profile.n_steps
    levels = np.empty(n, np.int64)
    top = 0
    for i in range(n):
        levels[i] = profile.level[i]
        top = i if profile.level[i] > profile.level[top] else top
    for i in range(top - 1, -1, -1):
        levels[i] = min(levels[i], levels[i + 1])
    for i in range(top + 1, n):
        levels[i] = min(levels[i], levels[i - 1])
    return levels


@compiled
def iteration_demand(job: SceneJob, lasts_ns: int, since_ns: int) -> tuple[Int64s, Int64s]:
    """Return what a job is predicted to hold from now on, so long after its iteration has begun.

    Args:
        job: The JOB record, with a profile.
        lasts_ns: How long its iteration is taken to be.
        since_ns: 0 for a job that would begin now.
    """
    if since_ns >= lasts_ns:
        return level(job.held)
    profile = profile_at(job)
    maps = _feature_maps(profile)
    n = profile.n_steps
    temporary = 0
    for i in range(n):
        temporary = max(temporary, profile.level[i] - maps[i])
    stretched = float(lasts_ns) / float(max(1, profile.duration_ns))
    t_ns, levels = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    k = -1
    for i in range(n):
        begin_ns = int(profile.step_ns[i] * stretched) - since_ns
        k += 1 if begin_ns > 0 or k < 0 else 0
        t_ns[k], levels[k] = max(0, begin_ns), maps[i] + temporary
    levels[0] = max(levels[0], job.held)
    t_ns[k + 1], levels[k + 1] = lasts_ns - since_ns, job.kept
    return t_ns[: k + 2], levels[: k + 2]


@compiled
def fits_now(scene: Scene, index: int, others: tuple[Int64s, Int64s], lasts_ns: int, budget: int) -> bool:
    """Tell whether a job's whole iteration, begun now, is predicted to fit beside what all others hold."""
    own = iteration_demand(job_at(scene, index), lasts_ns, 0)
    return bool(np.max(added(others, own)[1]) <= budget)
