"""Tensors put into slots and taken out again, with what that does to the regions held: compiled.

Theory of operation. A slot is a region-sized aligned stretch of addresses; it is held at a tick if
a live tensor touches it. Where may tensor x, alive during ``[l, u)``, go? Sort the placed tensors
that are alive with it by address: between two of them lies a gap, free all the time::

    address   slot 0    slot 1    slot 2    slot 3
              aaaaaa....|.........|.........|...bbbbbb        the gap between a and b
                    1 >xxxxxxxxx                              at its bottom
                              2 >xxxxxxxxx                    at its first border of slots
                                            xxxxxxxxx< 3      at its top

A slot inside the gap is idle during ``[l, u)``: x would hold it all that time, at the same price
everywhere. Only the slots at the two ends may be held by others for part of it. So three places a
gap are enough: no other one is cheaper.

The price of a tick in a slot is its share of time, and far more where the slots held are at
``target`` already.

Guarantees: no GIL, no exceptions, no allocation. Tensors come sorted by ``lower``; sizes, offsets
and the region are in one unit, the alignment.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zico.base.compiled import compiled, inlined

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BLOCK = 64
"""So many tensors, neighbours in ``lower``, are passed over together when all of them end too early."""
NOWHERE = -1
EVERYWHERE = 1 << 62
_SAME = 1e-12
"""Prices that differ by less are equal: sums of the same floats in another order."""

# Entries of Packing.state: tensors placed, the current stamp, the target, distinct slots, and the
# sum of slots held over ticks. Then the random state, and whether prices are out of date. Of
# Packing.figures: slots held over time, and above the target.
PLACED, STAMP, TARGET, SLOTS, SLOT_TICKS, SEED, DIRTY, STATES = range(8)
INTEGRAL, EXCESS, FIGURES = range(3)

_FACTOR, _INCREMENT = np.uint64(6364136223846793005), np.uint64(1442695040888963407)


class Packing(NamedTuple):
    """Tensors, where they lie, and the slots held over time. A tuple of arrays, as compiled code wants it."""

    lower: Ints
    """Ascending; ticks are numbered so that at each of them something begins or ends."""
    upper: Ints
    size: Ints
    block_upper: Ints
    """Latest end in each block of tensors."""
    region: int
    limit: int
    """No tensor may reach beyond this address."""

    weight: Floats
    """Each tick's share of the whole time."""
    weight_before: Floats
    """Sum of ``weight`` before each tick."""
    steep: Floats
    """What a tick adds to the excess for a slot above the target, squared."""
    price_before: Floats
    """Sum of prices before each tick; ``reprice`` brings it up to date."""

    lying: Ints
    """Where tensors that cannot be moved lie, ``NOWHERE`` for all others."""
    hole_begin: Ints
    """Scratch: free addresses between the tensors that lie, from below; the last one reaches up to the limit."""
    hole_end: Ints
    offset: Ints
    by_offset: Ints
    """Placed tensors by (offset, index); ``state[PLACED]`` of them."""
    held: Ints
    """Slots held at each tick."""
    users: Ints
    """Tensors that ever touch each slot."""
    bound: Ints
    """Fewest slots that can be held at each tick: the live bytes, rounded up."""
    lowest: int
    """The most of ``bound``."""
    lowest_ticks: int
    """Its sum."""

    near: Ints
    """Scratch: placed tensors alive with the one looked at, by ``lower``."""
    near_stamp: Ints
    slot_stamp: Ints
    slot_reach: Ints
    slot_shared: Floats

    state: Ints
    figures: Floats


@inlined
def below(state: Ints, bound: int) -> int:
    """Return a random integer from 0 to ``bound`` - 1, which is at most 2**31.

    Unsigned, since signed overflow is undefined in compiled code.
    Source: the generator of D. Knuth's MMIX, x * 6364136223846793005 + 1442695040888963407 modulo
    2**64.
    """
    state[SEED] = np.int64(np.uint64(state[SEED]) * _FACTOR + _INCREMENT)
    return int(((state[SEED] >> 32) & 0x7FFFFFFF) % bound)


