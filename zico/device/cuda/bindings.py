"""The one door to the CUDA driver: every call goes through ``Calls``, every status through ``check``.

The functions are those of ``cuda.bindings.driver``: each returns a tuple whose first element is a
``CUresult``. Another object with these functions takes their place by argument or by ``use``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from zico.base.errors import DriverError
from zico.device.record import FUNCTIONS

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
INVALID_CONTEXT = 201
NOT_SUPPORTED = 801
NO_DRIVER = 36  # CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, also where there is no driver at all

DEVICE_FILES = ("/dev/nvidia", "/dev/dxg")
"""How the names of the driver's files begin, on Linux and on Windows' Linux."""
_OPEN_FILES = Path("/proc/self/fd")
_MAPPINGS = Path("/proc/self/maps")
_MAPPED_FILE = 5  # the field of a line that is a path (proc_pid_maps(5))
_LIBRARY = "libcuda.so.1"
_NO_BINDINGS = "the package cuda.bindings is missing: pip install 'zico-memory[gpu]'"
_NO_LIBRARY = (
    f"the NVIDIA driver's library {_LIBRARY} could not be used: install the NVIDIA driver, and in a container start it "
    "with the GPU (docker run --gpus all)"
)

REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "not enough free memory on the device: lower --budget, or end what else uses it "
    "(nvidia-smi lists it)",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA is not initialised in this process; after a fork it never is: start processes "
    "by spawn",
    "CUDA_ERROR_NO_DEVICE": "there is no CUDA device that this process may use: look at nvidia-smi and "
    "CUDA_VISIBLE_DEVICES, or use --device host",
    "CUDA_ERROR_INVALID_DEVICE": "there is no such device: nvidia-smi -L lists them",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "the device is taken: another process has it in exclusive mode "
    "(nvidia-smi -q -d COMPUTE)",
    "CUDA_ERROR_INVALID_CONTEXT": "no context of the device is current in this thread, or another device's is",
    "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER": "the driver is too old for this: update the NVIDIA driver",
    "CUDA_ERROR_STUB_LIBRARY": "libcuda.so.1 is a stub for linking: take its folder out of LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver and its kernel module are of different versions: restart "
    "the machine after a driver update",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the machine's fabric manager is not ready: start nvidia-fabricmanager",
    "CUDA_ERROR_MPS_CONNECTION_FAILED": "the MPS daemon cannot be reached: start it, or unset CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_ERROR_OPERATING_SYSTEM": "the operating system refused; most often too many files are open: raise ulimit -n",
    "CUDA_ERROR_NOT_PERMITTED": "the driver does not permit it here; in a container check its GPU settings",
    "CUDA_ERROR_NOT_SUPPORTED": "the device or its driver cannot do this: zico doctor says what is supported",
    "CUDA_ERROR_INVALID_VALUE": "the driver refused an argument",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel touched memory that is not mapped for it; this process's CUDA context is "
    "lost: restart the job",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "work on the device took too long and was ended; this process's CUDA context is lost: "
    "restart the job",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory has an error that cannot be corrected, so a pool on it is gone: "
    "end its jobs and its broker (zico broker stop), reset the GPU (nvidia-smi --gpu-reset) or restart the machine",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED": "MPS has ended this process's work on the GPU: restart the job",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another GPU: clear Zico's cache directory",
    "CUDA_ERROR_INVALID_PTX": "the driver cannot read this kernel: clear Zico's cache directory",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the kernel was compiled by a CUDA newer than the driver: update the driver",
}
"""What a user can do about the statuses that users meet."""

_override: list[Any] = []


def use(api: object | None) -> None:
    """Let every driver made without an ``api`` of its own use this one; ``None``: the real one again. For tests."""
    _override[:] = [] if api is None else [api]


def default_api() -> Any:  # noqa: ANN401 - a module without types, or what stands in for it
    """Return what ``use`` set, else ``cuda.bindings.driver``, imported now.

    Raises:
        DriverError: It is not installed, or cannot be loaded.
    """
    if _override:
        return _override[0]
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]
    except ImportError as error:
        raise DriverError("import of cuda.bindings", NO_DRIVER, f"{_NO_BINDINGS} ({error})") from error
    return driver


def let_go_of_device_files() -> bool:
    """Let a forked child, which cannot use CUDA, keep no file of the driver open: it would keep contexts alive.

    The numbers stay taken, by ``/dev/null``: the driver's library in the child may still close
    them. Mappings stay, since pinned memory that the child may read can be among them.

    Returns:
        True if nothing of the driver is left here. A mapping keeps a context alive as an open file does.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in list(_OPEN_FILES.iterdir()):
        with contextlib.suppress(OSError):  # the one by which the directory was read
            if str(number.readlink()).startswith(DEVICE_FILES):
                os.dup2(null, int(number.name), inheritable=False)
    os.close(null)
    mapped = (line.split(None, _MAPPED_FILE)[_MAPPED_FILE:] for line in _MAPPINGS.read_text().splitlines())
    return not any(path and path[0].startswith(DEVICE_FILES) for path in mapped)


def check(function: str, result: Any) -> Any:  # noqa: ANN401 - what the function returned
    """Return what came after the status: nothing, one thing or a tuple.

    Raises:
        DriverError: The status is not success.
    """
    status, *values = result
    if int(status) != 0:
        name = getattr(status, "name", "an unknown status")
        remedy = REMEDIES.get(name)
        raise DriverError(function, int(status), f"{name}: {remedy}" if remedy else name)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


class Calls:
    """Call functions of the CUDA driver by name; a status that is not success becomes an error."""

    def __init__(self, api: object | None = None) -> None:
        """Call ``api``, or what ``default_api`` returns; initialise CUDA in this process.

        Raises:
            DriverError: No driver, no device, or too old a driver.
        """
        self.api: Any = default_api() if api is None else api
        self("cuInit", 0)

    def __call__(self, function: str, *args: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
        """Call one function.

        Raises:
            DriverError: The driver returned an error, or there is no driver.
        """
        try:
            result = getattr(self.api, function)(*args)
        except (RuntimeError, ImportError) as error:  # what cuda.bindings raises without libcuda
            raise DriverError(function, NO_DRIVER, f"{_NO_LIBRARY} ({error})") from error
        return check(function, result)

    def addresses(self, names: tuple[str, ...] = FUNCTIONS) -> dict[str, int]:
        """Return the addresses of C functions that compiled code calls.

        Raises:
            DriverError: The driver's library has no such function.
        """
        if hasattr(self.api, "addresses"):
            every = self.api.addresses()
            return {name: every[name] for name in names}
        return _library_addresses(names)


def _library_addresses(names: tuple[str, ...]) -> dict[str, int]:
    """Look the functions up in the driver's library: these are its exported names, ``_v2`` where cuda.h says so."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}
    except (OSError, AttributeError) as error:
        raise DriverError("look-up of driver functions", NO_DRIVER, f"{_NO_LIBRARY} ({error})") from error
    return found
