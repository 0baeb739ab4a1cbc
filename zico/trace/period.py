"""Find the iteration in a sequence of allocation sizes, for jobs in which nothing marks its boundary.

Theory of operation
    The period of a suffix is read off the prefix function (Knuth, Morris, Pratt) of the reversed sequence: its last
    ``3 L`` entries repeat with period L if the prefix function there reaches ``2 L``. Shorter things repeat too, and
    are told apart by memory: set-up (equal layers) grows and does not return to where it began; equal layers within
    an iteration rise by a part of what the whole iteration rises.
"""

from __future__ import annotations

from typing import Any

from zico.compiled import compiled

NO_PERIOD = 0
REPEATS = 3
"""Times in a row that an iteration is seen before it counts as one."""
SHORTEST = 4
"""Allocations over the threshold that an iteration has at least."""
_GROWTH_SHIFT = 5  # live bytes at both ends may differ by a 32nd of the iteration's rise

Array = Any


@compiled
def find_period(sizes: Array, live_bytes: Array, n: int, fail: Array) -> int:
    """Return the shortest L such that the last ``REPEATS`` times L entries are one iteration after the other.

    Takes O(n). Returns ``NO_PERIOD`` if there is none.

    Args:
        sizes: Allocation sizes, oldest first.
        live_bytes: Live bytes before each of these allocations.
        n: How many.
        fail: Scratch of ``n`` entries.
    """
    least_rise = (_spread(live_bytes, n) + 1) // 2
    low = live_bytes[n - 1]
    high = live_bytes[n - 1]
    fail[0] = 0
    matched = 0
    for i in range(1, n):
        while matched > 0 and sizes[n - 1 - i] != sizes[n - 1 - matched]:
            matched = fail[matched - 1]
        if sizes[n - 1 - i] == sizes[n - 1 - matched]:
            matched += 1
        fail[i] = matched
        if (i + 1) % REPEATS == 0:
            period = (i + 1) // REPEATS
            begin = live_bytes[n - 1 - period]
            low = min(low, begin)
            high = max(high, begin)
            # The shortest period of these entries is i + 1 - matched; so is each of its multiples (Fine and Wilf).
            repeats = period >= SHORTEST and period % (i + 1 - matched) == 0
            returns = abs(live_bytes[n - 1] - begin) <= (high - low) >> _GROWTH_SHIFT
            if repeats and returns and high > low and high - low >= least_rise:
                return period
    return NO_PERIOD


@compiled
def _spread(values: Array, n: int) -> int:
    low = values[0]
    high = values[0]
    for i in range(n):
        low = min(low, values[i])
        high = max(high, values[i])
    return high - low


@compiled
def lowest(live_bytes: Array, n: int, period: int) -> int:
    """Return the index, within the last period, of the allocation before which the fewest bytes were live."""
    best = n - period
    for i in range(n - period, n):
        if live_bytes[i] < live_bytes[best]:
            best = i
    return best
