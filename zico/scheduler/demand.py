"""What each job is going to hold, as staircases over time: from profiles, from where the jobs are, from reservations.

Theory of operation
    A staircase holds ``level[i]`` regions from ``t_ns[i]`` (0 is now) until ``t_ns[i + 1]``, the
    last one for ever. A job in an iteration goes on from its own progress and ends at what it
    keeps; everybody else stays level::

        profile         3 3 7 7 7 5 4      in bins
        curve           3 . 7 . . 5 4      runs of equal levels
        in an iteration       7 . 5 4 2    from the fourth bin on; 2, which it keeps, after the end
        at a boundary   2 2 3 . 7 . . 5 4 2    if it starts two bins from now

Guarantees
    * Pure: nothing here reads a clock.
    * A job waiting in an allocation is taken to go on now.

Known limitations
    * A job that computes without allocating for longer than its profile says is expected to go on
      at any moment, until it is given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import compiled, inlined, record_at
from zico.pool.layout import JobState
from zico.scheduler.layout import JOB, PROFILE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import ProfileRecord, Snapshot, SnapshotJob

    Int64s = NDArray[np.int64]

_FEW = 24  # so many are sorted by insertion
_GROUP = 1 << 14  # so many changes are sorted at once: they fit into a processor's second cache
_GROUP_SPANS = 1024
_RUNNING = int(JobState.RUNNING)
_JOB_BYTES = JOB.itemsize


@inlined
def job_at(snapshot: Snapshot, index: int) -> SnapshotJob:
    """Return the JOB record at an index of a snapshot."""
    return record_at(snapshot.jobs_address + index * _JOB_BYTES, JOB)


@inlined
def profile_at(job: SnapshotJob) -> ProfileRecord:
    """Return the PROFILE record of a job that has one."""
    return record_at(job.profile_address, PROFILE)


@inlined
def bin_ends_ns(profile: ProfileRecord, index: int) -> int:
    """Return when, in a profile's time, a bin of it ends."""
    return profile.t_ns[index + 1] if index + 1 < profile.n_bins else profile.duration_ns


@inlined
def is_iterating(job: SnapshotJob) -> bool:
    """Tell whether the job is inside an iteration whose profile is known."""
    return job.phase == _RUNNING and job.profile_address != 0


@compiled
def position_ns(job: SnapshotJob) -> int:
    """Return how far into its profile's time a job has come, at most the whole of it.

    Progress tells the bin, and the clock the way through it. A job that waits for data does not
    allocate, but its next rise comes nearer.
    """
    profile = profile_at(job)
    now_in = min(job.progress >> profile.shift, profile.n_bins - 1)
    begin_ns = profile.t_ns[now_in]
    return begin_ns + min(job.in_bin_ns, bin_ends_ns(profile, now_in) - begin_ns)


@inlined
def will_end(job: SnapshotJob) -> bool:
    """Tell whether the job is inside an iteration that is known and worth waiting for."""
    return is_iterating(job) and job.given_up == 0


@compiled
def span_at(begins_ns: Int64s, n: int, at_ns: int) -> int:
    """Return which of the first ``n`` spans of time, given by when each begins, an instant lies in."""
    low, high = 0, int(n)
    while high - low > 1:
        middle = (low + high) >> 1
        if begins_ns[middle] <= at_ns:
            low = middle
        else:
            high = middle
    return low


@inlined
def step_at(profile: ProfileRecord, at_ns: int) -> int:
    """Return which of the profile's steps an instant of its time lies in."""
    return span_at(profile.step_ns, profile.n_steps, at_ns)


@compiled
def is_passing_at(job: SnapshotJob, now_ns: int, delay_ns: int, after_ns: int) -> bool:
    """Tell whether a job holds more at a time from now than in the end, by what ``remaining`` or ``planned`` say.

    Args:
        job: The JOB record.
        now_ns: The snapshot's time.
        delay_ns: After which the job starts, if it is at its boundary and is going to; else below
            0.
        after_ns: From now.
    """
    if delay_ns >= 0:
        profile = profile_at(job)
        at_ns = after_ns - delay_ns
        inside = 0 <= at_ns < profile.duration_ns
        return inside and profile.level[step_at(profile, at_ns)] > job.held
    if not will_end(job):
        return False
    profile = profile_at(job)
    from_ns = position_ns(job)
    if from_ns >= profile.duration_ns:
        overrun_ns = max(profile.tick_ns, now_ns - job.started_ns - profile.duration_ns)
        return after_ns < overrun_ns and job.held > job.kept
    step = step_at(profile, from_ns + after_ns)
    holds = profile.level[step]
    if step == step_at(profile, from_ns):
        holds = max(holds, job.held)
    return from_ns + after_ns < profile.duration_ns and holds > job.kept


