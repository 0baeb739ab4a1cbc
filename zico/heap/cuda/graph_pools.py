"""The pieces of CUDA graphs' memory: which tensor of a capture lies where, and where the next one can.

Theory of operation
    A graph's launches write where its tensors lay when it was captured, also after they were freed.
    So a capture's tensors are cut from *segments* that stay with the graph's *pool*. What is freed
    is used again in its pool alone, for the same stream, which keeps order in the graph as well.
    This is PyTorch's rule for its own allocator (note "Interaction with CUDA graph capture" in
    ``c10/cuda/CUDACachingAllocator.cpp``). The smallest free piece that is large enough is cut, and
    freed neighbours merge::

        segments   |          2 MiB           |  6 MiB  |
        pieces     | live | free | live| free |  live   |

    A segment is a block of the heap without a tensor of its own. So only this table knows the
    tensors inside, and an ordinary free or ``record_stream`` comes here last.

    CUDA graph trees (PyTorch) go back to what lived where when another graph had been captured.
    ``save`` and ``restore`` are for them.

Known limitations
    Neighbours of two segments never merge. Finding a piece for a tensor looks at all of them: a
    capture is made once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import array_at, compiled, inlined, keep_out_of_line
from zico.heap import placing
from zico.heap.cuda.layout import GRAPH_POOL, MAX_GRAPH_POOLS, MAX_PIECES, PIECE, PieceState
from zico.heap.layout import block_at
from zico.pool.layout import NOBODY
from zico.pool.results import KEPT, NOTHING

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.heap.cuda.layout import GraphPool, Piece
    from zico.heap.layout import HeapRecord

_FREE = int(PieceState.FREE)
_LIVES = int(PieceState.LIVES)
_SHARED = int(PieceState.SHARED)
_SPENT = int(PieceState.SPENT)


@inlined
def _pieces(heap: HeapRecord) -> Records[Piece]:
    return array_at(heap.captures.pieces_address, MAX_PIECES, PIECE)


@inlined
def _graph_pools(heap: HeapRecord) -> Records[GraphPool]:
    return array_at(heap.captures.graph_pools_address, MAX_GRAPH_POOLS, GRAPH_POOL)


# -- graph pools -----------------------------------------------------------------------------------


@compiled
def find(heap: HeapRecord, first: int, second: int) -> int:
    """Return the entry of a graph pool that PyTorch knows by two numbers, or ``NOBODY``."""
    pools = _graph_pools(heap)
    for i in range(heap.captures.n_graph_pools):
        if pools[i].first == first and pools[i].second == second and pools[i].graphs + pools[i].pieces > 0:
            return i
    return NOBODY


@compiled
def join(heap: HeapRecord, first: int, second: int) -> int:
    """Count one more graph of a pool, which is new if need be; returns its entry, ``NOBODY`` if there is none left."""
    keep_out_of_line()
    pools = _graph_pools(heap)
    i = find(heap, first, second)
    if i == NOBODY:
        i = 0
        while i < heap.captures.n_graph_pools and pools[i].graphs + pools[i].pieces > 0:
            i += 1
        if i == MAX_GRAPH_POOLS:
            return NOBODY
        heap.captures.n_graph_pools = max(heap.captures.n_graph_pools, i + 1)
        pools[i].first = first
        pools[i].second = second
    pools[i].graphs += 1
    return i


@compiled
def leave(heap: HeapRecord, graph_pool: int) -> bool:
    """Count one graph of a pool less; tells whether it was the last. Then what nobody lives in is free."""
    keep_out_of_line()
    pool = _graph_pools(heap)[graph_pool]
    pool.graphs -= 1
    if pool.graphs > 0:
        return False
    pieces = _pieces(heap)
    for k in range(heap.captures.n_pieces - 1, -1, -1):
        if pieces[k].graph_pool == graph_pool and pieces[k].state in (_FREE, _SPENT):
            pieces[k].state = _FREE
            _merge(heap, k)
    return True


@compiled
def take_segment(heap: HeapRecord, graph_pool: int) -> int:
    """Take an empty segment off a pool that no graph uses; returns its offset, ``NOTHING`` if there is none."""
    keep_out_of_line()
    for k in range(heap.captures.n_pieces):
        if _pieces(heap)[k].graph_pool == graph_pool and _is_empty_segment(heap, k):
            return _remove(heap, k)
    return NOTHING


# -- pieces ----------------------------------------------------------------------------------------


@compiled
def add_segment(heap: HeapRecord, offset: int, size_bytes: int, stream: int) -> bool:
    """Let a block be a segment of the pool that captures, for one of its streams; false if there is no piece left."""
    keep_out_of_line()
    if heap.captures.n_pieces == MAX_PIECES:
        return False
    _insert(heap, _first_from(heap, offset), offset, size_bytes, stream, heap.streams.capturing - 1)
    return True


@compiled
def take(heap: HeapRecord, stream: int, size_bytes: int) -> int:
    """Return a place for a stream's tensor in the pool that captures; ``NOTHING`` if no piece is free and as large."""
    keep_out_of_line()
    pieces = _pieces(heap)
    graph_pool = heap.streams.capturing - 1
    best = NOBODY
    for k in range(heap.captures.n_pieces):
        fits = pieces[k].state == _FREE and size_bytes <= pieces[k].size_bytes
        is_ours = pieces[k].graph_pool == graph_pool and pieces[k].stream == stream
        if fits and is_ours and (best == NOBODY or pieces[k].size_bytes < pieces[best].size_bytes):
            best = k
    if best == NOBODY:
        return NOTHING
    piece = pieces[best]
    rest_bytes = piece.size_bytes - size_bytes
    if rest_bytes > 0 and heap.captures.n_pieces < MAX_PIECES:
        piece.size_bytes = size_bytes
        _insert(heap, best + 1, piece.offset + size_bytes, rest_bytes, stream, graph_pool)
    piece.state = _LIVES
    return piece.offset


