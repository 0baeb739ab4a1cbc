"""Chains of blocks: taking, following, freeing.

Guarantees
    A system call on a tier's descriptor does all of it or returns an errno. Any number of threads
    may take and free at once. A block is in one chain at most.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import add_at, array_at, call, compare_exchange, compiled, inlined, keep_in_line, record_at
from zico.device import host
from zico.tiers.layout import EMPTY, END, FILE, FULL, KEPT, SHARED, TAKEN, WORD_BYTES

if TYPE_CHECKING:
    from zico.tiers.layout import Shared, StoreRecord


# -- system calls ----------------------------------------------------------------------------------


_EINTR = errno.EINTR
_EIO = errno.EIO
_EOPNOTSUPP = errno.EOPNOTSUPP
_I32 = np.dtype("i4")


@compiled
def _errno(store: StoreRecord) -> int:
    status: int = np.int64(array_at(call(store.errno_location, ()), 1, _I32)[0])  # type: ignore[assignment]
    return status


@compiled
def write_at(store: StoreRecord, address: int, size_bytes: int, offset: int) -> int:
    """Write memory to the tier at an offset; returns 0 or an errno. ``ENOSPC``: the disk is full."""
    return _move(store, store.pwrite, address, size_bytes, offset)


@compiled
def read_at(store: StoreRecord, address: int, size_bytes: int, offset: int) -> int:
    """Read memory from the tier at an offset; returns 0 or an errno. ``EIO`` also where the file ends too early."""
    return _move(store, store.pread, address, size_bytes, offset)


@compiled
def _move(store: StoreRecord, function: int, address: int, size_bytes: int, offset: int) -> int:
    done = 0
    while done < size_bytes:
        n = call(function, (store.descriptor, address + done, size_bytes - done, offset + done))
        if n > 0:
            done += n
        elif n == 0:
            return _EIO
        else:
            status = _errno(store)
            if status != _EINTR:
                return status
    return 0


@compiled
def prepare(store: StoreRecord, offset: int, size_bytes: int) -> int:
    """Let the disk set space aside; returns 0 or an errno. Where it cannot, 0: a full disk shows when it is written."""
    while True:
        if call(store.fallocate, (store.descriptor, 0, offset, size_bytes)) == 0:
            return 0
        status = _errno(store)
        if status == _EOPNOTSUPP:
            return 0
        if status != _EINTR:
            return status


@compiled
def punch(store: StoreRecord, offset: int, size_bytes: int) -> bool:
    """Give the physical memory behind a range back; false if the kernel refused."""
    return call(store.fallocate, (store.descriptor, host.PUNCH_HOLE, offset, size_bytes)) == 0


# -- chains of blocks ------------------------------------------------------------------------------


Array = Any

_USED = SHARED.fields["used"][1]
_PREPARED_BYTES = 64 << 20
"""The disk is asked for so much at a time: some milliseconds, and little where a job needs little."""
EPOCH_NS = 10_000_000_000
"""Pages that nothing needs stay so long: some iterations, so that each finds what the last has left."""
_PUNCHED_BYTES = 8 << 20
_PAGES = 1
_NO_PAGES = TAKEN
"""A chain of one block without pages has this word."""


@inlined
def shared_of(store: StoreRecord) -> Shared:
    """Return what is known of the tier."""
    return record_at(store.shared_address, SHARED)


@inlined
def words_of(store: StoreRecord) -> Array:
    """Return the words of the tier's blocks."""
    return array_at(store.words_address, record_at(store.shared_address, SHARED).n_blocks, _I32)


@compiled
def next_of(word: int) -> int:
    """Return the index of the block behind one with this word in its chain, or ``END``."""
    keep_in_line()
    return (word >> 1) - 2


@compiled
def has_pages(word: int) -> bool:
    """Tell whether a block in a chain has physical pages of its own."""
    keep_in_line()
    return (word & _PAGES) != 0


@compiled
def word_of(following: int, pages: int) -> int:
    """Return the word of a block in a chain."""
    keep_in_line()
    return ((following + 2) << 1) | pages


@compiled
def is_taken(store: StoreRecord, i: int) -> bool:
    """Tell whether there is such a block, and in a chain: what follows a stale ticket may find anything."""
    return 0 <= i < shared_of(store).n_blocks and words_of(store)[i] >= TAKEN