@compiled
def level(regions: int) -> tuple[Int64s, Int64s]:
    """Return the staircase of somebody who holds so much without end."""
    return np.zeros(1, np.int64), np.full(1, regions, np.int64)


@compiled
def total(snapshot: Snapshot) -> tuple[Int64s, Int64s]:
    """Return what all jobs of a snapshot hold from now on if none begins anything new.

    Of very many jobs groups are added whose staircases are made coarse first, so that it takes time
    in proportion.
    """
    moving = np.empty(snapshot.n, np.int64)
    n_moving = room = held = 0
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if will_end(job):
            moving[n_moving] = i
            n_moving += 1
            room += profile_at(job).n_steps
        else:
            held += job.held
    room = min(room, _GROUP)
    when_ns, change = np.empty(room, np.int64), np.empty(room, np.int64)
    before = level(0)
    n = 0
    for i in moving[:n_moving]:
        if n + profile_at(job_at(snapshot, i)).n_steps > room:
            group = coarse(summed(held, *in_time(when_ns[:n], change[:n])), _GROUP_SPANS)
            before = coarse(added(before, group), _GROUP_SPANS)
            n = held = 0
        n, holds = _put_changes(job_at(snapshot, i), snapshot.now_ns, when_ns, change, n)
        held += holds
    if n_moving == 1:
        return summed(held, when_ns[:n], change[:n])
    last = summed(held, *in_time(when_ns[:n], change[:n]))
    return last if len(before[0]) == 1 else added(before, last)


@compiled
def _put_changes(job: SnapshotJob, now_ns: int, when_ns: Int64s, change: Int64s, n: int) -> tuple[int, int]:
    """Put behind the first ``n`` when and by how much a job's regions change; returns how many those are, and its now.

    A job that has overrun its profile is expected to take as long again as it has overrun. So
    whoever waits for it asks ever less often.
    """
    profile = profile_at(job)
    at_ns = position_ns(job)
    if at_ns >= profile.duration_ns:
        when_ns[n] = max(profile.tick_ns, now_ns - job.started_ns - profile.duration_ns)
        change[n] = job.kept - job.held
        return n + 1, job.held
    first = step_at(profile, at_ns)
    now = before = max(job.held, profile.level[first])
    for i in range(first + 1, profile.n_steps):
        when_ns[n] = profile.step_ns[i] - at_ns
        change[n] = profile.level[i] - before
        before = profile.level[i]
        n += 1
    when_ns[n] = profile.duration_ns - at_ns
    change[n] = job.kept - before
    return n + 1, now


@compiled
def reserved(promised: tuple[Int64s, Int64s], job: SnapshotJob, delay_ns: int) -> tuple[Int64s, Int64s]:
    """Return what is promised, a job at rest at its boundary included, if that job starts after ``delay_ns``."""
    t_ns, levels = promised
    profile = profile_at(job)
    n_steps = profile.n_steps
    out_ns, out = np.empty(len(t_ns) + n_steps + 1, np.int64), np.empty(len(t_ns) + n_steps + 1, np.int64)
    n = k = 0
    more = base = 0
    for i in range(n_steps + 1):
        at_ns = delay_ns + (profile.step_ns[i] if i < n_steps else profile.duration_ns)
        while k < len(t_ns) and t_ns[k] <= at_ns:
            base = levels[k]
            if t_ns[k] < at_ns:
                out_ns[n], out[n] = t_ns[k], base + more
                n += 1
            k += 1
        more = profile.level[i] - job.held if i < n_steps else 0
        if n == 0 or out[n - 1] != base + more:
            out_ns[n], out[n] = at_ns, base + more
            n += 1
    while k < len(t_ns):
        out_ns[n], out[n] = t_ns[k], levels[k]
        n += 1
        k += 1
    return out_ns[:n], out[:n]


