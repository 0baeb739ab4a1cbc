"""Which job of a sweep starts next: the order, at most so many at once, and again alone after out of memory.

Whether memory has room for one more is asked of whoever made the queue (``Room``): here nothing is
known of profiles.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Protocol

from zico.broker.protocol.messages import DEFAULT_SHARE, Share
from zico.broker.saving import DEFAULT_WISH, Wish
from zico.launch.jobs import Command, Stream
from zico.launch.sweep import AGAIN, SweepJob
from zico.launch.sweep_file import JobResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zico.report.model import JobFigures, Record

_OUT_OF_MEMORY = re.compile(
    rb"\bOutOfMemoryError\b|\bCUDA out of memory\b|\bCUDA_ERROR_OUT_OF_MEMORY\b|\bcudaErrorMemoryAllocation\b"
    rb"|\bResourceExhaustedError\b|\bRESOURCE_EXHAUSTED\b|\bOOM when allocating\b"
    rb"|\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b|\bMemoryError\b|\bstd::bad_alloc\b"
)
"""As PyTorch, TensorFlow, JAX, CuPy, NumPy and C++ say it in a failed process's last lines."""


def tells_out_of_memory(stream: Stream, lines: Iterable[bytes]) -> bool:
    """Tell whether a job's lines say that memory was out; only what goes to standard error counts."""
    return stream is Stream.STDERR and any(_OUT_OF_MEMORY.search(line) for line in lines)


class Room(Protocol):
    """Whoever knows whether one more job has room."""

    async def for_one_more(
        self, candidate: SweepJob, running: Sequence[SweepJob], look: Callable[[], Record | None]
    ) -> bool:
        """Tell whether ``candidate`` may start beside those that run, of which there is at least one.

        Args:
            candidate: The next job.
            running: The jobs that run.
            look: Returns the pool's record now; ``None`` if the broker does not answer.
        """


class Unlimited:
    """Room without asking: only the number of jobs counts."""

    async def for_one_more(
        self, candidate: SweepJob, running: Sequence[SweepJob], look: Callable[[], Record | None]
    ) -> bool:
        """Tell that it has."""
        del candidate, running, look
        return True


class Queue:
    """The jobs of a sweep that are left, and those that run."""

    def __init__(
        self,
        jobs: Sequence[SweepJob],
        earlier: Mapping[str, JobResult],
        *,
        at_most: int,
        room: Room,
        shares: Mapping[str, tuple[Share, Wish]] | None = None,
        ended: Callable[[JobResult], None],
    ) -> None:
        """Start nothing.

        Args:
            jobs: Those that are left, in their order.
            earlier: How tries of them ended before; those with ``again`` are to run alone.
            at_most: So many run at once.
            room: Says whether one more may start.
            shares: What the jobs of each owner get, and how they go on with less.
            ended: Called with the result of each try as it ends.
        """
        again = {name for name, result in earlier.items() if result.again}
        self._waiting = collections.deque(job for job in jobs if job.name not in again)
        self._alone = collections.deque(job for job in jobs if job.name in again)
        self._tries = {name: result.tries for name, result in earlier.items()}
        self._running: dict[str, SweepJob] = {}
        self._sole = ""
        """The name of the job that runs alone, if one does."""
        self._at_most = at_most
        self._room = room
        self._shares = shares or {}
        self._ended = ended

    @property
    def wishes(self) -> tuple[Wish, ...]:
        """Return how jobs are to go on with less."""
        return tuple(wish for _, wish in self._shares.values())

    @property
    def left(self) -> int:
        """Return how many jobs have not started, or are to be tried again."""
        return len(self._waiting) + len(self._alone)

    async def next(self, look: Callable[[], Record | None]) -> Command | None:
        """Return the command to start now; ``None`` if none may. With nothing running, one always may if any is left.

        Jobs that are to be tried again come when all others have ended.
        """
        if len(self._running) >= self._at_most:
            return None
        if self._waiting:
            job = self._waiting[0]
            running = tuple(self._running.values())
            if running and not await self._room.for_one_more(job, running, look):
                return None
            self._waiting.popleft()
            return self._started(job, job.name)
        if self._alone and not self._running:
            job = self._alone.popleft()
            self._sole = job.name + AGAIN
            return self._started(job, self._sole)
        return None

    def ended(self, figures: JobFigures, *, told_out_of_memory: bool) -> JobResult:
        """Note how the job of a command from ``next`` ended. After out of memory it waits to be tried again, once.

        Args:
            figures: What it did; its name is the command's.
            told_out_of_memory: Whether its output says so.
        """
        job = self._running.pop(figures.name)
        alone = figures.name == self._sole
        if alone:
            self._sole = ""
        tries = self._tries[job.name] = self._tries.get(job.name, 0) + 1
        refused = any(process.oom is not None for process in (figures, *figures.other_processes))
        out_of_memory = figures.exit_code != 0 and (refused or told_out_of_memory)
        again = out_of_memory and not alone
        if again:
            self._alone.append(job)
        result = JobResult(
            name=job.name,
            tries=tries,
            alone=alone,
            exit_code=figures.exit_code,
            ran_out_of_memory=out_of_memory,
            again=again,
            iterations=figures.iterations,
            iterations_per_s=figures.iterations_per_s,
            waited_s=figures.waited_s,
            peak_bytes=figures.peak_bytes,
            wall_s=figures.wall_s,
            note=figures.note,
        )
        self._ended(result)
        return result

    def _started(self, job: SweepJob, name: str) -> Command:
        self._running[name] = job
        share, wish = self._shares.get(job.owner, (DEFAULT_SHARE, DEFAULT_WISH))
        return Command(name, job.argv, job.text, share, wish)
