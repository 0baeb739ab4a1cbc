"""PyTorch's questions about CUDA memory, answered from Zico's counters. No GPU: PyTorch's own Python asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from zico.adapters import torch_cuda, torch_graphs

from zico.base.errors import HookError
from zico.heap.cuda import hooks
from zico.heap.layout import HEAP

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
CORE = ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats", "_cuda_resetAccumulatedMemoryStats", "_cuda_emptyCache")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Give a session with figures, and a PyTorch that believes its CUDA part to be in use and asks this session."""
    record = {
        "allocations": 10,
        "live_bytes": 3 * MIB,
        "peak_live_bytes": 7 * MIB,
        "requested_bytes": 20 * MIB,
        "held": 2,
        "peak_held": 5,
        "oom_count": 1,
    }
    driver = SimpleNamespace(facts=SimpleNamespace(ordinal=0, uuid="GPU-0"))
    pool = SimpleNamespace(region_bytes=4 * MIB, free_and_total_bytes=lambda: (280 * MIB, 400 * MIB), driver=driver)
    made = SimpleNamespace(record=record, pool=pool, heap=SimpleNamespace(record=[{"events": 16}]))
    for name in (*CORE, *torch_cuda.REFUSED):
        monkeypatch.setattr(torch._C, name, None, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    monkeypatch.setattr(torch.cuda.memory, "mem_get_info", None)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda *_, **__: 0)
    torch_cuda.answer(made, torch)
    yield made
    hooks.OTHERS_RECORD[0] = 0


def test_pytorchs_functions_answer_from_the_session(session: SimpleNamespace) -> None:
    """Current and peak bytes, totals and counts are the session's; a reset peak begins at what lives."""
    assert torch.cuda.memory_allocated() == 3 * MIB
    assert torch.cuda.max_memory_allocated() == 7 * MIB
    assert torch.cuda.memory_reserved() == 8 * MIB
    assert torch.cuda.max_memory_reserved() == 20 * MIB
    assert torch.cuda.mem_get_info() == (280 * MIB, 400 * MIB)
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.current"] == 4
    assert stats["allocated_bytes.all.freed"] == 17 * MIB
    assert stats["num_ooms"] == 1
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 3 * MIB
    torch.cuda.empty_cache()
    assert session.record["peak_live_bytes"] == 3 * MIB


def test_the_summary_is_whole(session: SimpleNamespace) -> None:
    """PyTorch's own table finds every key that it prints."""
    text = torch.cuda.memory_summary()
    assert "Allocated memory" in text
    assert "Oversize GPU segments" in text
    assert session.record["allocations"] == 10


@pytest.mark.parametrize("name", torch_cuda.REFUSED)
def test_what_needs_pytorchs_own_allocator_is_refused_with_a_sentence(session: SimpleNamespace, name: str) -> None:
    """The error says what does not work and what to use."""
    assert session is not None
    with pytest.raises(RuntimeError, match="not with Zico's allocator: "):
        getattr(torch._C, name)(0)


class Graph:
    """Stands in for PyTorch's graphs, whose captures need a device: what was called, and what is to fail."""

    def __init__(self) -> None:
        """Begin with nothing called."""
        self.called: list[str] = []
        self.failing = ""

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name == self.failing:
            raise ValueError(name)

    def __enter__(self) -> None:
        """Wait for the device."""
        self._call("enter")

    def __exit__(self, *_exc: object) -> None:
        """End."""

    def capture_begin(self, pool: object = None) -> None:
        """Begin."""
        del pool
        self._call("begin")

    def capture_end(self) -> None:
        """End."""
        self._call("end")


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Give a heap whose captures are watched by wrapped stand-ins of all of PyTorch's classes for captures."""
    made = SimpleNamespace(managed=None, record=np.zeros(1, HEAP), abandoned=0)

    def abandon(record: Any) -> None:  # noqa: ANN401 - a HEAP record
        made.abandoned += 1
        record["streams"]["capturing"] = 0

    monkeypatch.setattr(torch_graphs.captures, "abandon", abandon)
    for name in ("__enter__", "capture_begin", "capture_end"):
        monkeypatch.setattr(Graph, name, getattr(Graph, name))  # so that it is as it was afterwards
    cuda = SimpleNamespace(graph=type("graph", (Graph,), {}), CUDAGraph=Graph)
    torch_graphs.watch(made, SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    made.context = cuda.graph
    return made


def test_captures_that_cannot_be_served_are_refused_before_they_begin(heap: SimpleNamespace) -> None:
    """A second capture, and any in a job that pages, is one sentence before PyTorch has done anything."""
    graph, context = Graph(), heap.context()
    for text, managed, capturing in (("one capture at a time", None, 1), ("a job that pages", object(), 0)):
        heap.managed, heap.record[0]["streams"]["capturing"] = managed, capturing
        for step in (context.__enter__, graph.capture_begin):
            with pytest.raises(RuntimeError, match=rf"^zico: .*{text}"):
                step()
    assert graph.called == context.called == []
    heap.managed = None
    graph.capture_begin(pool=(0, 1))
    assert (graph.called, heap.abandoned) == (["begin"], 0)


def test_a_capture_that_fails_is_given_up(heap: SimpleNamespace) -> None:
    """PyTorch's error passes, and the heap is told; the end of another graph's capture ends nothing."""
    graph, other = Graph(), Graph()
    graph.failing = "begin"
    with pytest.raises(ValueError, match="begin"):
        graph.capture_begin()
    assert heap.abandoned == 1
    graph.failing = other.failing = "end"
    graph.capture_begin()
    with pytest.raises(ValueError, match="end"):
        other.capture_end()
    assert heap.abandoned == 1
    with pytest.raises(ValueError, match="end"):
        graph.capture_end()
    assert heap.abandoned == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, Expandable_Segments: True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
    ],
)
def test_settings_that_name_another_allocator_are_refused(name: str, value: str) -> None:
    """The message names the variable, its value and the remedy."""
    with pytest.raises(HookError, match=f"{name}=.*: unset {name}"):
        torch_cuda.refuse_settings({name: value})


def test_other_settings_pass() -> None:
    """What only tunes PyTorch's allocator does no harm."""
    torch_cuda.refuse_settings({"PYTORCH_ALLOC_CONF": "expandable_segments:False,garbage_collection_threshold:0.8"})


def test_an_allocator_in_use_is_refused(session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch changes its allocator only before the first tensor."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native", raising=False)
    with pytest.raises(HookError, match="in use already"):
        torch_cuda.enable(session)


def test_a_build_without_cuda_is_refused(session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build has no such allocator; the sentence names the version."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(HookError, match=r"PyTorch .* does not take Zico's allocator"):
        torch_cuda.enable(session)
