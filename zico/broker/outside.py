"""What of a GPU's memory lies outside the pool: framework contexts, and what other processes hold.

NVIDIA's management library says how much of the device is used, and by which processes. Contexts
and workspaces are what it lists for the jobs and the broker. The rest beyond the pool is of others.
That is more than it lists for them. A process without a context is not listed, such as the broker of
another pool. A process that has died may leave the list before its memory is free.

The manual leaves open whether a process that has mapped the pool is listed with it. The fact
``listing`` of ``benchmarks/gpu/driver_facts.py`` asks, and has not run on a GPU. So contexts are at
most what is used beyond the pool and what others are listed for.

The library is asked by the optional package ``nvidia-ml-py`` (``import pynvml``); where that is
missing, or knows less, the figures are left out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psutil

from zico.base.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from zico.device.cuda.facts import DeviceFacts

Answer = TypeVar("Answer")

LOOK_NS = 1_000_000_000
"""Two questions are so long apart: each takes a system call per process."""
_MOST_HOLDERS = 3
_LOST = {6: "the driver does not find the GPU any more", 15: "the GPU is lost", 16: "the GPU must be reset"}
"""By the library's status (nvml.h) NVML_ERROR_NOT_FOUND, NVML_ERROR_GPU_IS_LOST and
NVML_ERROR_RESET_REQUIRED mean this."""
_UNCORRECTED, _SINCE_LOADED = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC


class DeviceUse(NamedTuple):
    """A GPU's memory at one instant, in bytes."""

    total_bytes: int
    free_bytes: int
    by_process: dict[int, int] | None
    """Of each process, by its number here; ``None`` where some of them cannot be told."""
    reserved_bytes: int = 0
    """What the driver keeps for itself, where the library tells it."""

    @property
    def used_bytes(self) -> int:
        """Return what processes have taken."""
        return self.total_bytes - self.free_bytes - self.reserved_bytes

    @property
    def holders(self) -> str:
        """Return who holds most, as text; empty where nobody knows."""
        most = sorted((self.by_process or {}).items(), key=lambda item: -item[1])
        shown = [f"{_name_of(pid)} (process {pid}) {format_bytes(held)}" for pid, held in most[:_MOST_HOLDERS]]
        others = len(most) - len(shown)
        return ", ".join([*shown, *([f"{others} more"] if others else [])])


class OutsideFigures(NamedTuple):
    """What lies outside the pool, in bytes."""

    context_bytes: int
    foreign_bytes: int


def use_of(identity: str) -> DeviceUse | None:
    """Return how the GPU with that UUID is used now, ``None`` where that cannot be known."""
    return _asked(identity, _use)


def is_listed(identity: str, pid: int) -> bool:
    """Tell whether the GPU with that UUID still lists a process that is dead here.

    False where nobody knows: without the library, or where it numbers processes as another pid
    namespace does.
    """
    pids = _asked(identity, _pids) or set()
    return pid in pids and all(psutil.pid_exists(other) for other in pids - {pid})


def _asked(identity: str, question: Callable[[Any, Any], Answer]) -> Answer | None:
    """Return what the library answers about the GPU with that UUID, ``None`` where it does not."""
    nvml = _library()
    if nvml is None:
        return None
    with contextlib.suppress(nvml.NVMLError):
        return _answer(nvml, identity, question)
    return None


def _answer(nvml: Any, identity: str, question: Callable[[Any, Any], Answer]) -> Answer:  # noqa: ANN401 - a module
    with contextlib.ExitStack() as undo:
        nvml.nvmlInit()
        undo.callback(nvml.nvmlShutdown)
        return question(nvml, nvml.nvmlDeviceGetHandleByUUID(identity))


def _use(nvml: Any, device: Any) -> DeviceUse:  # noqa: ANN401 - a module and a handle without types
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    held = {int(process.pid): process.usedGpuMemory for process in _processes(nvml, device)}
    # In a container the numbers may be those of another pid namespace.
    is_known = all(size is not None and psutil.pid_exists(pid) for pid, size in held.items())
    return DeviceUse(int(memory.total), int(memory.free), held if is_known else None, _reserved_bytes(nvml, device))


