"""Which job of a sweep starts next, and on which device: the order, at most so many at once, alone after out of memory.

What each device's pool offers a job is asked of whoever made the queue (``Room``): here nothing is
known of profiles.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from typing import TYPE_CHECKING, Protocol

import msgspec

from zico.base.decoding import fields_for
from zico.launch.jobs import Command, Stream
from zico.launch.placement import Offer, choose, largest
from zico.launch.sweep import AGAIN, SweepJob
from zico.launch.sweep_file import JobResult
from zico.report.model import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zico.broker.protocol.messages import JobReport
    from zico.broker.saving import Wish
    from zico.report.model import JobFigures, Record

_OUT_OF_MEMORY = re.compile(
    rb"\bOutOfMemoryError\b|\bCUDA out of memory\b|\bCUDA_ERROR_OUT_OF_MEMORY\b|\bcudaErrorMemoryAllocation\b"
    rb"|\bResourceExhaustedError\b|\bRESOURCE_EXHAUSTED\b|\bOOM when allocating\b"
    rb"|\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b|\bMemoryError\b|\bstd::bad_alloc\b"
)
"""PyTorch, TensorFlow, JAX, CuPy, NumPy and C++ say it so in a failed process's last lines."""


def tells_out_of_memory(stream: Stream, lines: Iterable[bytes]) -> bool:
    """Tell whether a job's lines say that memory was out; only what goes to standard error counts."""
    return stream is Stream.STDERR and any(_OUT_OF_MEMORY.search(line) for line in lines)


@dataclasses.dataclass(frozen=True)
class PoolNow:
    """One device's pool at this moment."""

    budget_bytes: int
    free_bytes: int
    """Of the budget, beside the peaks of the jobs that are there."""
    look: Callable[[], Record | None]
    """Returns the pool's record now; ``None`` if the broker does not answer."""
    running: tuple[SweepJob, ...] = ()
    """The queue's jobs that run there, by their names in the pool."""
    others_bytes: int = 0
    """The most that each job of others held that is there, added up: a daemon serves others, too."""
    taken: frozenset[str] = frozenset()
    """Names of the jobs of others."""
    members: Callable[[], Sequence[JobReport]] = tuple
    """Returns the processes of the queue's jobs that are there now; asks the broker."""


class Room(Protocol):
    """Whoever knows which pools have room for one more job."""

    async def offers(self, candidate: SweepJob, pools: Mapping[int, PoolNow]) -> Mapping[int, Offer]:
        """Return what each pool offers ``candidate``; a pool where nothing runs lets it start.

        Args:
            candidate: The next job.
            pools: All that are to be had.
        """

    def ended(self, job: SweepJob, number: int, figures: JobFigures) -> None:
        """Take in what a job did that has ended in the pool of that number."""


class Unlimited:
    """Room without asking: only the number of jobs counts."""

    async def offers(self, candidate: SweepJob, pools: Mapping[int, PoolNow]) -> Mapping[int, Offer]:
        """Return that each pool has room; nobody's needs are known."""
        del candidate
        return {number: unknown_offer(pool) for number, pool in pools.items()}

    def ended(self, job: SweepJob, number: int, figures: JobFigures) -> None:
        """Do nothing."""


def unknown_offer(pool: PoolNow) -> Offer:
    """Return what a pool offers a job of which nothing is known, nor of those that run."""
    return Offer(pool.budget_bytes, pool.free_bytes, jobs=len(pool.running), unknown=len(pool.running))


