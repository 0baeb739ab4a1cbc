"""Payloads in a stack of tiers, from compiled code: put, get, drop.

Guarantees
    ``put`` leaves the source as it is, whatever happens. A ticket is given only when all of the payload is there.
    A payload lies in one tier: the first of the stack that has room for all of it.

Known limitations
    One ``put`` and one ``get`` at a time per process and stack, each by any thread; ``drop`` by any number.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import compiled, entry, inlined, monotonic_ns, record_at
from zico.driver.mapping import address_of
from zico.tiers import chains
from zico.tiers.chains import shared_of
from zico.tiers.compressing import compress_in, compress_out
from zico.tiers.copying import copy_in, copy_out
from zico.tiers.layout import COMPRESSED, END, FAILED, FULL, MEMORY, STACK, STORE, TIER_BITS, TIER_MASK
from zico.tiers.rates import IN, OUT, note

if TYPE_CHECKING:
    from zico.tiers.layout import StackRecord, StoreRecord

__all__ = ["FAILED", "FULL", "STACK", "drop", "get", "put", "where"]

_TIERS = STACK.fields["tiers"][1]
_STORE_BYTES = STORE.itemsize
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)

Array = Any


@inlined
def tier_of(stack: StackRecord, tier: int) -> StoreRecord:
    """Return this process's way to a tier of the stack."""
    return record_at(address_of(stack) + _TIERS + tier * _STORE_BYTES, STORE)


@entry(STACK, int, int)
def put(stack: StackRecord, address: int, size_bytes: int) -> int:
    """Copy memory to the first tier that has room.

    Args:
        stack: A ``STACK`` record of this process.
        address: Where the memory is; nobody may write to it meanwhile. Multiples of 4096 save files a copy.
        size_bytes: How much, at least 1.

    Returns:
        The payload's ticket, 0 or more; ``FULL``; ``FAILED`` if a tier that had room could not be written to. Without
        a ticket nothing is kept.
    """
    without = FULL
    for tier in range(stack.n_tiers):
        ticket = put_into(stack, tier, address, size_bytes)
        if ticket >= 0:
            return ticket
        without = min(without, ticket)
    return without


@entry(STACK, int, int, int)
def put_into(stack: StackRecord, tier: int, address: int, size_bytes: int) -> int:
    """Copy memory to one tier, as ``put`` does."""
    store = tier_of(stack, tier)
    shared = shared_of(store)
    start = monotonic_ns()
    if shared.kind == COMPRESSED:
        first, status = compress_out(store, address, size_bytes, int(tier == stack.n_tiers - 1))
    else:
        first, status = _copy_out(store, address, size_bytes)
    if first != FULL:
        end = monotonic_ns()
        note(shared, OUT, size_bytes, end - start)
        chains.trim_a_little(store, end)
        return (first << TIER_BITS) | tier
    if status == 0:
        return FULL
    shared.error = status
    for no_space in _NO_SPACE:
        if status == no_space:
            shared.refused += 1
            return FULL
    return FAILED


@compiled
def _copy_out(store: StoreRecord, address: int, size_bytes: int) -> tuple[int, int]:
    first = chains.take(store, chains.blocks_for(store, size_bytes))
    status = 0 if first == FULL else copy_out(store, first, address, size_bytes)
    if status != 0:
        chains.free(store, first)
        first = FULL
    return first, status


@entry(STACK, int, int, int)
def get(stack: StackRecord, ticket: int, address: int, size_bytes: int) -> int:
    """Copy a payload to memory; it stays where it is. Returns 0, or an errno: then the memory holds anything."""
    store = tier_of(stack, ticket & TIER_MASK)
    start = monotonic_ns()
    if shared_of(store).kind == COMPRESSED:
        status = compress_in(store, ticket >> TIER_BITS, address, size_bytes)
    else:
        status = copy_in(store, ticket >> TIER_BITS, address, size_bytes)
    if status == 0:
        note(shared_of(store), IN, size_bytes, monotonic_ns() - start)
    else:
        shared_of(store).error = status
    return status


@entry(STACK, int)
def drop(stack: StackRecord, ticket: int) -> None:
    """Forget a payload. Forget its ticket before: of a payload whose dropper has died nothing can be read."""
    chains.free(tier_of(stack, ticket & TIER_MASK), ticket >> TIER_BITS)


@entry(STACK, int)
def where(stack: StackRecord, ticket: int) -> int:
    """Return the address at which all of a payload can be read without a copy, or 0: it must be got."""
    store = tier_of(stack, ticket & TIER_MASK)
    first = ticket >> TIER_BITS
    i = first
    following = chains.next_of(chains.words_of(store)[i])
    while following == i + 1:
        i = following
        following = chains.next_of(chains.words_of(store)[i])
    beside = shared_of(store).kind == MEMORY and following == END
    return store.map_address + first * shared_of(store).block_bytes if beside else 0


@entry(STACK, [np.int64])
def keep_only(stack: StackRecord, tickets: Array) -> int:
    """Free all blocks that no payload of these tickets needs; returns how many. Nobody else may use the stack."""
    lost = 0
    for tier in range(stack.n_tiers):
        lost += chains.keep_only(tier_of(stack, tier), tier, tickets)
    return lost


@entry(STACK)
def trim(stack: StackRecord) -> int:
    """Give physical memory back that no payload has needed since the last call, at once; returns the bytes.

    ``put`` does so bit by bit with what ten seconds have not needed. This is for who puts nothing any more.
    """
    given = 0
    for tier in range(stack.n_tiers):
        given += chains.trim(tier_of(stack, tier))
    return given
