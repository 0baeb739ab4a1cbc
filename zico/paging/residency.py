"""Which blocks are there, which are expected and when: lists, so that all choices are O(1).

A block is in at most one list. Resident blocks that nobody expects lie in the order of their
migration or of their last expected use, in one of three lists; expected ones, resident or absent,
lie by the instance that is *due* first::

    idle       inactive: nothing lives in them      clean (without CLEAN: all others)      dirty
    resident   due now | now + 1 | now + 2 | ...
    absent     due now | now + 1 | now + 2 | ...

Without ``PREEVICT`` resident blocks are idle, whatever is expected: all go in the order of their
migration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, inlined, record_at
from zico.paging.layout import (
    ABSENT,
    BLOCK,
    CLEAN,
    DIRTY,
    HELD,
    IDLE,
    IDLE_DIRTY,
    IDLE_INACTIVE,
    INACTIVE,
    INVALIDATE,
    LIST,
    PREEVICT,
    RESIDENT,
    SPAN,
    WAS_WRITTEN,
    WORD_SHIFT,
    WORDS,
    WRITTEN,
)

if TYPE_CHECKING:
    from zico.paging.layout import Block, BlockList, PagingRecord

_BLOCK_BYTES = BLOCK.itemsize
_LIST_BYTES = LIST.itemsize
_WORD = 1 << WORD_SHIFT
_NO_LIST = -1


@inlined
def block_at(paging: PagingRecord, block: int) -> Block:
    """Return what is known of a block."""
    return record_at(paging.blocks_address + block * _BLOCK_BYTES, BLOCK)


@inlined
def list_at(paging: PagingRecord, number: int) -> BlockList:
    """Return a list by its number."""
    return record_at(paging.lists_address + number * _LIST_BYTES, LIST)


@inlined
def list_due(instance: int) -> int:
    """Return the number of the list of resident blocks that are due at an instance."""
    return instance & (SPAN - 1)


# -- lists -----------------------------------------------------------------------------------------


@compiled
def _list_of(paging: PagingRecord, known: Block) -> int:
    """Return the list that a block belongs to, or ``_NO_LIST``."""
    state = known.state
    if not state & RESIDENT:
        return ABSENT + list_due(known.due) if known.due > 0 and not state & HELD else _NO_LIST
    if known.due > 0 and paging.flags & PREEVICT:
        return list_due(known.due)
    if state & INACTIVE:
        return IDLE_INACTIVE
    return IDLE_DIRTY if state & DIRTY and paging.flags & CLEAN else IDLE


@compiled
def _append(paging: PagingRecord, block: int) -> None:
    """Put a block at the end of its list, if it belongs to one."""
    known = block_at(paging, block)
    number = _list_of(paging, known)
    if number == _NO_LIST:
        return
    ordered = list_at(paging, number)
    known.previous = ordered.last
    known.next = 0
    if ordered.last > 0:
        block_at(paging, ordered.last - 1).next = block + 1
    else:
        ordered.first = block + 1
    ordered.last = block + 1
    ordered.n += 1
    if number < ABSENT:
        paging.furthest = max(paging.furthest, known.due)
    elif number < IDLE_INACTIVE:
        paging.nearest = min(paging.nearest, known.due)


@compiled
def _unlink(paging: PagingRecord, block: int) -> None:
    """Take a block out of its list, if it is in one."""
    known = block_at(paging, block)
    number = _list_of(paging, known)
    if number == _NO_LIST:
        return
    ordered = list_at(paging, number)
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
def renew(paging: PagingRecord, block: int) -> None:
    """Put a block at the end of its list."""
    _unlink(paging, block)
    _append(paging, block)


@compiled
def _change(paging: PagingRecord, block: int, without: int, by: int) -> None:
    """Take bits off a block's state and add others. It keeps its place unless it comes into another list."""
    known = block_at(paging, block)
    before, state = known.state, (known.state & ~without) | by
    number = _list_of(paging, known)
    known.state = state
    if _list_of(paging, known) != number:
        known.state = before
        _unlink(paging, block)
        known.state = state
        if 0 < known.due < paging.now:  # it was not in a list by when it is due, and that is over
            known.due = _next_due(paging, known)
        _append(paging, block)


# -- what happens to blocks ------------------------------------------------------------------------


@compiled
def note_arrival(paging: PagingRecord, block: int) -> None:
    """Note that a block is there now, clean, and not held any more, unless it is kept."""
    held = HELD if is_kept(paging, block) else 0
    if block_at(paging, block).state & RESIDENT:
        _change(paging, block, HELD, held)
    else:
        _change(paging, block, HELD | DIRTY | WRITTEN, RESIDENT | held)


@compiled
def note_departure(paging: PagingRecord, block: int) -> None:
    """Note that a block is no longer there, and keep in mind whether it was written during its stay."""
    state = block_at(paging, block).state
    if state & RESIDENT:
        was = WAS_WRITTEN if state & WRITTEN else 0
        kept = HELD if is_kept(paging, block) else 0
        _change(paging, block, RESIDENT | DIRTY | WRITTEN | WAS_WRITTEN | kept, was)