@compiled
def find_near(p: Packing, lower: int, upper: int) -> int:
    """Collect the placed tensors that live in ``[lower, upper)`` into ``near``; return how many."""
    n = len(p.lower)
    m = 0
    for block in range(len(p.block_upper)):
        begin = block * BLOCK
        if p.lower[begin] >= upper:
            break
        if p.block_upper[block] <= lower:
            continue
        for j in range(begin, min(begin + BLOCK, n)):
            if p.upper[j] > lower and p.offset[j] >= 0 and p.lower[j] < upper:
                p.near[m] = j
                m += 1
    return m


@inlined
def _share(p: Packing, stamp: int, slot: int, lower: int, begin: int, end: int) -> None:
    """Note that a slot is held anyway from ``begin`` to ``end``; calls come by ``begin``."""
    if p.slot_stamp[slot] != stamp:
        p.slot_stamp[slot] = stamp
        p.slot_reach[slot] = lower
        p.slot_shared[slot] = 0.0
    begin = max(begin, p.slot_reach[slot])
    if end > begin:
        p.slot_shared[slot] += p.price_before[end] - p.price_before[begin]
        p.slot_reach[slot] = end


@inlined
def _slot_price(p: Packing, stamp: int, slot: int, whole: float) -> float:
    """Return what holding a slot for the tensor looked at costs beyond what it is held for anyway."""
    return whole - p.slot_shared[slot] if p.slot_stamp[slot] == stamp else whole


@inlined
def _price(p: Packing, stamp: int, size: int, offset: int, whole: float) -> float:
    first = offset // p.region
    last = (offset + size - 1) // p.region
    if first == last:
        return _slot_price(p, stamp, first, whole)
    return _slot_price(p, stamp, first, whole) + _slot_price(p, stamp, last, whole) + (last - first - 1) * whole


@inlined
def _mark_near(p: Packing, m: int, lower: int, upper: int) -> int:
    """Mark the ``near`` tensors and note for how long their end slots are held anyway; return the mark."""
    p.state[STAMP] += 1
    stamp = int(p.state[STAMP])
    for q in range(m):
        j = p.near[q]
        p.near_stamp[j] = stamp
        first = p.offset[j] // p.region
        last = (p.offset[j] + p.size[j] - 1) // p.region
        begin, end = max(p.lower[j], lower), min(p.upper[j], upper)
        _share(p, stamp, first, lower, begin, end)
        if last != first:
            _share(p, stamp, last, lower, begin, end)
    return stamp


@inlined
def _place_in_gap(place: int, bottom: int, ceiling: int, size: int, region: int) -> int:
    """Return one of the three addresses in a gap that the drawing shows, from 0."""
    if place == 0:
        return bottom
    if place == 1:
        return (bottom + region - 1) // region * region
    return ceiling - size


@compiled
def best_offset(p: Packing, i: int, blink: int) -> int:
    """Return the cheapest address for tensor ``i``, the tightest gap among equals, or ``NOWHERE``.

    One gap in ``blink`` is overlooked at random (0: none), so that a search does not always answer
    the same.
    """
    lower, upper, size = p.lower[i], p.upper[i], p.size[i]
    stamp = _mark_near(p, find_near(p, lower, upper), lower, upper)
    whole = p.price_before[upper] - p.price_before[lower]
    best, best_price, best_room = NOWHERE, np.inf, EVERYWHERE
    bottom = 0
    placed = p.state[PLACED]
    for q in range(placed + 1):
        j = p.by_offset[min(q, placed - 1)]  # the last round looks at what lies above all
        if q < placed and p.near_stamp[j] != stamp:
            continue
        ceiling = p.offset[j] if q < placed else p.limit
        room = ceiling - bottom - size
        if room >= 0 and (blink == 0 or q == placed or below(p.state, blink) > 0):
            for place in range(3 if q < placed else 2):
                offset = _place_in_gap(place, bottom, ceiling, size, p.region)
                if bottom <= offset <= ceiling - size:
                    price = _price(p, stamp, size, offset, whole)
                    if price < best_price - _SAME or (price < best_price + _SAME and room < best_room):
                        best, best_price, best_room = offset, price, room
        bottom = max(bottom, ceiling + p.size[j])
    return best