@inlined
def _live_at(heap: HeapRecord, offset: int) -> int:
    """Return the piece of the tensor that begins at an offset, or ``NOBODY``."""
    k = _first_from(heap, offset)
    pieces = _pieces(heap)
    is_there = k < heap.captures.n_pieces and pieces[k].offset == offset
    return k if is_there and pieces[k].state in (_LIVES, _SHARED) else NOBODY


@compiled
def lives(heap: HeapRecord, offset: int) -> bool:
    """Tell whether a tensor of a capture begins at an offset."""
    return bool(_live_at(heap, offset) != NOBODY)


@compiled
def has(heap: HeapRecord, offset: int) -> bool:
    """Tell whether a piece begins at an offset, as one does where a segment begins."""
    k = _first_from(heap, offset)
    return bool(k < heap.captures.n_pieces and _pieces(heap)[k].offset == offset)


@compiled
def note_use(heap: HeapRecord, offset: int, stream: int) -> None:
    """Note that a stream uses the tensor of a capture at an offset, if one is there and is not its own."""
    keep_out_of_line()
    k = _live_at(heap, offset)
    if k != NOBODY and _pieces(heap)[k].stream != stream:
        _pieces(heap)[k].state = _SHARED


@compiled
def give(heap: HeapRecord, offset: int) -> int:
    """Free the tensor of a capture at an offset.

    Returns:
        The offset of the segment that it was the last one of, in a pool that no graph uses. It is
        taken off the table, and the caller frees it. ``KEPT``: the pool keeps the memory.
        ``NOTHING``: no such tensor is there.
    """
    keep_out_of_line()
    k = _live_at(heap, offset)
    if k == NOBODY:
        return NOTHING
    piece = _pieces(heap)[k]
    has_graphs = _graph_pools(heap)[piece.graph_pool].graphs > 0
    piece.state = _SPENT if piece.state == _SHARED and has_graphs else _FREE
    if piece.state == _FREE:
        _merge(heap, k)
        if k > 0:
            k = k - 1 if _merge(heap, k - 1) else k
    return KEPT if has_graphs or not _is_empty_segment(heap, k) else _remove(heap, k)


# -- going back ------------------------------------------------------------------------------------


@compiled
def save(heap: HeapRecord, graph_pool: int, saved: Records[Piece]) -> int:
    """Write what is in use of a pool, by offset, as far as there is room; returns how many pieces that is."""
    keep_out_of_line()
    n = 0
    pieces = _pieces(heap)
    for k in range(heap.captures.n_pieces):
        if pieces[k].graph_pool == graph_pool and pieces[k].state != _FREE:
            if n < len(saved):
                _copy(saved[n], pieces[k])
            n += 1
    return n


