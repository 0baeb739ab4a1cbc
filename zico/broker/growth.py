"""Does a job keep more after each iteration, as one that collects its losses with their graphs does?

Theory of operation
    A window of the last iterations is split into quarters. A job *grows* if it never kept less in a
    quarter than in the one before. What it keeps must also have risen at least ``RISES`` times. So
    neither its first iterations nor one new buffer count, nor what comes and goes.
"""

from __future__ import annotations

import collections
import itertools

WINDOW = 64
"""Iterations' ends that are remembered, as far as looks saw them."""
_QUARTER = WINDOW // 4
RISES = 3


class Growth:
    """What one job kept at the ends of its last iterations."""

    def __init__(self) -> None:
        """Begin with none."""
        self._seen: collections.deque[tuple[int, int]] = collections.deque(maxlen=WINDOW)

    def note(self, iteration: int, kept: int) -> None:
        """Note the regions that a job kept at the end of its last iteration, at each look."""
        if self._seen and iteration < self._seen[-1][0]:
            self._seen.clear()
        if not self._seen or iteration > self._seen[-1][0]:
            self._seen.append((iteration, kept))

    @property
    def regions(self) -> float:
        """Return by how many regions more the job keeps after an iteration, 0 where it does not grow."""
        kept = [each for _, each in self._seen]
        if len(kept) < WINDOW or sum(after > before for before, after in itertools.pairwise(kept)) < RISES:
            return 0.0
        quarters = [kept[begin : begin + _QUARTER] for begin in range(0, WINDOW, _QUARTER)]
        if any(min(after) < max(before) for before, after in itertools.pairwise(quarters)):
            return 0.0
        return (kept[-1] - kept[0]) / (self._seen[-1][0] - self._seen[0][0])
