"""What a job has done with its time in the pool, by looks at the table and by what the kernel counts.

Theory of operation
    A look that finds an iteration ended makes a mark at the begin of the next one. Until the
    policy has thought about the job, everything but computing counts as learning. After that, the
    time between two marks is usual, or something else, such as an evaluation or a pause::

        joined    first end           planned for                                       now
        | start   | learning  ...     | usual, window by window | else | usual ...      |

    A window has ``FEW`` usual iterations and ``WINDOW_NS``, and the kernel's counters are read at
    its ends. The job by itself is the sum of the windows in which no other job was inside an
    iteration while it was. Without one it is the window with the shortest iterations.

Guarantees
    Nothing is counted twice, whatever a job writes into its record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from zico.broker.protocol.messages import Counted, Spent
from zico.broker.views import count_of
from zico.pool.layout import JobState
from zico.pool.profiles import MAIN_PHASE

if TYPE_CHECKING:
    from zico.base.processes import Counters

FEW = 8
"""Usual iterations of a window at least."""
WINDOW_NS = 1_000_000_000
"""Their time at least, without waits and copies: a look may be 20 ms late, a fiftieth of it."""
_NS = 1e-9


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """A time, and what had been counted by then."""

    t_ns: int
    iteration: int
    boundary_ns: int
    inside_ns: int
    copies_ns: int

    def since(self, earlier: _Mark) -> _Mark:
        """Return the differences, none below 0."""
        return _Mark(
            max(0, self.t_ns - earlier.t_ns),
            max(0, self.iteration - earlier.iteration),
            max(0, self.boundary_ns - earlier.boundary_ns),
            max(0, self.inside_ns - earlier.inside_ns),
            max(0, self.copies_ns - earlier.copies_ns),
        )

    @property
    def running_ns(self) -> int:
        """Return the time without waits and copies, of differences."""
        return max(0, self.t_ns - self.boundary_ns - self.inside_ns - self.copies_ns)


class Spending:
    """One job's, from the first look at it on."""

    def __init__(self) -> None:
        self.is_planned = False
        """The job's iterations are known, and the policy has thought about it if it plans."""
        self.is_to_count = False
        """The last look has ended a window, or begun the first: the kernel's counters are to be read."""
        self._joined: _Mark | None = None
        self._first: _Mark | None = None
        self._learned: _Mark | None = None
        self._last: _Mark | None = None
        self._now_ns = 0
        self._is_usual = self._is_alone = True
        """Since the last mark, and since the window began."""
        self._usual = self._window = Counted()
        self._counters: Counters | None = None
        """Of the begin of the window."""
        self._windows = self._alone = Counted()
        self._best: Counted | None = None

    def observe(self, record: Any, now_ns: int, *, is_alone: bool) -> None:  # noqa: ANN401 - a numpy record
        """Take in a look at the job's record; ``is_alone``: no other job is inside an iteration."""
        self._now_ns = now_ns
        self._joined = self._joined or _until(record, now_ns)
        self.is_to_count = False
        if self._is_alone and not is_alone:
            self._is_alone = record["state"] != JobState.RUNNING
        if record["iteration"] > (self._last.iteration if self._last else 0):
            self._is_usual &= not record["atypical"]
            self._end(_mark(record, now_ns, self._last or self._joined))
            self._is_usual = True
        self._is_usual = self._is_usual and _is_usual(record)

    def _end(self, mark: _Mark) -> None:
        """End what lies between the last mark and this one."""
        if self._learned is not None and self._last is not None:
            took = mark.since(self._last)
            if self._is_usual:
                self._usual = _sum(self._usual, _counted(took))
                self._window = _sum(self._window, _counted(took))
                is_long = self._window.running_s >= WINDOW_NS * _NS
                self.is_to_count = self._window.iterations >= FEW and is_long
            else:
                self._window, self.is_to_count = Counted(), True
        elif self.is_planned:
            self._learned = mark
            self.is_to_count = True
        self._first = self._first or mark
        self._last = mark

    def count(self, counters: Counters | None) -> None:
        """Take in the kernel's counters where ``is_to_count``; ``None``: the process cannot be seen."""
        window = self._window
        if window.iterations:
            window = _with_counters(window, self._counters, counters)
            self._windows = _sum(self._windows, window)
            if self._is_alone:
                self._alone = _sum(self._alone, window)
            if self._best is None or _mean_s(window) < _mean_s(self._best):
                self._best = window
        self._window, self._counters, self._is_alone = Counted(), counters, True

    def spent(self, record: Any) -> Spent:  # noqa: ANN401 - a numpy record
        """Return all of it up to the last look, which has found the job's record like this."""
        joined, now = self._joined, _until(record, self._now_ns)
        if joined is None:
            return Spent()
        first, learned = (self._first, self._learned) if self._first and self._learned else (joined, joined)
        start, learning, then = first.since(joined), learned.since(first), now.since(learned)
        return Spent(
            elapsed_s=(now.t_ns - joined.t_ns) * _NS,
            learning_s=(start.t_ns - start.running_ns + learning.t_ns) * _NS,
            learning_iterations=learning.iteration,
            boundary_s=then.boundary_ns * _NS,
            inside_s=then.inside_ns * _NS,
            copies_s=then.copies_ns * _NS,
            usual=self._usual,
            windows=self._windows,
            own=self._alone if self._alone.iterations else self._best,
            own_is_alone=self._alone.iterations > 0,
        )


