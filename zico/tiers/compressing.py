"""Payloads into chains and out of them, compressed; without loss, unless the caller allows more.

A payload is cut into pieces, each of which is encoded (``zico.tiers.encodings``). Nobody has to
be told how: a piece says it. The 4-byte numbers that are zero are left out, which takes hardly more
time than a copy. More is left out where the caller allows that. A piece that does not get
smaller is kept as it is. Pieces follow each other through the chain's blocks::

    block 7                              block 2
    | zeros 90 | ninety bytes | zeros 51 | fifty-|one bytes | ...    form and length in 4 bytes, then so many bytes

What would take nearly as many blocks as it would uncompressed is refused, and goes to the next tier
as it is.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import array_at, call, compiled
from zico.tiers import chains
from zico.tiers.chains import has_pages, is_taken, next_of, shared_of, word_of, words_of, write_at
from zico.tiers.encodings import (
    FP16,
    NUMBER_BYTES,
    SIGNS,
    ZEROS,
    in_a_word,
    keep_signs,
    leave_out_zeros,
    narrow,
    put_in_signs,
    put_in_zeros,
    widen,
)
from zico.tiers.layout import END, FULL, IN, OUT

if TYPE_CHECKING:
    from zico.tiers.layout import StoreRecord


# -- the compressed tier ---------------------------------------------------------------------------


PIECE_BYTES = 1 << 18
"""A piece fits a processor's second cache."""
WORTH = 0.9
"""What takes a larger share of its size is not worth the time. Saved tensors take at most .69, or .93 and more
(benchmarks/results/gist.md)."""
_HEAD_BYTES = 4
_LENGTH_BITS = 24
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1
_AS_IT_IS = -1
"""This form is none of the encodings: the piece is kept as it is."""
_EINVAL = errno.EINVAL
_EIO = errno.EIO
_U8 = np.dtype("u1")
_I32 = np.dtype("i4")
_U32 = np.dtype("u4")


# -- out -------------------------------------------------------------------------------------------


@compiled
def compress_out(store: StoreRecord, address: int, size_bytes: int, encoding: int, always: int) -> tuple[int, int]:
    """Put a payload into a new chain.

    Args:
        store: A ``STORE`` record of a compressed tier.
        address: Where the payload is.
        size_bytes: How much.
        encoding: Of its numbers, one of ``zico.tiers.encodings``.
        always: Not 0: also if it does not get smaller.

    Returns:
        The chain's first block and 0; or ``FULL`` and 0 if there is no room or it does not get
        smaller, or an errno.
    """
    most = chains.blocks_for(store, int(size_bytes * WORTH) if always == 0 else 2 * size_bytes)
    first = chains.take(store, 1)
    last = first
    blocks = 1
    at = 0
    done = 0
    while first != FULL and done < size_bytes:
        length = min(PIECE_BYTES, size_bytes - done)
        stored = _compress(store, address + done, length, encoding)
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
def _give_up(store: StoreRecord, first: int, status: int) -> tuple[int, int]:
    chains.free(store, first)
    return FULL, status


