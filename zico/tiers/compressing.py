"""Payloads into chains and out of them, compressed without loss.

A payload is cut into pieces. Of each the first bytes of all its 4-byte numbers come first, then the second ones and so
on: of floats that makes one run of signs and exponents, which repeat, and three that hardly do. Then Zstandard at its
first level. A piece that does not get smaller is kept as it is. Pieces follow each other through the chain's blocks::

    block 7                   block 2
    | 90 | ninety bytes | 51 | fifty-|one bytes | ...      a length (i4, less than 0: as it is), then so many bytes

What would take nearly as many blocks as it would uncompressed is refused, and goes to the next tier as it is.
"""

from __future__ import annotations

import errno
from typing import Any

import numpy as np

from zico.compiled import array_at, call, compiled
from zico.tiers import chains
from zico.tiers.calls import write_at
from zico.tiers.chains import has_pages, is_taken, next_of, shared_of, word_of, words_of
from zico.tiers.layout import END, FULL

PIECE_BYTES = 1 << 18
"""Fits a processor's second cache, and is long enough for Zstandard's tables to pay."""
WORTH = 0.9
"""What takes more of its size than this is not worth the time."""
LEVEL = 1
_LENGTH_BYTES = 4
_NUMBER_BYTES = 4
_ROOM_BYTES = PIECE_BYTES + (PIECE_BYTES >> 7)
"""More than ``ZSTD_compressBound`` of a piece."""
_OUT = 0
_IN = 1
_EINVAL = errno.EINVAL
_EIO = errno.EIO
_U8 = np.dtype("u1")
_I32 = np.dtype("i4")

Record = Any
Array = Any


@compiled
def split(source: Array, target: Array) -> None:
    """Put the first bytes of all 4-byte numbers first, then the second ones, and so on; the rest at the end."""
    n = len(source) // _NUMBER_BYTES
    for i in range(n):
        for place in range(_NUMBER_BYTES):
            target[place * n + i] = source[_NUMBER_BYTES * i + place]
    for i in range(_NUMBER_BYTES * n, len(source)):
        target[i] = source[i]


@compiled
def join(source: Array, target: Array) -> None:
    """Undo ``split``."""
    n = len(source) // _NUMBER_BYTES
    for i in range(n):
        for place in range(_NUMBER_BYTES):
            target[_NUMBER_BYTES * i + place] = source[place * n + i]
    for i in range(_NUMBER_BYTES * n, len(source)):
        target[i] = source[i]


# -- out ------------------------------------------------------------------------------------------------------------


@compiled
def compress_out(store: Record, address: int, size_bytes: int, always: int) -> tuple[int, int]:
    """Put a payload into a new chain.

    Args:
        store: A ``STORE`` record of a compressed tier.
        address: Where the payload is.
        size_bytes: How much.
        always: Not 0: also if it does not get smaller.

    Returns:
        The chain's first block and 0; or ``FULL`` and 0 if there is no room or it does not get smaller, or an errno.
    """
    most = chains.blocks_for(store, int(size_bytes * WORTH) if always == 0 else 2 * size_bytes)
    first = chains.take(store, 1)
    last = first
    blocks = 1
    at = 0
    done = 0
    while first != FULL and done < size_bytes:
        length = min(PIECE_BYTES, size_bytes - done)
        stored = _compress(store, address + done, length)
        if always == 0 and done == 0 and stored > length * WORTH:  # the rest will hardly be better
            return _give_up(store, first, 0)
        last, at, blocks, status = _append(store, last, at, blocks, most, stored)
        if last == FULL:
            return _give_up(store, first, status)
        done += length
    if first != FULL:
        _link(store, last, END)
    return first, 0


@compiled
def _give_up(store: Record, first: int, status: int) -> tuple[int, int]:
    chains.free(store, first)
    return FULL, status


