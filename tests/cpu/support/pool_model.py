"""What a pool must do, in plain Python: a model of its jobs and of the answers to their requests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from cpu.support.members import job_of, make_pool
from cpu.support.scheduler_cases import Debt, some_order_works
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from zico.pool.layout import NOBODY, JobState
from zico.pool.results import GRANTED, MUST_WAIT, NEVER_FITS, NOT_SERVED

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.pool.table import PoolTable
Record = Any
INSIDE = (JobState.RUNNING, JobState.BOUNDARY, JobState.LEAVING)


@dataclasses.dataclass
class ModelJob:
    """What the model knows of one job."""

    member: PoolTable
    state: JobState = JobState.RUNNING
    held: set[int] = dataclasses.field(default_factory=set)
    levels: list[int] = dataclasses.field(default_factory=list)
    profiled: bool = False
    begun: bool = True
    progress: int = 0
    floor: int = 0
    extra: int = 0
    persistent: int = 0
    passed: int = 0
    limit: int = 0
    promised: int = 0
    threads: int = 0
    """That wait."""
    waited: bool = False
    """For long."""

    @property
    def record(self) -> Record:
        """Return the job's shared record."""
        return self.member.jobs[job_of(self.member)]

    def claim(self) -> int:
        """Return the most regions it may come to hold before its iteration ends."""
        if self.state != JobState.RUNNING or not self.profiled:
            return len(self.held)
        return self.within_limit(max(self.floor, self.expected() + self.extra))

    def cap(self, budget: int) -> int:
        """Return the most that it may hold."""
        return min(budget, self.limit or budget)

    def within_limit(self, regions: int) -> int:
        """Return so many regions, or its limit, but no fewer than it holds."""
        return max(len(self.held), min(regions, self.limit) if self.limit else regions)

    def expected(self) -> int:
        """Return what the profile says of the rest of the iteration, four bins earlier for safety's sake."""
        if self.progress > len(self.levels) - 1 + 8:
            return max(self.levels)
        return max(self.levels[min(max(self.progress - 4, 0), len(self.levels) - 1) :])

    def debt(self, more: int = 0, claim: int | None = None, *, must: bool | None = None) -> Debt:
        """Return the job as the banker sees it, with ``more`` regions."""
        inside = self.state == JobState.RUNNING and self.profiled
        claims = self.claim() if claim is None else claim
        return Debt(len(self.held) + more, claims, self.persistent, inside if must is None else must)


class NotNow(Exception):  # noqa: N818 - no error
    """The state has nothing for a step."""


def need(condition: object) -> None:
    """Leave the step out if there is nothing for it; ``assume`` would throw the whole example away."""
    if not condition:
        raise NotNow


def when_possible(step: Callable[..., None]) -> Callable[..., None]:
    """Make a rule that does nothing where ``need`` says so."""

    @functools.wraps(step)
    def tried(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the rule's own
        with contextlib.suppress(NotNow):
            step(*args, **kwargs)

    return tried


class ModelledPool(RuleBasedStateMachine):
    """A pool, and what the model says of it."""

    @initialize(n=st.integers(2, 10), claims=st.booleans(), unasked=st.booleans())
    def begin(self, n: int, claims: bool, unasked: bool) -> None:  # noqa: FBT001 - drawn
        """Make a pool."""
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(make_pool(n, claims=claims, unasked=unasked))
        self.n, self.claims, self.unasked, self.budget = n, claims, unasked, n
        self.jobs: dict[int, ModelJob] = {}
        self.ceiling = n
        self.free: list[int] = []
        """With pages."""
        self.bare = list(range(n))
        self.fence: dict[int, tuple[int, int]] = {}
        self.recoveries = 0
        self.spare = 0
        self.alone: int | None = None
        self.alone_is_fresh = False

    def teardown(self) -> None:
        """Close all mappings."""
        if hasattr(self, "stack"):
            self.stack.close()

    # -- helpers

    def _pick(self, data: st.DataObject, *states: JobState) -> tuple[int, ModelJob]:
        fit = [(number, job) for number, job in self.jobs.items() if job.state in states]
        need(fit)
        return data.draw(st.sampled_from(fit))

    def _granted(self) -> int:
        return sum(len(job.held) for job in self.jobs.values())

    def _takable(self, r: int, number: int) -> bool:
        if r not in self.free and r not in self.bare:
            return False
        owner, value = self.fence.get(r, (NOBODY, 0))
        return owner in (NOBODY, number) or value <= self.jobs[owner].passed

    def _others(self, number: int) -> list[Debt]:
        return [job.debt() for other, job in self.jobs.items() if other != number]

    def _is_safe_with(self, number: int, more: int, claim: int, *, must: bool) -> bool | None:
        """Tell whether the state is safe after a grant; ``None`` if it was unsafe without the requester already."""
        free = self.budget - self._granted()
        others = self._others(number)
        mine = self.jobs[number].debt(more, claim, must=must)
        if some_order_works(free - more, [*others, mine]):
            return True
        return False if some_order_works(free, others) else None

    def _someone_else_is_alone(self, number: int) -> bool:
        if self.alone in (None, number):
            return False
        job = self.jobs.get(self.alone)
        if job is None or job.state != JobState.RUNNING or job.profiled:
            return False
        return not job.waited if job.threads else self.alone_is_fresh

    def _expected_status(self, number: int, n: int) -> int | None:
        """Predict the answer; ``None`` where the state is unsafe already and either is right."""
        job = self.jobs[number]
        if job.state == JobState.LEAVING:
            return NOT_SERVED
        if len(job.held) + n > job.promised:
            return NEVER_FITS
        if job.limit and len(job.held) + n > job.limit:
            return MUST_WAIT
        if self._granted() + n > self.budget:
            return MUST_WAIT
        may = self._claims_allow(number, n) if self.claims else True
        if may is None:
            return None
        return GRANTED if may and sum(self._takable(r, number) for r in [*self.free, *self.bare]) >= n else MUST_WAIT

    def _claims_allow(self, number: int, n: int) -> bool | None:
        """Tell whether claims allow a grant; a request above the claim raises it, granted or not."""
        job = self.jobs[number]
        if not job.profiled:
            return not self._someone_else_is_alone(number) and self._is_safe_with(number, n, 0, must=False)
        if len(job.held) + n > job.claim():
            job.extra = len(job.held) + n - job.expected()
            return self._is_safe_with(number, n, len(job.held) + n, must=True)
        return self._is_safe_with(number, n, job.claim(), must=True)

    def _take(self, number: int, wanted: list[int]) -> list[int] | None:
        """Do what the grant should do to the free list; returns the regions, ``None`` if too few can be had."""
        result: list[int] = []
        for r in wanted:
            result.append(r if r in self.free and self._takable(r, number) else NOBODY)
            if result[-1] != NOBODY:
                self.free.remove(r)
        bare = set(self.bare)
        for i, r in enumerate(result):
            if r == NOBODY:
                first = next((f for f in [*self.free, *self.bare] if self._takable(f, number)), None)
                if first is None:
                    self.free += [r for r in result if r != NOBODY and r not in bare]
                    self.bare += [r for r in result if r in bare]
                    return None
                (self.bare if first in bare else self.free).remove(first)
                result[i] = first
        return result
