"""A process puts its CUDA contexts aside, with all that they hold on the GPU, and takes them up again.

Theory of operation
    The driver does it (``cuCheckpointProcess*``, in the manual of the driver's API from CUDA 12.8 on). It
    locks the process's calls, copies what is on the GPU to memory of its own on the host, and lets the
    GPU go. Addresses, streams and modules are as before when they are taken up. A process may do this
    to itself. Its other threads' calls wait meanwhile.

Known limitations
    It has run on no GPU. A driver before 610 refuses processes that use memory of another one
    (NVIDIA/cuda-checkpoint, issue 56), as every job of a pool does. MPS, and aarch64 so far, are refused.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zico.base.errors import DriverError

if TYPE_CHECKING:
    from zico.device.cuda.bindings import Calls

LOCK_MS = 10_000
"""The driver waits so long for calls that are under way."""
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED


def put_aside(call: Calls) -> None:
    """Put this process's contexts aside; until ``take_up`` every other call of the driver waits.

    Waits for work that is under way, and for the copies.

    Raises:
        DriverError: The driver or the bindings cannot; the process is as it was.
    """
    pid = os.getpid()
    try:
        lock = call.api.CUcheckpointLockArgs()
    except AttributeError as error:  # bindings before 12.8
        detail = f"cuda.bindings is too old: {error}"
        raise DriverError("cuCheckpointProcessLock", _NOT_SUPPORTED, detail) from error
    lock.timeoutMs = LOCK_MS
    call("cuCheckpointProcessLock", pid, lock)
    try:
        call("cuCheckpointProcessCheckpoint", pid, None)
    except DriverError:
        call("cuCheckpointProcessUnlock", pid, None)
        raise


def take_up(call: Calls) -> None:
    """Take them up again, at the same addresses.

    Raises:
        DriverError: ``OUT_OF_MEMORY`` where the GPU has too little free memory: they stay aside. Any
            other: they are lost.
    """
    pid = os.getpid()
    call("cuCheckpointProcessRestore", pid, None)
    call("cuCheckpointProcessUnlock", pid, None)