class Queue:
    """The jobs of a sweep that are left, and those that run."""

    def __init__(
        self,
        jobs: Sequence[SweepJob],
        earlier: Mapping[str, JobResult],
        *,
        at_most: int,
        room: Room,
        owners: Mapping[str, Command] | None = None,
        ended: Callable[[JobResult], None],
    ) -> None:
        """Start nothing.

        Args:
            jobs: Those that are left, in their order.
            earlier: How tries of them ended before; those with ``again`` are to run alone.
            at_most: So many run at once.
            room: Says whether one more may start.
            owners: What the jobs of each owner get, and how they go on with less.
            ended: Called with the result of each try as it ends.
        """
        again = {name for name, result in earlier.items() if result.again}
        self._waiting = collections.deque(job for job in jobs if job.name not in again)
        self._alone = collections.deque(job for job in jobs if job.name in again)
        self._tries = {name: result.tries for name, result in earlier.items()}
        self._running: dict[str, tuple[SweepJob, int]] = {}
        """By the name in the pool: the job, and the number of its pool."""
        self._sole = ""
        """The name of the job that runs alone, if one does."""
        self._names = {job.name for job in jobs}
        self._at_most = at_most
        self._room = room
        self._owners = owners or {}
        self._ended = ended

    @property
    def wishes(self) -> tuple[Wish, ...]:
        """Return how jobs are to go on with less."""
        return tuple(owner.wish for owner in self._owners.values())

    @property
    def left(self) -> int:
        """Return how many jobs have not started, or are to be tried again."""
        return len(self._waiting) + len(self._alone)

    async def next(self, pools: Mapping[int, PoolNow]) -> tuple[Command, int] | None:
        """Return the command to start now and the number of its pool; ``None`` if none may start.

        With nothing running, one always may if any is left. Jobs that are to be tried again come
        when all others have ended, in the largest pool.

        Args:
            pools: Those that are to be had, by their numbers; what the queue runs there is not in
                them.
        """
        if len(self._running) >= self._at_most:
            return None
        if self._waiting:
            job = self._waiting[0]
            offers = await self._offers(job, pools)
            number = choose(offers, self._limits(job, pools))
            if number is None and not self._running:
                number = largest(offers)
            if number is None:
                return None
            self._waiting.popleft()
            return self._started(job, self._free(job.name, pools[number].taken), number), number
        if self._alone and not self._running:
            number = largest({number: unknown_offer(pool) for number, pool in pools.items()})
            if number is None:
                return None
            job = self._alone.popleft()
            self._sole = self._free(job.name + AGAIN, pools[number].taken)
            return self._started(job, self._sole, number), number
        return None

    async def _offers(self, job: SweepJob, pools: Mapping[int, PoolNow]) -> Mapping[int, Offer]:
        """Return what the pools offer a job; the only pool is not asked while nothing runs in it."""
        on: dict[int, list[SweepJob]] = {number: [] for number in pools}
        for name, (one, number) in self._running.items():
            if number in on:
                on[number].append(msgspec.structs.replace(one, name=name))
        now = {number: dataclasses.replace(pool, running=tuple(on[number])) for number, pool in pools.items()}
        if len(pools) == 1 and not self._running:
            return {number: unknown_offer(pool) for number, pool in now.items()}
        return await self._room.offers(job, now)

    def _limits(self, job: SweepJob, pools: Mapping[int, PoolNow]) -> dict[int, int]:
        owner = self._owners.get(job.owner)
        return {number: owner.wish_on(number).limit_bytes for number in pools} if owner is not None else {}

    def ended(self, figures: JobFigures, *, told_out_of_memory: bool) -> JobResult:
        """Note how the job of a command from ``next`` ended. After out of memory it waits to be tried again, once.

        Args:
            figures: What it did; its name is the command's.
            told_out_of_memory: Whether its output says so.
        """
        job, number = self._running.pop(figures.name)
        self._room.ended(job, number, figures)
        alone = figures.name == self._sole
        if alone:
            self._sole = ""
        tries = self._tries[job.name] = self._tries.get(job.name, 0) + 1
        refused = any(process.oom is not None for process in (figures, *figures.other_processes))
        out_of_memory = figures.exit_code != 0 and (refused or told_out_of_memory)
        again = out_of_memory and not alone
        if again:
            self._alone.append(job)
        tried = {"name": job.name, "tries": tries, "alone": alone, "ran_out_of_memory": out_of_memory, "again": again}
        result = JobResult(**fields_for(JobResult, figures) | tried)
        self._ended(result)
        return result

    def _free(self, name: str, taken: frozenset[str]) -> str:
        """Return a name that nobody has in the pool, and no job of the sweep: where one is taken, it gets a number."""
        if all(owner_of(other, {name}) is None for other in taken):
            return name
        return next(
            found
            for n in itertools.count(2)
            if (found := f"{name}-{n}") not in self._names and all(owner_of(other, {found}) is None for other in taken)
        )

    def _started(self, job: SweepJob, name: str, number: int) -> Command:
        self._running[name] = job, number
        owner = self._owners.get(job.owner, Command("", (), ""))
        return dataclasses.replace(owner, name=name, argv=job.argv, text=job.text)
