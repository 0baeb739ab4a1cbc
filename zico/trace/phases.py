"""Tell which phase of a job begins with an allocation: a training step, an evaluation, a closure, a micro-batch.

Theory of operation
    A job that marks its iterations has one phase at least: what begins with a mark. Others lie
    between two marks. A phase is known by its beginning: the sizes of its first few allocations and
    how live memory changes from one to the next. Only changes count, so memory that has risen for
    good since hides no phase::

        mark  T T T  mark  T T T  mark  V V V V V V  T T T  mark
        ^            ^            ^     ^ ^ ^ ^ ^ ^  ^
        by the mark               "     evaluation   by its beginning, known from earlier marks

    A phase that is not known yet is found by repetition (``zico.trace.online``), in what comes
    after the usual end of the phase in use. Whole iterations are looked at, too, now and then: they
    may consist of closures or of micro-batches. A loop is a phase only if memory comes back after
    each pass to where it was, and rises in each pass as far as in the others. So layers are none.

Guarantees
    * Within an iteration that goes as its profile says nothing is looked for: no cost there.
    * Where two known phases begin alike, the one that comes to hold more is meant.
    * Bounded memory; allocates nothing, raises nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np

from zico.base.compiled import array_at, compiled, inlined, keep_out_of_line
from zico.base.records import I4, I8, Numbers, Record
from zico.trace import online
from zico.trace.online import HISTORY
from zico.trace.profile import SLACK_SHIFT, expected_end, is_flat
from zico.trace.repeats import REPEATS, STRICT, mark_at, mixed, slack

if TYPE_CHECKING:
    from zico.trace.online import Tracker
    from zico.trace.profile import Curve

PHASES = 8
"""Phases of a job that are known at a time; of more, the one that has not come for longest is forgotten."""
MARKED = 0
"""The phase that begins with a mark; in a job that marks nothing, all of it."""
NONE = -1

WIDEST = 8
"""Allocations by which a phase is known at most; of a short one half of them."""
_FEWEST = 2
_ENDLESS = 1 << 62

_I64 = np.dtype("i8")


class Phases(Record):
    """How a job's phases begin, and where in one it is; begins as zeros."""

    n: I8  # allocations since the phase began
    quiet_until: I8  # progress before which no other phase is looked for once the beginning has been seen
    usual_end: I8  # progress after which it is none of what is known, 0: nothing is known
    marks: I8  # seen
    boundaries: I8  # marks, and beginnings of phases
    inside_since: I8  # mark at which a pass inside the iteration last began, 0: there are none
    inside_level: I8  # live bytes above which none begins
    beginning: I8  # of the phase that the last mark began
    by_mark: I4  # 1: the phase in use began with a mark
    is_searched: I4  # 1: the whole of this iteration is kept, to be searched at its end
    is_strange: I4  # 1: what runs does not begin as what marks begin, and is not known either
    added: I4  # a phase that is new, MARKED: none
    strange: I8  # marks in a row after which it was so
    mark: Annotated[Numbers, "i8", (PHASES,)]
    width: Annotated[Numbers, "i8", (PHASES,)]  # 0: no such phase, or its beginning is not known
    gap: Annotated[Numbers, "i8", (PHASES,)]  # allocations of one pass
    rank: Annotated[Numbers, "i8", (PHASES,)]  # regions held at most: of two that begin alike
    used: Annotated[Numbers, "i8", (PHASES,)]  # the boundary at which it last began


@inlined
def is_quiet(phases: Phases, progress: int) -> bool:
    """Tell whether the job is where it is known to be: then nothing is looked for."""
    return phases.n >= WIDEST and progress < phases.quiet_until


@compiled
def begins(
    phases: Phases, tracker: Tracker, size_bytes: int, live_bytes: int, progress: int, phase: int, held: int
) -> int:
    """Note an allocation where it is not certain what runs; returns the phase that begins with it, or ``NONE``.

    Args:
        phases: What is known.
        tracker: What has been allocated lately, and what repeats in it.
        size_bytes: Of the allocation.
        live_bytes: Before it.
        progress: Allocations and frees of the phase so far.
        phase: The one in use.
        held: Regions held at most since it began.
    """
    keep_out_of_line()
    if phases.n == WIDEST and phases.quiet_until > 0:
        online.restart(tracker)  # what came in between was not looked at
    phases.n += 1
    repeats = False
    if phase != MARKED or 0 < phases.usual_end < progress:
        repeats = online.begins(tracker, size_bytes, live_bytes)
    else:
        online.note(tracker, size_bytes, live_bytes)
    if phases.by_mark == 1 and phases.n == WIDEST:
        _compare_beginning(phases, tracker)
    found = _known(phases, tracker, phase)
    if found == MARKED and phase == MARKED and not _is_another(phases, tracker, progress):
        found = NONE
    if found == NONE and repeats:
        found = _of_loop(phases, tracker, phase, held)
    return found


