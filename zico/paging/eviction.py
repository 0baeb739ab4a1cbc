"""Who goes: what nobody lives in, then what was migrated longest ago and is not expected.

Theory of operation
    A list is looked through from its first block, the least recently migrated. What is expected or held goes to the
    list's end: it is about to be touched. A list of which all are so is not looked through again before another
    execution begins or it becomes shorter or longer.

Guarantees
    * ``choose_victim_ahead`` returns no block that is expected, and nothing without ``PREEVICT``.
    * ``choose_victim`` returns a block as long as one is there that is not held.

Source: "pre-eviction" and "invalidation" of "DeepUM" (J. Jung, J. Kim, J. Lee, ASPLOS 2023), section 5.
"""

from __future__ import annotations

from typing import Any

from zico.compiled import compiled, inlined
from zico.paging.layout import CLEAN, NONE, PENDING, PREEVICT, WRITTEN
from zico.paging.prefetch import walk
from zico.paging.resident import block_at, renew

_LOOKED_AT = 8
"""Blocks that may go, of which a clean one does."""

Record = Any


@compiled
def choose_victim(paging: Record) -> int:
    """Return the resident block that a waiting fault should take the place of, or ``NONE``. It is not removed yet."""
    block = choose_victim_ahead(paging)
    if block == NONE:
        block = _oldest(paging, paging.inactive)
    if block == NONE:
        block = _oldest(paging, paging.active)
    if block != NONE and block_at(paging, block).expected >= paging.now:
        paging.early += 1
    return block


@compiled
def choose_victim_ahead(paging: Record) -> int:
    """Return a resident block that may go before its room is needed, or ``NONE``. It is not removed yet."""
    if not paging.flags & PREEVICT:
        return NONE
    walk(paging)
    block = _unexpected(paging, paging.inactive)
    return block if block != NONE else _unexpected(paging, paging.active)


@inlined
def _is_needed(paging: Record, block: int) -> bool:
    known = block_at(paging, block)
    return (known.state & PENDING) != 0 or known.expected >= paging.now


@compiled
def _unexpected(paging: Record, ordered: Record) -> int:
    """Return the least recently migrated block that is not expected, or ``NONE``."""
    if ordered.checked == paging.now and ordered.n == ordered.checked_n:
        return NONE
    for _ in range(ordered.n):
        block = int(ordered.first) - 1
        if not _is_needed(paging, block):
            return _clean_one(paging, block) if paging.flags & CLEAN else block
        renew(paging, block)
    ordered.checked = paging.now
    ordered.checked_n = ordered.n
    return NONE


@compiled
def _clean_one(paging: Record, first: int) -> int:
    """Return a block that was not written of the few that may go from the first one on; else the first."""
    block = first
    for _ in range(_LOOKED_AT):
        known = block_at(paging, block)
        if not known.state & WRITTEN and not _is_needed(paging, block):
            return block
        if known.next == 0:
            break
        block = int(known.next) - 1
    return first


@compiled
def _oldest(paging: Record, ordered: Record) -> int:
    """Return the least recently migrated block that is not held, or ``NONE``."""
    for _ in range(ordered.n):
        block = int(ordered.first) - 1
        if not block_at(paging, block).state & PENDING:
            return block
        renew(paging, block)
    return NONE
