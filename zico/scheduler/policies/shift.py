"""The published scrooge scheduler, to the letter: ask every so often until the whole iteration is predicted to fit.

What the paper leaves open is a parameter. What it does not need, because it shares between two jobs
of its own framework, is added. Who fits beside nobody waits, and jobs that are stopped keep nobody
waiting.

Source: G. Lim et al., "Zico: Efficient GPU Memory Sharing for Concurrent DNN Training", USENIX ATC
2021, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, compiled, inlined, record_at
from zico.base.records import I8, Record, dtype_of
from zico.pool.layout import JobState
from zico.scheduler.demand import added, job_at, level, profile_at, will_end
from zico.scheduler.layout import MEMO_BYTES, NOBODY, Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.parameters import Parameter, Unit
from zico.scheduler.state import Capabilities
from zico.scheduler.turns import (
    blocked_by,
    decision_at,
    fits_beside_kept,
    in_turn,
    kept_by_all,
    snapshot_at,
    starts,
    unstick,
    waits,
    waits_for_alone,
    waits_to_fit,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import ProfileRecord, Snapshot, SnapshotJob

    Int64s = NDArray[np.int64]


# --------------------------------------------------------------------------------------------------
# What the published scrooge scheduler predicts: feature maps that rise until the peak and fall
# after it.
#
# Theory of operation
#     A profile says how much is held and not what it is for. What is held from some time on until
#     the peak, and from the peak until some later time, are feature maps. What comes and goes
#     meanwhile is temporary. Its largest sum is kept apart for the whole iteration, as the paper's
#     local regions are::
#
#         profile          1 4 2 6 9 5 6 2
#         feature maps     1 2 2 6 9 5 5 2    rises up to the peak, falls from there
#         temporary        0 2 0 0 0 0 1 0    at most 2
#         demand           3 4 4 8 11 7 7 4
#
#     Time is the clock's since the iteration's real start, stretched to the length of the job's
#     last iteration; what is live is known, and is held at least.
#
# Source: G. Lim et al., "Zico: Efficient GPU Memory Sharing for Concurrent DNN Training", USENIX
# ATC 2021, section 4.


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
def iteration_demand(job: SnapshotJob, lasts_ns: int, since_ns: int) -> tuple[Int64s, Int64s]:
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
def fits_now(snapshot: Snapshot, index: int, others: tuple[Int64s, Int64s], lasts_ns: int, budget: int) -> bool:
    """Tell whether a job's whole iteration, begun now, is predicted to fit beside what all others hold."""
    own = iteration_demand(job_at(snapshot, index), lasts_ns, 0)
    return bool(np.max(added(others, own)[1]) <= budget)


# --------------------------------------------------------------------------------------------------

PARAMETERS = (
    Parameter("poll", "1ms", Unit.TIME, "the quantum T after which a job that waits asks again", least="1us"),
    Parameter("ramp", "0.7", Unit.SHARE, "the share of the budget that predictions begin with"),
    Parameter("step", "0.05", Unit.SHARE, "the share that every iteration begun adds to it, up to the whole"),
    Parameter(
        "profile",
        "replace",
        Unit.CHOICE,
        "whether the next prediction takes a job's last iteration for its length, or the first",
        ("replace", "keep"),
    ),
    Parameter("fallback", "16", Unit.COUNT, "iterations begun one at a time after a job has had to wait inside one"),
    Parameter("profiling", "60s", Unit.TIME, "the longest that others wait for a first iteration, which runs alone"),
)
_POLL, _RAMP, _STEP, _PROFILE, _FALLBACK, _PROFILING = range(6)
_KEEP = 1.0
_N_OPTIONS = len(PARAMETERS)


class Memory(Record, align=False):
    """Iterations begun by these jobs, and how many more of them begin one at a time."""

    begun: I8
    one_by_one: I8


MEMORY = dtype_of(Memory)


class Memo(Record, align=False):
    """When a job last asked, how many of its iterations were seen to end, and how long the last of them took."""

    asked_ns: I8
    iteration: I8
    lasted_ns: I8


MEMO = dtype_of(Memo)

_FLOAT64 = np.dtype(np.float64)
_RUNNING, _BOUNDARY = int(JobState.RUNNING), int(JobState.BOUNDARY)
_MEETS, _TURN = int(Reason.MEETS), int(Reason.TURN)


@inlined
def _memo_of(snapshot: Snapshot, index: int) -> Memo:
    return record_at(snapshot.memos_address + index * MEMO_BYTES, MEMO)


@compiled
def _learn(snapshot: Snapshot, options: NDArray[np.float64]) -> None:
    """Note how long iterations took that have ended, and whether a job waits inside one: a prediction has failed."""
    for i in range(snapshot.n):
        job, memo = job_at(snapshot, i), _memo_of(snapshot, i)
        if job.phase == _BOUNDARY and job.iteration != memo.iteration:
            memo.iteration = job.iteration
            memo.asked_ns = 0
            known = memo.lasted_ns != 0 and options[_PROFILE] == _KEEP
            if job.started_ns != 0 and job.waiting_since_ns > job.started_ns and not known:
                memo.lasted_ns = job.waiting_since_ns - job.started_ns
        if will_end(job) and job.need > 0:
            record_at(snapshot.memory_address, MEMORY).one_by_one = int(options[_FALLBACK])