@inlined
def _is_another(phases: Phases, tracker: Tracker, progress: int) -> bool:
    """Tell whether what begins like a mark's iteration is a new one.

    It is after the usual end, after something unknown, or as a pass inside the iteration.
    """
    if phases.is_searched == 1:
        return False
    live = array_at(tracker.memory_address + HISTORY * 8, HISTORY, _I64)
    if phases.inside_since > 0:
        return bool(live[tracker.n - WIDEST] <= phases.inside_level)
    return phases.is_strange == 1 or progress > phases.usual_end > 0


@compiled
def _beginning(tracker: Tracker, last: int, width: int) -> int:
    """Return what ``width`` allocations up to the one at ``last`` look like: sizes, and how memory changed between."""
    sizes = array_at(tracker.memory_address, HISTORY, _I64)
    live = array_at(tracker.memory_address + HISTORY * 8, HISTORY, _I64)
    first = last + 1 - width
    mark = np.uint64(width)
    for i in range(first, last + 1):
        mark = mixed(mixed(mark, sizes[i]), live[i] - live[first])
    return int(np.int64(mark))


@inlined
def _compare_beginning(phases: Phases, tracker: Tracker) -> None:
    """See whether what follows this mark is what follows marks; if not, go on looking. Learns it if it comes twice."""
    beginning = _beginning(tracker, tracker.n - 1, WIDEST)
    if phases.width[MARKED] > 0 and phases.mark[MARKED] != beginning:
        phases.quiet_until = 0
        phases.is_strange = 1
        phases.strange += 1
        if phases.strange >= REPEATS:
            phases.width[MARKED] = 0
    else:
        phases.strange = 0
    if phases.beginning == beginning:
        phases.mark[MARKED] = beginning
        phases.width[MARKED] = WIDEST
        phases.is_strange = 0
    phases.beginning = beginning


@inlined
def _known(phases: Phases, tracker: Tracker, phase: int) -> int:
    """Return which known phase begins here, of several the one that holds most; ``NONE`` if none does."""
    found = NONE
    for other in range(PHASES):
        width = phases.width[other]
        if width == 0 or tracker.n < width or _beginning(tracker, tracker.n - 1, width) != phases.mark[other]:
            continue
        if other == MARKED and phases.by_mark == 1 and phases.n == width:
            return NONE  # the mark has begun it
        if (
            other == MARKED
            and phase != MARKED
            and phases.n < width
            and 4 * phases.rank[phase] >= 3 * phases.rank[other]
        ):
            continue  # a pass has just begun, of which what marks begin consists: closures
        least = width + 1 if other == MARKED else phases.gap[other] - slack(phases.gap[other])
        goes_on = other == phase and phases.n < least
        if not goes_on and (found == NONE or phases.rank[other] > phases.rank[found]):
            found = other
    return found


