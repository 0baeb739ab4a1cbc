"""What a job holds that does what a trace says: its own heap, in a pool of addresses alone.

Every allocation and free of the trace goes through the heap that jobs have. So the regions held
are those of a job: before it knows its tensors, as it learns their classes, and by its plan. Nobody
touches what is allocated, so the pool may be larger than the machine.

Known limitations:
    The heap is that of jobs on the host. For another device this leaves out what the device alone
    has: memory that returns when a stream has come so far, and the contexts of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import CommandError
from zico.base.units import format_bytes
from zico.trace.events import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zico.heap.build import Heap
    from zico.trace.events import Trace

THRESHOLD_BYTES = 64 << 10
"""Smaller tensors of a job on the host are not the pool's."""
REPEATED = 9
"""Times that the last iteration of a trace comes again: until a second plan is followed."""
_SPARE_REGIONS = 64
_ALIGNMENT_BYTES = 64

Event = tuple[int, Any, int]
"""Kind, name of the tensor, bytes."""


@dataclasses.dataclass(frozen=True)
class Held:
    """The most that a job holds from its first allocation on."""

    held_bytes: int
    """Of regions."""
    live_bytes: int
    """Of tensors in them."""
    small_bytes: int
    """Of tensors that are too small for the pool of a job on the host."""


def held_by(trace: Trace, region_bytes: int, marks: Sequence[int] = ()) -> Held:
    """Return what a job holds that does what a trace says, and its last iteration again and again.

    Args:
        trace: From the program's first allocation on, with at least two marks.
        region_bytes: Size of a region.
        marks: The events before which a job would mark an iteration's end; the trace's BEGINs if
            none are given.

    Raises:
        CommandError: The job would hold more than there are addresses for.
    """
    parts = parts_of(trace, marks)
    live_bytes, small_bytes = _most_bytes(parts)
    n_regions = 4 * -(-live_bytes // region_bytes) + _SPARE_REGIONS
    with _heap(n_regions, region_bytes) as heap:
        job = _play(heap, [_large(part) for part in parts])
        return Held(int(job["peak_held"]) * region_bytes, int(job["peak_live_bytes"]), small_bytes)


# -- events ----------------------------------------------------------------------------------------


def parts_of(trace: Trace, marks: Sequence[int] = ()) -> list[list[Event]]:
    """Return the allocations and frees of a trace from mark to mark, the first part with all before its first mark."""
    events = trace.events
    at = list(marks) or np.flatnonzero(events["kind"] == Kind.BEGIN).tolist()
    return [
        [(int(one["kind"]), int(one["tensor"]), int(one["size_bytes"])) for one in part[_changes(part["kind"])]]
        for part in (events[begin:end] for begin, end in zip([0, *at], at, strict=False))
    ]


def _changes(kind: Any) -> Any:  # noqa: ANN401 - arrays
    return (kind == Kind.ALLOC) | (kind == Kind.FREE)


def again(events: Sequence[Event], turn: int) -> Iterable[Event]:
    """Yield an iteration with new tensors; what it frees of the one before is what that one has left."""
    born = [tensor for kind, tensor, _ in events if kind == Kind.ALLOC]
    freed = [tensor for kind, tensor, _ in events if kind == Kind.FREE]
    left = sorted(set(born) - set(freed))
    ended = dict(zip(sorted(set(freed) - set(born)), left, strict=True))
    for kind, tensor, size_bytes in events:
        if tensor not in ended:
            yield kind, (turn, tensor), size_bytes
        else:
            yield kind, ended[tensor] if turn == 0 else (turn - 1, ended[tensor]), size_bytes


def _repeats(events: Sequence[Event]) -> bool:
    """Tell whether an iteration leaves as many tensors as it frees of the one before."""
    born = {tensor for kind, tensor, _ in events if kind == Kind.ALLOC}
    freed = {tensor for kind, tensor, _ in events if kind == Kind.FREE}
    return len(born - freed) == len(freed - born)


def _most_bytes(parts: Sequence[Sequence[Event]]) -> tuple[int, int]:
    """Return the most bytes of tensors alive in the pool, and of those too small for it."""
    sizes: dict[int, int] = {}
    alive, most = [0, 0], [0, 0]
    for kind, tensor, size_bytes in (event for part in parts for event in part):
        if kind == Kind.ALLOC:
            sizes[tensor] = size_bytes
        change = sizes.get(tensor, 0)
        which = int(change < THRESHOLD_BYTES)
        alive[which] += change if kind == Kind.ALLOC else -change
        most[which] = max(most[which], alive[which])
    return most[0], most[1]


def _large(part: Sequence[Event]) -> list[Event]:
    return [event for event in part if event[0] == Kind.FREE or event[2] >= THRESHOLD_BYTES]


# -- the heap --------------------------------------------------------------------------------------


def _play(heap: Heap, parts: Sequence[Sequence[Event]]) -> Any:  # noqa: ANN401 - the JOB record
    """Do what the parts say, and the last one again and again; returns the job's figures."""
    from zico.heap import allocator
    from zico.heap.plan_thread import Planning

    record = heap.record[0]
    job = heap.pool.jobs[int(heap.pool.member[0]["job"])]
    addresses: dict[Any, int] = {}
    with contextlib.closing(Planning(heap)) as planning:
        last = _known(parts)
        turns = range(REPEATED if _repeats(last) else 0)
        for part in (*parts, *(again(last, turn) for turn in turns)):
            for kind, tensor, size_bytes in part:
                if kind == Kind.ALLOC:
                    addresses[tensor] = int(allocator.allocate(record, size_bytes, _ALIGNMENT_BYTES))
                    if addresses[tensor] <= 0 or int(job["spilled_bytes"]):
                        held = int(job["held"]) * heap.pool.region_bytes
                        message = f"the forecast ends where the job holds {format_bytes(held)}: try a smaller job"
                        raise CommandError(message)
                elif tensor in addresses:
                    allocator.free(record, addresses.pop(tensor))
            allocator.mark(record)
            if record["planning"]["asked"] and not record["planning"]["next_address"]:
                planning.plan_handed()
    return job.copy()


def _known(parts: Sequence[Sequence[Event]]) -> list[Event]:
    """Return the last part without frees of what no part has allocated."""
    born = {tensor for part in parts for kind, tensor, _ in part if kind == Kind.ALLOC}
    return [event for event in parts[-1] if event[1] in born]


@contextlib.contextmanager
def _heap(n_regions: int, region_bytes: int) -> Iterator[Heap]:
    """Make a pool on the host and the heap of the one job in it, none of whose pages is ever made."""
    from zico.heap.build import Heap
    from zico.heap.layout import HEAP
    from zico.pool.table import PoolTable

    with contextlib.ExitStack() as stack:
        size_bytes = n_regions * region_bytes
        pool = stack.enter_context(
            PoolTable.create(budget_bytes=size_bytes, region_bytes=region_bytes, use_claims=False, self_admit=True)
        )
        job = pool.join(os.getpid(), "forecast")
        memory_fd, table_fd, notify_fd = map(os.dup, (pool.memory_fd, pool.table_fd, pool.notify_fd))
        member = stack.enter_context(PoolTable.join_pool(memory_fd, table_fd, notify_fd, job))
        heap = stack.enter_context(contextlib.closing(Heap(member, np.zeros(1, HEAP), wait_limit_s=0.0)))
        heap.device[0]["madvise"] = ctypes.cast(_leave_pages, ctypes.c_void_p).value
        yield heap


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
def _leave_pages(_address: int, _size_bytes: int, _advice: int) -> int:
    """Stand in for ``madvise(2)``, by which a heap has pages made."""
    return 0
