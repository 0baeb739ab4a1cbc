"""The rules by which jobs go on: one copy for the pool, the policies and the simulator, compiled.

What a profile says that a job may still come to hold is ``zico.trace.profile.claim_at``; what the
rules make of that is here. The pool asks them about its own records, inside the mutex. What they say
of each job stands in a ``Debt``, the front of a policy's and the simulator's record of it.

The banker's rule: may this state go on, whatever the speeds, without anybody having to be stopped?
    Each job in an iteration has a claim: the most regions it may still come to hold. It has a
    residual: what it keeps when the iteration ends. A state is *safe* if there is an order in which
    one job after the other can end its iteration. In its turn a job gets all of its claim, and
    leaves only its residual behind. With 10 regions in all, 2 of them free::

        job   held  claim  residual   needs   gives back
        A        3      9         1       6            2
        B        5      7         1       2            4

    B first: it needs the 2, leaves 6 free; that is what A needs: safe. Had A one more, 1 would be
    free, B could not be helped, nor could A: unsafe, so A has to wait for that region.

    Jobs that give back more than they take help everybody, so they go first, in any order in which
    they fit. Jobs that end with more than they hold now (they had freed gradients, say) come last,
    those that need the least in the end last of all: read backwards in time such a job gives back,
    and the same argument holds. Hence no search.

Ranks of one job are a group, and a group is one job to that rule. Each of them waits for the others in
    its collectives, so none ends its iteration unless all can. ``merge_groups`` makes their sums one entry.
    Of two groups whose ranks each need 2 of 4 regions, one rank each holds 2. As four jobs that is safe:
    each of the two needs no more and will give back. As groups it is not: each needs 2, and none is free.

Guarantees
    * From a safe state, if every grant leaves the state safe and every claim is right, every job
      ends its iteration.
    * Where some job cannot end even now (a profile was wrong), ``is_no_worse`` goes on: a grant must
      leave everybody able to end who is now.
    * No allocation, no exception. ``is_safe`` takes at most O(n^2), and O(n) if all needs fit at
      once.

Source: Dijkstra, EWD 623; Habermann, CACM 12(7), 1969 (safe order found greedily).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Protocol

from zico.base.compiled import compiled, inlined, keep_out_of_line
from zico.base.records import I8, Record
from zico.trace.profile import claim_at, expected_end

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zico.trace.profile import Curve

    Int64s = NDArray[np.int64]
    Flags = NDArray[np.uint8]


@dataclasses.dataclass(kw_only=True)
class Debt(Record):
    """What one job has and owes by the banker's rule, in regions."""

    held: I8
    """What the others cannot have while it stays where it is."""
    yielded: I8 = 0
    """What it holds besides at its boundary, where it evicts that if others wait."""
    claim: I8
    """The most that it may still come to hold in its iteration; at its boundary, in its next one."""
    kept: I8
    """What the others cannot have when that iteration has ended."""
    most: I8
    """The most that it may come to hold in its iteration and in the next one."""
    must_finish: I8 = 0
    """1: it is inside an iteration whose claim is known."""
    given_up: I8 = 0
    """1: nobody is to wait for its iteration, whatever the rest of this says."""
    inside_claim: I8 = 0
    """Of a group at its boundary that must finish: the most that it may come to hold while no other rank begins."""
    inside_kept: I8 = 0
    """What the others cannot have when its ranks that are inside have ended, and no other has begun."""


class Claimant(Protocol):
    """What a job's claim follows from: its record in the pool and the simulator's have these fields."""

    progress: int
    held: int
    evicted: int
    limit: int
    claim_floor: int
    claim_extra: int


STILL_ITERATIONS = 4
STILL_NS = 1_000_000_000
"""A job that has been in its iteration for so many times its usual time and this longer stands still.

A job without a profile that has not grown for ``STILL_NS`` keeps the others from nothing more.
"""
REGULAR_NS = 5_000_000_000
"""A regular iteration ends within so long: who keeps others waiting, or waits for what it has evicted, may go on."""
IDLE_NS = 30_000_000_000
"""A job that has done nothing for so long does something else, and may be at a prompt. A job that never
iterates keeps the others from starting iterations for as long in all."""

FADE_ITERATIONS = 16.0
"""A job's recent throughput looks back over about so many of its own iterations."""

_CANNOT = 2  # in done, while the takers are gone through


@inlined
def within_limit(job: Claimant, regions: int) -> int:
    """Return that many regions, or the job's limit where that is lower, but no fewer than it holds."""
    return max(job.held, min(regions, job.limit) if job.limit > 0 else regions)


@inlined
def claim_of(job: Claimant, curve: Curve, claims: Any) -> int:  # noqa: ANN401 - an int32 array
    """Return the most regions that a job inside an iteration may still come to hold in it.

    Without those that it has evicted: it can end its iteration although they stay where they are.

    Args:
        job: Its record.
        curve: Its profile, by which its iteration is known.
        claims: For each bin of that the most regions held from it on.
    """
    expected = claim_at(curve, claims, job.progress)
    if job.progress <= expected_end(curve):
        expected += job.claim_extra
    return max(job.held, within_limit(job, max(job.claim_floor, expected)) - job.evicted)


