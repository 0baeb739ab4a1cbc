"""The twin's functions at C addresses, for compiled code."""

from __future__ import annotations

import ctypes
import traceback
import types
from typing import TYPE_CHECKING, Any

from twin.entry import real
from zico.device.record import FUNCTIONS, MANAGED_FUNCTIONS
from zico.job.context_aside import FUNCTIONS as CHECKPOINT_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

_U64 = ctypes.c_uint64
_U32 = ctypes.c_uint32
_POINTER = ctypes.c_void_p
_UNKNOWN = int(real.CUresult.CUDA_ERROR_UNKNOWN)

# The arguments in cuda.h.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuMemCreate": (_POINTER, _U64, _POINTER, _U64),
    "cuMemImportFromShareableHandle": (_POINTER, _U64, _U32),
    "cuMemRelease": (_U64,),
    "cuMemMap": (_U64, _U64, _U64, _U64, _U64),
    "cuMemUnmap": (_U64, _U64),
    "cuMemSetAccess": (_U64, _U64, _POINTER, _U64),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxSynchronize": (),
    "cuStreamWaitValue64_v2": (_POINTER, _U64, _U64, _U32),
    "cuStreamWriteValue64_v2": (_POINTER, _U64, _U64, _U32),
    "cuStreamSynchronize": (_POINTER,),
    "cuStreamQuery": (_POINTER,),
    "cuStreamIsCapturing": (_POINTER, _POINTER),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
    "cuLaunchKernel": (_POINTER, *([_U32] * 7), _POINTER, _POINTER, _POINTER),
    "cuMemcpyAsync": (_U64, _U64, _U64, _POINTER),
    "cuMemPrefetchAsync_v2": (_U64, _U64, _U64, _U32, _POINTER),
    **dict.fromkeys(CHECKPOINT_FUNCTIONS, (ctypes.c_int, _POINTER)),
}


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int))


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _LockArguments(ctypes.Structure):
    """``CUcheckpointLockArgs``."""

    _fields_ = (("timeoutMs", ctypes.c_uint), ("rest", ctypes.c_ubyte * 60))


class _Flags(ctypes.Structure):
    """``CUmemAllocationProp::allocFlags``."""

    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("rest", ctypes.c_ubyte * 6),
    )


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", _Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", _Flags),
    )


class Addresses:
    """C functions over the methods of one twin; they live as long as this does."""

    def __init__(self, twin: Any) -> None:  # noqa: ANN401 - the Twin, which holds this
        """Make one function a name."""
        self._twin = twin
        self.do: dict[str, Callable[..., Any]] = {}
        """What each does; tests may put something else there."""
        self._keep = {name: self._callback(name) for name in (*FUNCTIONS, *MANAGED_FUNCTIONS, *CHECKPOINT_FUNCTIONS)}
        self.by_name = {name: ctypes.cast(one, _POINTER).value or 0 for name, one in self._keep.items()}

    def _callback(self, name: str) -> Any:  # noqa: ANN401 - a ctypes function
        own: dict[str, Callable[..., Any]] = {
            "cuMemCreate": self._create,
            "cuMemImportFromShareableHandle": self._import,
            "cuMemSetAccess": self._set_access,
            "cuCtxGetCurrent": self._get_current,
            "cuStreamIsCapturing": self._is_capturing,
            "cuThreadExchangeStreamCaptureMode": self._exchange_mode,
            "cuMemPrefetchAsync_v2": self._prefetch,
            "cuCheckpointProcessLock": self._lock,
        }
        self.do[name] = own.get(name) or getattr(self._twin, name.removesuffix("_v2"))

        def call(*args: Any) -> int:  # noqa: ANN401 - integers and addresses
            try:
                return int(self.do[name](*args)[0])
            except Exception:  # noqa: BLE001 - the border to C: nothing may pass, and 0 would mean success
                traceback.print_exc()
                return _UNKNOWN

        return ctypes.CFUNCTYPE(ctypes.c_int, *_ARGUMENTS[name])(call)

    def _create(self, result: int, size: int, prop: int, flags: int) -> Any:  # noqa: ANN401
        status, handle = self._twin.cuMemCreate(size, _Properties.from_address(prop), flags)
        if int(status) == 0:
            _U64.from_address(result).value = int(handle)
        return (status,)

    def _import(self, result: int, descriptor: int, kind: int) -> Any:  # noqa: ANN401
        status, handle = self._twin.cuMemImportFromShareableHandle(descriptor, kind)
        if int(status) == 0:
            _U64.from_address(result).value = int(handle)
        return (status,)

    def _set_access(self, ptr: int, size: int, desc: int, count: int) -> Any:  # noqa: ANN401
        array = (_Access * count).from_address(desc)
        wanted = [types.SimpleNamespace(location=one, flags=one.flags) for one in array]
        return self._twin.cuMemSetAccess(ptr, size, wanted, count)

    def _get_current(self, result: int) -> Any:  # noqa: ANN401
        status, *context = self._twin.cuCtxGetCurrent()
        if int(status) == 0:
            _U64.from_address(result).value = int(context[0])
        return (status,)

    def _prefetch(self, ptr: int, size: int, place: int, flags: int, stream: int) -> Any:  # noqa: ANN401
        location = _Location.from_buffer_copy(place.to_bytes(ctypes.sizeof(_Location), "little"))
        return self._twin.cuMemPrefetchAsync(ptr, size, location, flags, stream)

    def _lock(self, pid: int, arguments: int) -> Any:  # noqa: ANN401
        return self._twin.cuCheckpointProcessLock(pid, _LockArguments.from_address(arguments))

    def _exchange_mode(self, mode: int) -> Any:  # noqa: ANN401
        word = ctypes.c_int.from_address(mode)
        status, before = self._twin.cuThreadExchangeStreamCaptureMode(word.value)
        if int(status) == 0:
            word.value = before
        return (status,)

    def _is_capturing(self, stream: int, result: int) -> Any:  # noqa: ANN401
        status, capturing = self._twin.cuStreamIsCapturing(stream)
        if int(status) == 0:
            ctypes.c_int.from_address(result).value = int(capturing)
        return (status,)
