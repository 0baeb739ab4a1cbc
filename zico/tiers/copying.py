"""Payloads into chains and out of them, for tiers that keep them as they are.

Into memory that has pages a payload is copied through a mapping, at the speed of ``memcpy``. Into memory that has none
it is written: the kernel then neither faults for each page nor zeroes it first, which is twice as fast, and having no
memory is an errno instead of a signal. Files are read and written past the page cache where they can be (``O_DIRECT``):
what the cache keeps has not left the machine's memory.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from zico.compiled import call, compiled
from zico.tiers.calls import read_at, write_at
from zico.tiers.chains import has_pages, is_taken, next_of, shared_of, word_of, words_of
from zico.tiers.layout import ALIGNMENT_BYTES, BOUNCE_BYTES

if TYPE_CHECKING:
    from zico.tiers.layout import StoreRecord

_EINVAL = errno.EINVAL
_OUT = 0
_IN = 1


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
    bounce = store.bounce_address[_OUT]
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
    bounce = store.bounce_address[_IN]
    while status == 0 and done < size_bytes:
        length = min(size_bytes - done, BOUNCE_BYTES)
        status = read_at(store, bounce, _rounded(store, length), offset + done)
        if status == 0:
            call(store.memcpy, (address + done, bounce, length))
        done += length
    return status
