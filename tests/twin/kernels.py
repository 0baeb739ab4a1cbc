"""The twin's kernels: Python functions, launched in stream order with the arguments of C."""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import ctypes
import dataclasses
from typing import TYPE_CHECKING, Any

from twin.captures import CaptureFunctions
from twin.entry import Value, entry, number, real, refuse_unless
from twin.timeline import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_THREADS = 1024  # per block


@dataclasses.dataclass
class Kernel:
    """A kernel of the twin: a Python function ``run(twin, *arguments)``."""

    types: tuple[Any, ...]
    run: Callable[..., None]


class KernelFunctions(CaptureFunctions):
    """The functions named ``cuModule*``, and ``cuLaunchKernel``."""

    def __init__(
        self, devices: int, total_bytes: int, granularity_bytes: int, wait_deadline_s: float, *, has_memory_ops: bool
    ) -> None:
        """Start without kernels."""
        super().__init__(devices, total_bytes, granularity_bytes, wait_deadline_s, has_memory_ops=has_memory_ops)
        self.kernels: dict[str, Kernel] = {}
        self._modules: dict[int, bytes] = {}
        self._functions: dict[int, tuple[int, str]] = {}  # function -> module, name

    def kernel(self, name: str, *types: Value) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register a Python function as a kernel: ``run(twin, *arguments)`` with arguments of these ctypes."""

        def register(run: Callable[..., None]) -> Callable[..., None]:
            self.kernels[name] = Kernel(types, run)
            return run

        return register

    @entry(context=True)
    def cuModuleLoadData(self, image: bytes) -> Value:
        """Keep an image; which functions it has is in its text."""
        refuse_unless(isinstance(image, bytes) and image.strip(b"\0"), "INVALID_IMAGE")
        with self.lock:
            handle = self._new()
            self._modules[handle] = image
            return real.CUmodule(handle)

    @entry(context=True)
    def cuModuleGetFunction(self, hmod: Value, name: bytes) -> Value:
        """Return a kernel that the image names and a test registered."""
        with self.lock:
            refuse_unless(number(hmod) in self._modules, "INVALID_HANDLE")
            known = name in self._modules[number(hmod)] and name.decode() in self.kernels
            refuse_unless(known, "NOT_FOUND")
            handle = self._new()
            self._functions[handle] = (number(hmod), name.decode())
            return real.CUfunction(handle)

    @entry(context=True, undo=True)
    def cuModuleUnload(self, hmod: Value) -> None:
        """Forget an image and its functions."""
        with self.lock:
            refuse_unless(number(hmod) in self._modules, "INVALID_HANDLE")
            del self._modules[number(hmod)]
            self._functions = {at: one for at, one in self._functions.items() if one[0] != number(hmod)}

    @entry(context=True)
    def cuLaunchKernel(self, f: Value, *launch: Value) -> None:
        """Run a kernel when the stream gets there; its arguments are read now, as on the real one."""
        *shape, shared_bytes, stream, parameters, extra = launch
        blocks, threads = shape[:3], shape[3:]
        refuse_unless(len(shape) == 6 and min(shape) > 0 and shared_bytes >= 0 and number(extra) == 0)
        refuse_unless(threads[0] * threads[1] * threads[2] <= _MOST_THREADS and max(blocks) < 1 << 31)
        refuse_unless(number(f) in self._functions, "INVALID_HANDLE")
        kernel = self.kernels[self._functions[number(f)][1]]
        arguments = _arguments(parameters, kernel.types)
        self.stream(stream).put(Operation("kernel", lambda: kernel.run(self, *arguments)))


def _arguments(parameters: Value, types: tuple[Any, ...]) -> list[Any]:
    """Read kernel arguments: from an array of pointers, or from the tuple of values that Python callers pass."""
    if isinstance(parameters, tuple):
        return list(parameters[0])
    pointers = (ctypes.c_void_p * len(types)).from_address(number(parameters)) if types else ()
    return [kind.from_address(pointer).value for kind, pointer in zip(types, pointers, strict=True)]
