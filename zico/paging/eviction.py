"""Who goes: what nothing lives in, then what was migrated longest ago and is not expected.

Guarantees
    * ``choose_victim_ahead`` returns nothing without ``PREEVICT``, and without ``FURTHEST`` no block that is expected;
      with it, at most one that is due after the block that was prefetched last.
    * ``choose_victim`` returns a block as long as one is there that is not held: with ``PREEVICT``, of those that all
      are expected, the one that is due last.

Source: "pre-eviction" and "invalidation" of "DeepUM" (J. Jung, J. Kim, J. Lee, ASPLOS 2023), section 5. That the
furthest goes is optimal: L. Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled
from zico.paging.layout import CLEAN, FURTHEST, HELD, IDLE, IDLE_DIRTY, IDLE_INACTIVE, NONE, PREEVICT
from zico.paging.prefetch import walk
from zico.paging.resident import block_at, list_at, list_due, renew

if TYPE_CHECKING:
    from zico.paging.layout import PagingRecord

_PRESSED = 1 << 16
"""Instances for which a job counts as too large after a block had to go in which something lived."""


@compiled
def choose_victim(paging: PagingRecord) -> int:
    """Return the resident block that a waiting fault should take the place of, or ``NONE``. It is not removed yet."""
    walk(paging)
    block = _idle(paging)
    if block == NONE:
        block = _furthest(paging, paging.now)
        paging.early += block != NONE
    return block


@compiled
def choose_victim_ahead(paging: PagingRecord) -> int:
    """Return a resident block that may go before its room is needed, or ``NONE``. It is not removed yet."""
    if not paging.flags & PREEVICT:
        return NONE
    walk(paging)
    block = _idle(paging)
    if block == NONE and paging.flags & FURTHEST and paging.next_due > 0:
        block = _furthest(paging, paging.next_due + 1)
    return block


@compiled
def choose_to_clean(paging: PagingRecord) -> int:
    """Return a resident block to copy out while it stays, or ``NONE``: with ``CLEAN``, what would go next but is dirty.

    Nothing is returned to a job for which no block had to go lately in which something lived.
    """
    if not paging.flags & CLEAN or paging.pressed == 0 or paging.now - paging.pressed > _PRESSED:
        return NONE
    return _oldest(paging, IDLE_DIRTY)


@compiled
def _idle(paging: PagingRecord) -> int:
    """Return the first block that is not expected: of the inactive ones, else of the clean ones, else of all."""
    block = _oldest(paging, IDLE_INACTIVE)
    if block == NONE:
        block = _oldest(paging, IDLE)
        if block == NONE:
            block = _oldest(paging, IDLE_DIRTY)
        if block != NONE:
            paging.pressed = paging.now
    return block


@compiled
def _oldest(paging: PagingRecord, number: int) -> int:
    """Return the first block of a list that is not held, or ``NONE``."""
    ordered = list_at(paging, number)
    for _ in range(ordered.n):
        block = int(ordered.first) - 1
        if not block_at(paging, block).state & HELD:
            return block
        renew(paging, block)
    return NONE


@compiled
def _furthest(paging: PagingRecord, least: int) -> int:
    """Return the block that is due last, but not before an instance; or ``NONE``."""
    at = paging.furthest
    while at >= least:
        block = _oldest(paging, list_due(at))
        if block != NONE:
            paging.pressed = paging.now
            return block
        if at == paging.furthest and list_at(paging, list_due(at)).n == 0:
            paging.furthest -= 1
        at -= 1
    return NONE
