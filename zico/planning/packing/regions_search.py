"""Find a packing that holds few regions: build some, then take tensors out of the best and put them back: compiled.

Theory of operation. Training allocates like a stack: what is alive at the peak is born one after
the other and dies in about the reverse order. Piled up in that order without gaps, it holds the
fewest slots possible at the peak, and slots come free from the top. The rest goes where it is
cheapest, longest lives first.

What remains is improved by ruin and recreate. Where slots are held for little, everything in one or
two of them goes out and back in, in another order. What gets better stays; what gets worse may stay
too, less and less as time goes on. Source: G. Schrimpf et al., "Record Breaking Optimization
Results Using the Ruin and Recreate Principle" (2000); blinks and the acceptance from J.
Christiaens, G. Vanden Berghe, "Slack Induction by String Removals" (2020), sections 5 and 6.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types

from zico.base.compiled import compiled, entry, inlined
from zico.base.libc import monotonic_ns
from zico.planning.packing.problem import FOREVER_NS
from zico.planning.packing.regions_packing import (
    EVERYWHERE,
    EXCESS,
    INTEGRAL,
    NOWHERE,
    PLACED,
    SLOT_TICKS,
    SLOTS,
    TARGET,
    Floats,
    Ints,
    Packing,
    aim,
    below,
    best_offset,
    clear,
    find_near,
    put,
    reprice,
    take,
)

MOST_VICTIMS = 24
"""One move takes out at most so many tensors."""
_SLOT_SHARE = 1e-3
"""A distinct slot more weighs like one held for this share of the time: it is mapped once an iteration."""
_LOOK_AT_CLOCK = 16
_SAME = 1e-9

BUILT, OUT_OF_TIME, NO_ROOM = range(3)


class Found(NamedTuple):
    """The best packing so far, and room for a move."""

    offset: Ints
    figures: Floats
    """Indexed by PEAK, MEAN, USED...: what is minimised, in this order, and counts."""
    victims: Ints
    old: Ints
    keys: Floats
    scores: Floats


class Effort(NamedTuple):
    """How to improve."""

    blink: int
    """One place in so many is overlooked when tensors are put back; 0: none."""
    heat: float
    """How much worse a move may make it at first, in slots held all the time."""
    most_moves: int
    starts: int
    """Packings to improve, best first; time and moves are shared out evenly."""


PEAK, MEAN, USED, OPTIMAL, MOVES, FOUND = range(6)
"""They are the most slots held, their mean over time, distinct slots, and 1 if nothing can be
better. Behind them are moves made, and 1 if there is a packing."""


@inlined
def _score(p: Packing) -> float:
    return p.figures[INTEGRAL] + p.figures[EXCESS] + _SLOT_SHARE * p.state[SLOTS]


@compiled
def _keep_if_best(p: Packing, found: Found) -> None:
    """Copy a packing that is better than the best so far, and aim at a lower peak than the new best's."""
    best = found.figures
    peak, mean, used = 0, p.figures[INTEGRAL], p.state[SLOTS]
    for held in p.held:
        peak = max(peak, held)
    if peak > best[PEAK]:
        return
    if peak == best[PEAK] and (mean > best[MEAN] + _SAME or (mean > best[MEAN] - _SAME and used >= best[USED])):
        return
    if peak < best[PEAK]:
        aim(p, max(p.lowest, peak - 1))
    best[PEAK], best[MEAN], best[USED] = peak, mean, used
    best[OPTIMAL] = p.state[SLOT_TICKS] == p.lowest_ticks and used == p.lowest
    for i in range(len(p.offset)):
        found.offset[i] = p.offset[i]


@compiled
def _build(p: Packing, order: Ints, piled: int, deadline_ns: int) -> int:
    """Place all tensors in this order; the first ``piled``, all alive at one tick, upon each other without a gap."""
    clear(p)
    holes = _put_lying(p)
    for q in range(len(order)):
        if q % _LOOK_AT_CLOCK == 0 and monotonic_ns() > deadline_ns:
            return OUT_OF_TIME
        i = order[q]
        if p.lying[i] != NOWHERE:
            continue
        if q < piled:
            offset = _lowest_hole(p, holes, p.size[i])
        else:
            reprice(p)
            offset = best_offset(p, i, 0)
        if offset == NOWHERE or offset + p.size[i] > p.limit:
            return NO_ROOM
        put(p, i, offset)
    return BUILT


