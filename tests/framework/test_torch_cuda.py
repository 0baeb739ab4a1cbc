"""PyTorch's questions about CUDA memory, answered from Zico's counters. No GPU: PyTorch's own Python asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from zico.adapters import torch_cuda

from zico.base.errors import HookError
from zico.heap.cuda import hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def enter_graph() -> None:
    """Begin a capture as programs do, without the parts of it that need a device."""
    object.__new__(torch.cuda.graph).__enter__()


def capture_begin() -> None:
    """Begin a capture by hand."""
    torch.cuda.CUDAGraph.capture_begin(None, capture_error_mode="relaxed")


def capture_begin_on_any_accelerator() -> None:
    """Begin a capture by the interface that names no vendor."""
    torch.accelerator.Graph.capture_begin(None)


@pytest.mark.parametrize("begin", [enter_graph, capture_begin, capture_begin_on_any_accelerator])
def test_cuda_graphs_are_refused_before_anything_is_captured(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None]
) -> None:
    """Every way into a capture ends in one sentence that says what to do, and touch neither stream nor device."""
    monkeypatch.setattr(torch.cuda.graph, "__enter__", torch.cuda.graph.__enter__)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", torch.cuda.CUDAGraph.capture_begin)
    monkeypatch.setattr(torch.accelerator.Graph, "capture_begin", torch.accelerator.Graph.capture_begin)
    torch_cuda.refuse_captures(torch)
    with pytest.raises(RuntimeError, match=r"not with Zico's allocator: CUDA graphs, .*: train without"):
        begin()


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
