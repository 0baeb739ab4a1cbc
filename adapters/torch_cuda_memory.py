"""PyTorch's questions about CUDA memory, answered for this job within its budget.

PyTorch asks its own caching allocator, which is replaced here, and its pluggable allocator raises.
So the functions of ``torch._C`` that ``torch.cuda.memory`` and ``torch.accelerator.memory`` call are
Zico's. No training script ends by one of them: what nobody can answer is told in a line. Other
visible GPUs have no memory of this job's. Its answers have not been compared on a GPU.

The heap does not keep some figures. One is the size that was asked for (``requested_bytes`` is what
tensors take). Others are how many free ranges there are (``inactive_split``), and what was unused
before (``inactive_split_bytes``: its peak is what is unused now). There is one pool of tensors,
here called large. Tensors in the next tier count, and their bytes do not.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from zico.base.saying import inform
from zico.heap.cuda.contents import HELD, WAITS, contents
from zico.trace.snapshot import block, segment

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from zico.job.session import Session

HISTORY = (
    "torch.cuda.memory._record_memory_history does nothing here, since Zico keeps no history of allocations: record "
    "the job with zico trace"
)
OBSERVERS = (
    "observers of PyTorch's out-of-memory errors are not called here: torch.OutOfMemoryError says what the job lacked"
)
FRACTION = (
    "torch.cuda.set_per_process_memory_fraction does nothing here: the budget is set by zico run --budget, and what a "
    "job may hold of it by zico limit"
)

NO_EFFECT = (
    "{} has no effect in this job, since its GPU memory comes from Zico's pool: leave it, or unset it to be rid of "
    "this line"
)
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
BACKENDS = ("native", "cudaMallocAsync")
"""PyTorch's own allocators of GPU memory, of which a setting chooses one."""
_BACKEND, _OF_PINNED_MEMORY = "backend:", "pinned_"
_PART = re.compile(r"(?:[^,\[]|\[[^]]*\]?)+")


def settle(environment: MutableMapping[str, str]) -> str:
    """Take the settings of PyTorch's allocator that would do harm out of an environment.

    Returns:
        A sentence that names those without effect; empty where there are none.
    """
    ignored = []
    for name in SETTINGS:
        if name in environment:
            kept, without_effect = _read(environment[name])
            if kept:
                environment[name] = kept
            else:
                del environment[name]
            ignored += [f"{name}={without_effect}"] if without_effect else []
    return NO_EFFECT.format(" and ".join(ignored)) if ignored else ""


def _read(settings: str) -> tuple[str, str]:
    """Return what PyTorch may read of settings, and what of them has no effect.

    It must not read ``backend``: it compares that with the allocator that it has when it reads, and
    raises. Pinned memory has an allocator of its own, which stays PyTorch's.
    """
    parts = ["".join(part.split()) for part in _PART.findall(settings)]
    kept = [part for part in parts if part and not part.startswith(_BACKEND)]
    without_effect = [part for part in parts if part and not part.startswith(_OF_PINNED_MEMORY)]
    return ",".join(kept), ",".join(without_effect)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What PyTorch's statistics are made of: bytes, tensors, regions. Totals are since the process began."""

    live_bytes: int = 0
    peak_live_bytes: int = 0
    freed_bytes: int = 0
    allocations: int = 0
    frees: int = 0
    peak_tensors: int = 0
    held: int = 0
    peak_held: int = 0
    returned: int = 0
    refused: int = 0


TOTALS = ("freed_bytes", "allocations", "frees", "returned", "refused")


def counts_of(session: Session) -> Counts:
    """Return a session's counts now."""
    job, figures = session.record, session.heap.record[0]["figures"]
    of_job = {name: int(job[name]) for name in ("live_bytes", "allocations", "held")}
    of_heap = ("peak_live_bytes", "freed_bytes", "frees", "peak_tensors", "peak_held", "returned")
    return Counts(**of_job, refused=int(job["oom_count"]), **{name: int(figures[name]) for name in of_heap})