@compiled
def blocks_for(store: StoreRecord, size_bytes: int) -> int:
    """Return the blocks that so many bytes take."""
    keep_in_line()
    return -(-size_bytes // shared_of(store).block_bytes)


@compiled
def take(store: StoreRecord, n: int) -> int:
    """Make a chain of ``n`` free blocks, the lowest there are.

    Returns:
        The first one's index, or ``FULL``: there are not so many, or the disk has no space for
        them.
    """
    shared = shared_of(store)
    if n < 1 or n > shared.n_blocks:
        return FULL
    if add_at(store.shared_address + _USED, n) + n > shared.n_blocks:
        return _refuse(store, n, END)
    first = END
    last = END
    missing = n
    for start in (shared.hint, 0):  # the hint may be wrong: then from the beginning
        i = start
        while missing > 0 and i < shared.n_blocks:
            if _claim(store, i):
                if last == END:
                    first = i
                else:
                    _link(store, last, i)
                last = i
                missing -= 1
                if i >= shared.prepared and not _prepare(store, i):
                    return _refuse(store, n, first)
            i += 1
        if missing == 0:
            shared.hint = i if start == shared.hint else shared.hint
            shared.peak = max(shared.peak, shared.used)
            shared.recent_peak = max(shared.recent_peak, shared.used)
            return first
    return _refuse(store, n, first)


@compiled
def _claim(store: StoreRecord, i: int) -> bool:
    word = words_of(store)[i]
    if word >= TAKEN:
        return False
    taken = np.int32(word_of(END, int(word == KEPT)))
    return compare_exchange(store.words_address + WORD_BYTES * i, word, taken) == word


@compiled
def _link(store: StoreRecord, i: int, following: int) -> None:
    words = words_of(store)
    words[i] = word_of(following, int(has_pages(words[i])))


@compiled
def _refuse(store: StoreRecord, n: int, first: int) -> int:
    """Undo a taking of ``n`` blocks that has come as far as the chain that begins with ``first``."""
    shared = shared_of(store)
    _release(store, first)
    add_at(store.shared_address + _USED, -n)
    shared.refused += 1
    return FULL


@compiled
def _prepare(store: StoreRecord, i: int) -> bool:
    """Let the disk set space aside for a block and some behind it; any number may do this at once."""
    shared = shared_of(store)
    if shared.kind != FILE:
        return True
    end = min(shared.n_blocks, i + max(_PREPARED_BYTES // shared.block_bytes, 1))
    status = prepare(store, i * shared.block_bytes, (end - i) * shared.block_bytes)
    if status != 0:  # the last of the space
        end = i + 1
        status = prepare(store, i * shared.block_bytes, shared.block_bytes)
    if status == 0:
        shared.prepared = max(shared.prepared, end)
    else:
        shared.error = status
    return status == 0


@compiled
def _release(store: StoreRecord, first: int) -> int:
    """Free a chain's blocks; returns how many, not yet taken off ``used``."""
    words = words_of(store)
    shared = shared_of(store)
    n = 0
    i = first
    while is_taken(store, i):
        word = words[i]
        words[i] = KEPT if has_pages(word) else EMPTY
        shared.hint = min(shared.hint, i)
        i = next_of(word)
        n += 1
    return n


@compiled
def free(store: StoreRecord, first: int) -> None:
    """Free a chain, whose index is worth nothing from then on."""
    add_at(store.shared_address + _USED, -_release(store, first))


@compiled
def trim(store: StoreRecord) -> int:
    """Give back the pages of free blocks above the most that were in use since the last call; returns the bytes."""
    _begin_epoch(store, shared_of(store).epoch_ns)
    return _punch(store, shared_of(store).n_blocks)


@compiled
def trim_a_little(store: StoreRecord, now_ns: int) -> None:
    """Do the same bit by bit: what ``EPOCH_NS`` did not need goes in the next calls, a few milliseconds each."""
    if now_ns - shared_of(store).epoch_ns > EPOCH_NS:
        _begin_epoch(store, now_ns)
    _punch(store, max(_PUNCHED_BYTES // shared_of(store).block_bytes, 1))


@compiled
def _begin_epoch(store: StoreRecord, now_ns: int) -> None:
    shared = shared_of(store)
    shared.epoch_ns = now_ns
    shared.trim_at = shared.n_blocks if shared.kind == FILE else shared.recent_peak
    shared.recent_peak = shared.used


@compiled
def _punch(store: StoreRecord, most: int) -> int:
    """Give back the pages of so many free blocks at most; returns the bytes."""
    shared = shared_of(store)
    words = words_of(store)
    given = 0
    i = shared.trim_at
    while i < shared.n_blocks and given < most * shared.block_bytes:
        if words[i] == KEPT and compare_exchange(store.words_address + WORD_BYTES * i, KEPT, _NO_PAGES) == KEPT:
            gone = punch(store, i * shared.block_bytes, shared.block_bytes)
            given += shared.block_bytes if gone else 0
            words[i] = EMPTY if gone else KEPT
        i += 1
    shared.trim_at = i
    return given
