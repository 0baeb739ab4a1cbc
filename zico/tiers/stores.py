"""Payloads in a stack of tiers, from compiled code: put, get, drop.

A tier keeps a payload as it is or compressed (``zico.tiers.compressing``). Into memory that has
pages a payload is copied through a mapping, at the speed of ``memcpy``. Into memory that has none
it is written. The kernel then neither faults for each page nor zeroes it first, which is twice as
fast. A lack of memory is an errno then instead of a signal. Files are read and written past the page
cache where they can be (``O_DIRECT``): what the cache keeps has not left the machine's memory.

Guarantees
    ``put`` leaves the source as it is, whatever happens. A ticket is given only when all of the
    payload is there. A payload lies in one tier: the first of the stack that has room for all of
    it.

Known limitations
    One ``put`` and one ``get`` at a time per stack, each by any thread; ``drop`` by any
    number.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from zico.base.compiled import call, compiled, entry, inlined, record_at
from zico.base.libc import monotonic_ns
from zico.device.mapping import address_of
from zico.tiers import chains
from zico.tiers.chains import has_pages, is_taken, next_of, read_at, shared_of, word_of, words_of, write_at
from zico.tiers.compressing import compress_in, compress_out
from zico.tiers.layout import (
    ALIGNMENT_BYTES,
    BOUNCE_BYTES,
    COMPRESSED,
    END,
    FAILED,
    FULL,
    IN,
    MEMORY,
    OUT,
    STACK,
    STORE,
    TIER_BITS,
    TIER_MASK,
    note,
)

if TYPE_CHECKING:
    from zico.tiers.layout import StackRecord, StoreRecord


# -- tiers that are copied to ----------------------------------------------------------------------


_EINVAL = errno.EINVAL


@compiled
def copy_out(store: StoreRecord, first: int, address: int, size_bytes: int) -> int:
    """Copy memory into a chain of enough blocks; returns 0 or an errno."""
    block_bytes = shared_of(store).block_bytes
    done = 0
    i = first
    while done < size_bytes:
        n, following = _run(store, i)
        length = min(n * block_bytes, size_bytes - done)
        if store.map_address == 0:
            status = _write_file(store, address + done, length, i * block_bytes)
        else:
            status = _fill_memory(store, i, n, address + done, length)
        if status != 0:
            return status
        done += length
        i = following
    return 0


@compiled
def copy_in(store: StoreRecord, first: int, address: int, size_bytes: int) -> int:
    """Copy what a chain holds to memory; returns 0 or an errno, ``EINVAL``: there is no such chain, or not so long."""
    block_bytes = shared_of(store).block_bytes
    done = 0
    i = first
    while done < size_bytes:
        if not is_taken(store, i):
            return _EINVAL
        n, following = _run(store, i)
        length = min(n * block_bytes, size_bytes - done)
        if store.map_address == 0:
            status = _read_file(store, address + done, length, i * block_bytes)
            if status != 0:
                return status
        else:
            call(store.memcpy, (address + done, store.map_address + i * block_bytes, length))
        done += length
        i = following
    return 0


@compiled
def _run(store: StoreRecord, i: int) -> tuple[int, int]:
    """Return how many blocks of a chain lie side by side from one on, all with or without pages, and the next one."""
    words = words_of(store)
    n = 1
    pages = has_pages(words[i])
    following = next_of(words[i])
    while following == i + n and has_pages(words[following]) == pages:
        following = next_of(words[following])
        n += 1
    return n, following


@compiled
def _fill_memory(store: StoreRecord, i: int, n: int, address: int, size_bytes: int) -> int:
    words = words_of(store)
    offset = i * shared_of(store).block_bytes
    if has_pages(words[i]):
        call(store.memcpy, (store.map_address + offset, address, size_bytes))
        return 0
    status = write_at(store, address, size_bytes, offset)
    for block in range(i, i + n):
        words[block] = word_of(next_of(words[block]), 1)
    return status


@compiled
def _whole_pieces(store: StoreRecord, address: int, size_bytes: int) -> int:
    """Return how many bytes of a payload a file takes from, or gives to, where they are."""
    if store.direct == 0:
        return size_bytes
    return 0 if address % ALIGNMENT_BYTES else size_bytes - size_bytes % ALIGNMENT_BYTES


@compiled
def _rounded(store: StoreRecord, size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if store.direct else size_bytes


@compiled
def _write_file(store: StoreRecord, address: int, size_bytes: int, offset: int) -> int:
    done = _whole_pieces(store, address, size_bytes)
    status = write_at(store, address, done, offset)
    bounce = store.bounce_address[OUT]
    while status == 0 and done < size_bytes:
        length = min(size_bytes - done, BOUNCE_BYTES)
        call(store.memcpy, (bounce, address + done, length))
        status = write_at(store, bounce, _rounded(store, length), offset + done)
        done += length
    return status


@compiled
def _read_file(store: StoreRecord, address: int, size_bytes: int, offset: int) -> int:
    done = _whole_pieces(store, address, size_bytes)
    status = read_at(store, address, done, offset)
    bounce = store.bounce_address[IN]
    while status == 0 and done < size_bytes:
        length = min(size_bytes - done, BOUNCE_BYTES)
        status = read_at(store, bounce, _rounded(store, length), offset + done)
        if status == 0:
            call(store.memcpy, (address + done, bounce, length))
        done += length
    return status


# -- any tier --------------------------------------------------------------------------------------


__all__ = ["FAILED", "FULL", "STACK", "drop", "get", "put", "where"]

_TIERS = STACK.fields["tiers"][1]
_STORE_BYTES = STORE.itemsize
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)

Array = Any


@inlined
def tier_of(stack: StackRecord, tier: int) -> StoreRecord:
    """Return the way to a tier of the stack."""
    return record_at(address_of(stack) + _TIERS + tier * _STORE_BYTES, STORE)


@entry(STACK, int, int, int)
def put(stack: StackRecord, address: int, size_bytes: int, encoding: int) -> int:
    """Copy memory to the first tier that has room.

    Args:
        stack: A ``STACK`` record.
        address: Where the memory is; nobody may write to it meanwhile. Multiples of 4096 save files
            a copy.
        size_bytes: How much, at least 1.
        encoding: What a compressed tier keeps of its numbers: ``zico.tiers.encodings.ZEROS``
            loses nothing. Other tiers keep all.

    Returns:
        The payload's ticket, 0 or more; ``FULL``; ``FAILED`` if a tier that had room could not be
        written to. Without a ticket nothing is kept.
    """
    without = FULL
    for tier in range(stack.n_tiers):
        ticket = put_into(stack, tier, address, size_bytes, encoding)
        if ticket >= 0:
            return ticket
        without = min(without, ticket)
    return without


@entry(STACK, int, int, int, int)
def put_into(stack: StackRecord, tier: int, address: int, size_bytes: int, encoding: int) -> int:
    """Copy memory to one tier, as ``put`` does."""
    store = tier_of(stack, tier)
    shared = shared_of(store)
    start = monotonic_ns()
    if shared.kind == COMPRESSED:
        first, status = compress_out(store, address, size_bytes, encoding, int(tier == stack.n_tiers - 1))
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


@entry(STACK)
def trim(stack: StackRecord) -> int:
    """Give physical memory back that no payload has needed since the last call, at once; returns the bytes.

    ``put`` does so bit by bit with what ten seconds have not needed. This is for who puts nothing
    any more.
    """
    given = 0
    for tier in range(stack.n_tiers):
        given += chains.trim(tier_of(stack, tier))
    return given
