"""Bindings of NVIDIA's management library that say what a test likes: ``import pynvml`` gives them once installed."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

VERSION = 2
"""Of the figures that have what the driver keeps for itself."""
UUID = "GPU-00000000-0000-0000-0000-000000000001"


NOT_SUPPORTED = 3


class NvmlError(Exception):
    """The library's error."""

    def __init__(self, what: str, value: int = 999) -> None:
        """Say what failed and with which status of the library's (nvml.h)."""
        super().__init__(what)
        self.value = value


@dataclasses.dataclass
class Process:
    """A process on the GPU."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815 - the library's name for it


@dataclasses.dataclass
class Memory:
    """A GPU's memory."""

    total: int
    free: int
    reserved: int = 0
    """Told to those alone who ask for the second version of these figures."""


class Library:
    """A library that knows one GPU; counts how often it is asked and by how many it is open."""

    def __init__(self, memory: Memory, processes: list[Process], *, uuid: str = UUID, failing: str = "") -> None:
        """Answer with these figures; the function ``failing`` fails."""
        self.memory = memory
        self.processes = processes
        self.mps: list[Process] = []
        self.failing = failing
        self.questions = 0
        self.open = 0
        self.errors: int | None = None
        """Of the GPU's memory, uncorrected; ``None``: it does not count them."""
        self.lost = 0
        """The status with which the GPU is no longer found."""
        self._uuid = uuid

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what ``import pynvml`` gives."""
        module = types.ModuleType("pynvml")
        module.NVMLError = NvmlError  # type: ignore[attr-defined]
        module.nvmlMemory_v2 = VERSION  # type: ignore[attr-defined]
        for name in (
            "Init",
            "Shutdown",
            "DeviceGetHandleByUUID",
            "DeviceGetMemoryInfo",
            "DeviceGetComputeRunningProcesses",
            "DeviceGetMPSComputeRunningProcesses",
            "DeviceGetTotalEccErrors",
        ):
            setattr(module, f"nvml{name}", self._function(name))
        monkeypatch.setitem(sys.modules, "pynvml", module)

    def _function(self, name: str) -> object:
        def function(*args: object, **named: object) -> object:
            if name == self.failing:
                raise NvmlError(name)
            return getattr(self, f"_{name}")(*args, **named)

        return function

    def _Init(self) -> None:  # noqa: N802 - as the library's
        self.open += 1

    def _Shutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def _DeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != self._uuid:
            raise NvmlError(uuid)
        if self.lost:
            raise NvmlError(uuid, self.lost)
        return 1

    def _DeviceGetMemoryInfo(self, _handle: int, version: int | None = None) -> Memory:  # noqa: N802
        self.questions += version is None
        return self.memory if version == VERSION else dataclasses.replace(self.memory, reserved=0)

    def _DeviceGetComputeRunningProcesses(self, _handle: int) -> list[Process]:  # noqa: N802
        return self.processes

    def _DeviceGetMPSComputeRunningProcesses(self, _handle: int) -> list[Process]:  # noqa: N802
        return self.mps

    def _DeviceGetTotalEccErrors(self, _handle: int, kind: int, since: int) -> int:  # noqa: N802
        if self.errors is None:
            raise NvmlError("ECC", NOT_SUPPORTED)
        assert (kind, since) == (1, 0), "uncorrected ones, since the driver was loaded"
        return self.errors


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import pynvml`` fail, whatever is installed here."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