@compiled
def restore(heap: HeapRecord, graph_pool: int, saved: Records[Piece]) -> bool:
    """Let that be in use of a pool which was when it was saved; its segments from then must still be there.

    False, and nothing has changed, where a tensor lives now that did not live then, or where the
    table has no room.
    """
    keep_out_of_line()
    pieces = _pieces(heap)
    if heap.captures.n_pieces + 2 * len(saved) > MAX_PIECES or not _all_in(heap, graph_pool, saved):
        return False
    for k in range(heap.captures.n_pieces - 1, -1, -1):
        if pieces[k].graph_pool == graph_pool:
            pieces[k].state = _FREE
            _merge(heap, k)
    for i in range(len(saved)):
        _carve(heap, saved[i])
    return True


@compiled
def _all_in(heap: HeapRecord, graph_pool: int, saved: Records[Piece]) -> bool:
    """Tell whether all tensors that live in a pool are among some, which are sorted by offset."""
    keep_out_of_line()
    pieces = _pieces(heap)
    i = 0
    for k in range(heap.captures.n_pieces):
        if pieces[k].graph_pool == graph_pool and pieces[k].state in (_LIVES, _SHARED):
            while i < len(saved) and saved[i].offset < pieces[k].offset:
                i += 1
            if i == len(saved) or saved[i].offset != pieces[k].offset or saved[i].state == _SPENT:
                return False
    return True


@compiled
def _carve(heap: HeapRecord, wanted: Piece) -> None:
    """Make a piece of a free one that contains it."""
    keep_out_of_line()
    pieces = _pieces(heap)
    k = _first_from(heap, wanted.offset + 1) - 1
    stream, graph_pool = pieces[k].stream, pieces[k].graph_pool
    before_bytes = wanted.offset - pieces[k].offset
    behind_bytes = pieces[k].size_bytes - before_bytes - wanted.size_bytes
    if before_bytes > 0:
        pieces[k].size_bytes = before_bytes
        k += 1
        _insert(heap, k, wanted.offset, wanted.size_bytes, stream, graph_pool)
    if behind_bytes > 0:
        _insert(heap, k + 1, wanted.offset + wanted.size_bytes, behind_bytes, stream, graph_pool)
    pieces[k].size_bytes = wanted.size_bytes
    pieces[k].state = wanted.state


@inlined
def _is_empty_segment(heap: HeapRecord, k: int) -> bool:
    piece = _pieces(heap)[k]
    begins = piece.state == _FREE and placing.is_block(heap, piece.offset)
    return begins and block_at(heap, piece.offset).size_bytes == piece.size_bytes


@compiled
def _first_from(heap: HeapRecord, offset: int) -> int:
    """Return the first piece that begins at an offset or behind it."""
    pieces = _pieces(heap)
    low = 0
    high = heap.captures.n_pieces
    while low < high:
        middle = (low + high) // 2
        if pieces[middle].offset < offset:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _merge(heap: HeapRecord, k: int) -> bool:
    """Merge a piece with the next one if both are free and in one segment; tells whether they were."""
    keep_out_of_line()
    if k + 1 >= heap.captures.n_pieces:
        return False
    piece = _pieces(heap)[k]
    following = _pieces(heap)[k + 1]
    if piece.state != _FREE or following.state != _FREE or placing.is_block(heap, following.offset):
        return False
    piece.size_bytes += following.size_bytes
    _remove(heap, k + 1)
    return True


@compiled
def _insert(heap: HeapRecord, k: int, offset: int, size_bytes: int, stream: int, graph_pool: int) -> None:
    keep_out_of_line()
    pieces = _pieces(heap)
    for i in range(heap.captures.n_pieces, k, -1):
        _copy(pieces[i], pieces[i - 1])
    heap.captures.n_pieces += 1
    piece = pieces[k]
    piece.offset = offset
    piece.size_bytes = size_bytes
    piece.stream = stream
    piece.graph_pool = graph_pool
    piece.state = _FREE
    _graph_pools(heap)[graph_pool].pieces += 1


@compiled
def _remove(heap: HeapRecord, k: int) -> int:
    """Take a piece off the table; returns its offset."""
    keep_out_of_line()
    pieces = _pieces(heap)
    offset = pieces[k].offset
    _graph_pools(heap)[pieces[k].graph_pool].pieces -= 1
    heap.captures.n_pieces -= 1
    for i in range(k, heap.captures.n_pieces):
        _copy(pieces[i], pieces[i + 1])
    return offset


@inlined
def _copy(to: Piece, source: Piece) -> None:
    to.offset = source.offset
    to.size_bytes = source.size_bytes
    to.stream = source.stream
    to.graph_pool = source.graph_pool
    to.state = source.state