@inlined
def _hold(p: Packing, begin: int, end: int, slots: int) -> None:
    """Let so many slots more (or fewer) be held from ``begin`` to ``end``."""
    target = p.state[TARGET]
    p.figures[INTEGRAL] += slots * (p.weight_before[end] - p.weight_before[begin])
    p.state[SLOT_TICKS] += slots * (end - begin)
    excess = 0.0
    most = 0
    for t in range(begin, end):
        was = p.held[t]
        now = was + slots
        p.held[t] = now
        over_was, over_now = max(was - target, 0), max(now - target, 0)
        excess += p.steep[t] * (over_now * over_now - over_was * over_was)
        most = max(most, was, now)
    p.figures[EXCESS] += excess
    if most >= target:
        p.state[DIRTY] = 1


@inlined
def _hold_rest(p: Packing, m: int, slot: int, lower: int, upper: int, sign: int) -> None:
    """Hold (or give up) a slot for that part of ``[lower, upper)`` where none of the ``near`` tensors touches it."""
    reach = lower
    for q in range(m):
        j = p.near[q]
        if p.offset[j] < (slot + 1) * p.region and p.offset[j] + p.size[j] > slot * p.region:
            if p.lower[j] > reach:
                _hold(p, reach, p.lower[j], sign)
            reach = max(reach, p.upper[j])
            if reach >= upper:
                return
    _hold(p, reach, upper, sign)


@inlined
def _change(p: Packing, i: int, offset: int, sign: int) -> None:
    """Account for tensor ``i`` (which is not placed) coming to or leaving ``offset``."""
    lower, upper = p.lower[i], p.upper[i]
    first = offset // p.region
    last = (offset + p.size[i] - 1) // p.region
    m = find_near(p, lower, upper)
    _hold_rest(p, m, first, lower, upper, sign)
    if last > first:
        _hold_rest(p, m, last, lower, upper, sign)
    if last > first + 1:
        _hold(p, lower, upper, sign * (last - first - 1))
    for slot in range(first, last + 1):
        before = p.users[slot]
        p.users[slot] = before + sign
        p.state[SLOTS] += sign if before + min(sign, 0) == 0 else 0


@inlined
def _rank(p: Packing, i: int, offset: int) -> int:
    """Return how many placed tensors come before (``offset``, ``i``)."""
    low, high = 0, p.state[PLACED]
    while low < high:
        middle = (low + high) // 2
        j = p.by_offset[middle]
        if p.offset[j] < offset or (p.offset[j] == offset and j < i):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def put(p: Packing, i: int, offset: int) -> None:
    """Place tensor ``i``, which is not placed."""
    _change(p, i, offset, 1)
    rank = _rank(p, i, offset)
    for q in range(p.state[PLACED], rank, -1):
        p.by_offset[q] = p.by_offset[q - 1]
    p.by_offset[rank] = i
    p.state[PLACED] += 1
    p.offset[i] = offset


@compiled
def take(p: Packing, i: int) -> None:
    """Take tensor ``i`` out."""
    offset = p.offset[i]
    rank = _rank(p, i, offset)
    p.state[PLACED] -= 1
    for q in range(rank, p.state[PLACED]):
        p.by_offset[q] = p.by_offset[q + 1]
    p.offset[i] = NOWHERE
    _change(p, i, offset, -1)


@compiled
def reprice(p: Packing) -> None:
    """Bring prices up to date with the slots held."""
    if p.state[DIRTY] == 0:
        return
    p.state[DIRTY] = 0
    target = p.state[TARGET]
    total = 0.0
    for t in range(len(p.weight)):
        p.price_before[t] = total
        over = max(p.held[t] - target, -1)
        total += p.weight[t] + p.steep[t] * (2 * over + 1 if over >= 0 else 0)
    p.price_before[len(p.weight)] = total


@compiled
def aim(p: Packing, target: int) -> None:
    """Set the number of slots above which each one more costs extra."""
    p.state[TARGET] = target
    excess = 0.0
    for t in range(len(p.weight)):
        over = max(p.held[t] - target, 0)
        excess += p.steep[t] * over * over
    p.figures[EXCESS] = excess
    p.state[DIRTY] = 1


@compiled
def clear(p: Packing) -> None:
    """Take all tensors out."""
    p.state[DIRTY] = 1
    while p.state[PLACED] > 0:
        take(p, p.by_offset[p.state[PLACED] - 1])
    p.figures[INTEGRAL] = 0.0
    p.figures[EXCESS] = 0.0