@compiled
def _put_lying(p: Packing) -> int:
    """Put what lies where it lies into an empty packing, and list the holes between; returns how many."""
    for i in range(len(p.lying)):
        if p.lying[i] != NOWHERE:
            put(p, i, p.lying[i])
    bottom = 0
    for q in range(p.state[PLACED]):
        j = p.by_offset[q]
        p.hole_begin[q], p.hole_end[q] = bottom, p.offset[j]
        bottom = p.offset[j] + p.size[j]
    holes = p.state[PLACED]
    p.hole_begin[holes], p.hole_end[holes] = bottom, EVERYWHERE
    return holes + 1


@inlined
def _lowest_hole(p: Packing, holes: int, size: int) -> int:
    """Take room from the bottom of the lowest hole that has it."""
    h = 0
    while p.hole_end[h] - p.hole_begin[h] < size and h < holes - 1:
        h += 1
    offset = p.hole_begin[h]
    p.hole_begin[h] = offset + size
    return offset


@inlined
def _tick_at(p: Packing, share: float) -> int:
    """Return the tick at which this share of the time has passed."""
    low, high = 0, len(p.weight) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if p.weight_before[middle] <= share:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def _wasted_tick(p: Packing) -> int:
    """Return a tick to look at: half of the time one above the target if there is one, else where much is wasted."""
    n = len(p.weight)
    if p.figures[EXCESS] > 0.0 and below(p.state, 2) == 0:
        start = below(p.state, n)
        for q in range(n):
            t = (start + q) % n
            if p.held[t] > p.state[TARGET]:
                return t
    worst, worst_waste = 0, -1
    for _ in range(2):
        t = _tick_at(p, below(p.state, 1 << 30) / (1 << 30) * p.weight_before[n])
        if p.held[t] - p.bound[t] > worst_waste:
            worst, worst_waste = t, p.held[t] - p.bound[t]
    return worst


@inlined
def _emptiest_slot(p: Packing, m: int) -> int:
    """Return that one of a few slots of the ``near`` tensors in which they use the least."""
    worst, worst_used = 0, EVERYWHERE
    for _ in range(1 << below(p.state, 5)):
        j = p.near[below(p.state, m)]
        slot = (p.offset[j] + below(p.state, 2) * (p.size[j] - 1)) // p.region
        used = 0
        for q in range(m):
            k = p.near[q]
            begin, end = max(p.offset[k], slot * p.region), min(p.offset[k] + p.size[k], (slot + 1) * p.region)
            used += max(end - begin, 0)
        if used < worst_used:
            worst, worst_used = slot, used
    return worst


@compiled
def _choose(p: Packing, victims: Ints) -> int:
    """Choose the tensors that go out, return how many: those of one or two slots at some tick, or the large ones then.

    Or those that live about that tick. Few go out in a move; where slots hold hundreds, only large
    ones make room.
    """
    t = _wasted_tick(p)
    m = find_near(p, t, t + 1)
    if m == 0:
        return 0
    a = _emptiest_slot(p, m)
    b = _emptiest_slot(p, m) if below(p.state, 2) == 0 else a
    if below(p.state, 2) == 0:  # also what lives there a while before and after
        j = p.near[below(p.state, m)]
        m = find_near(p, p.lower[j], p.upper[j])
    least = 0
    for _ in range(below(p.state, 2) * below(p.state, 16)):
        least = max(least, p.size[p.near[below(p.state, m)]])
    n = 0
    start = below(p.state, m)
    for q in range(m):
        j = p.near[(start + q) % m]
        first, last = p.offset[j] // p.region, (p.offset[j] + p.size[j] - 1) // p.region
        if (
            p.lying[j] == NOWHERE
            and p.size[j] >= least
            and (least > 0 or first <= a <= last or first <= b <= last)
            and n < len(victims)
        ):
            victims[n] = j
            n += 1
    return n


