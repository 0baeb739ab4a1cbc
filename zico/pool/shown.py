"""What policies are shown of the jobs: by the pool's own rules, from a copy of its table.

A policy sees the ranks of a group as one job, at the place of the first. What it is told of that
job is what the pool would judge by if it were asked at that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled, entry, inlined
from zico.base.records import I8, dtype_of
from zico.pool import groups, living, regions
from zico.pool.layout import BOUNDARY, EMPTY, HEADER, MEMBER, NOBODY, RUNNING, header_of, job_at, profile_is_known
from zico.pool.rules import Debt

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.pool.layout import Member


class Shown(Debt):
    """What is shown of the job at a place; a group's debt stands at the place of its first rank."""

    first: I8  # that place
    at_boundary: I8  # 1: it is to begin when it can, and its whole group waits for that
    stays: I8  # 1: it stands at its boundary, where a pause or a gate keeps it
    awaited: I8  # 1: it stands at its boundary, and others of its group have begun


SHOWN = dtype_of(Shown)


def shown_of(header: Any, jobs: Any, now_ns: int) -> tuple[Any, int]:  # noqa: ANN401 - records, as PoolTable.snapshot's
    """Return a SHOWN record for each of these copies of jobs' records, and who keeps the others waiting or ``NOBODY``.

    That one grows in an iteration of which nothing is known.
    """
    headers, member, shown = np.array([header], HEADER), np.zeros(1, MEMBER), np.zeros(len(jobs), SHOWN)
    headers["places"] = len(jobs)
    member["header_address"], member["jobs_address"], member["job"] = headers.ctypes.data, jobs.ctypes.data, NOBODY
    return shown, int(_show(member[0], now_ns, shown))


@entry(MEMBER, int, [SHOWN])
def _show(pool: Member, now_ns: int, shown: Records[Shown]) -> int:
    _put_debts(pool, NOBODY, now_ns)
    for j in range(header_of(pool).places):
        one, job = shown[j], job_at(pool, j)
        one.first = groups.first_of(pool, j)
        one.held, one.claim, one.kept = pool.scratch[0][j], pool.scratch[1][j], pool.scratch[2][j]
        one.must_finish = pool.scratch[3][j]
        shown[one.first].most += regions.most_of(job) if job.state != EMPTY else 0
        if job.state == BOUNDARY:
            one.stays, one.awaited = groups.stays(pool, j, now_ns), groups.is_awaited(pool, j)
    for j in range(header_of(pool).places):
        if shown[j].first == j and job_at(pool, j).state != EMPTY:
            shown[j].given_up = _is_given_up(pool, j, shown[j].must_finish != 0, now_ns)
            starter = groups.starter_of(pool, j, now_ns)
            if starter != NOBODY:
                _show_next(pool, starter, now_ns, shown[j])
    alone = header_of(pool).alone_job
    return alone if alone != NOBODY and regions.grows_alone(pool, alone, now_ns) else NOBODY


@inlined
def _put_debts(pool: Member, requester: int, now_ns: int) -> int:
    """Put debts into the banker's arrays; returns the place at which the requester stands then."""
    regions.put_debts(pool, requester)
    if requester != NOBODY:
        pool.scratch[1][requester] = groups.peak_of(job_at(pool, requester))
        pool.scratch[3][requester] = profile_is_known(job_at(pool, requester))
    return groups.merge(pool, requester, now_ns) if header_of(pool).grouped == 1 else requester


@compiled
def _show_next(pool: Member, starter: int, now_ns: int, one: Shown) -> None:
    """Show what a job at its boundary comes to owe if it begins its next iteration now."""
    place = _put_debts(pool, starter, now_ns)
    one.at_boundary, one.inside_claim, one.inside_kept = 1, one.claim, one.kept
    one.yielded = pool.scratch[0][place] - one.held
    one.claim, one.kept = pool.scratch[1][place], pool.scratch[2][place]


@compiled
def _is_given_up(pool: Member, j: int, known: bool, now_ns: int) -> bool:  # noqa: FBT001 - compiled
    """Tell whether nobody is to wait for what the group of a place does inside an iteration.

    By its profile, or because it has none that holds and is stopped or idle, or does something else.
    """
    if known:
        return groups.stands_still(pool, j, now_ns)
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        gone_on = living.is_stopped(job, now_ns) or living.is_past(job, now_ns) or living.is_idle(job, now_ns)
        if (i == j or groups.are_mates(pool, i, j)) and job.state == RUNNING and gone_on:
            return True
    return False
