"""A job's profiles: what its iterations teach, one for each of its phases, the one in use in its record.

Claims, shift and plans read the record alone. When a phase begins, its profile takes the place of
the one before, which is kept in this process. Written by the job's own threads, inside the pool's
mutex.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, inlined, keep_out_of_line, record_at
from zico.trace import profile
from zico.trace.phases import MARKED, PHASES
from zico.trace.profile import CURVE

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member
    from zico.trace.profile import Curve

_CURVE_BYTES = CURVE.itemsize

MAIN_PHASE = MARKED
"""Policies plan for the phase of a job's usual iterations."""


@inlined
def kept(pool: Member, phase: int) -> Curve:
    """Return where the profile of a phase is kept while that is not in use; ``n_bins`` 0: there is none."""
    return record_at(pool.profiles_address + phase * _CURVE_BYTES, CURVE)


@inlined
def before(pool: Member, phase: int) -> Curve:
    """Return where the iteration of a phase is kept that was learnt last; ``n_bins`` 0: there is none."""
    return record_at(pool.profiles_address + (PHASES + phase) * _CURVE_BYTES, CURVE)


@compiled
def learn(pool: Member, me: Job) -> None:
    """Fold the iteration that has ended into the profile in use."""
    keep_out_of_line()
    goes_on = not profile.is_flat(me.profile) and me.current.n_events > profile.expected_end(me.profile)
    if me.profiled == 0:
        profile.flatten(me.profile, me.current)
        me.profiled = 1
    elif profile.is_flat(me.profile):
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
