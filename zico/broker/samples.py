"""A bounded history of who held what: when it is full, every second row goes and rows become rarer.

What the jobs hold in a row is one true instant, never a mixture of two: of the instants that fall into one
period the one with the most regions held stays, so a thinned history still shows the peaks and never a sum
that never was. The physical bytes of a row are the most seen in its period.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_ROWS = 32_768
"""Rows kept: eleven minutes at 20 ms before they are first thinned, and far more than a picture has
columns."""

FIRST_PERIOD_NS = 5_000_000
"""Rows closer than this share one place, so that bursts of events do not fill the history."""

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class History:
    """Rows of (time, physical bytes, regions held by each job ever seen)."""

    def __init__(self, max_rows: int = MAX_ROWS, period_ns: int = FIRST_PERIOD_NS) -> None:
        """Begin empty with room for ``max_rows``, an even number."""
        self._t_ns: Int64s = np.zeros(max_rows, np.int64)
        self._physical_bytes: Int64s = np.zeros(max_rows, np.int64)
        self._held: Int32s = np.zeros((max_rows, 4), np.int32)
        self._n = 0
        self._n_jobs = 0
        self.period_ns = period_ns

    def __len__(self) -> int:
        """Return the rows kept."""
        return self._n

    def add(self, t_ns: int, physical_bytes: int, held: dict[int, int]) -> None:
        """Add the instant ``t_ns``, not before the last one.

        Args:
            t_ns: On the monotonic clock.
            physical_bytes: Of the whole pool.
            held: Regions by job index; jobs that are not named hold none.
        """
        self._make_columns(max(held, default=-1) + 1)
        if not self._shares_last_row(t_ns):
            self._begin_row()
        elif sum(held.values()) < int(self._held[self._n - 1].sum()):
            self._physical_bytes[self._n - 1] = max(physical_bytes, self._physical_bytes[self._n - 1])
            return
        row = self._n - 1
        self._t_ns[row] = t_ns
        self._physical_bytes[row] = max(physical_bytes, self._physical_bytes[row])
        self._held[row] = 0
        for job, regions in held.items():
            self._held[row, job] = regions

    def rows(self) -> tuple[Int64s, Int64s, Int32s]:
        """Return copies of times [n], physical bytes [n] and regions held [n, jobs]."""
        kept = slice(self._n)
        return (
            self._t_ns[kept].copy(),
            self._physical_bytes[kept].copy(),
            self._held[kept, : self._n_jobs].copy(),
        )

    def _shares_last_row(self, t_ns: int) -> bool:
        return self._n > 0 and t_ns // self.period_ns == int(self._t_ns[self._n - 1]) // self.period_ns

    def _begin_row(self) -> None:
        if self._n == len(self._t_ns):
            self._thin()
        self._physical_bytes[self._n] = 0
        self._n += 1

    def _thin(self) -> None:
        """Keep of each pair of rows the one that holds more."""
        totals = self._held[: self._n].sum(axis=1)
        pairs = np.arange(0, self._n - 1, 2)
        kept = pairs + (totals[pairs + 1] > totals[pairs])
        physical = np.maximum(self._physical_bytes[pairs], self._physical_bytes[pairs + 1])
        count = len(kept)
        self._t_ns[:count] = self._t_ns[kept]
        self._held[:count] = self._held[kept]
        self._physical_bytes[:count] = physical
        self._n = count
        self.period_ns *= 2

    def _make_columns(self, n_jobs: int) -> None:
        """Make room for as many jobs, doubling."""
        self._n_jobs = max(self._n_jobs, n_jobs)
        columns = self._held.shape[1]
        if n_jobs > columns:
            wider: Int32s = np.zeros((len(self._t_ns), max(n_jobs, 2 * columns)), np.int32)
            wider[:, :columns] = self._held
            self._held = wider
