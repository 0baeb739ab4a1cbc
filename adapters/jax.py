"""JAX: arrays live in the pool; an execution of the jitted function that returns most ends an iteration.

On a CUDA device its plugin's XLA takes device memory from the pool (``zico.adapters.xla``). The
plugin looks up the driver's functions when JAX first uses a GPU. That is after it was discovered,
when JAX calls back. On the host ``libjax_common.so`` takes large arrays from ``posix_memalign``, as
TensorFlow does.

The public hook is ``jax.jit`` itself: what it returns counts its executions. A training step returns
the new parameters and the optimizer's state, more than any other function of a program does. In a
program without such a function repetition shows the iterations, or ``zico.step()`` marks them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from zico.base.errors import HookError
from zico.job import joining, session
from zico.job.autoload import not_shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.job.session import Session

TESTED_VERSION = "0.10, 0.11"

HOST_LIBRARY = "libjax_common.so"
CUDA_PLUGIN = "xla_cuda_plugin.so"

SETTINGS = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": ("cuda_async",),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("false", "0"),
}
"""What JAX reads when it discovers its plugins, with the values that lead its memory to us; the first is set."""


class ExecutionMarker:
    """Marks an iteration at each execution of the jitted function that returns the most bytes."""

    def __init__(self, of: Session, *, waits: bool) -> None:
        """Mark the iterations of a session; ``waits``: executions go on after their call, so await their results."""
        self._session = of
        self._waits = waits
        self._most_bytes = 1

    def jit(self, jit: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``jax.jit``."""

        @functools.wraps(jit)
        def marking_jit(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as JAX'
            made = jit(*args, **kwargs)
            # Without a function, jit returns a decorator: what that makes counts.
            return Counted(made, self) if args or "fun" in kwargs else lambda fun: Counted(made(fun), self)

        return marking_jit

    def executed(self, returned: Any) -> None:  # noqa: ANN401 - any tree of arrays
        """Note what an execution returned; waits for admission if it ends an iteration."""
        if "keras" in self._session.frameworks:
            return  # Keras' own steps are marked
        jax = importlib.import_module("jax")
        leaves = jax.tree_util.tree_leaves(returned)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return  # part of a larger function
        size_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        if size_bytes < self._most_bytes:
            return
        self._most_bytes = size_bytes
        if self._waits:
            jax.block_until_ready(returned)
        self._session.mark()


class Counted:
    """A jitted function whose executions are counted; anything else is that function's."""

    def __init__(self, jitted: Callable[..., Any], marker: ExecutionMarker) -> None:
        """Count the executions of ``jitted``."""
        functools.update_wrapper(self, jitted)
        self._jitted = jitted
        self._marker = marker

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function's
        """Execute it."""
        returned = self._jitted(*args, **kwargs)
        self._marker.executed(returned)
        return returned

    def __get__(self, instance: Any, owner: type | None = None) -> Any:  # noqa: ANN401 - as a function's
        """Bind it, where it is a method."""
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever JAX gives it
        """Return what the jitted function has under that name: ``lower``, ``trace``, ``clear_cache``."""
        if name == "_jitted":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._jitted, name)


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
    jax: Any = importlib.import_module("jax")
    jax.jit = ExecutionMarker(joined, waits=kind == "host").jit(jax.jit)
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
        not_shared("jax", error)


joining.join()  # the import is the front door