@compiled
def hold(paging: PagingRecord, block: int) -> None:
    """Let a block be no victim and not be prefetched: somebody waits for it, or uses it."""
    _change(paging, block, 0, HELD)


@compiled
def release(paging: PagingRecord, block: int) -> None:
    """End a block's being held, as its arrival does."""
    kept = block_at(paging, block).state & RESIDENT != 0 and is_kept(paging, block)
    _change(paging, block, HELD, HELD if kept else 0)


@inlined
def is_kept(paging: PagingRecord, block: int) -> bool:
    """Tell whether a block stays once it is there."""
    return paging.kept_from <= block < paging.kept_to


@compiled
def keep(paging: PagingRecord, first: int, after: int) -> None:
    """Let those of some blocks that are there be no victims, and from now on also those that come; no others.

    Somebody else may still choose one of them in which nothing lives (``choose_empty``).
    """
    before_from, before_to = paging.kept_from, paging.kept_to
    paging.kept_from, paging.kept_to = first, after
    for block in range(before_from, before_to):
        release(paging, block)
    for block in range(first, after):
        release(paging, block)


@compiled
def note_written(paging: PagingRecord, block: int) -> None:
    """Note that a resident block was written to."""
    _change(paging, block, 0, DIRTY | WRITTEN)


@compiled
def note_cleaned(paging: PagingRecord, block: int) -> None:
    """Note that a resident block was copied out, and nothing was written to it since the copy began."""
    _change(paging, block, DIRTY, 0)


@compiled
def note_inactive(paging: PagingRecord, block: int) -> None:
    """Note that nothing lives in a block any more. Without ``INVALIDATE`` that changes nothing."""
    if paging.flags & INVALIDATE:
        _change(paging, block, 0, INACTIVE)


@compiled
def note_active(paging: PagingRecord, block: int) -> None:
    """Note that something lives in a block."""
    _change(paging, block, INACTIVE, 0)


@compiled
def was_written(paging: PagingRecord, block: int) -> bool:
    """Tell whether a block was written to during its last stay, or came writable, so that nobody knows."""
    return (block_at(paging, block).state & WAS_WRITTEN) != 0


# -- when blocks are expected ----------------------------------------------------------------------


@compiled
def expect(paging: PagingRecord, block: int, instance: int) -> None:
    """Note that an instance, the one that runs or one of the next ``MOST_DEGREE``, is expected to touch a block."""
    known = block_at(paging, block)
    _forget_past(known, paging.now)
    known.dues[(instance >> WORD_SHIFT) & (WORDS - 1)] |= 1 << (instance & (_WORD - 1))
    if known.due < paging.now or instance < known.due:
        _set_due(paging, block, _next_due(paging, known))


@compiled
def end_instance(paging: PagingRecord, instance: int) -> None:
    """Note that an instance is over: what was due then is due at its next one, or idle as what came last."""
    for number in (list_due(instance), ABSENT + list_due(instance)):
        ordered = list_at(paging, number)
        while ordered.first > 0:
            block = int(ordered.first) - 1
            _set_due(paging, block, _next_due(paging, block_at(paging, block)))


@compiled
def is_expected(paging: PagingRecord, block: int) -> bool:
    """Tell whether the instance that runs, or one up to ``degree`` ahead, is expected to touch a block."""
    known = block_at(paging, block)
    if 0 < known.due < paging.now:  # it was not in a list by when it is due
        _set_due(paging, block, _next_due(paging, known))
    return known.due > 0


@compiled
def _set_due(paging: PagingRecord, block: int, due: int) -> None:
    _unlink(paging, block)
    block_at(paging, block).due = due
    _append(paging, block)


@compiled
def _forget_past(known: Block, now: int) -> None:
    """Clear the bits of instances that are over."""
    if now - known.cleared >= SPAN:
        known.dues[:] = 0
        known.cleared = now
    while known.cleared < now:
        word = (known.cleared >> WORD_SHIFT) & (WORDS - 1)
        if known.dues[word] == 0:
            known.cleared = min(now, ((known.cleared >> WORD_SHIFT) + 1) << WORD_SHIFT)
        else:
            known.dues[word] &= ~(1 << (known.cleared & (_WORD - 1)))
            known.cleared += 1


@compiled
def _next_due(paging: PagingRecord, known: Block) -> int:
    """Return the first instance from now on that is expected to touch a block, 0 if none is."""
    _forget_past(known, paging.now)
    first = paging.now >> WORD_SHIFT
    for i in range(first, first + WORDS + 1):
        word = known.dues[i & (WORDS - 1)]
        if i == first:
            word &= -(1 << (paging.now & (_WORD - 1)))
        if word != 0:
            bit = 0
            while not word >> bit & 1:
                bit += 1
            return int((i << WORD_SHIFT) + bit)
    return 0
