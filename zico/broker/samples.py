"""A bounded history of who held what: when it is full, every second row goes and rows become rarer.

What the jobs hold in a row is one true instant, never a mixture of two. Of the instants that fall
into one period the one with the most regions held stays. So a thinned history still shows the peaks,
and no sum that never was. The physical bytes of a row are the most seen in its period.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ROWS = 32_768
"""So many rows are kept: eleven minutes at 20 ms before they are first thinned, and far more than a
picture has columns."""

MAX_CELLS = 1 << 22
"""Rows times jobs ever seen stay below this: beyond 128 jobs rows become fewer, so that a long
sweep does not fill memory."""

FIRST_PERIOD_NS = 5_000_000
"""Rows closer than this share one place, so that bursts of events do not fill the history."""

NOTHING: Mapping[int, int] = MappingProxyType({})

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class History:
    """Rows of (time, physical bytes, regions held by each job ever seen, regions' worth that each has in a tier)."""

    def __init__(self, max_rows: int = MAX_ROWS, period_ns: int = FIRST_PERIOD_NS, max_cells: int = MAX_CELLS) -> None:
        """Begin empty with room for ``max_rows``, a power of two, or fewer with many jobs."""
        self._max_cells = max_cells
        self._t_ns: Int64s = np.zeros(max_rows, np.int64)
        self._physical_bytes: Int64s = np.zeros(max_rows, np.int64)
        self._regions: Int32s = np.zeros((max_rows, 4, 2), np.int32)
        self._n = 0
        self._n_jobs = 0
        self.period_ns = period_ns

    def __len__(self) -> int:
        return self._n

    def add(self, t_ns: int, physical_bytes: int, held: dict[int, int], out: Mapping[int, int] = NOTHING) -> None:
        """Add the instant ``t_ns``, not before the last one.

        Args:
            t_ns: On the monotonic clock.
            physical_bytes: Of the whole pool.
            held: Regions by job index; jobs that are not named hold none.
            out: Regions' worth of live tensors in a tier, likewise, of jobs that ``held`` names.
        """
        self._make_columns(max(held, default=-1) + 1)
        if not self._shares_last_row(t_ns):
            self._begin_row()
        elif sum(held.values()) < int(self._regions[self._n - 1, :, 0].sum()):
            self._physical_bytes[self._n - 1] = max(physical_bytes, self._physical_bytes[self._n - 1])
            return
        row = self._n - 1
        self._t_ns[row] = t_ns
        self._physical_bytes[row] = max(physical_bytes, self._physical_bytes[row])
        self._regions[row] = 0
        for job, regions in held.items():
            self._regions[row, job] = regions, out.get(job, 0)

    def rows(self) -> tuple[Int64s, Int64s, Int32s, Int32s]:
        """Return copies of times [n], physical bytes [n], regions held [n, jobs] and in a tier [n, jobs]."""
        kept = slice(self._n)
        return (
            self._t_ns[kept].copy(),
            self._physical_bytes[kept].copy(),
            self._regions[kept, : self._n_jobs, 0].copy(),
            self._regions[kept, : self._n_jobs, 1].copy(),
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
        totals = self._regions[: self._n, :, 0].sum(axis=1)
        pairs = np.arange(0, self._n - 1, 2)
        kept = pairs + (totals[pairs + 1] > totals[pairs])
        physical = np.maximum(self._physical_bytes[pairs], self._physical_bytes[pairs + 1])
        count = len(kept)
        self._t_ns[:count] = self._t_ns[kept]
        self._regions[:count] = self._regions[kept]
        self._physical_bytes[:count] = physical
        self._n = count
        self.period_ns *= 2

    def _make_columns(self, n_jobs: int) -> None:
        """Make room for as many jobs, doubling."""
        self._n_jobs = max(self._n_jobs, n_jobs)
        columns = self._regions.shape[1]
        if n_jobs > columns:
            columns_then = max(n_jobs, 2 * columns)
            rows = len(self._t_ns)
            while rows > 2 and rows * columns_then > self._max_cells:  # noqa: PLR2004 - a pair can be thinned
                rows //= 2
            while self._n > rows:
                self._thin()
            wider: Int32s = np.zeros((rows, columns_then, 2), np.int32)
            wider[: self._n, :columns] = self._regions[: self._n]
            self._regions = wider
            self._t_ns, self._physical_bytes = self._t_ns[:rows].copy(), self._physical_bytes[:rows].copy()
