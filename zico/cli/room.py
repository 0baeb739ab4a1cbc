"""Where memory has room for one more job of a sweep: ``zico fit`` on profiles of jobs of the same command.

A job whose command has no profile yet starts beside jobs that all have one, and nothing starts
beside it until it has its own. A job may end without one, or have none after ``PATIENCE_S``. Then
jobs of its command count with the most that one has held so far. Jobs that never
join the pool need none of its memory. A profile counts on every device, with the times of the
device where it was made. It counts for jobs that get the same share of the processors: with another
one, an iteration takes another time. Jobs of others, whom a daemon serves, too, count with the most
that they have held.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from zico.base.errors import ZicoError
from zico.base.units import format_bytes
from zico.launch.placement import Offer
from zico.launch.queue import unknown_offer
from zico.launch.sweep import AGAIN
from zico.report.files import jobs_of
from zico.report.model import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zico.launch.queue import PoolNow
    from zico.launch.sweep import SweepJob
    from zico.report.model import JobFigures, Record
    from zico.scheduler.simulate import Load
    from zico.scheduler.state import Profile

    Kind = tuple[tuple[str, ...], float]
    """The words of a command that jobs have in common, and their share of the processors, 1: all."""

_NS_A_SECOND = 1e9
PATIENCE_S = 120.0
"""A job's profile is waited for so long after its start."""
WORTH = 0.125
"""One more job that makes others wait must add so much to the common throughput, as a share of a job's alone."""