@compiled
def _append(
    store: StoreRecord, last: int, at: int, blocks: int, most: int, size_bytes: int
) -> tuple[int, int, int, int]:
    """Write the piece in the bounce buffer behind what a chain has, which may come to have the most blocks.

    Returns:
        The chain's last block, how much of it is written, how many blocks there are, and an errno.
        The block is ``FULL`` if not all of the piece could be written.
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
        status = _write(store, last, at, store.bounce_address[OUT] + PIECE_BYTES + done, n)
        if status != 0:
            return FULL, 0, 0, status
        done += n
        at += n
    return last, at, blocks, 0


@compiled
def _compress(store: StoreRecord, address: int, size_bytes: int, encoding: int) -> int:
    """Leave a piece with its form and length in the second half of the bounce buffer; returns the bytes of all."""
    piece = store.bounce_address[OUT] + PIECE_BYTES
    content = piece + _HEAD_BYTES
    form, n = _encode(address, size_bytes, content, encoding)
    if n >= size_bytes:
        form = _AS_IT_IS
        call(store.memcpy, (content, address, size_bytes))
        n = size_bytes
    array_at(piece, 1, _I32)[0] = form << _LENGTH_BITS | n
    return n + _HEAD_BYTES


@compiled
def _encode(address: int, size_bytes: int, content: int, encoding: int) -> tuple[int, int]:
    """Write a piece encoded, and its last bytes that are no number; returns the form and the bytes.

    Fewer bits are taken only where that is less than leaving out zeros.
    """
    if address % NUMBER_BYTES:
        return ZEROS, size_bytes
    numbers = size_bytes // NUMBER_BYTES
    source, target = array_at(address, numbers, _U32), array_at(content, 2 * numbers + 1, _U32)
    form = encoding
    if encoding == SIGNS:
        n = keep_signs(source, target)
    else:
        n = leave_out_zeros(source, target)
        if encoding >= FP16 and -(-numbers // in_a_word(encoding)) < n:
            n = narrow(source, target, encoding)
        else:
            form = ZEROS
    end = NUMBER_BYTES * n
    for i in range(NUMBER_BYTES * numbers, size_bytes):
        array_at(content + end, 1, _U8)[0] = array_at(address + i, 1, _U8)[0]
        end += 1
    return form, end


@compiled
def _write(store: StoreRecord, block: int, at: int, address: int, size_bytes: int) -> int:
    offset = block * shared_of(store).block_bytes + at
    if has_pages(words_of(store)[block]):
        call(store.memcpy, (store.map_address + offset, address, size_bytes))
        return 0
    return write_at(store, address, size_bytes, offset)


@compiled
def _link(store: StoreRecord, block: int, following: int) -> None:
    """Let a chain go on behind a block that is full: it has pages now."""
    words_of(store)[block] = word_of(following, 1)


# -- in --------------------------------------------------------------------------------------------


@compiled
def compress_in(store: StoreRecord, first: int, address: int, size_bytes: int) -> int:
    """Copy what a chain holds to memory; returns 0 or an errno, ``EINVAL``: there is no such chain, or not so long."""
    piece = store.bounce_address[IN] + PIECE_BYTES
    block = first
    at = 0
    done = 0
    while done < size_bytes:
        block, at = _read(store, block, at, piece, _HEAD_BYTES)
        head: int = np.int64(array_at(piece, 1, _I32)[0])  # type: ignore[assignment]
        n = head & _LENGTH_MASK
        length = min(PIECE_BYTES, size_bytes - done)
        if block == END or n > length:
            return _EINVAL
        block, at = _read(store, block, at, piece, n)
        if block == END:
            return _EINVAL
        if not _expand(store, head >> _LENGTH_BITS, n, address + done, length):
            return _EIO
        done += length
    return 0


@compiled
def _read(store: StoreRecord, block: int, at: int, address: int, size_bytes: int) -> tuple[int, int]:
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
def _expand(store: StoreRecord, form: int, n: int, address: int, size_bytes: int) -> bool:
    """Turn a piece in the second half of the bounce buffer into what it was; false if it cannot be."""
    piece = store.bounce_address[IN] + PIECE_BYTES
    if form == _AS_IT_IS:
        call(store.memcpy, (address, piece, size_bytes))
        return n == size_bytes
    target = store.bounce_address[IN] if address % NUMBER_BYTES else address
    is_whole = _decode(piece, form, target, size_bytes) == n
    if target != address:
        call(store.memcpy, (address, target, size_bytes))
    return is_whole


@compiled
def _decode(piece: int, form: int, address: int, size_bytes: int) -> int:
    """Undo ``_encode``; returns the bytes read."""
    numbers = size_bytes // NUMBER_BYTES
    source, target = array_at(piece, 2 * numbers + 1, _U32), array_at(address, numbers, _U32)
    if form == SIGNS:
        n = put_in_signs(source, target)
    elif form >= FP16:
        n = widen(source, target, form)
    else:
        n = put_in_zeros(source, target)
    end = NUMBER_BYTES * n
    for i in range(NUMBER_BYTES * numbers, size_bytes):
        array_at(address + i, 1, _U8)[0] = array_at(piece + end, 1, _U8)[0]
        end += 1
    return end