@compiled
def coarse(staircase: tuple[Int64s, Int64s], most: int) -> tuple[Int64s, Int64s]:
    """Return a staircase of few steps that is nowhere lower: the most in each of ``most`` equal spans of time."""
    t_ns, levels = staircase
    if len(t_ns) <= 2 * most:
        return staircase
    span_ns = max(1, t_ns[-1] // most)
    out_ns, out = np.empty(most + 3, np.int64), np.empty(most + 3, np.int64)
    n = 0
    before = levels[0]
    i = 0
    while i < len(t_ns):
        begin_ns = t_ns[i] // span_ns * span_ns
        highest = max(before, levels[i])
        while i < len(t_ns) and t_ns[i] < begin_ns + span_ns:
            highest = max(highest, levels[i])
            before = levels[i]
            i += 1
        out_ns[n], out[n] = begin_ns, highest
        n += 1
        if (i == len(t_ns) or t_ns[i] >= begin_ns + 2 * span_ns) and before != highest:
            out_ns[n], out[n] = begin_ns + span_ns, before
            n += 1
    return out_ns[:n], out[:n]


@compiled
def added(one: tuple[Int64s, Int64s], other: tuple[Int64s, Int64s]) -> tuple[Int64s, Int64s]:
    """Merge two staircases; steps that change nothing are left out."""
    a_ns, a = one
    b_ns, b = other
    out_ns = np.empty(len(a) + len(b), np.int64)
    out = np.empty(len(a) + len(b), np.int64)
    out_ns[0] = 0
    out[0] = a[0] + b[0]
    n = 1
    i = j = 0
    while i + 1 < len(a) or j + 1 < len(b):
        if j + 1 == len(b) or (i + 1 < len(a) and a_ns[i + 1] <= b_ns[j + 1]):
            i += 1
            t_ns = a_ns[i]
        else:
            j += 1
            t_ns = b_ns[j]
        if out_ns[n - 1] == t_ns:
            out[n - 1] = a[i] + b[j]
        elif out[n - 1] != a[i] + b[j]:
            out_ns[n] = t_ns
            out[n] = a[i] + b[j]
            n += 1
    return out_ns[:n], out[:n]


@compiled
def in_time(when_ns: Int64s, change: Int64s) -> tuple[Int64s, Int64s]:
    """Sort changes by their times: into as many equal spans of time as there are changes, and within each of these."""
    n = len(when_ns)
    if n == 0:
        return when_ns, change
    last_ns = when_ns.max()
    shift = 0
    while last_ns >> shift >= n:
        shift += 1
    end = np.zeros((last_ns >> shift) + 2, np.int64)
    for i in range(n):
        end[(when_ns[i] >> shift) + 1] += 1
    for span in range(1, len(end)):
        end[span] += end[span - 1]
    sorted_ns, sorted_change = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        span = when_ns[i] >> shift
        at = end[span]
        end[span] = at + 1
        sorted_ns[at], sorted_change[at] = when_ns[i], change[i]
    first = 0
    for span in range(len(end) - 1):
        if end[span] - first > _FEW and not _are_in_time(sorted_ns[first : end[span]]):
            order = np.argsort(sorted_ns[first : end[span]], kind="mergesort")
            sorted_ns[first : end[span]] = sorted_ns[first : end[span]][order]
            sorted_change[first : end[span]] = sorted_change[first : end[span]][order]
        first = end[span]
    for i in range(1, n):
        at_ns, by = sorted_ns[i], sorted_change[i]
        at = i
        while at > 0 and sorted_ns[at - 1] > at_ns:
            sorted_ns[at], sorted_change[at] = sorted_ns[at - 1], sorted_change[at - 1]
            at -= 1
        sorted_ns[at], sorted_change[at] = at_ns, by
    return sorted_ns, sorted_change


@compiled
def _are_in_time(when_ns: Int64s) -> bool:
    falls = 0
    for i in range(1, len(when_ns)):
        falls += when_ns[i] < when_ns[i - 1]
    return falls == 0


@compiled
def summed(held: int, when_ns: Int64s, change: Int64s) -> tuple[Int64s, Int64s]:
    """Return the staircase that begins with so much and changes at these times, which do not fall."""
    t_ns, levels = np.empty(len(when_ns) + 1, np.int64), np.empty(len(when_ns) + 1, np.int64)
    t_ns[0], levels[0] = 0, held
    n = 1
    for i in range(len(when_ns)):
        held += change[i]
        if when_ns[i] == t_ns[n - 1]:
            levels[n - 1] = held
        elif held != levels[n - 1]:
            t_ns[n], levels[n] = when_ns[i], held
            n += 1
    return t_ns[:n], levels[:n]