def _mean_s(window: Counted) -> float:
    return window.running_s / window.iterations


def _counted(took: _Mark) -> Counted:
    return Counted(iterations=took.iteration, running_s=took.running_ns * _NS, processor_s=0.0, queued_s=0.0)


def _sum(some: Counted, more: Counted) -> Counted:
    """Return what was counted in all; of what was not always counted nothing is known."""
    return Counted(
        iterations=some.iterations + more.iterations,
        running_s=some.running_s + more.running_s,
        processor_s=_known_sum(some.processor_s, more.processor_s),
        system_s=some.system_s + more.system_s,
        queued_s=_known_sum(some.queued_s, more.queued_s),
        minor_faults=some.minor_faults + more.minor_faults,
        major_faults=some.major_faults + more.major_faults,
    )


def _known_sum(some: float | None, more: float | None) -> float | None:
    return None if some is None or more is None else some + more


def _with_counters(window: Counted, before: Counters | None, after: Counters | None) -> Counted:
    """Return a window with what the kernel has counted in it."""
    if before is None or after is None:
        return Counted(iterations=window.iterations, running_s=window.running_s, processor_s=None, queued_s=None)
    is_queue_known = before.queued_ns is not None and after.queued_ns is not None
    return Counted(
        iterations=window.iterations,
        running_s=window.running_s,
        processor_s=max(0, after.processor_ns - before.processor_ns) * _NS,
        system_s=max(0, after.system_ns - before.system_ns) * _NS,
        # A thread that has ended takes what it waited with it.
        queued_s=max(0, (after.queued_ns or 0) - (before.queued_ns or 0)) * _NS if is_queue_known else None,
        minor_faults=max(0, after.minor_faults - before.minor_faults),
        major_faults=max(0, after.major_faults - before.major_faults),
    )


def _is_usual(record: Any) -> bool:  # noqa: ANN401 - a numpy record
    """Tell whether a job is in an iteration of the usual kind, or waits for one."""
    stays = record["state"] == JobState.BOUNDARY and record["boundary_since_ns"] == 0
    return bool(record["phase"] == MAIN_PHASE and not record["paused"] and not stays)


def _until(record: Any, now_ns: int) -> _Mark:  # noqa: ANN401 - a numpy record
    """Return what has been counted by a look, waits that last included."""
    boundary_since_ns, need_since_ns = count_of(record["boundary_since_ns"]), count_of(record["need_since_ns"])
    return _Mark(
        now_ns,
        count_of(record["iteration"]),
        count_of(record["boundary_waited_ns"]) + (max(0, now_ns - boundary_since_ns) if boundary_since_ns else 0),
        count_of(record["need_waited_ns"]) + (max(0, now_ns - need_since_ns) if need_since_ns else 0),
        count_of(record["copy_waited_ns"]) + count_of(record["making_ns"]),
    )


def _mark(record: Any, now_ns: int, last: _Mark) -> _Mark:  # noqa: ANN401 - a numpy record
    """Return what had been counted when the iteration in flight began, or the last one ended; never before ``last``."""
    is_inside = record["state"] == JobState.RUNNING
    since_ns = count_of(record["started_ns" if is_inside else "last_boundary_ns"])
    waited_ns = count_of(record["iteration_waited_ns"]) if is_inside else 0
    return _Mark(
        max(last.t_ns, min(since_ns, now_ns)),
        count_of(record["iteration"]),
        max(last.boundary_ns, count_of(record["boundary_waited_ns"])),
        max(last.inside_ns, count_of(record["need_waited_ns"]) - waited_ns),
        max(last.copies_ns, count_of(record["copy_waited_ns"]) + count_of(record["making_ns"])),
    )