class RoomByFit:
    """Room as ``zico fit`` sees it, by what the jobs of a sweep have shown of themselves so far."""

    def __init__(
        self,
        jobs: Sequence[SweepJob],
        policy: str,
        region_bytes: Sequence[int],
        *,
        compute: Mapping[str, float] | None = None,
        by_memory: bool = True,
        tell: Callable[[str], None] = lambda _text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know no profile.

        Args:
            jobs: All jobs of the sweep.
            policy: The scheduler of the run.
            region_bytes: Of each pool, by its number.
            compute: By the names of their owners, the share of the processors that jobs get; 1 is all.
            by_memory: A job may start only where memory has room for it; else everywhere, and this
                tells only where it is slowed least.
            tell: Gets a line where no profile is waited for any more.
            clock: Returns seconds.
        """
        self._compute = dict(compute or {})
        self._kinds = {name: self._kind_of(job) for job in jobs for name in (job.name, job.name + AGAIN)}
        self._policy = policy
        self._region_bytes = tuple(region_bytes)
        self._by_memory = by_memory
        self._tell = tell
        self._clock = clock
        self._loads: dict[Kind, tuple[Load, ...]] = {}
        """What a job of each kind holds, each of its processes, in bytes: of the one that held most."""
        self._most_bytes: collections.Counter[Kind] = collections.Counter()
        """What a job of each kind has held at most, all its processes together."""
        self._news: list[str] = []
        """Lines that are to be told."""
        self._by_peak: set[Kind] = set()
        """Those that count with it until a profile comes."""
        self._since_s: dict[tuple[int, str], float] = {}
        """When a job was first seen, by its pool and its name there."""
        self._ended: dict[Kind, tuple[int, str]] = {}
        """Pool and name of a job that has ended well, until its profile has been looked for."""
        self._outside: set[Kind] = set()
        """Whose jobs have ended without joining."""
        self._joined: set[Kind] = set()
        self._seen: list[set[str]] = [set() for _ in region_bytes]
        """Of each pool: names of jobs that have run there when asked."""
        self._records: list[Record | None] = [None for _ in region_bytes]

    async def offers(self, candidate: SweepJob, pools: Mapping[int, PoolNow]) -> Mapping[int, Offer]:
        """Return what each pool offers ``candidate``. Takes up to seconds, in a thread.

        A pool has no room where jobs run and its broker does not answer, or a profile is none that
        ``zico fit`` takes.
        """
        records = {number: pool.look() for number, pool in pools.items()}
        for number, pool in pools.items():
            self._note_peaks(number, pool)
        found = await asyncio.to_thread(self._offers, candidate, pools, records)
        while self._news:
            self._tell(self._news.pop(0))
        return found

    def ended(self, job: SweepJob, number: int, figures: JobFigures) -> None:
        """Take in what a job held; whether it has left a profile is looked for when offers are asked for."""
        if not figures.framework:
            return  # it never was in the pool
        peak_bytes = figures.peak_bytes + sum(one.peak_bytes for one in figures.other_processes)
        kind = self._kind_of(job)
        self._most_bytes[kind] = max(self._most_bytes[kind], peak_bytes)
        if figures.exit_code == 0:
            self._ended.setdefault(kind, (number, job.name))

    def _kind_of(self, job: SweepJob) -> Kind:
        """Return what a job has in common with those that need about the same memory for as long."""
        return job.kind, self._compute.get(job.owner, 1.0)

    def _note_peaks(self, number: int, pool: PoolNow) -> None:
        """Take in what the jobs in a pool have held, and since when each is there."""
        names = {job.name for job in pool.running}
        held: collections.Counter[str] = collections.Counter()
        for member in pool.members() if names else ():
            held[owner_of(member.name, names) or ""] += member.peak_bytes
        for job in pool.running:
            self._since_s.setdefault((number, job.name), self._clock())
            kind = self._kind_of(job)
            self._most_bytes[kind] = max(self._most_bytes[kind], held[job.name])

    def _offers(
        self, candidate: SweepJob, pools: Mapping[int, PoolNow], records: Mapping[int, Record | None]
    ) -> dict[int, Offer]:
        fresh = set()
        for number, pool in pools.items():
            with contextlib.suppress(ZicoError):
                if self._learn(number, pool.running, records[number]):
                    fresh.add(number)
        self._give_up(pools, fresh)
        found = {}
        for number, pool in pools.items():
            try:
                found[number] = self._offer(candidate, number, pool, records[number])
            except ZicoError:
                found[number] = self._closed(pool)
        return found

    def _closed(self, pool: PoolNow) -> Offer:
        """Return what a pool offers where nothing can be told of those that run."""
        return dataclasses.replace(unknown_offer(pool), may_start=not self._by_memory or not pool.running)

    def _offer(self, candidate: SweepJob, number: int, pool: PoolNow, record: Record | None) -> Offer:
        if record is None and pool.running:
            return self._closed(pool)
        budget_bytes = pool.budget_bytes if record is None else int(record.budget_bytes[-1])
        own_kind, all_kinds = self._kind_of(candidate), [*map(self._kind_of, pool.running)]
        kinds = [kind for kind in all_kinds if kind not in self._outside]
        offer = Offer(
            budget_bytes=budget_bytes,
            free_bytes=pool.free_bytes,
            jobs=len(pool.running),
            unknown=sum(not self._is_known(kind) for kind in all_kinds),
        )
        if not all(map(self._is_known, kinds)):
            return dataclasses.replace(offer, may_start=not self._by_memory)
        if not self._is_known(own_kind):
            return offer
        left_bytes = budget_bytes - pool.others_bytes
        before = self._fit(kinds, number, left_bytes)
        after = self._fit([own_kind, *kinds], number, left_bytes)
        its = self._loads.get(own_kind, ())
        own = len(its) or 1
        if before is None or after is None:
            return dataclasses.replace(offer, may_start=not self._by_memory, normalised=0.0)
        normalised = sum(after[:own]) / own if its else 1.0
        pays = not pool.running or sum(after) >= sum(before) + WORTH * own
        return dataclasses.replace(offer, may_start=pays or not self._by_memory, normalised=normalised)

    def _is_known(self, kind: Kind) -> bool:
        return kind in self._loads or kind in self._by_peak

    def _give_up(self, pools: Mapping[int, PoolNow], fresh: set[int]) -> None:
        """Wait for no profile of jobs that have ended without one, or have none after ``PATIENCE_S``.

        Args:
            pools: All that are to be had.
            fresh: Those whose record is younger than the last end of a job.
        """
        for kind, (number, name) in list(self._ended.items()):
            if number in fresh:
                del self._ended[kind]
                self._count_by_peak(kind, f"{name} has ended without a profile")
        now_s = self._clock()
        for number, pool in pools.items():
            for job in pool.running:
                kind = self._kind_of(job)
                if kind not in self._outside and now_s - self._since_s[number, job.name] >= PATIENCE_S:
                    self._count_by_peak(kind, f"{job.name} has no profile after {PATIENCE_S:.0f} s")

    def _count_by_peak(self, kind: Kind, why: str) -> None:
        if self._is_known(kind):
            return
        self._by_peak.add(kind)
        if self._by_memory:
            most = format_bytes(self._most_bytes[kind])
            self._news.append(f"{why}: jobs of its command count with the most that one has held, {most} so far")

    def _learn(self, number: int, running: Sequence[SweepJob], record: Record | None) -> bool:
        """Take in the profiles of a pool, and which jobs have ended without being in it.

        Returns whether the record is another one than the last time.
        """
        if record is None:
            return False
        seen = self._seen[number]
        seen |= {job.name for job in running}
        self._kinds |= {job.name: self._kind_of(job) for job in running}
        if record is self._records[number]:  # older than the end of some that run no more
            return False
        self._records[number] = record
        joined = {owner for member in record.names if (owner := owner_of(member, set(self._kinds)))}
        ended = seen - {job.name for job in running} - joined
        self._joined |= {self._kinds[name] for name in joined}
        self._outside = (self._outside | {self._kinds[name] for name in ended}) - self._joined
        found = jobs_of(record)
        if not found:
            return True
        of_job: dict[str, list[Load]] = {}
        for load in map(_load, found):
            if owner := owner_of(load.name, set(self._kinds)):
                of_job.setdefault(owner, []).append(load)
        for name, its in of_job.items():
            known = self._loads.get(self._kinds[name], ())
            if _peak(its) >= _peak(known):
                self._loads[self._kinds[name]] = tuple(its)
        return True

    def _fit(self, kinds: Sequence[Kind], number: int, budget_bytes: int) -> list[float] | None:
        """Return the normalised throughput of each process of such jobs together; ``None``: they do not fit.

        Jobs without a profile come last, with one process each that is never slowed.
        """
        from zico.scheduler.curves import in_regions
        from zico.scheduler.fit import Answer, fit
        from zico.scheduler.policies import policy_named

        region_bytes = self._region_bytes[number]
        by_peak = [kind for kind in kinds if kind not in self._loads]
        budget_bytes -= sum(self._most_bytes[kind] for kind in by_peak)
        if budget_bytes < 0 and by_peak:
            return None
        profiled = [load for kind in kinds for load in self._loads.get(kind, ())]
        loads = in_regions(profiled, region_bytes, whole=True)
        if not loads:
            return [1.0] * len(by_peak)
        if budget_bytes < region_bytes:
            return None
        named = [dataclasses.replace(load, name=str(place)) for place, load in enumerate(loads)]
        found = fit(named, budget_bytes // region_bytes, policy_named(self._policy), region_bytes)
        if found.answer is Answer.NO:
            return None
        return [*(job.normalised for job in found.jobs), *(1.0 for _ in by_peak)]


def _load(job: Mapping[str, Any]) -> Load:
    """Return what a job of a record does, in bytes.

    Raises:
        ProblemError: Its curve is none.
    """
    from zico.scheduler.simulate import Load, LoadPhase

    phases = tuple(LoadPhase(phase["after"], *_shape(phase)) for phase in job.get("phases", ()))
    return Load(job["name"], *_shape(job), phases=phases)


def _shape(told: Mapping[str, Any]) -> tuple[Profile, int]:
    from zico.scheduler.curves import profile_of_points

    t_s, held = [t for t, _ in told["curve"]], [level for _, level in told["curve"]]
    duration_ns, persistent = round(told["iteration_s"] * _NS_A_SECOND), told["persistent_bytes"]
    return profile_of_points(t_s, held, duration_ns, persistent), persistent


def _peak(loads: Sequence[Load]) -> int:
    from zico.scheduler.simulate import peak_of

    return sum(map(peak_of, loads))
