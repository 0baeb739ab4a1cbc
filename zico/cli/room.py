"""Whether memory has room for one more job of a sweep: ``zico fit`` on profiles of jobs of the same command.

A job whose command has no profile yet starts beside jobs that all have one, and nothing starts
beside it until it has its own. Jobs that never join the pool need none of its memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zico.base.errors import ZicoError
from zico.launch.sweep import AGAIN
from zico.report.files import jobs_of
from zico.report.model import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zico.launch.sweep import SweepJob
    from zico.report.model import Record
    from zico.simulator.simulate import Load

    Kind = tuple[str, ...]

WORTH = 0.25
"""What one more job that makes others wait must add to the jobs' common throughput, as a share of a job's alone."""


class RoomByFit:
    """Room as ``zico fit`` sees it, by what the jobs of a sweep have shown of themselves so far."""

    def __init__(self, jobs: Sequence[SweepJob], policy: str, region_bytes: int) -> None:
        """Know no profile.

        Args:
            jobs: All jobs of the sweep.
            policy: The scheduler of the run.
            region_bytes: The pool's.
        """
        self._kinds = {name: job.kind for job in jobs for name in (job.name, job.name + AGAIN)}
        self._policy = policy
        self._region_bytes = region_bytes
        self._loads: dict[Kind, tuple[Load, ...]] = {}
        """What a job of each kind holds, each of its processes: of the one that held most."""
        self._outside: set[Kind] = set()
        """Whose jobs have ended without joining."""
        self._seen: set[str] = set()
        """Names of jobs that have run when asked."""
        self._record: Record | None = None

    async def for_one_more(
        self, candidate: SweepJob, running: Sequence[SweepJob], look: Callable[[], Record | None]
    ) -> bool:
        """Tell whether ``candidate`` may start beside those that run. Takes up to seconds, in a thread.

        False also where the broker does not answer, or a profile is none that ``zico fit`` takes.
        """
        record = look()
        if record is None:
            return False
        try:
            return await asyncio.to_thread(self._has_room, candidate, running, record)
        except ZicoError:
            return False

    def _has_room(self, candidate: SweepJob, running: Sequence[SweepJob], record: Record) -> bool:
        self._learn(running, record)
        kinds = [job.kind for job in running if job.kind not in self._outside]
        if any(kind not in self._loads for kind in kinds):
            return False
        if candidate.kind not in self._loads:
            return True
        budget = int(record.budget_bytes[-1]) // self._region_bytes
        before = self._throughput(kinds, budget)
        after = self._throughput([*kinds, candidate.kind], budget)
        if before is None or after is None:
            return False
        return after >= before + WORTH * len(self._loads[candidate.kind])

    def _learn(self, running: Sequence[SweepJob], record: Record) -> None:
        """Take in the profiles, and which jobs have ended without being in the pool."""
        from zico.simulator.jobs_file import in_regions, read_jobs

        self._seen |= {job.name for job in running}
        if record is self._record:  # older than the end of some that run no more
            return
        self._record = record
        joined = {owner for member in record.names if (owner := owner_of(member, set(self._kinds)))}
        ended = self._seen - {job.name for job in running} - joined
        self._outside = {self._kinds[name] for name in ended} - {self._kinds[name] for name in joined}
        found = jobs_of(record)
        if not found:
            return
        loads = read_jobs(msgspec.json.encode({"jobs": found}), "the record", Path())
        of_job: dict[str, list[Load]] = {}
        for load in in_regions(loads, self._region_bytes, whole=True):
            if owner := owner_of(load.name, set(self._kinds)):
                of_job.setdefault(owner, []).append(load)
        for name, its in of_job.items():
            known = self._loads.get(self._kinds[name], ())
            if _peak(its) >= _peak(known):
                self._loads[self._kinds[name]] = tuple(its)

    def _throughput(self, kinds: Sequence[Kind], budget: int) -> float | None:
        """Return the sum of normalised throughputs of jobs of these kinds together; ``None`` if they do not fit."""
        from zico.scheduler.policies import policy_named
        from zico.simulator.fit import Answer, fit

        loads = [load for kind in kinds for load in self._loads[kind]]
        if not loads:
            return 0.0
        named = [dataclasses.replace(load, name=str(number)) for number, load in enumerate(loads)]
        found = fit(named, budget, policy_named(self._policy), self._region_bytes)
        return None if found.answer is Answer.NO else sum(job.normalised for job in found.jobs)


def _peak(loads: Sequence[Load]) -> int:
    return sum(load.profile.peak for load in loads)
