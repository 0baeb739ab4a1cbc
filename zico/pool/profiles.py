"""A job's profiles: what its iterations teach, one for each of its phases, the one in use in its record.

Claims, shift and plans read the record alone. When a phase begins, its profile takes the place of
the one before, which is kept in this process. Written by the job's own threads, inside the pool's
mutex.

A job that has run before may *remember* two curves: of its first iteration, with all set-up, and the
profile of those that followed::

    in use     first iteration of then | profile of then, and what is learned now
    the job    first iteration         | second | third ...
                                       ^ unless they were alike, the job begins as if it remembered nothing

Guarantees
    * A job that comes to hold more than it remembers counts as unknown at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line, record_at
from zico.pool.layout import MEMBER, job_at
from zico.pool.mutex import lock, unlock_changed
from zico.trace import profile
from zico.trace.phases import MARKED, PHASES
from zico.trace.profile import CURVE

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member
    from zico.trace.profile import Curve

_CURVE_BYTES = CURVE.itemsize

MAIN_PHASE = MARKED
"""Policies plan for the phase of a job's usual iterations."""
FIRST = 2 * PHASES
"""Among the curves that a process keeps, the place of its first iteration's."""
CURVES = FIRST + 1


@inlined
def kept(pool: Member, phase: int) -> Curve:
    """Return where the profile of a phase is kept while that is not in use; ``n_bins`` 0: there is none."""
    return record_at(pool.profiles_address + phase * _CURVE_BYTES, CURVE)


@inlined
def before(pool: Member, phase: int) -> Curve:
    """Return where the iteration of a phase is kept that was learnt last; ``n_bins`` 0: there is none."""
    return record_at(pool.profiles_address + (PHASES + phase) * _CURVE_BYTES, CURVE)


@inlined
def _first(pool: Member) -> Curve:
    return record_at(pool.profiles_address + FIRST * _CURVE_BYTES, CURVE)


@entry(MEMBER)
def remember(pool: Member) -> None:
    """Use what is kept of an earlier run, at ``FIRST`` and ``MARKED``, until the first iteration has ended."""
    me = job_at(pool, pool.job)
    lock(pool)
    profile.copy(me.profile, _first(pool))
    me.claim_peak = profile.suffix_maximum(me.profile, me.claims)
    me.profiled = 1
    me.remembered = 1
    unlock_changed(pool)


@compiled
def _end_first(pool: Member, me: Job) -> None:
    """Keep the first iteration, and use what is remembered of the following ones if it went as remembered."""
    keep_out_of_line()
    if me.remembered == 1 and me.outgrown == 0 and profile.is_alike(me.profile, me.current):
        profile.copy(me.profile, kept(pool, MARKED))
    else:
        profile.flatten(me.profile, me.current)
    profile.replace(_first(pool), me.current)
    me.profiled = 1
    me.remembered = 0


@compiled
def learn(pool: Member, me: Job) -> None:
    """Fold the iteration that has ended into the profile in use."""
    keep_out_of_line()
    if me.profiled == 0 or me.remembered == 1:
        _end_first(pool, me)
        me.claim_peak = profile.suffix_maximum(me.profile, me.claims)
        return
    goes_on = not profile.is_flat(me.profile) and me.current.n_events > profile.expected_end(me.profile)
    if profile.is_flat(me.profile):
        profile.replace(me.profile, me.current)
    elif profile.is_typical(me.profile, me.current.n_events):
        profile.merge(me.profile, me.current)
        profile.cover(me.profile, before(pool, me.phase))
        me.atypical = 0
    else:
        if goes_on:
            profile.learn_tail(me.profile, me.current)
        me.atypical += 1
        if me.atypical == 1:
            me.claim_peak = max(me.claim_peak, profile.peak(me.current))
            return
        profile.replace(me.profile, me.current)
        me.profile.tail = 0
        me.atypical = 0
    if not profile.is_flat(me.profile):
        profile.replace(before(pool, me.phase), me.current)
    me.claim_peak = profile.suffix_maximum(me.profile, me.claims)


@compiled
def change(pool: Member, me: Job, phase: int) -> None:
    """Put the profile of another phase in use; of a new one only the peak of what has just ended is known."""
    keep_out_of_line()
    profile.copy(kept(pool, me.phase), me.profile)
    if kept(pool, phase).n_bins > 0:
        profile.copy(me.profile, kept(pool, phase))
    else:
        profile.flatten(me.profile, me.current)
    me.phase = phase
    me.atypical = 0
    me.claim_peak = profile.suffix_maximum(me.profile, me.claims)


@compiled
def forget(pool: Member, phase: int) -> None:
    """Forget the profile of a phase whose place another one takes."""
    kept(pool, phase).n_bins = 0
    before(pool, phase).n_bins = 0
