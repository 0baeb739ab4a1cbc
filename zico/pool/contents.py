"""Regions that nobody owns alone: what jobs on a GPU have in common (``zico.broker.frozen``) is in a place of its own.

Theory of operation
    All memory of such a pool is regions, so a content takes some. They belong to a *holder*: a place
    in the table without a process, which stands at its boundary, paused. To everybody else it is a
    job that keeps what it holds, so budget, banker and policies need know nothing more. Only the
    broker, who has no stream, takes regions for it: those that need no wait.

Guarantees (numbers as in docs/design/invariants.md)
    1, 2, 3. As for every job: regions come by ``regions.acquire``, and go by ``regions.release``.
    Nobody takes the holder for dead, since it has no number of a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import entry, inlined, keep_out_of_line
from zico.base.errors import BrokerError
from zico.pool.layout import MEMBER, NO_MORE, NOBODY, JobState, Paused, header_of, job_at
from zico.pool.mutex import lock, unlock_changed
from zico.pool.regions import HOST_SLOT, acquire, give_back_unused, release
from zico.pool.results import BEHIND, GRANTED, MUST_WAIT

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member
    from zico.pool.table import PoolTable

NAME = "frozen memory"
"""Of the place, where a table is looked at."""


class Holder:
    """The place that holds what jobs have in common; taken when it is first needed, and kept."""

    def __init__(self, table: PoolTable) -> None:
        """Hold nothing yet."""
        self._table = table
        self._member: Any = None

    def take(self, n: int) -> tuple[int, ...]:
        """Take ``n`` regions; none, where the budget has no room, a device still uses them, or no place is free."""
        if self._member is None and not self._joins():
            return ()
        given = np.zeros(n, np.int64)
        return tuple(given.tolist()) if take(self._member[0], given, n) == GRANTED else ()

    def put_back(self, regions: tuple[int, ...]) -> None:
        """Return regions that no device uses any more."""
        put_back(self._member[0], np.array(regions, np.int64), len(regions))

    def _joins(self) -> bool:
        try:
            place = self._table.join(0, NAME)
        except BrokerError:
            return False
        record = self._table.jobs[place]
        record["profiled"] = 1  # what it holds is all that it will
        record["evict"] = NO_MORE
        record["paused"] = Paused.STAYS
        record["state"] = JobState.BOUNDARY
        self._member = self._table.member.copy()
        self._member[0]["job"] = place
        return True


@entry(MEMBER, [np.int64], int)
def take(pool: Member, given: Any, n: int) -> int:  # noqa: ANN401 - an int64 array
    """Take ``n`` regions for the holder whose place the member record names; never waits.

    Args:
        pool: A member record.
        given: Gets the regions.
        n: How many.

    Returns:
        ``GRANTED``, or why not: ``MUST_WAIT``, also where free regions are behind fences.
    """
    keep_out_of_line()
    me = job_at(pool, pool.job)
    me.promised = header_of(pool).budget_total
    _keep(me, me.held + n)
    for i in range(n):
        given[i] = NOBODY
    status = acquire(pool, given, n, HOST_SLOT)
    if status == BEHIND:
        for i in range(pool.n_waits):
            pool.wait_values[pool.wait_pairs[i]] = 0
        pool.n_waits = 0
        give_back_unused(pool, given, n)
        status = MUST_WAIT
    if status != GRANTED:
        lock(pool)
        _keep(me, me.held)
        unlock_changed(pool)  # somebody may have been refused for what this has claimed meanwhile
    return status


@entry(MEMBER, [np.int64], int)
def put_back(pool: Member, given: Any, n: int) -> None:  # noqa: ANN401 - an int64 array
    """Return ``n`` regions of the holder, which no device uses any more."""
    keep_out_of_line()
    me = job_at(pool, pool.job)
    _keep(me, me.held - n)  # first: whoever the release wakes looks at it
    release(pool, given, n)


@inlined
def _keep(me: Job, regions: int) -> None:
    me.persistent = regions
    me.claim_peak = regions
    me.outgrown = 0
