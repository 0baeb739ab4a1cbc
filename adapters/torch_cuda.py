"""PyTorch on a CUDA device: the whole allocator is Zico's, so that every tensor's free is seen with its stream.

``torch.cuda.memory_allocated`` and its like answer from Zico's counters, since PyTorch's pluggable allocator has none.
What needs PyTorch's caching allocator itself (checkpoints of its state, snapshots, its history, the memory of CUDA
graphs) is refused with a sentence. Has not run on a GPU.

Rejected: ``torch.cuda.MemPool`` over an allocator of ours keeps PyTorch's statistics and its out-of-memory error, but
the caching allocator in front of it gives back segments only when it is emptied, so that nobody else could use what an
iteration has finished with.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from zico.autoload import complain
from zico.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zico.session import Session

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CLASHING = ("expandable_segments:true", "backend:cudamallocasync")
"""Parts of these settings, lower case and without blanks, that name another allocator than the one replaced."""

REFUSED = {
    "_cuda_getCheckpointState": "CUDA graph trees (torch.compile with mode='reduce-overhead'): use another mode, or "
    "torch._inductor.config.triton.cudagraph_trees = False",
    "_cuda_setCheckpointPoolState": "CUDA graph trees (torch.compile with mode='reduce-overhead'): use another mode",
    "_cuda_memorySnapshot": "snapshots of PyTorch's allocator: record with zico trace, and write one with "
    "zico trace show --snapshot",
    "_cuda_record_memory_history": "the history of PyTorch's allocator: record with zico trace",
    "_cuda_attach_out_of_memory_observer": "observers of PyTorch's allocator",
}
GRAPHS = (
    "CUDA graphs, whose tensors would have to stay where they are between replays: train without torch.cuda.graph and "
    "make_graphed_callables, and let torch.compile use mode='default' or 'max-autotune-no-cudagraphs'"
)
OTHER_DEVICE = (
    "zico: this tensor is for another GPU than the pool's, cuda:{ordinal}: put it there, or let the process see "
    "that GPU alone by CUDA_VISIBLE_DEVICES={uuid} (zico run does)"
)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What PyTorch's statistics are made of. Bytes and counts since the process began."""

    live_bytes: int
    peak_live_bytes: int
    held_bytes: int
    peak_held_bytes: int
    requested_bytes: int
    allocations: int
    frees: int
    refused: int


def counts_of(session: Session) -> Counts:
    """Return a session's counts now."""
    job, heap = session.record, session.heap.record[0]
    region_bytes = session.pool.region_bytes
    allocations = int(job["allocations"])
    return Counts(
        live_bytes=int(job["live_bytes"]),
        peak_live_bytes=int(job["peak_live_bytes"]),
        held_bytes=int(job["held"]) * region_bytes,
        peak_held_bytes=int(job["peak_held"]) * region_bytes,
        requested_bytes=int(job["requested_bytes"]),
        allocations=allocations,
        frees=int(heap["events"]) - allocations,
        refused=int(job["oom_count"]),
    )


def nested_stats(counts: Counts) -> dict[str, Any]:
    """Return the counts as ``torch.cuda.memory_stats_as_nested_dict`` has them.

    Reserved is what the job holds of the pool. There is one pool, here called large.
    """
    live = counts.allocations - counts.frees
    tensors = _pools(live, live, counts.allocations, counts.frees)
    in_use = _pools(
        counts.live_bytes, counts.peak_live_bytes, counts.requested_bytes, counts.requested_bytes - counts.live_bytes
    )
    held = _pools(counts.held_bytes, counts.peak_held_bytes, counts.peak_held_bytes, 0)
    unused_bytes = max(0, counts.held_bytes - counts.live_bytes)
    unused = _pools(unused_bytes, unused_bytes, 0, 0)
    none = _pools(0, 0, 0, 0)
    return {
        "num_alloc_retries": 0,
        "num_ooms": counts.refused,
        "num_sync_all_streams": 0,
        "num_device_alloc": 0,
        "num_device_free": 0,
        "max_split_size": -1,
        "allocation": tensors,
        "active": tensors,
        "segment": none,
        "inactive_split": none,
        "allocated_bytes": in_use,
        "active_bytes": in_use,
        "requested_bytes": in_use,
        "reserved_bytes": held,
        "inactive_split_bytes": unused,
        "oversize_allocations": none["small_pool"],
        "oversize_segments": none["small_pool"],
    }


def _pools(current: int, peak: int, allocated: int, freed: int) -> dict[str, dict[str, int]]:
    values = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
    return {"all": values, "large_pool": dict(values), "small_pool": dict.fromkeys(values, 0)}


