"""Ways to go on, each tried for a while and measured; the one that takes least is kept. Pure.

What a change leaves behind disturbs the first measurements after it, so these do not count. Of a
window's measurements the median counts, since one slow iteration says nothing of a way::

    change   settle   window                   window                  change   settle
    |        9.0      3.1 7.5 3.0  -> 3.1      3.0 3.2 3.1  -> 3.1     |        8.8  ...
"""

from __future__ import annotations

import math
import statistics
from typing import Generic, TypeVar

Way = TypeVar("Way")


class Comparison(Generic[Way]):
    """What was measured of some ways, one of which is in force."""

    def __init__(self, way: Way, *, settle: int, window: int, clear: float = 1.0, steady: float = math.inf) -> None:
        """Begin with one way, of which nothing is known.

        Args:
            way: The first.
            settle: Measurements after a change that do not count.
            window: Measurements that count together.
            clear: A way has lost that takes more than so many times what the best one takes.
            steady: A window says nothing in which measurements differ by a greater share of their
                median.
        """
        self._settle, self._window, self._clear, self._steady = settle, window, clear, steady
        self.took: dict[Way, float] = {}
        """What each way took that was measured; of several windows, the last one."""
        self.turn(way)

    def turn(self, way: Way) -> None:
        """Go on by a way, or by the same one after a change of something else."""
        self.way = way
        self.has_lost = False
        """The last window says that the way in force is slower than the best one."""
        self._rows: list[tuple[float, ...]] = []

    def note(self, took: float, *others: float) -> tuple[float, ...] | None:
        """Note a measurement of the way in force; returns a window's medians once that is whole.

        Args:
            took: What is compared.
            others: What else is to be known of the window.
        """
        self._rows.append((took, *others))
        if len(self._rows) < self._settle + self._window:
            return None
        columns = list(zip(*self._rows[self._settle :], strict=True))
        del self._rows[self._settle :]
        medians = tuple(map(statistics.median, columns))
        if max(columns[0]) - min(columns[0]) <= self._steady * medians[0]:
            self.took[self.way] = medians[0]
            self.has_lost = medians[0] > self._clear * self.took[self.best]
        return medians

    @property
    def best(self) -> Way:
        """Return the way that took least; of those alike, the one that was measured first."""
        return min(self.took, key=lambda way: self.took[way])