def _reserved_bytes(nvml: Any, device: Any) -> int:  # noqa: ANN401 - a module and a handle without types
    with contextlib.suppress(AttributeError, nvml.NVMLError):  # an older package, an older driver
        return int(nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2).reserved)
    return 0


def _pids(nvml: Any, device: Any) -> set[int]:  # noqa: ANN401 - a module and a handle without types
    return {int(process.pid) for process in _processes(nvml, device)}


def _processes(nvml: Any, device: Any) -> list[Any]:  # noqa: ANN401 - a module and a handle without types
    """Return the processes with a context, clients of MPS among them, which have a list of their own."""
    listed = list(nvml.nvmlDeviceGetComputeRunningProcesses(device))
    with contextlib.suppress(AttributeError, nvml.NVMLError):  # an older package, an older driver
        listed += nvml.nvmlDeviceGetMPSComputeRunningProcesses(device)
    return listed


def _errors(nvml: Any, device: Any) -> int:  # noqa: ANN401 - a module and a handle without types
    """Return how many errors of the GPU's memory could not be corrected; 0 where they are not counted."""
    try:
        return int(nvml.nvmlDeviceGetTotalEccErrors(device, _UNCORRECTED, _SINCE_LOADED))
    except nvml.NVMLError as error:
        if _status_of(error) in _LOST:
            raise
        return 0


def _status_of(error: Exception) -> int:
    return int(getattr(error, "value", 0))


def use_now(facts: DeviceFacts) -> DeviceUse:
    """Return how a CUDA device is used now.

    Where no management library knows, a context is made for a moment, since the driver tells nobody
    else. The answer is then low by what that takes.

    Raises:
        DriverError: The driver cannot tell either.
    """
    use = use_of(facts.uuid)
    if use is not None:
        return use._replace(free_bytes=min(use.free_bytes, facts.total_bytes))
    from zico.device.cuda.facts import free_bytes

    return DeviceUse(facts.total_bytes, free_bytes(facts.ordinal), None)


def _library() -> Any | None:  # noqa: ANN401 - a module without types
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


class Outside:
    """Looks now and then at what lies outside one pool."""

    def __init__(self, identity: str, pool_bytes: int) -> None:
        """Look at the GPU with that UUID, on which a pool of so many bytes lies.

        Keeps the library initialised until the process ends: to do that anew takes longer than all
        the questions.
        """
        self._identity = identity
        self._pool_bytes = pool_bytes
        nvml = _library()
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlInit()
        self._looked_ns = -LOOK_NS
        self._found: OutsideFigures | None = None
        self._errors: int | None = None
        self.fault = ""
        """What has become of the GPU that ends the pool, as a part of a sentence; empty: nothing that is known."""

    def look(self, jobs: AbstractSet[int], now_ns: int) -> OutsideFigures | None:
        """Return the figures, at most ``LOOK_NS`` old; ``None``: nobody knows. ``jobs``: the members' processes."""
        if now_ns - self._looked_ns >= LOOK_NS:
            self._looked_ns = now_ns
            self._found = self._figures(jobs)
            self.fault = self.fault or self._find_fault()
        return self._found

    def _find_fault(self) -> str:
        nvml = _library()
        if nvml is None:
            return ""
        try:
            errors = _answer(nvml, self._identity, _errors)
        except nvml.NVMLError as error:
            return _LOST.get(_status_of(error), "") if self._errors is not None else ""
        self._errors = errors if self._errors is None else self._errors
        more = errors - self._errors
        return f"the GPU's memory has had errors ({more}) that could not be corrected" if more > 0 else ""

    def _figures(self, jobs: AbstractSet[int]) -> OutsideFigures | None:
        use = use_of(self._identity)
        if use is None or use.by_process is None:
            return None
        ours = {*jobs, os.getpid()}
        our_bytes = sum(held for pid, held in use.by_process.items() if pid in ours)
        beyond_bytes = max(0, use.used_bytes - self._pool_bytes)
        context_bytes = max(0, min(our_bytes, beyond_bytes - sum(use.by_process.values()) + our_bytes))
        return OutsideFigures(context_bytes, beyond_bytes - context_bytes)


def _name_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "somebody"
