"""PyTorch's questions about CUDA memory, answered from a heap on a device of software. PyTorch's own Python asks."""

from __future__ import annotations

import inspect
import itertools
import pickle
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cpu.support.hooked_place import BUDGET_BYTES, MIB, Place, put_in_place
from torch.cuda import _memory_viz
from zico.adapters import torch_cuda, torch_cuda_memory, torch_graphs, torch_pools

from zico.base.errors import HookError
from zico.heap.cuda import hooks, on_stream
from zico.heap.layout import HEAP
from zico.trace.snapshot import unpickle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNIT_BYTES = 512
FIRST, SECOND = 11, 12
CORE = (
    *("_cuda_memoryStats", "_cuda_resetPeakMemoryStats", "_cuda_resetAccumulatedMemoryStats", "_cuda_memorySnapshot"),
    *("_cuda_record_memory_history", "_cuda_record_memory_history_legacy", "_cuda_isHistoryEnabled"),
    *("_cuda_allocationTraceback", "_cuda_attach_out_of_memory_observer", "_cuda_setMemoryFraction"),
    *("_cuda_getMemoryFraction", "_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
    *("_accelerator_resetAccumulatedStats", "_accelerator_getMemoryInfo", "_accelerator_setAllocatorSettings"),
)
VIEWS = {"cuda": torch.cuda, "accelerator": torch.accelerator}
if not hasattr(torch.accelerator, "memory_stats"):
    del VIEWS["accelerator"]  # before 2.9 it answered no questions about memory


@pytest.fixture
def place() -> Iterator[Place]:
    """Give a heap that hardly waits for memory."""
    with put_in_place(wait_limit_s=0.01) as made:
        yield made


@pytest.fixture
def session(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Give a session of the pool's first job, and a PyTorch with two GPUs that believes the first to be in use."""
    member = place.heap.pool
    driver = SimpleNamespace(facts=SimpleNamespace(ordinal=0, uuid="GPU-0"))
    pool = SimpleNamespace(
        region_bytes=member.region_bytes, free_and_total_bytes=member.free_and_total_bytes, driver=driver
    )
    made = SimpleNamespace(record=member.jobs[0], pool=pool, heap=place.heap)
    for name in CORE:
        monkeypatch.setattr(torch._C, name, None, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True, raising=False)
    of_other = lambda device: ("PyTorch's own", device)  # noqa: E731 - a stand-in
    monkeypatch.setattr(torch._C, "_accelerator_getMemoryInfo", of_other, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    monkeypatch.setattr(torch.cuda.memory, "mem_get_info", of_other)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    for memory in filter(None, (torch.cuda.memory, getattr(torch.accelerator, "memory", None))):
        monkeypatch.setattr(memory, "_get_device_index", lambda device, **_: device or 0)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    torch_cuda_memory.Answers(made, torch).install()
    yield made
    hooks.OTHERS_RECORD[0] = 0


def allocate(place: Place, size_bytes: int, stream: int = FIRST) -> int:
    """Allocate for a stream."""
    address = int(on_stream.allocate_on(place.heap.record[0], size_bytes, stream))
    assert address > 0
    return address


def free(place: Place, address: int, stream: int = FIRST) -> None:
    """Free what a stream has finished with."""
    on_stream.free_on(place.heap.record[0], address, stream)


@pytest.mark.parametrize("view", VIEWS)
def test_figures_are_those_of_the_heap(place: Place, session: SimpleNamespace, view: str) -> None:
    """Tensors, regions and peaks are what came and went; Zico's reports keep the peaks that PyTorch resets."""
    asked = VIEWS[view]
    small, large = allocate(place, 100), allocate(place, 2 * MIB)
    assert asked.memory_allocated() == 2 * MIB + UNIT_BYTES
    assert asked.memory_reserved() == 3 * MIB
    free(place, large)
    free(place, allocate(place, MIB))
    assert (asked.memory_allocated(), asked.max_memory_allocated()) == (UNIT_BYTES, 2 * MIB + UNIT_BYTES)
    assert (asked.memory_reserved(), asked.max_memory_reserved()) == (MIB, 3 * MIB)
    asked.reset_peak_memory_stats()
    assert (asked.max_memory_allocated(), asked.max_memory_reserved()) == (UNIT_BYTES, MIB)
    assert asked.memory_stats()["allocation.all.peak"] == 1
    assert session.record["peak_live_bytes"] == 2 * MIB + UNIT_BYTES
    assert session.record["peak_held"] == 3
    free(place, allocate(place, MIB))
    assert asked.max_memory_allocated() == MIB + UNIT_BYTES
    free(place, small)


@pytest.mark.parametrize("view", VIEWS)
def test_totals_count_what_came_and_went(place: Place, session: SimpleNamespace, view: str) -> None:
    """Of each figure so much came and went as is there now, and they begin anew when PyTorch is told to."""
    asked = VIEWS[view]
    kept = allocate(place, MIB)
    for _ in range(3):
        free(place, allocate(place, 2 * MIB))
    assert on_stream.allocate_on(place.heap.record[0], 8 * MIB, FIRST) < 0
    found = asked.memory_stats()
    of_all = [name.removesuffix(".all.current") for name in found if name.endswith(".all.current")]
    assert len(of_all) == 9
    for name in of_all:
        figures = {kind: found[f"{name}.all.{kind}"] for kind in ("current", "peak", "allocated", "freed")}
        assert figures["allocated"] - figures["freed"] == figures["current"] <= figures["peak"], name
    assert [found[f"allocation.all.{kind}"] for kind in ("current", "peak", "allocated", "freed")] == [1, 2, 4, 3]
    assert [found[f"segment.all.{kind}"] for kind in ("current", "peak", "allocated", "freed")] == [1, 3, 7, 6]
    assert (found["allocated_bytes.all.freed"], found["reserved_bytes.all.freed"]) == (6 * MIB, 6 * MIB)
    assert found["num_ooms"] == session.record["oom_count"] == 1
    asked.reset_accumulated_memory_stats()
    free(place, allocate(place, MIB))
    found = asked.memory_stats()
    assert [found[f"allocation.all.{kind}"] for kind in ("current", "peak", "allocated", "freed")] == [1, 2, 1, 1]
    assert (found["allocated_bytes.all.allocated"], found["num_ooms"]) == (MIB, 0)
    free(place, kept)


def test_free_is_what_the_job_may_still_take(place: Place, session: SimpleNamespace) -> None:
    """Total is the budget, or the job's limit; what others hold can be had by waiting. Other GPUs are PyTorch's."""
    kept = allocate(place, MIB)
    answers = [torch.cuda.mem_get_info, torch.cuda.memory.mem_get_info]
    if hasattr(torch.accelerator, "get_memory_info"):  # not in every version
        answers.append(torch.accelerator.get_memory_info)
    assert {answer() for answer in answers} == {(BUDGET_BYTES - MIB, BUDGET_BYTES)}
    assert {answer(1) for answer in answers} == {("PyTorch's own", 1)}
    place.pool.set_limit(0, 2)
    assert {answer() for answer in answers} == {(MIB, 2 * MIB)}
    place.pool.set_limit(0, 0)
    free(place, kept)
    assert session.pool.region_bytes == MIB


def test_other_gpus_have_nothing_of_the_job(place: Place, session: SimpleNamespace) -> None:
    """Statistics of a GPU that is not the pool's are 0, and one that there is not is an error that says which are."""
    kept = allocate(place, MIB)
    for asked in VIEWS.values():
        assert set(asked.memory_stats(1).values()) == {0, -1}
        asked.reset_peak_memory_stats(1)
        asked.reset_accumulated_memory_stats(1)
        assert asked.memory_allocated(0) == MIB
        for ask in (asked.memory_stats, asked.reset_peak_memory_stats, asked.reset_accumulated_memory_stats):
            with pytest.raises(RuntimeError, match=r"no cuda:2: this process sees 2, give a number from 0 to 1"):
                ask(2)
    free(place, kept)
    assert session.record["live_bytes"] == 0


def test_the_summary_is_whole(place: Place, session: SimpleNamespace) -> None:
    """PyTorch's own table finds every key that it prints."""
    kept = allocate(place, MIB)
    text = torch.cuda.memory_summary()
    assert "Allocated memory      |   1024 KiB" in text
    assert "Oversize GPU segments" in text
    free(place, kept)
    assert session.record["allocations"] == 1


def test_a_snapshot_shows_every_tensor(place: Place, session: SimpleNamespace, tmp_path: Path) -> None:
    """Its segments are what the job holds; its blocks tile them; PyTorch's tools and its viewer's pickles take it."""
    assert torch.cuda.memory_snapshot() == []
    small, large, waits = allocate(place, 3000), allocate(place, 3 * MIB // 2), allocate(place, 70_000, SECOND)
    gone = allocate(place, 3000)
    place.device.wait_until(FIRST, lambda: False)
    on_stream.record_stream(place.heap.record[0], waits, FIRST)
    free(place, waits, SECOND)
    free(place, gone)
    knows_traces = "augment_with_fx_traces" in inspect.signature(torch.cuda.memory._snapshot).parameters  # since 2.11
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot(**{"augment_with_fx_traces": True} if knows_traces else {})
    assert _memory_viz.segsum(snapshot)
    assert sum(one["total_size"] for one in snapshot["segments"]) == torch.cuda.memory_reserved() == 4 * MIB
    blocks = [(one["stream"], it) for one in snapshot["segments"] for it in one["blocks"] if it["state"] != "inactive"]
    assert {(it["address"], it["size"], stream, it["state"]) for stream, it in blocks} == {
        (small, 3072, FIRST, "active_allocated"),
        (large, 3 * MIB // 2, FIRST, "active_allocated"),
        (waits, 70_144, SECOND, "active_pending_free"),
    }
    assert [len(one) for one in snapshot["device_traces"]] == [0, 0]
    torch.cuda.memory._dump_snapshot(str(tmp_path / "dumped"))
    dumped = (tmp_path / "dumped").read_bytes()
    assert unpickle(dumped) == pickle.loads(dumped) == torch.cuda.memory._snapshot()  # noqa: S301 - our own
    assert torch.cuda.memory_snapshot((0, 7)) == []
    assert _memory_viz.segment_plot(snapshot)
    place.device.queues[FIRST].clear()
    for address in (small, large):
        free(place, address)
    on_stream.settle(place.heap.record[0])
    assert session.record["live_bytes"] == 0


def test_a_large_snapshot_is_whole(place: Place, session: SimpleNamespace) -> None:
    """More tensors than a first look has room for are all there."""
    made = [allocate(place, 100) for _ in range(2 * MIB // UNIT_BYTES)]
    (one,) = torch.cuda.memory_snapshot()
    assert [it["address"] for it in one["blocks"]] == sorted(made)
    assert (one["allocated_size"], one["total_size"]) == (2 * MIB, 2 * MIB)
    for address in made:
        free(place, address)
    assert session.record["live_bytes"] == 0


def test_what_nobody_can_answer_is_told_and_ends_no_job(
    session: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainers ask for a history, for observers and for a share: each is told once what to use instead."""
    assert session is not None
    for _ in range(2):
        torch.cuda.memory._record_memory_history(max_entries=1000)
        torch.cuda.memory._record_memory_history(enabled=True)
        torch.cuda.memory._record_memory_history(enabled=None)
        torch._C._cuda_attach_out_of_memory_observer(print)
        torch.cuda.set_per_process_memory_fraction(0.5)
    told = [torch_cuda_memory.HISTORY, torch_cuda_memory.OBSERVERS, torch_cuda_memory.FRACTION]
    assert capsys.readouterr().err == "".join(f"zico: {one}\n" for one in told)
    assert torch.cuda.get_per_process_memory_fraction() == 1
    assert torch._C._cuda_isHistoryEnabled() is False
    if hasattr(torch.cuda.memory, "_allocation_traceback"):  # not in 2.11
        assert torch.cuda.memory._allocation_traceback(1) is None


def test_stopping_a_history_says_nothing(session: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that only makes sure that nothing is recorded is told nothing."""
    assert session is not None
    torch.cuda.memory._record_memory_history(enabled=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.reset_max_memory_allocated()
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize(("managed", "swaps"), [(None, False), (object(), False), (None, True)])
def test_without_graph_trees_compiled_functions_run_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], managed: object, *, swaps: bool
) -> None:
    """Where a function is lacking, or a job pages or swaps, PyTorch skips its graphs, and one line says why."""
    from torch._inductor import config, output_code

    graphs = ("cudagraph_post_compile", "cudagraph_partition_post_compile")
    captured: list[str] = []
    for name in graphs:
        monkeypatch.setattr(output_code, name, lambda *_args, name=name: captured.append(name))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delattr(torch._C, "_cuda_getCheckpointState", raising=False)  # builds for CUDA have it
    joined: Any = SimpleNamespace(heap=SimpleNamespace(managed=managed), is_to_swap=swaps)
    torch_graphs.serve(joined, torch)
    for trees in (True, False):
        for name in graphs:
            is_to_capture = output_code.BoxedBool(value=True)
            with config.patch({"triton.cudagraph_trees": trees}):
                getattr(output_code, name)([], None, is_to_capture, {}, None)
            assert is_to_capture.value is not trees
    assert captured == list(graphs), "graphs without trees are the user's"
    why = (
        "a job that pages"
        if managed
        else "a job that swaps"
        if swaps
        else f"PyTorch {torch.__version__} has no torch._C._cuda_"
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"zico: torch.compile with mode='reduce-overhead' runs without CUDA graphs in this job: {why}"
    )


KEYS = (
    *("max_split_size_mb:64", "max_non_split_rounding_mb:20", "garbage_collection_threshold:0.8"),
    *("roundup_power2_divisions:[256:1,512:2,>:4]", "expandable_segments:True", "release_lock_on_cudamalloc:True"),
    *("graph_capture_record_stream_reuse:True", "per_process_memory_fraction:0.5", "large_segment_size_mb:64"),
    "throw_on_cudamalloc_oom:True",
)
"""Of PyTorch 2.11 and later, but for those of pinned memory and of the allocator itself."""
OF_PINNED_MEMORY = ("pinned_use_cuda_host_register:True", "pinned_num_register_threads:8")


@pytest.mark.parametrize("name", torch_cuda_memory.SETTINGS)
@pytest.mark.parametrize("backend", torch_cuda_memory.BACKENDS)
def test_settings_of_the_allocator_are_accepted_with_one_line(name: str, backend: str) -> None:
    """The line names what has no effect. PyTorch may read all but the allocator's name, at which it would raise."""
    environment = {"HOME": "/", name: ", ".join((*OF_PINNED_MEMORY, f"backend: {backend}", *KEYS)), "A": "b"}
    line = torch_cuda_memory.settle(environment)
    assert line.startswith(f"{name}=backend:{backend},{','.join(KEYS)} has no effect in this job, since ")
    assert environment == {"HOME": "/", name: ",".join((*OF_PINNED_MEMORY, *KEYS)), "A": "b"}


def test_settings_that_say_nothing_are_worth_no_line() -> None:
    """Without a setting, or with one of pinned memory alone, nothing is said; both variables share one line."""
    assert torch_cuda_memory.settle({}) == ""
    both = {"PYTORCH_ALLOC_CONF": OF_PINNED_MEMORY[0], "PYTORCH_CUDA_ALLOC_CONF": ""}
    assert torch_cuda_memory.settle(both) == ""
    assert both == {"PYTORCH_ALLOC_CONF": OF_PINNED_MEMORY[0]}
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    line = torch_cuda_memory.settle(both)
    assert line.startswith(
        "PYTORCH_ALLOC_CONF=expandable_segments:True and PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync has"
    )
    assert both == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_settings_that_a_script_changes_are_told_once(
    session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a running script sets reaches PyTorch without the allocator's name, and what has no effect is one line."""
    read: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", read.append)
    torch_cuda_memory.Answers(session, torch).install()
    for _ in range(2):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch._C._accelerator_setAllocatorSettings("backend:native")
    assert read == ["expandable_segments:False"] * 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" has ")[0] for line in lines] == ["zico: expandable_segments:False", "zico: backend:native"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a PyTorch with Zico's pools, put back afterwards."""
    for module in (torch.cuda, torch.cuda.memory):
        for name in ("MemPool", "use_mem_pool"):
            monkeypatch.setattr(module, name, None, raising=False)
    names = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(names)))
    for name in ("_share_cuda_", "_new_shared_cuda"):
        monkeypatch.setattr(torch.UntypedStorage, name, None, raising=False)
    torch_pools.serve(torch)


@pytest.mark.usefixtures("served")
def test_a_pool_of_pytorchs_is_a_name() -> None:
    """Pools have names of their own and change nothing about a tensor; an allocator of their own is one sentence."""
    first, second = torch.cuda.MemPool(), torch.cuda.memory.MemPool(None, use_on_oom=True, no_split=True)
    with torch.cuda.use_mem_pool(first), torch.cuda.memory.use_mem_pool(second, device="cuda:0"):
        assert torch.ones(1).sum() == 1
    assert (first.id, second.id) == ((0, 0), (0, 1))
    assert (first.allocator, first.use_count(), first.snapshot(include_traces=False)) == (None, 1, [])
    with pytest.raises(RuntimeError, match=r"^zico: a torch.cuda.MemPool with an allocator of its own"):
        torch.cuda.MemPool(object())  # type: ignore[arg-type]


@pytest.mark.usefixtures("served")
def test_gpu_memory_is_not_shared_with_processes() -> None:
    """Both ends of sharing say in one sentence what to do."""
    storage = torch.ones(1).untyped_storage()
    for share in (storage._share_cuda_, torch.UntypedStorage._new_shared_cuda):
        with pytest.raises(RuntimeError, match=r"^zico: a tensor in GPU memory cannot be shared .*: send a copy in"):
            share()


def test_an_allocator_in_use_is_refused(session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch changes its allocator only before the first tensor."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native", raising=False)
    with pytest.raises(HookError, match="in use already"):
        torch_cuda.enable(session)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is a build for CUDA")
def test_a_build_without_cuda_is_refused(session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build has no such allocator; the sentence names the version."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(HookError, match=r"PyTorch .* does not take Zico's allocator"):
        torch_cuda.enable(session)