@inlined
def _lasts_ns(snapshot: Snapshot, index: int) -> int:
    lasted_ns = _memo_of(snapshot, index).lasted_ns
    return lasted_ns if lasted_ns > 0 else profile_at(job_at(snapshot, index)).duration_ns


@inlined
def _is_inside(snapshot: Snapshot, index: int) -> bool:
    """Tell whether a job is in an iteration whose end is worth waiting for."""
    return will_end(job_at(snapshot, index))


@compiled
def _first(snapshot: Snapshot, profiling_ns: int) -> int:
    """Return who is in its first iteration, for no longer than others wait for one, or ``NOBODY``."""
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        recent = snapshot.now_ns - job.started_ns <= profiling_ns
        if job.phase == _RUNNING and job.profile_address == 0 and job.held > 0 and recent:
            return i
    return NOBODY


@compiled
def _demand(snapshot: Snapshot) -> tuple[Int64s, Int64s]:
    """Return what all jobs are predicted to hold from now on if nobody begins."""
    promised = level(0)
    kept = 0
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if _is_inside(snapshot, i):
            promised = added(promised, iteration_demand(job, _lasts_ns(snapshot, i), snapshot.now_ns - job.started_ns))
        else:
            kept += job.held
    return promised[0], promised[1] + kept


@compiled
def _waits_and_asks(snapshot: Snapshot, index: int, poll_ns: int) -> None:
    """Wait a quantum, for all that are inside an iteration or begin one now."""
    one_by_one = record_at(snapshot.memory_address, MEMORY).one_by_one > 0
    reason = _TURN if one_by_one or job_at(snapshot, index).profile_address == 0 else _MEETS
    waits(snapshot, index, reason, _memo_of(snapshot, index).asked_ns + poll_ns)
    for other in range(snapshot.n):
        if other != index and job_at(snapshot, other).phase == _RUNNING:
            blocked_by(snapshot, index, other)
    if decision_at(snapshot, index).against == NOBODY:
        blocked_by(snapshot, index, 0 if index > 0 or snapshot.n == 1 else 1)


@compiled
def _waits_for_first(snapshot: Snapshot, index: int, first: int, profiling_ns: int) -> None:
    waits_for_alone(snapshot, index, first)
    decision_at(snapshot, index).until_ns = max(snapshot.now_ns, job_at(snapshot, first).started_ns) + profiling_ns


@compiled
def _goes(snapshot: Snapshot, index: int, inside: int, promised: tuple[Int64s, Int64s], budget: int) -> bool:
    job = job_at(snapshot, index)
    if inside == NOBODY:
        return True
    if job.profile_address == 0 or record_at(snapshot.memory_address, MEMORY).one_by_one > 0:
        return False
    return fits_now(snapshot, index, (promised[0], promised[1] - job.held), _lasts_ns(snapshot, index), budget)


@compiled
def _begins(snapshot: Snapshot, index: int) -> None:
    starts(snapshot, index)
    memory = record_at(snapshot.memory_address, MEMORY)
    memory.begun += 1
    memory.one_by_one = max(0, memory.one_by_one - 1)


@compiled
def _budget(snapshot: Snapshot, options: NDArray[np.float64]) -> int:
    """Return what predictions may use by now."""
    begun = record_at(snapshot.memory_address, MEMORY).begun
    return int(snapshot.budget * min(1.0, options[_RAMP] + options[_STEP] * begun))


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Decide for every job at its boundary; each asks for itself, in the order in which they came."""
    snapshot = snapshot_at(snapshot_address)
    options = array_at(snapshot.options_address, _N_OPTIONS, _FLOAT64)
    poll_ns, profiling_ns = max(1, int(options[_POLL])), int(options[_PROFILING])
    _learn(snapshot, options)
    order = in_turn(snapshot)
    first, kept, inside = _first(snapshot, profiling_ns), kept_by_all(snapshot), NOBODY
    for i in range(snapshot.n):
        inside = i if _is_inside(snapshot, i) else inside
    promised = _demand(snapshot)
    for index in order:
        job, memo = job_at(snapshot, index), _memo_of(snapshot, index)
        if first != NOBODY:
            _waits_for_first(snapshot, index, first, profiling_ns)
        elif not fits_beside_kept(snapshot, index, kept):
            waits_to_fit(snapshot, index)
        elif inside != NOBODY and memo.asked_ns != 0 and snapshot.now_ns < memo.asked_ns + poll_ns:
            _waits_and_asks(snapshot, index, poll_ns)
        else:
            memo.asked_ns = snapshot.now_ns
            if not _goes(snapshot, index, inside, promised, _budget(snapshot, options)):
                _waits_and_asks(snapshot, index, poll_ns)
                first = index if job.profile_address == 0 else first  # those behind it do not keep it waiting
                continue
            _begins(snapshot, index)
            inside = index
            if job.profile_address == 0:
                first = index
            else:
                own = iteration_demand(job, _lasts_ns(snapshot, index), 0)
                promised = added((promised[0], promised[1] - job.held), own)
    unstick(snapshot, order)


POLICY = Compiled(
    "shift",
    decide,
    use_claims=False,
    self_admit=False,
    parameters=PARAMETERS,
    knows="profile, start of the iteration, what is held",
    capabilities=Capabilities(watches=True, asks=True),
)
