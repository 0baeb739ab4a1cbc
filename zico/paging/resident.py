"""Which blocks are there, in the order of their migration: two lists, of blocks in which something lives and others.

::

    active     first [least recently migrated] <-> ... <-> last [just came]
    inactive   the same, of blocks in which nothing lives

All is O(1).
"""

from __future__ import annotations

from typing import Any

from zico.compiled import compiled, inlined, record_at
from zico.paging.layout import BLOCK, INACTIVE, INVALIDATE, PENDING, RESIDENT, WAS_WRITTEN, WRITTEN

_BLOCK_BYTES = BLOCK.itemsize

Record = Any


@inlined
def block_at(paging: Record, block: int) -> Record:
    """Return what is known of a block."""
    return record_at(paging.blocks_address + block * _BLOCK_BYTES, BLOCK)


@inlined
def list_of(paging: Record, state: int) -> Record:
    """Return the list that a resident block of this state is in."""
    return paging.inactive if state & INACTIVE else paging.active


@compiled
def append(paging: Record, block: int) -> None:
    """Put a block at the end of its list, as one that came now."""
    known = block_at(paging, block)
    ordered = list_of(paging, known.state)
    known.previous = ordered.last
    known.next = 0
    if ordered.last > 0:
        block_at(paging, ordered.last - 1).next = block + 1
    else:
        ordered.first = block + 1
    ordered.last = block + 1
    ordered.n += 1


@compiled
def unlink(paging: Record, block: int) -> None:
    """Take a block out of its list."""
    known = block_at(paging, block)
    ordered = list_of(paging, known.state)
    if known.previous > 0:
        block_at(paging, known.previous - 1).next = known.next
    else:
        ordered.first = known.next
    if known.next > 0:
        block_at(paging, known.next - 1).previous = known.previous
    else:
        ordered.last = known.previous
    ordered.n -= 1


@compiled
def renew(paging: Record, block: int) -> None:
    """Let a resident block count as migrated now."""
    if list_of(paging, block_at(paging, block).state).last != block + 1:
        unlink(paging, block)
        append(paging, block)


@compiled
def note_arrival(paging: Record, block: int) -> None:
    """Note that a block is there now; nothing was written to it yet."""
    known = block_at(paging, block)
    known.state &= ~PENDING
    if not known.state & RESIDENT:
        known.state = (known.state | RESIDENT) & ~WRITTEN
        append(paging, block)


@compiled
def note_departure(paging: Record, block: int) -> None:
    """Note that a block is no longer there, and keep in mind whether it was written during its stay."""
    known = block_at(paging, block)
    if known.state & RESIDENT:
        unlink(paging, block)
        was = WAS_WRITTEN if known.state & WRITTEN else 0
        known.state = (known.state & ~(RESIDENT | WRITTEN | WAS_WRITTEN)) | was


@compiled
def hold(paging: Record, block: int) -> None:
    """Let a block be no victim and not be prefetched: somebody waits for it, or uses it."""
    block_at(paging, block).state |= PENDING


@compiled
def release(paging: Record, block: int) -> None:
    """End a block's being held, as its arrival does."""
    block_at(paging, block).state &= ~PENDING


@compiled
def note_written(paging: Record, block: int) -> None:
    """Note that a resident block was written to."""
    block_at(paging, block).state |= WRITTEN


@compiled
def note_inactive(paging: Record, block: int) -> None:
    """Note that nothing lives in a block any more. Without ``INVALIDATE`` that changes nothing."""
    if paging.flags & INVALIDATE and not block_at(paging, block).state & INACTIVE:
        _set_inactive(paging, block, INACTIVE)


@compiled
def note_active(paging: Record, block: int) -> None:
    """Note that something lives in a block."""
    if block_at(paging, block).state & INACTIVE:
        _set_inactive(paging, block, 0)


@compiled
def _set_inactive(paging: Record, block: int, inactive: int) -> None:
    known = block_at(paging, block)
    is_there = known.state & RESIDENT
    if is_there:
        unlink(paging, block)
    known.state = (known.state & ~INACTIVE) | inactive
    if is_there:
        append(paging, block)


@compiled
def is_resident(paging: Record, block: int) -> bool:
    """Tell whether a block is there."""
    return (block_at(paging, block).state & RESIDENT) != 0


@compiled
def was_written(paging: Record, block: int) -> bool:
    """Tell whether a block was written to during its last stay, so that it should come back writable."""
    return (block_at(paging, block).state & WAS_WRITTEN) != 0