@compiled
def _append(store: Record, last: int, at: int, blocks: int, most: int, size_bytes: int) -> tuple[int, int, int, int]:
    """Write the piece in the bounce buffer behind what a chain has, which may come to have the most blocks.

    Returns:
        The chain's last block, how much of it is written, how many blocks there are, and an errno. The block is
        ``FULL`` if not all of the piece could be written.
    """
    block_bytes = shared_of(store).block_bytes
    done = 0
    while done < size_bytes:
        if at == block_bytes:
            following = chains.take(store, 1) if blocks < most else FULL
            if following == FULL:
                return FULL, 0, 0, 0
            _link(store, last, following)
            last = following
            blocks += 1
            at = 0
        n = min(size_bytes - done, block_bytes - at)
        status = _write(store, last, at, store.bounce_address[_OUT] + PIECE_BYTES + done, n)
        if status != 0:
            return FULL, 0, 0, status
        done += n
        at += n
    return last, at, blocks, 0


@compiled
def _compress(store: Record, address: int, size_bytes: int) -> int:
    """Leave a piece with its length in the second half of the bounce buffer; returns the bytes of both."""
    split_address = store.bounce_address[_OUT]
    piece = split_address + PIECE_BYTES
    content = piece + _LENGTH_BYTES
    split(array_at(address, size_bytes, _U8), array_at(split_address, size_bytes, _U8))
    arguments = (store.compressor, content, _ROOM_BYTES, split_address, size_bytes, LEVEL)
    n = call(store.compress, arguments)
    if n <= 0 or n >= size_bytes:  # an error is a number near 2**64
        call(store.memcpy, (content, address, size_bytes))
        n = size_bytes
        array_at(piece, 1, _I32)[0] = -size_bytes
    else:
        array_at(piece, 1, _I32)[0] = n
    return n + _LENGTH_BYTES


@compiled
def _write(store: Record, block: int, at: int, address: int, size_bytes: int) -> int:
    offset = block * shared_of(store).block_bytes + at
    if has_pages(words_of(store)[block]):
        call(store.memcpy, (store.map_address + offset, address, size_bytes))
        return 0
    return write_at(store, address, size_bytes, offset)


@compiled
def _link(store: Record, block: int, following: int) -> None:
    """Let a chain go on behind a block that is full: it has pages now."""
    words_of(store)[block] = word_of(following, 1)


# -- in -------------------------------------------------------------------------------------------------------------


@compiled
def compress_in(store: Record, first: int, address: int, size_bytes: int) -> int:
    """Copy what a chain holds to memory; returns 0 or an errno, ``EINVAL``: there is no such chain, or not so long."""
    piece = store.bounce_address[_IN] + PIECE_BYTES
    block = first
    at = 0
    done = 0
    while done < size_bytes:
        block, at = _read(store, block, at, piece, _LENGTH_BYTES)
        n: int = np.int64(array_at(piece, 1, _I32)[0])  # type: ignore[assignment]
        length = min(PIECE_BYTES, size_bytes - done)
        if block == END or abs(n) > length:
            return _EINVAL
        block, at = _read(store, block, at, piece, abs(n))
        if block == END:
            return _EINVAL
        if not _expand(store, n, address + done, length):
            return _EIO
        done += length
    return 0


@compiled
def _read(store: Record, block: int, at: int, address: int, size_bytes: int) -> tuple[int, int]:
    """Copy bytes out of a chain; returns where it goes on, the block ``END`` if it does not."""
    block_bytes = shared_of(store).block_bytes
    done = 0
    while done < size_bytes:
        if at == block_bytes and is_taken(store, block):
            block = next_of(words_of(store)[block])
            at = 0
        if not is_taken(store, block):
            return END, 0
        n = min(size_bytes - done, block_bytes - at)
        call(store.memcpy, (address + done, store.map_address + block * block_bytes + at, n))
        done += n
        at += n
    return block, at


@compiled
def _expand(store: Record, n: int, address: int, size_bytes: int) -> bool:
    """Turn a piece in the second half of the bounce buffer into what it was; false if it cannot be."""
    split_address = store.bounce_address[_IN]
    piece = split_address + PIECE_BYTES
    if n < 0:
        call(store.memcpy, (address, piece, size_bytes))
        return -n == size_bytes
    if call(store.expand, (store.expander, split_address, size_bytes, piece, n)) != size_bytes:
        return False
    join(array_at(split_address, size_bytes, _U8), array_at(address, size_bytes, _U8))
    return True