def nested_stats(counts: Counts, since: Counts, region_bytes: int) -> dict[str, Any]:
    """Return counts as ``torch.cuda.memory_stats_as_nested_dict`` has them. Reserved is what the job holds of the pool.

    Args:
        counts: Of now.
        since: Totals are counted from these.
        region_bytes: Of the pool.
    """
    live = counts.allocations - counts.frees
    tensors = _pools(live, counts.peak_tensors, counts.frees, since.frees, since.allocations - since.frees)
    in_use = _pools(counts.live_bytes, counts.peak_live_bytes, counts.freed_bytes, since.freed_bytes, since.live_bytes)
    regions = (counts.held, counts.peak_held, counts.returned, since.returned, since.held)
    unused_bytes = max(0, counts.held * region_bytes - counts.live_bytes)
    unused = _pools(unused_bytes, unused_bytes, 0, 0, 0)
    none = _pools(0, 0, 0, 0, 0)
    return {
        "num_alloc_retries": 0,
        "num_ooms": counts.refused - since.refused,
        "num_sync_all_streams": 0,
        "num_device_alloc": 0,
        "num_device_free": 0,
        "num_oom_rejections": 0,
        "max_split_size": -1,
        "allocation": tensors,
        "active": tensors,
        "segment": _pools(*regions),
        "inactive_split": none,
        "allocated_bytes": in_use,
        "active_bytes": in_use,
        "requested_bytes": in_use,
        "reserved_bytes": _pools(*(n * region_bytes for n in regions)),
        "inactive_split_bytes": unused,
        "oversize_allocations": none["small_pool"],
        "oversize_segments": none["small_pool"],
    }


def _pools(current: int, peak: int, freed: int, freed_before: int, there_before: int) -> dict[str, dict[str, int]]:
    """Return one figure, whose totals count from a moment at which so much had been freed and so much was there."""
    freed -= freed_before
    values = {"current": current, "peak": peak, "allocated": freed + current - there_before, "freed": freed}
    return {"all": values, "large_pool": dict(values), "small_pool": dict.fromkeys(values, 0)}


def segments_of(session: Session, device: int) -> list[dict[str, Any]]:
    """Return what the job holds of the pool as segments of ``torch.cuda.memory_snapshot``.

    A segment is a run of regions for one stream; what is freed and waits for other streams is
    ``active_pending_free``. The heap's other callers wait meanwhile.
    """
    runs: list[tuple[int, int, int]] = []  # address, size, stream
    blocks: list[list[dict[str, Any]]] = []
    base = session.heap.base
    for offset, size_bytes, stream, kind in contents(session.heap).tolist():
        address = base + offset
        if kind != HELD:
            state = "active_pending_free" if kind == WAITS else "active_allocated"
            blocks[-1].append(block(address, size_bytes, size_bytes, state, []))
        elif runs and (sum(runs[-1][:2]), runs[-1][2]) == (address, stream):
            runs[-1] = (runs[-1][0], runs[-1][1] + size_bytes, stream)
        else:
            runs.append((address, size_bytes, stream))
            blocks.append([])
    return [
        segment(address, size_bytes, inside, device=device, stream=stream)
        for (address, size_bytes, stream), inside in zip(runs, blocks, strict=True)
    ]


