"""Plan an iteration that was logged: from lifetimes to a table of places, off the hot path.

A thread of the job sleeps until the heap hands it a finished log, plans without the GIL, and
installs the answer. No allocation waits for it, and a job whose thread never gets to run goes on as
it would without plans.

Guarantees
    The thread imports nothing and compiles nothing, so that a fork meets it without a lock of
    Python's or Numba's. A child could never get such a lock.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.background import work_lock
from zico.base.compiled import entry
from zico.base.errors import ProblemError
from zico.heap import history
from zico.heap.history import size_of
from zico.heap.layout import ALIGNMENT_BYTES, GRANULE_BYTES, HEAP, LIFETIME, PLACE, PLAN_ENTRIES
from zico.planning.packing.problem import Problem
from zico.planning.packing.regions import Options, place
from zico.pool.layout import JOB
from zico.trace.lifetimes import NEVER, cut_open
from zico.trace.profile import is_flat

if TYPE_CHECKING:
    from zico.heap.build import Heap
    from zico.planning.packing.problem import Int64s

DEADLINE_S = 0.5
"""Planning one iteration may take so much time of one core. Improving what is built would use all
of it, for about a tenth of a percent (benchmarks/results/regions.md), while the jobs train."""
_FEWEST_BINS = 16
_NEARLY_WHOLE = 16
_NOTHING = np.empty(0, np.int64)
_REHEARSED = 16
"""The iteration that is planned to load what planning calls has so many tensors."""


class Planning:
    """The planner of one heap: an eventfd, two tables of which one is in force, and a thread."""

    def __init__(self, heap: Heap) -> None:
        """Let the heap ask for plans; ``start`` answers in a thread."""
        self._heap = heap
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._work = work_lock()
        self._tables = [heap.zeros(PLACE, PLAN_ENTRIES) for _ in range(2)]
        heap.record[0]["planning"]["fd"] = self._wake_fd

    def start(self) -> None:
        """Load what plans are made with and start the thread; it sleeps until an iteration has been logged."""
        self.load()
        threading.Thread(target=self._run, name="zico-planner", daemon=True).start()

    def load(self) -> None:
        """Compile or load all that ``plan_handed`` calls, by a plan that nobody follows."""
        nobody: Any = np.zeros(1, HEAP)
        nobody["mutex_address"] = nobody.ctypes.data + HEAP.fields["mutex"][1]
        rehearsed = np.zeros(_REHEARSED, LIFETIME)
        rehearsed["key"] = GRANULE_BYTES
        rehearsed["lower"] = np.arange(_REHEARSED)
        rehearsed["upper"] = rehearsed["lower"] + 2
        keys, offsets = self._plan(rehearsed, 0, 2 * _REHEARSED)
        history.fill_plan(self._tables[0].ctypes.data, keys, offsets, len(keys))
        history.install_plan(nobody[0], 0)
        _knows_times(self._job)

    def close(self) -> None:
        """Ask for no more plans; for a heap without a thread."""
        self._heap.record[0]["planning"]["fd"] = -1
        os.close(self._wake_fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        while True:
            poll.poll()  # no deadline: nobody waits for this thread
            os.eventfd_read(self._wake_fd)
            with self._work:
                self.plan_handed()

    def plan_handed(self) -> None:
        """Plan the log that the heap has handed over, and install the answer."""
        record = self._heap.record[0]
        log = record["planning"]["handed"]
        keys, offsets = self._plan(self._heap.handed[: int(log["n"])], int(log["begin"]), int(log["end"]))
        table_address = 0
        if len(keys):
            spare = next(table for table in self._tables if table.ctypes.data != record["plan_address"])
            table_address = spare.ctypes.data
            history.fill_plan(table_address, keys, offsets, len(keys))
        history.install_plan(record, table_address)

    def _plan(self, lifetimes: Any, begin: int, end: int) -> tuple[Int64s, Int64s]:  # noqa: ANN401 - of LIFETIME
        """Return the keys of the tensors that have places, and these."""
        n_ticks = end - begin
        size_bytes = size_of(lifetimes["key"])
        upper = np.where(lifetimes["upper"] > 0, lifetimes["upper"] - begin, NEVER)
        line = cut_open(lifetimes["lower"] - begin, upper, size_bytes, n_ticks)
        # What lives for nearly a whole iteration has two of its kind alive at once whenever one
        # comes a little early.
        planned = ~line.persists & (line.upper - line.lower < n_ticks - n_ticks // _NEARLY_WHOLE)
        pinned = self._heap.pinned[: int(self._heap.record[0]["planning"]["n_pinned"])]
        if not planned.any():
            return _NOTHING, _NOTHING
        problem = Problem(
            np.concatenate([np.zeros(len(pinned), np.int64), line.lower[planned]]),
            np.concatenate([np.full(len(pinned), n_ticks), line.upper[planned]]),
            np.concatenate([pinned["size_bytes"], size_bytes[planned]]),
            alignment_bytes=ALIGNMENT_BYTES,
            tick_ns=self._times(line.cut, n_ticks),
        )
        at = np.concatenate([pinned["offset"], np.full(int(planned.sum()), -1)])
        try:
            placed = place(problem, self._heap.pool.region_bytes, DEADLINE_S, Options(improve=False), at)
        except ProblemError:  # too many slots to plan for: the job goes on without
            return _NOTHING, _NOTHING
        if placed.reason is not None:
            return _NOTHING, _NOTHING
        keys, offsets = lifetimes["key"][planned], placed.offset_bytes[len(pinned) :]
        inside = offsets + size_bytes[planned] <= self._heap.arena_bytes
        return keys[inside], offsets[inside]

    @property
    def _job(self) -> Any:  # noqa: ANN401 - one JOB record
        return self._heap.pool.jobs[int(self._heap.pool.member[0]["job"])]

    def _times(self, cut: int, n_ticks: int) -> Int64s | None:
        """Return when the ticks of the line begin, by the job's profile; ``None``: it does not say."""
        if not _knows_times(self._job):
            return None
        profile = self._job["profile"]
        n_bins = int(profile["n_bins"])
        ticks = np.append(np.arange(n_bins) << int(profile["shift"]), n_ticks)
        t_ns = np.append(profile["t_ns"][:n_bins], profile["duration_ns"])
        durations = np.diff(np.interp(np.arange(n_ticks + 1), ticks, t_ns))
        return np.concatenate([[0], np.cumsum(np.roll(durations, -cut))]).astype(np.int64)


@entry(JOB)
def _knows_times(job: Any) -> bool:  # noqa: ANN401 - one JOB record
    return job.profile.duration_ns > 0 and job.profile.n_bins >= _FEWEST_BINS and not is_flat(job.profile)
