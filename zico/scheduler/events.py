"""The simulator's queue of steps that end: a binary heap, by time and then by order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import array_at, inlined, record_at
from zico.scheduler.tenants import EVENT

if TYPE_CHECKING:
    from zico.records import Records
    from zico.scheduler.tenants import RunRecord, StepEnd


@inlined
def _queue(run: RunRecord, n: int) -> Records[StepEnd]:
    return array_at(run.queue_address, n, EVENT)


@inlined
def first_at(run: RunRecord) -> int:
    """Return when, on the work clock, the next step ends; there must be one."""
    return record_at(run.queue_address, EVENT).at


@inlined
def _is_before(one: StepEnd, at: int, order: int) -> bool:
    return one.at < at or (one.at == at and one.order < order)


@inlined
def _put(queue: Records[StepEnd], i: int, at: int, order: int, tenant: int) -> None:
    event = queue[i]
    event.at = at
    event.order = order
    event.tenant = tenant


@inlined
def push(run: RunRecord, at: int, tenant: int) -> None:
    """Add a step that ends at a time."""
    run.order += 1
    run.n_queued += 1
    queue = _queue(run, run.n_queued)
    i = run.n_queued - 1
    while i > 0:
        parent = queue[(i - 1) >> 1]
        if _is_before(parent, at, run.order):
            break
        _put(queue, i, parent.at, parent.order, parent.tenant)
        i = (i - 1) >> 1
    _put(queue, i, at, run.order, tenant)


@inlined
def pop(run: RunRecord) -> int:
    """Take the first out; returns its tenant."""
    n = run.n_queued - 1
    run.n_queued = n
    queue = _queue(run, n + 1)
    tenant = queue[0].tenant
    at, order, last = queue[n].at, queue[n].order, queue[n].tenant
    i = 0
    while 2 * i + 1 < n:
        child = 2 * i + 1
        if child + 1 < n and _is_before(queue[child + 1], queue[child].at, queue[child].order):
            child += 1
        if not _is_before(queue[child], at, order):
            break
        _put(queue, i, queue[child].at, queue[child].order, queue[child].tenant)
        i = child
    _put(queue, i, at, order, last)
    return tenant