@inlined
def exceed(job: Claimant, curve: Curve, claims: Any, n: int) -> int:  # noqa: ANN401 - an int32 array
    """Note that a job needs ``n`` regions more than its claim allows; returns its claim then.

    The profile was wrong by so much: the rest of the iteration is expected to lie that much higher.
    To claim the whole peak again would make states unsafe in which a job near its end lacks a
    region or two.
    """
    job.claim_extra = job.held + job.evicted + n - claim_at(curve, claims, job.progress)
    return job.held + n


@inlined
def _need(held: int, claim: int, residual: int) -> int:
    """Return the regions that a job may still take: up to its claim, and at least what it keeps."""
    return max(claim, residual, held) - held


@inlined
def _finish_givers(free: int, held: Int64s, claim: Int64s, residual: Int64s, done: Flags, n: int) -> int:
    """End the iterations of all jobs that leave at least as much as they found; returns what is free then."""
    ended = True
    while ended:
        ended = False
        for i in range(n):
            need = _need(held[i], claim[i], residual[i])
            if done[i] == 0 and held[i] >= residual[i] and (need <= free or need == 0):
                free += held[i] - residual[i]
                done[i] = 1
                ended = True
    return free


@inlined
def _finish_takers(free: int, held: Int64s, claim: Int64s, residual: Int64s, done: Flags, n: int) -> None:
    """End the iterations of those that keep more than they hold, the largest transient need first."""
    while True:
        chosen = -1
        most = -1
        for i in range(n):
            transient = _need(held[i], claim[i], residual[i]) + held[i] - residual[i]
            if done[i] == 0 and held[i] < residual[i] and transient > most:
                chosen = i
                most = transient
        if chosen < 0:
            return
        if _need(held[chosen], claim[chosen], residual[chosen]) <= free:
            free += held[chosen] - residual[chosen]
            done[chosen] = 1
        else:
            done[chosen] = _CANNOT


@compiled
def is_safe(free: int, held: Int64s, claim: Int64s, residual: Int64s, must_finish: Flags, done: Flags, n: int) -> bool:
    """Tell whether every job that must finish can reach the end of its iteration in some order.

    Changes only ``done``. Callable from compiled code under a lock.

    Args:
        free: Regions that nobody holds; below zero while the budget is being lowered.
        held: Regions per job. Jobs between iterations and jobs without a profile hold theirs
            without end.
        claim: Most regions per job until its iteration ends; less than ``held`` means ``held``.
        residual: Regions per job that stay when its iteration ends.
        must_finish: 1 for jobs inside an iteration whose claim is known, else 0 (their other values
            do not count).
        done: Scratch of the same length. After ``False``, 1 for jobs that can finish although some
            others cannot, and for those that need not; after ``True`` it means nothing.
        n: Jobs to look at.
    """
    missing = 0
    for i in range(n):
        done[i] = 0 if must_finish[i] else 1
        if must_finish[i]:
            missing += _need(held[i], claim[i], residual[i])
    if missing <= free or missing == 0:
        return True
    free = _finish_givers(free, held, claim, residual, done, n)
    _finish_takers(free, held, claim, residual, done, n)
    safe = True
    for i in range(n):
        done[i] = 1 if done[i] == 1 else 0
        safe = safe and done[i] == 1
    return safe


@compiled
def is_no_worse(  # noqa: PLR0913, PLR0917 - the banker's arrays
    free: int,
    held: Int64s,
    claim: Int64s,
    residual: Int64s,
    must_finish: Flags,
    given_up: Flags,
    done: Flags,
    n: int,
    place: int,
    more: int,
) -> bool:
    """Tell whether a state that ``is_safe`` refuses is right all the same, since it keeps nobody from ending.

    Who is given up is left out: should it go on, it waits for memory like everybody else. Some
    job may not be able to finish even without what is asked for (a profile was wrong). That one is
    left out: the grant must not make it worse.

    Args:
        free: As for ``is_safe``, as all that follow.
        held: With what is asked for.
        claim: Of all jobs.
        residual: Of all jobs.
        must_finish: Changed.
        given_up: 1 for jobs whose iteration nobody is to wait for.
        done: As ``is_safe`` has left it; changed.
        n: Jobs to look at.
        place: Who asks; it is not left out.
        more: For how many regions.
    """
    keep_out_of_line()
    known = must_finish[place]
    stuck = some = False
    for j in range(n):
        if must_finish[j] and j != place:
            stuck = stuck or done[j] == 0
            if given_up[j]:
                must_finish[j] = 0
                some = True
    if not stuck:  # it is the one who asks that could not end
        return False
    if some and is_safe(free, held, claim, residual, must_finish, done, n):
        return True
    held[place] -= more
    must_finish[place] = 0
    is_wrong = not is_safe(free + more, held, claim, residual, must_finish, done, n)
    if is_wrong:
        for j in range(n):
            must_finish[j] = done[j] if must_finish[j] else 0
        must_finish[place] = known
    held[place] += more
    return is_wrong and is_safe(free, held, claim, residual, must_finish, done, n)


