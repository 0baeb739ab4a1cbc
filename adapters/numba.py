"""Numba on a CUDA device, built in or as the package ``numba-cuda``: device arrays live in the pool.

Managed, mapped and pinned memory and the memory of other devices stay Numba's own business, and
handles for other processes (``get_ipc_handle``) are refused.

Numba marks no iterations: they are found by repetition, or marked by ``zico.step()``.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING

from zico.base.errors import HookError
from zico.job import joining, session

if TYPE_CHECKING:
    from zico.job.session import Session

TESTED_VERSION = "0.68"

MANAGER_VARIABLE = "NUMBA_CUDA_MEMORY_MANAGER"


@session.once
def enable() -> Session | None:
    """Take Numba's device memory from the pool of the broker that ``ZICO_SOCKET`` names.

    Returns:
        The session, or ``None`` if there is no broker to join.

    Raises:
        HookError: The pool is on the host, where Numba has no device arrays, or Zico cannot
            redirect this Numba.
        ZicoError: The broker or the device refuses this process.
    """
    joined = session.attach("numba", kind="cuda")
    if joined is None:
        return None
    redirect(joined)
    return joined


def enable_on_gpu() -> Session | None:
    """Do as ``enable`` where the pool is on a GPU, else nothing: for whoever imports ``numba.cuda``."""
    return enable() if session.pool_kind() != "host" else None


def redirect(joined: Session) -> None:
    """Take Numba's device memory from a session's pool.

    Raises:
        HookError: Numba simulates, has a context already, is told to use another manager, or has
            another interface.
    """
    cuda = import_module("numba.cuda")
    driver = import_module("numba.cuda.cudadrv.driver")
    config = getattr(driver, "config", None)
    if config is None or config.ENABLE_CUDASIM:
        raise HookError("Numba simulates CUDA (NUMBA_ENABLE_CUDASIM), with arrays that are no device's: unset it")
    if config.CUDA_MEMORY_MANAGER != "default":
        raise HookError(
            f"{MANAGER_VARIABLE}={config.CUDA_MEMORY_MANAGER} asks for another memory manager than Zico's: "
            "unset it, or run without Zico"
        )
    if any(device.primary_context is not None for device in driver.driver.devices.values()):
        raise HookError("Numba uses a CUDA device already, and takes a memory manager only before: let Zico come first")
    try:
        from zico.adapters.numba_manager import PoolMemoryManager

        cuda.set_memory_manager(functools.partial(PoolMemoryManager, joined))
    except (AttributeError, ImportError, RuntimeError) as error:
        message = f"Numba {import_module('numba').__version__} does not take Zico's memory manager: {error}"
        raise HookError(message) from error


joining.enter()  # the import is the front door
