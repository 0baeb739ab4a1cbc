"""CUDA graphs of PyTorch's, and graph trees (``torch.compile(mode="reduce-overhead")``) in graph memory of Zico's.

Captures
    PyTorch tells its allocator when a capture begins and ends (``zico.heap.cuda.captures``). It does
    not tell that a capture has failed, at its beginning or its end. So the two functions are
    wrapped: what cannot be served is refused before it begins, and what failed is given up.

Graph trees
    Trees capture one graph behind another in one pool of memory. A launch runs no allocator. So
    after launches PyTorch goes back to what lived where when a graph had been captured, before it
    captures the next one. PyTorch's own allocator has functions for that, and a pluggable one does
    not. Five functions of ``torch._C``, which trees look up at each call, are therefore Zico's::

        _cuda_beginAllocateCurrentThreadToPool  one thread's tensors are the pool's, without a capture
        _cuda_getCheckpointState                what is in use of the pool now
        _cuda_setCheckpointPoolState            goes back to that; storages own their memory again
        _cuda_checkPoolLiveAllocations          whether exactly these tensors live in the pool
        _cuda_cudaCachingAllocator_raw_delete   frees what no storage owns

    A storage that a launch has filled owns nothing. To own its memory, it needs the deleter of
    PyTorch's pluggable allocator, and that allocator must know the address. The allocator learns it
    by asking Zico's for *the address* instead of a size. The deleter is written into the storage:
    PyTorch has no function for it but the one that is replaced here.

Guarantees
    Nothing is written into a storage unless it is laid out as one whose address, deleter and owner
    are known. Where this PyTorch lacks a function or lays storages out otherwise, compiled functions
    run without CUDA graphs, and one line says so.

Known limitations
    Where tensors that PyTorch does not know live in the pool, the error names addresses and no stack.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import HookError
from zico.base.saying import inform
from zico.heap.cuda import captures, on_stream
from zico.heap.cuda.layout import MAX_GRAPH_POOLS, PIECE, PieceState
from zico.job import autoload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.heap.build import Heap
    from zico.job.session import Session

SECOND_CAPTURE = (
    "zico: a CUDA graph is being captured already, and Zico serves one capture at a time: end that capture first, or "
    "capture one graph after the other"
)
TOO_MANY = (
    f"zico: {MAX_GRAPH_POOLS} CUDA graphs have memory pools of their own, and Zico serves no more: delete some, or let "
    "graphs share a pool (torch.cuda.graph_pool_handle)"
)
PAGED = (
    "zico: CUDA graphs are not served in a job that pages (--save page), whose memory moves between launches: train "
    "without torch.cuda.graph and make_graphed_callables, or with --save none"
)
STALE = (
    "zico: CUDA graph trees go back to an earlier graph while tensors live that are younger: clone outputs that you "
    "keep, and call torch.compiler.cudagraph_mark_step_begin() before each iteration"
)
TREES_PAGED = "a job that pages (--save page) captures nothing"
SWAPS = "a job that swaps (--save) moves tensors that a graph would look for where they were"
_PREFIX = "_cuda_"
_NEEDED = (
    *("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool", "getCheckpointState"),
    *("setCheckpointPoolState", "checkPoolLiveAllocations", "cudaCachingAllocator_raw_alloc"),
    "cudaCachingAllocator_raw_delete",
)
_SPENT = int(PieceState.SPENT)
_FEW = 1 << 10
_WORDS = 8
"""How many words of a storage are looked at: its address is among the first."""


class Captures:
    """This process's captures: at most one graph at a time."""

    def __init__(self, heap: Heap) -> None:
        """Watch the captures that a heap serves."""
        self._heap = heap
        self._graph: Any = None
        """What is being captured, as far as Python began it."""

    def refuse(self) -> None:
        """Refuse a capture that cannot be served, before anything of it has begun.

        Raises:
            RuntimeError: The job pages, or a capture is under way.
        """
        if self._heap.managed is not None:
            raise RuntimeError(PAGED)
        if self._heap.record[0]["streams"]["capturing"]:
            raise RuntimeError(SECOND_CAPTURE)

    def entering(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the ``__enter__`` of a context that captures: it waits for the device before it begins."""

        @functools.wraps(enter)
        def __enter__(context: Any) -> Any:  # noqa: ANN401, N807 - as PyTorch's
            self.refuse()
            return enter(context)

        return __enter__

    def beginning(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``capture_begin``."""

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as PyTorch's
            self.refuse()
            self._graph = graph
            return self._or_abandon(graph, begin, *args, **kwargs)

        return capture_begin

    def ending(self, end: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``capture_end``."""

        @functools.wraps(end)
        def capture_end(graph: Any) -> Any:  # noqa: ANN401 - as PyTorch's
            ended = self._or_abandon(graph, end)
            self._graph = None
            return ended

        return capture_end

    def _or_abandon(self, graph: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call PyTorch's function; where it raises in the capture under way, no graph comes of that."""
        try:
            return step(graph, *args, **kwargs)
        except BaseException:
            if graph is self._graph:
                self._graph = None
                captures.abandon(self._heap.record[0])
            raise


def watch(heap: Heap, torch: Any) -> None:  # noqa: ANN401 - the module
    """Wrap PyTorch's ways into a capture and out of it."""
    made = Captures(heap)
    accelerator_graph = getattr(getattr(torch, "accelerator", None), "Graph", None)  # not in every version
    for context in filter(None, (torch.cuda.graph, accelerator_graph)):
        context.__enter__ = made.entering(context.__enter__)
    for graph in filter(None, (torch.cuda.CUDAGraph, accelerator_graph)):
        graph.capture_begin = made.beginning(graph.capture_begin)
        graph.capture_end = made.ending(graph.capture_end)


# -- graph trees -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What was in use of a pool."""

    pool: tuple[int, int]
    pieces: Any
    """An array of PIECE, by offset."""


class Trees:
    """What graph trees ask of PyTorch's allocator; ``install`` puts it in place."""

    def __init__(self, joined: Session, torch: Any) -> None:  # noqa: ANN401 - the module
        """Answer for a session, whose pool is on a CUDA device.

        Raises:
            HookError: This PyTorch lacks a function, or lays storages out otherwise.
        """
        self._torch, self._core = torch, torch._C  # noqa: SLF001 - where trees look
        lacking = [name for name in _NEEDED if not hasattr(self._core, _PREFIX + name)]
        if lacking:
            message = f"PyTorch {torch.__version__} has no torch._C.{_PREFIX}{lacking[0]}"
            raise HookError(message)
        self._record, self._base = joined.heap.record[0], joined.heap.base
        self._place = place_in_storage(torch)
        self._deleter = 0
        self._unowned: set[int] = set()
        """Tensors that live since the last way back, and that no storage owns."""
        self._begin = self._core._cuda_beginAllocateCurrentThreadToPool  # noqa: SLF001
        self._raw_delete = self._core._cuda_cudaCachingAllocator_raw_delete  # noqa: SLF001

    def install(self) -> None:
        """Put the functions where trees look for them."""
        core = self._core
        core._cuda_beginAllocateCurrentThreadToPool = self.begin  # noqa: SLF001
        core._cuda_getCheckpointState = self.checkpoint  # noqa: SLF001
        core._cuda_setCheckpointPoolState = self.go_back  # noqa: SLF001
        core._cuda_checkPoolLiveAllocations = self.check  # noqa: SLF001
        core._cuda_cudaCachingAllocator_raw_delete = self.raw_delete  # noqa: SLF001

    def begin(self, device: int, pool: tuple[int, int]) -> None:
        """Serve what this thread asks for from a pool, until ``endAllocateToPool``."""
        self._begin(device, pool)
        captures.serve_thread(self._record, *pool, threading.get_ident())

    def checkpoint(self, _device: int, pool: tuple[int, int]) -> Checkpoint:
        """Return what is in use of a pool."""
        pieces = np.zeros(0, PIECE)
        n = _FEW
        while n > len(pieces):
            pieces = np.zeros(2 * n, PIECE)
            n = captures.save(self._record, *pool, pieces)
        return Checkpoint((pool[0], pool[1]), pieces[:n])

    def go_back(self, device: int, state: Checkpoint, _stale: Sequence[int], storages: Sequence[int] = ()) -> None:
        """Go back to what was in use, and let storages own what they have there.

        Args:
            device: The pool's.
            state: What ``checkpoint`` returned.
            _stale: Always empty in the versions that were read.
            storages: Addresses of ``c10::StorageImpl``.

        Raises:
            RuntimeError: A tensor lives that did not live then, or another thread captures.
        """
        with self._torch.cuda.device(device), self._serving(state.pool):
            before = self._living(self.checkpoint(device, state.pool))
            if not captures.restore(self._record, *state.pool, state.pieces):
                raise RuntimeError(STALE)
            streams = {address: stream for address, stream in self._living(state).items() if address not in before}
            self._unowned = set(streams)
            for storage in dict.fromkeys(storages):
                address = _words(storage)[self._place]
                if address in self._unowned:
                    self._own(storage, address, streams[address])

    def check(self, device: int, pool: tuple[int, int], expected: set[int]) -> bool:
        """Tell that exactly these tensors live in a pool.

        Raises:
            RuntimeError: Others do, also after garbage has been collected.
        """
        wanted = set(expected)
        if set(self._living(self.checkpoint(device, pool))) != wanted:
            gc.collect()
            lives = set(self._living(self.checkpoint(device, pool)))
            if lives != wanted:
                message = (
                    f"zico: CUDA graph trees and the pool of their graphs disagree about tensors (not known to trees: "
                    f"{_named(lives - wanted)}; not in the pool: {_named(wanted - lives)}): use another mode of "
                    "torch.compile"
                )
                raise RuntimeError(message)
        return True

    def raw_delete(self, address: int) -> None:
        """Free memory, which no storage needs to own."""
        if address in self._unowned:
            self._unowned.remove(address)
            on_stream.free_on(self._record, address, 0)
        else:
            self._raw_delete(address)

    def _living(self, state: Checkpoint) -> dict[int, int]:
        """Return the addresses of tensors that live, with their streams."""
        rows = state.pieces[state.pieces["state"] != _SPENT]
        return dict(zip((rows["offset"] + self._base).tolist(), rows["stream"].tolist(), strict=True))

    @contextlib.contextmanager
    def _serving(self, pool: tuple[int, int]) -> Iterator[None]:
        """Let this thread ask for addresses in a pool."""
        if captures.begin(self._record, *pool) != captures.BEGUN:
            raise RuntimeError(SECOND_CAPTURE)
        try:
            captures.serve_thread(self._record, *pool, threading.get_ident())
            yield
        finally:
            captures.end(self._record, *pool)
            captures.release(self._record, *pool)

    def _own(self, storage: int, address: int, stream: int) -> None:
        """Let a storage own its memory."""
        words = _words(storage)
        if words[self._place + 2] != 0:
            return
        self._deleter = self._deleter or self._find_deleter()
        self._core._cuda_cudaCachingAllocator_raw_alloc(address, stream)  # noqa: SLF001
        words[self._place + 1] = self._deleter
        words[self._place + 2] = address
        self._unowned.remove(address)

    def _find_deleter(self) -> int:
        """Return the deleter of PyTorch's pluggable allocator."""
        mine = self._torch.empty(1, dtype=self._torch.uint8, device="cuda").untyped_storage()
        words = _words(mine._cdata)  # noqa: SLF001 - its address
        return int(words[self._place + 1])


def _words(storage: int) -> Any:  # noqa: ANN401 - an array of words
    """Return the first words of a ``c10::StorageImpl``; writing one writes there."""
    return (ctypes.c_uint64 * _WORDS).from_address(storage)


def _named(addresses: set[int]) -> str:
    return ", ".join(f"{address:#x}" for address in sorted(addresses)) or "none"


def place_in_storage(torch: Any) -> int:  # noqa: ANN401 - the module
    """Return at which word of a storage its address stands; behind it stand its deleter and what that is given.

    Raises:
        HookError: A storage of this PyTorch, or one that owns nothing, is laid out otherwise.
    """
    owner = torch.empty(1, dtype=torch.uint8, device="cpu").untyped_storage()
    address = owner.data_ptr()
    other = torch._C._construct_storage_from_data_pointer(address, owner.device, 1)  # noqa: SLF001 - as trees do
    words, others = (_words(each._cdata) for each in (owner, other))  # noqa: SLF001 - its address
    places = [
        place
        for place in range(_WORDS - 2)
        if words[place] == words[place + 2] == others[place] == address and others[place + 2] == 0
    ]
    if len(places) != 1:
        message = f"PyTorch {torch.__version__} lays storages out in a way that Zico does not know"
        raise HookError(message)
    return places[0]


# -- without graphs --------------------------------------------------------------------------------

_told: list[str] = []


def serve(joined: Session, torch: Any) -> None:  # noqa: ANN401 - the module
    """Let graph trees run in a session's memory; where they cannot, compiled functions run without CUDA graphs."""
    try:
        if joined.heap.managed is not None:
            raise HookError(TREES_PAGED)  # noqa: TRY301 - one way out
        if joined.is_to_swap:
            raise HookError(SWAPS)  # noqa: TRY301 - as above
        Trees(joined, torch).install()
    except (HookError, AttributeError, TypeError, RuntimeError) as error:
        _told[:] = [f"torch.compile with mode='reduce-overhead' runs without CUDA graphs in this job: {error}"]
        autoload.install({"torch._inductor.output_code": f"{__name__}:leave_out"})


def leave_out() -> None:
    """Let compiled functions run as they do where PyTorch itself decides against CUDA graphs."""
    from torch._inductor import config, output_code

    for name in ("cudagraph_post_compile", "cudagraph_partition_post_compile"):
        setattr(output_code, name, _without(getattr(output_code, name), output_code, config))


def _without(before: Any, output_code: Any, config: Any) -> Any:  # noqa: ANN401 - functions and modules of PyTorch's
    """Wrap what gives a compiled function its CUDA graphs; graphs without trees are the user's own choice."""

    def post_compile(example_inputs: Any, compiled: Any, cudagraphs: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if not config.triton.cudagraph_trees:
            before(example_inputs, compiled, cudagraphs, *args, **kwargs)
            return
        output_code.BoxedBool.disable(cudagraphs)
        if _told:
            inform(_told.pop())

    return post_compile