def refuse_settings(environment: Mapping[str, str]) -> None:
    """Refuse settings under which PyTorch would not use the allocator that is replaced.

    Raises:
        HookError: One of them is there; the message says which and what to do.
    """
    for name in SETTINGS:
        parts = environment.get(name, "").lower().replace(" ", "").split(",")
        for part in parts:
            if part in CLASHING:
                message = (
                    f"{name}={environment[name]} asks for an allocator of PyTorch's own ({part}), and Zico replaces "
                    f"the allocator: unset {name}, or train without Zico"
                )
                raise HookError(message)


def enable(joined: Session) -> None:
    """Take PyTorch's CUDA memory from the pool.

    Raises:
        HookError: PyTorch's allocator is in use already, its settings clash, or this build cannot be redirected.
    """
    refuse_settings(os.environ)
    import torch
    from zico.adapters import torch_cache_info, torch_raising

    from zico import lookup
    from zico.heap.cuda import hooks

    facts = joined.pool.driver.facts  # type: ignore[attr-defined]  # a CUDA device's driver
    refusal = OTHER_DEVICE.format(ordinal=facts.ordinal, uuid=facts.uuid)
    others = hooks.OTHERS_RECORD[0]
    others["out_of_memory"] = torch_raising.prepare(torch)
    others["device"] = facts.ordinal
    others["refuse_device"] = torch_raising.prepare_refusal(torch, refusal)
    core, memory = torch._C, torch.cuda.memory  # noqa: SLF001 - the only door
    try:
        backend = memory.get_allocator_backend()
        if torch.cuda.is_initialized() or backend != "native":
            message = (
                f"PyTorch's CUDA allocator ({backend}) is in use already, and PyTorch changes it only before the first "
                "tensor: let Zico come first"
            )
            raise HookError(message)
        allocator = core._cuda_customAllocator(hooks.allocate.address, hooks.free.address)  # noqa: SLF001
        allocator.set_record_stream_fn(hooks.record_stream.address)
        # PyTorch's static destructors free tensors after the interpreter is gone.
        handed = (hooks.allocate, hooks.free, hooks.record_stream)
        lookup.keep(joined, torch_raising.RAISERS, *hooks.NEEDED_TO_THE_END, *handed)
        memory.change_current_allocator(memory._CUDAAllocator(allocator))  # noqa: SLF001 - as CUDAPluggableAllocator does
    except (AttributeError, TypeError, RuntimeError) as error:
        message = f"PyTorch {torch.__version__} does not take Zico's allocator: {error}"
        raise HookError(message) from error
    try:
        torch_cache_info.install(torch)
    except HookError as error:
        complain("cuDNN cannot time its algorithms in this job", error)
    answer(joined, torch)
    refuse_captures(torch)


def refuse_captures(torch: Any) -> None:  # noqa: ANN401 - the module
    """Refuse CUDA graphs before PyTorch has begun one: its context manager has changed the current stream by then.

    A graph would go on using the addresses that it was captured with when others have their memory.
    """
    refuse = _refusing(GRAPHS)
    torch.cuda.graph.__enter__ = refuse
    torch.cuda.CUDAGraph.capture_begin = refuse
    accelerator_graph = getattr(getattr(torch, "accelerator", None), "Graph", None)  # not in every version
    if accelerator_graph is not None:
        accelerator_graph.capture_begin = refuse


def answer(joined: Session, torch: Any) -> None:  # noqa: ANN401 - the module
    """Let PyTorch's questions about its memory be answered from the session; refuse what nobody can answer."""
    core = torch._C  # noqa: SLF001 - what torch.cuda.memory asks
    core._cuda_memoryStats = lambda _device: nested_stats(counts_of(joined))  # noqa: SLF001
    core._cuda_resetPeakMemoryStats = lambda _device: _reset_peaks(joined)  # noqa: SLF001
    core._cuda_resetAccumulatedMemoryStats = lambda _device: None  # noqa: SLF001 - totals are the pool's too
    core._cuda_emptyCache = lambda *_pool: None  # noqa: SLF001 - nothing is cached
    for name, what in REFUSED.items():
        setattr(core, name, _refusing(what))
    torch.cuda.memory.mem_get_info = torch.cuda.mem_get_info = lambda _device=None: joined.pool.free_and_total_bytes()


def _reset_peaks(joined: Session) -> None:
    job = joined.record
    job["peak_live_bytes"] = job["live_bytes"]


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:  # noqa: ANN401 - whatever PyTorch passes
        message = f"not with Zico's allocator: {what}"
        raise RuntimeError(message)

    return refuse
