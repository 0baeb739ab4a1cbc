"""Record events into shared memory without waiting for anybody: one writer at a time, one reader.

The writer holds a lock of its own process (the heap's). The reader is another process. So recording
goes on to the last instruction of a job that is killed, and costs the job nothing but the write::

    RING | event event event ... | names
           ^tail        ^head          what is between tail and head waits to be read

Guarantees
    An event that finds the ring full is counted in ``dropped``, never waited for and never
    overwrites another.
"""

from __future__ import annotations

from zico.base.compiled import array_at, compiled, entry, inlined, keep_small, record_at, release_fence
from zico.base.libc import ticks
from zico.trace.events import EVENT, Kind
from zico.trace.profile import RING, RING_EVENTS

ALLOC = int(Kind.ALLOC)
FREE = int(Kind.FREE)
BEGIN = int(Kind.BEGIN)
OP = int(Kind.OP)
HELD = int(Kind.HELD)

_HEADER_BYTES = RING.itemsize
_MASK = RING_EVENTS - 1


@inlined
def put(ring_address: int, kind: int, tensor: int, size_bytes: int, name: int) -> None:
    """Record an event now, or count it as dropped. The caller holds the lock."""
    _put(ring_address, kind, tensor, size_bytes, name, ticks())


@compiled
def _put(ring_address: int, kind: int, tensor: int, size_bytes: int, name: int, at_ticks: int) -> None:
    keep_small()
    ring = record_at(ring_address, RING)
    head = ring.head
    if head - ring.tail >= RING_EVENTS:
        ring.dropped += 1
        return
    event = array_at(ring_address + _HEADER_BYTES, RING_EVENTS, EVENT)[head & _MASK]
    event.t_ns = at_ticks  # the reader turns ticks into nanoseconds
    event.tensor = tensor
    event.size_bytes = size_bytes
    event.name = name
    event.stream = 0
    event.kind = kind
    event.flags = 0
    release_fence()
    ring.head = head + 1


@inlined
def put_op(ring_address: int, name: int, begin_ticks: int) -> None:
    """Record an operation that began at ``begin_ticks`` and ends now. The caller holds the lock."""
    _put(ring_address, OP, 0, ticks() - begin_ticks, name, begin_ticks)


@entry()
def now_ticks() -> int:
    """Read the clock that events are stamped with."""
    return ticks()
