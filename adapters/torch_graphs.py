"""CUDA graphs of PyTorch's: captures that cannot be served are refused before they begin, failed ones are given up.

PyTorch tells its allocator when a capture begins and ends (``zico.heap.cuda.captures``). It does not
tell that a capture has failed, at its beginning or its end. So the two functions are wrapped.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zico.heap.cuda import captures
from zico.heap.cuda.layout import MAX_GRAPH_POOLS

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.heap.build import Heap

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