@inlined
def entry_of(group: Int64s, job: int) -> int:
    """Return at which place a job stands once groups are merged: at that of its group's first rank."""
    for i in range(job):
        if group[i] == group[job] and group[job] != 0:
            return i
    return job


@compiled
def merge_groups(
    group: Int64s, held: Int64s, claim: Int64s, residual: Int64s, must_finish: Flags, budget: int, n: int
) -> None:
    """Make one job of the ranks of each group, at the place of its first rank; the others' places hold nothing then.

    Regions are added up, and the group must finish if any of its ranks must. A group never comes to
    hold more than the budget, whatever its ranks have held one after the other.

    Args:
        group: For each job its group, 0: none.
        held: As for ``is_safe``, as all that follow.
        claim: Changed.
        residual: Changed.
        must_finish: Changed.
        budget: Regions that all jobs may hold together.
        n: Jobs to look at.
    """
    for i in range(n):
        if group[i] == 0:
            continue
        need = _need(held[i], claim[i], residual[i]) if must_finish[i] else 0
        claim[i] = held[i] + need
        first = entry_of(group, i)
        if first != i:
            held[first] += held[i]
            claim[first] += claim[i]
            residual[first] += residual[i]
            must_finish[first] = max(must_finish[first], must_finish[i])
            held[i] = 0
            claim[i] = 0
            residual[i] = 0
            must_finish[i] = 0
    for i in range(n):
        if group[i] != 0:
            claim[i] = min(claim[i], budget)
            residual[i] = min(residual[i], budget)


@inlined
def residual(persistent: int, held: int, evicted: int) -> int:
    """Return the regions that a job keeps when its iteration ends.

    What it has evicted it need not take back, and what is evicted first does not persist.
    """
    return max(persistent - evicted, min(persistent, held)) if evicted > 0 else persistent


@inlined
def is_still(waits: Any, inside_ns: Any, duration_ns: Any, stopped: Any) -> Any:  # noqa: ANN401 - numbers, or arrays
    """Tell whether nobody is to wait for a job's iteration: it is stopped, or has been inside for too long.

    One that has been inside for so long does something else: it is at a prompt, evaluates, or is
    done with training. Its progress does not say so, since that may not move. A job that waits for
    memory is not inside for too long. But a stopped one goes no further, whatever it waits for.

    Args:
        waits: Whether it waits for memory.
        inside_ns: Since it was admitted, without its waits for memory.
        duration_ns: Of its usual iteration.
        stopped: Whether its process is stopped (``zico.pool.living``).
    """
    return ((inside_ns > STILL_ITERATIONS * duration_ns + STILL_NS) & (waits == 0)) | (stopped != 0)


@inlined
def grows_alone(spent_ns: int, waits: bool, waited_ns: int, grown_ns: int, still: bool) -> bool:  # noqa: FBT001 - compiled
    """Tell whether a job without a profile keeps the others at their boundaries.

    One that does not grow any more loses that right: it may never iterate. So does one that has
    outgrown its profile and stands still by it.

    Args:
        spent_ns: How long it has kept them there so far.
        waits: Whether it waits for memory.
        waited_ns: So long, if it does.
        grown_ns: Since it last grew.
        still: Whether nobody is to wait for its iteration (``is_still``).
    """
    if still or spent_ns > IDLE_NS:
        return False
    return waited_ns < REGULAR_NS if waits else grown_ns < STILL_NS


@inlined
def counted(work_ns: float, time_ns: float, done_ns: float, passed_ns: float) -> tuple[float, float]:
    """Return the work and the time of a job's recent throughput once more was done while some time has passed."""
    keeps = math.exp(-passed_ns / (FADE_ITERATIONS * done_ns))
    return keeps * work_ns + done_ns, keeps * time_ns + passed_ns


@inlined
def recent_throughput(work_ns: float, time_ns: float, since_ns: int, duration_ns: int) -> float:
    """Return a job's throughput over alone's; it falls, too, while an iteration takes longer than alone.

    A job that has not ended one counts as having just done one alone: kept from it, it is owed
    something as well.

    Args:
        work_ns: Work done, in time alone, and
        time_ns: the time that it took, both fading; 0: none yet.
        since_ns: The time since the last iteration's end.
        duration_ns: Of an iteration alone.
    """
    late_ns = max(0, since_ns - duration_ns)
    if time_ns == 0:
        return duration_ns / (duration_ns + late_ns)
    return min(1.0, work_ns / (time_ns + late_ns))