@compiled
def _arrange(p: Packing, victims: Ints, n: int, keys: Floats) -> None:
    """Sort the victims by a rule drawn at random, largest key first."""
    rule = below(p.state, 5)
    for q in range(n):
        j = victims[q]
        alive = p.weight_before[p.upper[j]] - p.weight_before[p.lower[j]]
        if rule == 0:
            keys[q] = p.upper[j]
        elif rule == 1:
            keys[q] = p.size[j]
        elif rule == 2:  # noqa: PLR2004 - as drawn
            keys[q] = alive
        elif rule == 3:  # noqa: PLR2004 - as drawn
            keys[q] = alive * p.size[j]
        else:
            keys[q] = below(p.state, 1 << 30)
    for q in range(1, n):
        j, key = victims[q], keys[q]
        r = q
        while r > 0 and keys[r - 1] < key:
            victims[r], keys[r] = victims[r - 1], keys[r - 1]
            r -= 1
        victims[r], keys[r] = j, key


@compiled
def _move(p: Packing, found: Found, blink: int, heat: float) -> bool:
    """Take tensors out and put them back; undo it if that is worse by too much. Returns whether it stays."""
    limit = _score(p) - heat * math.log((1 + below(p.state, 1 << 30)) / (1 << 30)) + _SAME
    n = _choose(p, found.victims)
    _arrange(p, found.victims, n, found.keys)
    for q in range(n):
        i = found.victims[q]
        found.old[q] = p.offset[i]
        take(p, i)
    back = 0
    while back < n and _score(p) <= limit:  # what is put back never lowers the score
        reprice(p)
        offset = best_offset(p, found.victims[back], blink)
        if offset == NOWHERE:
            break
        put(p, found.victims[back], offset)
        back += 1
    if back == n and _score(p) <= limit:
        return True
    for q in range(back):
        take(p, found.victims[q])
    for q in range(n):
        put(p, found.victims[q], found.old[q])
    return False


@compiled
def _improve(p: Packing, found: Found, effort: Effort, most_moves: int, deadline_ns: int) -> None:
    """Improve the packing until nothing can be better, or the moves or the time are used up."""
    begun_ns = monotonic_ns()
    left = 1.0
    moves = 0
    while moves < most_moves and found.figures[OPTIMAL] == 0.0:
        if moves % _LOOK_AT_CLOCK == 0:
            now_ns = monotonic_ns()
            if now_ns >= deadline_ns:
                break
            passed = 0.0 if deadline_ns == FOREVER_NS else (now_ns - begun_ns) / (deadline_ns - begun_ns)
            left = 1.0 - max(passed, moves / most_moves)
        if _move(p, found, effort.blink, effort.heat * left):
            _keep_if_best(p, found)
        moves += 1
    found.figures[MOVES] += moves


@entry(Packing, Found, types.int64[:, ::1], [np.int64], Effort, int)
def search(p: Packing, found: Found, orders: Ints, piled: Ints, effort: Effort, deadline_ns: int) -> int:
    """Build a packing in each order, improve the best; returns ``BUILT`` and leaves the best in ``found``, or why not.

    Args:
        p: What to pack; its content is replaced.
        found: Where the best goes.
        orders: A row of tensors per packing to build.
        piled: How many of each row are piled up.
        effort: How to improve it.
        deadline_ns: When to answer, by ``time.monotonic_ns``.
    """
    found.figures[PEAK] = np.inf
    n_built = 0
    reason = NO_ROOM
    for k in range(len(piled)):
        found.scores[k] = np.inf
        if reason != OUT_OF_TIME and found.figures[OPTIMAL] == 0.0:
            aim(p, p.lowest)
            reason = _build(p, orders[k], piled[k], deadline_ns)
            if reason == BUILT:
                found.scores[k] = _score(p)
                _keep_if_best(p, found)
                n_built += 1
    if n_built == 0:
        return reason
    starts = min(effort.starts, n_built)
    for left in range(starts, 0, -1):
        start = int(np.argmin(found.scores))
        found.scores[start] = np.inf
        now_ns = monotonic_ns()
        if found.figures[OPTIMAL] == 0.0 and _build(p, orders[start], piled[start], deadline_ns) == BUILT:
            end_ns = deadline_ns if deadline_ns == FOREVER_NS else now_ns + (deadline_ns - now_ns) // left
            _improve(p, found, effort, effort.most_moves // starts, end_ns)
    return BUILT
