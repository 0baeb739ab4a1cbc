"""Where memory has room for one more job of a sweep: ``zico fit`` on profiles of jobs of the same command.

A job whose command has no profile yet starts beside jobs that all have one, and nothing starts
beside it until it has its own. Jobs that never join the pool need none of its memory. A profile
counts on every device, with the times of the device where it was made. Jobs of others, whom a daemon
serves, too, count with the most that they have held.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zico.base.errors import ZicoError
from zico.launch.placement import Offer
from zico.launch.queue import unknown_offer
from zico.launch.sweep import AGAIN
from zico.report.files import jobs_of
from zico.report.model import owner_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zico.launch.queue import PoolNow
    from zico.launch.sweep import SweepJob
    from zico.report.model import Record
    from zico.simulator.simulate import Load

    Kind = tuple[str, ...]

WORTH = 0.25
"""What one more job that makes others wait must add to the jobs' common throughput, as a share of a job's alone."""


class RoomByFit:
    """Room as ``zico fit`` sees it, by what the jobs of a sweep have shown of themselves so far."""

    def __init__(
        self, jobs: Sequence[SweepJob], policy: str, region_bytes: Sequence[int], *, by_memory: bool = True
    ) -> None:
        """Know no profile.

        Args:
            jobs: All jobs of the sweep.
            policy: The scheduler of the run.
            region_bytes: Of each pool, by its number.
            by_memory: A job may start only where memory has room for it; else everywhere, and this
                tells only where it is slowed least.
        """
        self._kinds = {name: job.kind for job in jobs for name in (job.name, job.name + AGAIN)}
        self._policy = policy
        self._region_bytes = tuple(region_bytes)
        self._by_memory = by_memory
        self._loads: dict[Kind, tuple[Load, ...]] = {}
        """What a job of each kind holds, each of its processes, in bytes: of the one that held most."""
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
        return await asyncio.to_thread(self._offers, candidate, pools, records)

    def _offers(
        self, candidate: SweepJob, pools: Mapping[int, PoolNow], records: Mapping[int, Record | None]
    ) -> dict[int, Offer]:
        for number, pool in pools.items():
            with contextlib.suppress(ZicoError):
                self._learn(number, pool.running, records[number])
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
        kinds = [job.kind for job in pool.running if job.kind not in self._outside]
        offer = Offer(
            budget_bytes=budget_bytes,
            free_bytes=pool.free_bytes,
            jobs=len(pool.running),
            unknown=sum(job.kind not in self._loads for job in pool.running),
        )
        if any(kind not in self._loads for kind in kinds):
            return dataclasses.replace(offer, may_start=not self._by_memory)
        if candidate.kind not in self._loads:
            return offer
        left_bytes = budget_bytes - pool.others_bytes
        before = self._fit(kinds, number, left_bytes)
        after = self._fit([candidate.kind, *kinds], number, left_bytes)
        own = len(self._loads[candidate.kind])
        if before is None or after is None:
            return dataclasses.replace(offer, may_start=not self._by_memory, normalised=0.0)
        pays = not pool.running or sum(after) >= sum(before) + WORTH * own
        return dataclasses.replace(offer, may_start=pays or not self._by_memory, normalised=sum(after[:own]) / own)

    def _learn(self, number: int, running: Sequence[SweepJob], record: Record | None) -> None:
        """Take in the profiles of a pool, and which jobs have ended without being in it."""
        from zico.simulator.jobs_file import read_jobs

        if record is None:
            return
        seen = self._seen[number]
        seen |= {job.name for job in running}
        self._kinds |= {job.name: job.kind for job in running}
        if record is self._records[number]:  # older than the end of some that run no more
            return
        self._records[number] = record
        joined = {owner for member in record.names if (owner := owner_of(member, set(self._kinds)))}
        ended = seen - {job.name for job in running} - joined
        self._joined |= {self._kinds[name] for name in joined}
        self._outside = (self._outside | {self._kinds[name] for name in ended}) - self._joined
        found = jobs_of(record)
        if not found:
            return
        of_job: dict[str, list[Load]] = {}
        for load in read_jobs(msgspec.json.encode({"jobs": found}), "the record", Path()):
            if owner := owner_of(load.name, set(self._kinds)):
                of_job.setdefault(owner, []).append(load)
        for name, its in of_job.items():
            known = self._loads.get(self._kinds[name], ())
            if _peak(its) >= _peak(known):
                self._loads[self._kinds[name]] = tuple(its)

    def _fit(self, kinds: Sequence[Kind], number: int, budget_bytes: int) -> list[float] | None:
        """Return the normalised throughput of each process of such jobs together; ``None``: they do not fit."""
        from zico.scheduler.policies import policy_named
        from zico.simulator.fit import Answer, fit
        from zico.simulator.jobs_file import in_regions

        region_bytes = self._region_bytes[number]
        loads = in_regions([load for kind in kinds for load in self._loads[kind]], region_bytes, whole=True)
        if not loads:
            return []
        if budget_bytes < region_bytes:
            return None
        named = [dataclasses.replace(load, name=str(place)) for place, load in enumerate(loads)]
        found = fit(named, budget_bytes // region_bytes, policy_named(self._policy), region_bytes)
        return None if found.answer is Answer.NO else [job.normalised for job in found.jobs]


def _peak(loads: Sequence[Load]) -> int:
    return sum(load.profile.peak for load in loads)