@compiled
def _of_loop(phases: Phases, tracker: Tracker, phase: int, held: int) -> int:
    """Return the phase of the loop that the tracker has found; ``NONE`` if it is none."""
    keep_out_of_line()
    if phase != MARKED and phases.gap[phase] == tracker.gap:
        # Threads may reorder its allocations, so that its beginning is not seen each time.
        return phase if phases.n > tracker.gap + slack(tracker.gap) else NONE
    is_within = phase != MARKED and phases.n <= phases.gap[phase] and tracker.gap < phases.gap[phase]
    before = _pass_before(tracker)
    if is_within or before == NONE or not is_level(tracker):
        return NONE
    is_around = phase != MARKED and phases.n <= tracker.gap and phases.gap[phase] < tracker.gap
    place = phase if is_around else _place(phases, phase)
    width = max(_FEWEST, min(WIDEST, tracker.gap // 2))
    phases.width[place] = width
    phases.mark[place] = _beginning(tracker, before + width - 1, width)
    phases.gap[place] = tracker.gap
    phases.rank[place] = held
    phases.added = place
    return place


@inlined
def _pass_before(tracker: Tracker) -> int:
    """Return where the mark of the loop was last seen before the present sighting, ``NONE`` if it was not."""
    sizes = array_at(tracker.memory_address, HISTORY, _I64)
    marked = online.bytes_in(tracker, tracker.width)
    i = tracker.n - 1 - tracker.gap + slack(tracker.gap)
    while i >= STRICT and mark_at(sizes, marked, i, tracker.width) != tracker.mark:
        i -= 1
    return i if i >= STRICT else NONE


@inlined
def _place(phases: Phases, phase: int) -> int:
    """Return a place for a new phase: that of the one that has not come for longest, and is not in use."""
    place = NONE
    for other in range(MARKED + 1, PHASES):
        if other != phase and (place == NONE or phases.used[other] < phases.used[place]):
            place = other
    return place


@compiled
def is_level(tracker: Tracker) -> bool:
    """Tell whether memory comes back after each of the last passes to where it was, and rises as far in each."""
    sizes = array_at(tracker.memory_address, HISTORY, _I64)
    live = array_at(tracker.memory_address + HISTORY * 8, HISTORY, _I64)
    marked = online.bytes_in(tracker, tracker.width)
    i = tracker.n - 1
    least = most = top = live[i]
    least_rise = _ENDLESS
    most_rise = passes = since = 0
    while i > STRICT and passes < REPEATS:
        i -= 1
        since += 1
        top = max(top, live[i])
        if since >= tracker.gap - slack(tracker.gap) and mark_at(sizes, marked, i, tracker.width) == tracker.mark:
            least_rise = min(least_rise, top - live[i])
            most_rise = max(most_rise, top - live[i])
            passes += 1
            least = min(least, live[i])
            most = max(most, live[i])
            since = 0
            top = live[i]
    level = (most - least) << SLACK_SHIFT <= most_rise  # passes begin within a sixteenth of the rise
    return passes == REPEATS and level and 4 * least_rise >= 3 * most_rise > 0


@compiled
def is_largest(phases: Phases, phase: int) -> bool:
    """Tell whether no other phase holds much more: what is learned for a job as a whole is learned from this one."""
    keep_out_of_line()
    most = 0
    for other in range(PHASES):
        most = max(most, phases.rank[other])
    return 4 * phases.rank[phase] >= 3 * most


# -- boundaries ------------------------------------------------------------------------------------


@compiled
def enter(phases: Phases, phase: int, profile: Curve, rank: int) -> None:
    """Note that a phase begins, not with a mark.

    Args:
        phases: What is known.
        phase: Which.
        profile: What it does.
        rank: Regions that it holds at most.
    """
    if phase == MARKED and phases.inside_since > 0:
        phases.inside_since = phases.marks
    _enter(phases, phase, profile, rank)
    phases.by_mark = 0


@inlined
def _enter(phases: Phases, phase: int, profile: Curve, rank: int) -> None:
    phases.boundaries += 1
    phases.used[phase] = phases.boundaries
    phases.rank[phase] = rank
    phases.is_searched = 0
    phases.is_strange = 0
    phases.n = 0
    quiet = phase == MARKED and phases.inside_since == 0 and not is_flat(profile)
    phases.quiet_until = profile.n_events - slack(profile.n_events) if quiet else 0
    phases.usual_end = 0 if is_flat(profile) else expected_end(profile)


@compiled
def enter_by_mark(phases: Phases, tracker: Tracker, profile: Curve, rank: int) -> None:
    """Note that a mark ends whatever was, and begins ``MARKED``.

    Args:
        phases: What is known.
        tracker: What has been allocated since the mark before.
        profile: What an iteration does.
        rank: Regions that it holds at most.
    """
    keep_out_of_line()
    phases.marks += 1
    if phases.is_searched == 1 and phases.width[MARKED] > 0:
        _look_inside(phases, tracker)
    if phases.inside_since + REPEATS < phases.marks:
        phases.inside_since = 0
    _enter(phases, MARKED, profile, rank)
    phases.by_mark = 1
    online.restart(tracker)
    if phases.marks & (phases.marks - 1) == 0 and phases.inside_since == 0:  # the 1st, 2nd, 4th, 8th, ...
        phases.is_searched = 1
        phases.quiet_until = 0


@inlined
def _begins_at(phases: Phases, tracker: Tracker, i: int) -> bool:
    """Tell whether what begins at ``i`` looks like what marks begin, and is not what the last mark has begun."""
    last = i + WIDEST - 1
    return i >= WIDEST and last < tracker.n and _beginning(tracker, last, WIDEST) == phases.mark[MARKED]


@inlined
def _look_inside(phases: Phases, tracker: Tracker) -> None:
    """See whether the iteration that has ended consists of closures or micro-batches: then its beginning comes again.

    Layers may begin like an iteration, too. But memory comes down to one level for each pass, and
    rises from there at least half as far as at all.
    """
    live = array_at(tracker.memory_address + HISTORY * 8, HISTORY, _I64)
    low = high = live[0]
    level = _ENDLESS
    for i in range(tracker.n):
        low = min(low, live[i])
        high = max(high, live[i])
        if _begins_at(phases, tracker, i):
            level = min(level, live[i])
    least = (high - low) // 2
    level += (high - low) >> SLACK_SHIFT  # some of it, gradients say, comes with the first pass and stays
    rises = level - low <= least and 2 * tracker.n < HISTORY
    passes = 0
    begin = top = live[0]
    for i in range(tracker.n):
        if live[i] <= level and _begins_at(phases, tracker, i):
            rises = rises and top - begin >= least
            passes += 1
            begin = top = live[i]
        top = max(top, live[i])
    if passes > 0 and rises and top - begin >= least > 0:
        phases.inside_since = phases.marks
        phases.inside_level = level
