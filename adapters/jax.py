"""JAX: arrays live in the pool; ``zico.step()`` or ``with zico.iteration()`` ends an iteration, or repetition shows it.

On a CUDA device its plugin's XLA takes device memory from the pool (``zico.adapters.xla``): the
plugin looks up the driver's functions when JAX first uses a GPU, which is after it was discovered,
when JAX calls back. On the host ``libjax_common.so`` takes large arrays from ``posix_memalign``, as
TensorFlow does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from zico.base.errors import HookError
from zico.job import joining, session
from zico.job.autoload import complain

if TYPE_CHECKING:
    from zico.job.session import Session

TESTED_VERSION = "0.10"

HOST_LIBRARY = "libjax_common.so"
CUDA_PLUGIN = "xla_cuda_plugin.so"

SETTINGS = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": ("cuda_async",),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("false", "0"),
}
"""What JAX reads when it discovers its plugins, with the values that lead its memory to us; the first is set."""


@session.once
def enable() -> Session | None:
    """Take JAX's memory from the pool of the broker that ``ZICO_SOCKET`` names.

    Returns:
        The session, or ``None`` if there is no broker to join.

    Raises:
        HookError: Zico cannot redirect this build of JAX, a setting prevents it, or JAX has already
            used a device. JAX then works as without Zico; the scheduler still admits the iterations
            of a process that has joined.
        ZicoError: The broker or the device refuses this process.
    """
    kind = session.pool_kind()
    joined = session.attach("jax", kind=kind)
    if joined is None:
        return None
    if kind == "host":
        joined.redirect(HOST_LIBRARY, ("posix_memalign", "free"))
    else:
        _enable_cuda(joined)
    return joined


def _enable_cuda(joined: Session) -> None:
    from zico.adapters import xla

    if importlib.util.find_spec("jax_plugins") is None:
        message = "JAX has no plugin for GPUs here: pip install jax[cuda13], or share the host's memory (--device host)"
        raise HookError(message)
    xla.enable(joined, os.environ, SETTINGS)
    try:
        xla_bridge = importlib.import_module("jax._src.xla_bridge")
        is_used, call_back = xla_bridge.backends_are_initialized(), xla_bridge.register_plugin_callbacks
    except (ImportError, AttributeError) as error:
        message = f"this version of JAX does not say when it has found its plugins ({error}): use {TESTED_VERSION}"
        raise HookError(message) from error
    if is_used:
        message = "JAX has used a device already, and looks the driver's functions up once: let Zico come first"
        raise HookError(message)
    call_back(_redirect_plugin)


def _redirect_plugin(**_plugin: Any) -> None:  # noqa: ANN401 - as JAX calls it, once for each plugin
    """Redirect the CUDA plugin; the user's program goes on where that cannot be."""
    from zico.adapters import xla

    try:
        xla.redirect(CUDA_PLUGIN)
    except HookError as error:
        complain("jax is not shared", error)


joining.join()  # the import is the front door