class Answers:
    """What answers PyTorch's questions; ``install`` puts it in place."""

    def __init__(self, joined: Session, torch: Any) -> None:  # noqa: ANN401 - the module
        """Answer for a session, whose pool is on a CUDA device."""
        self._joined, self._torch = joined, torch
        self._device: int = joined.pool.driver.facts.ordinal  # type: ignore[attr-defined]  # a CUDA device's driver
        self._since = Counts()
        self._told: set[str] = set()

    def install(self) -> None:
        """Put the answers where PyTorch's Python asks."""
        core = self._torch._C  # noqa: SLF001 - what torch.cuda.memory asks
        core._cuda_memoryStats = core._accelerator_getDeviceStats = self.stats  # noqa: SLF001
        core._cuda_resetPeakMemoryStats = core._accelerator_resetPeakStats = self.reset_peaks  # noqa: SLF001
        core._cuda_resetAccumulatedMemoryStats = core._accelerator_resetAccumulatedStats = self.reset_totals  # noqa: SLF001
        core._cuda_memorySnapshot = self.snapshot  # noqa: SLF001
        core._cuda_record_memory_history = core._cuda_record_memory_history_legacy = self.record_history  # noqa: SLF001
        core._cuda_isHistoryEnabled = lambda: False  # noqa: SLF001
        core._cuda_allocationTraceback = lambda _address: None  # noqa: SLF001
        core._cuda_attach_out_of_memory_observer = lambda _observer: self._tell(OBSERVERS)  # noqa: SLF001
        core._cuda_setMemoryFraction = lambda _fraction, _device: self._tell(FRACTION)  # noqa: SLF001
        settings = getattr(core, "_accelerator_setAllocatorSettings", None)  # not in every version
        core._accelerator_setAllocatorSettings = lambda text: self._set(settings, text)  # noqa: SLF001
        core._cuda_getMemoryFraction = lambda _device: 1.0  # noqa: SLF001 - of what mem_get_info says
        of_any = getattr(core, "_accelerator_getMemoryInfo", None)  # not in every version
        core._accelerator_getMemoryInfo = self._memory_info(of_any)  # noqa: SLF001
        memory = self._torch.cuda.memory
        of_cuda, index_of = self._memory_info(memory.mem_get_info), memory._get_device_index  # noqa: SLF001
        memory.mem_get_info = self._torch.cuda.mem_get_info = lambda device=None: of_cuda(
            index_of(device, optional=True)
        )

    def stats(self, device: int) -> dict[str, Any]:
        """Return the nested statistics of a device."""
        is_pools = self._is_pools(device)
        counts, since = (counts_of(self._joined), self._since) if is_pools else (Counts(), Counts())
        return nested_stats(counts, since, self._joined.pool.region_bytes)

    def reset_peaks(self, device: int) -> None:
        """Let peaks begin at what is there now; those of Zico's reports go on."""
        if self._is_pools(device):
            counts, figures = counts_of(self._joined), self._joined.heap.record[0]["figures"]
            figures["peak_live_bytes"], figures["peak_held"] = counts.live_bytes, counts.held
            figures["peak_tensors"] = counts.allocations - counts.frees

    def reset_totals(self, device: int) -> None:
        """Let totals begin at nothing."""
        if self._is_pools(device):
            self._since = counts_of(self._joined)

    def snapshot(self, pool: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Return a snapshot, which has no history; a private pool of PyTorch's (``MemPool``) has nothing of Zico's."""
        is_all = pool is None or tuple(pool[:2]) == (0, 0)
        return {
            "segments": segments_of(self._joined, self._device) if is_all else [],
            "device_traces": [[] for _ in range(self._torch.cuda.device_count())],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def record_history(self, enabled: object, *_args: object, **_kwargs: object) -> None:
        """Say once that there is no history, to who wants one."""
        if enabled:
            self._tell(HISTORY)

    def _set(self, before: Callable[[str], None] | None, settings: str) -> None:
        """Say once what of settings has no effect, and let PyTorch have what may have one."""
        kept, without_effect = _read(settings)
        if without_effect:
            self._tell(NO_EFFECT.format(without_effect))
        if kept and before is not None:
            before(kept)

    def _memory_info(self, before: Callable[[int], tuple[int, int]] | None) -> Callable[[int], tuple[int, int]]:
        """Return what answers for free and total bytes: for the pool's device as the job's, else as PyTorch did."""

        def memory_info(device: int) -> tuple[int, int]:
            if device == self._device or before is None:
                return self._joined.pool.free_and_total_bytes()
            return before(device)

        return memory_info

    def _is_pools(self, device: int) -> bool:
        """Tell whether a device is the pool's; PyTorch has allocated nothing on another one.

        Raises:
            RuntimeError: There is none of that number.
        """
        n = self._torch.cuda.device_count()
        if not 0 <= device < n:
            message = f"zico: there is no cuda:{device}: this process sees {n}, give a number from 0 to {n - 1}"
            raise RuntimeError(message)
        return device == self._device

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            inform(sentence)
