"""JAX: arrays live in the pool; an execution that computes gradients ends an iteration.

On a CUDA device its plugin's XLA takes device memory from the pool (``zico.adapters.xla``). The
plugin looks up the driver's functions when JAX first uses a GPU. That is after it was discovered,
when JAX calls back. On the host ``libjax_common.so`` takes large arrays from ``posix_memalign``, as
TensorFlow does.

The public hooks are ``jax.jit`` and ``jax.grad`` with their like. Whatever is traced around a
gradient computes gradients. The outermost execution of such a function counts: a jitted training
step, or ``jax.value_and_grad`` itself in a loop without ``jit``. Of several in an iteration the
first one counts (``Session.stepped``). Initialisation, evaluation and the optimizer's own function
compute none.

Known limitations
    Gradients that are added up over several executions are an iteration each. A ``jax.lax.scan``
    over steps is one where it is jitted, and is not seen elsewhere, nor are an eager ``jax.vjp`` or
    ``jax.vmap`` of gradients. Then repetition shows the iterations, or ``zico.step()`` marks them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from zico.base.errors import HookError
from zico.job import joining, session
from zico.job.autoload import not_shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.adapters.jax_frozen import FrozenSharing

    from zico.job.session import Session

TESTED_VERSION = "0.6, 0.10, 0.11, 0.12"

HOST_LIBRARY = "libjax_common.so"
CUDA_PLUGIN = "xla_cuda_plugin.so"

SETTINGS = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": ("cuda_async",),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("false", "0"),
}
"""What JAX reads when it discovers its plugins, with the values that lead its memory to us; the first is set."""


class GradientMarker:
    """Marks an iteration at each execution, not part of a larger one, that computes gradients."""

    def __init__(self, of: Session, *, waits: bool) -> None:
        """Mark the iterations of a session; ``waits``: executions go on after their call, so await their results."""
        self._session = of
        self._waits = waits
        self._inside = threading.local()
        self._differentiating: weakref.WeakSet[Any] = weakref.WeakSet()
        """Jitted functions that compute gradients, as the user wrote them."""

    def jit(self, jit: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``jax.jit``."""

        @functools.wraps(jit)
        def marking_jit(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as JAX'
            made = jit(*args, **kwargs)
            # Without a function, jit returns a decorator: what that makes is watched.
            if args or "fun" in kwargs:
                return Watched(made, args[0] if args else kwargs["fun"], self)
            return lambda fun: Watched(made(fun), fun, self)

        return marking_jit

    def transform(self, transform: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``jax.grad``, or another that makes a function of gradients."""

        @functools.wraps(transform)
        def marking_transform(fun: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as JAX'
            made = transform(fun, *args, **kwargs)

            @functools.wraps(made)
            def gradient(*of: Any, **by: Any) -> Any:  # noqa: ANN401 - as the function's
                return self.run(made, fun, of, by, differentiates=True)

            return gradient

        return marking_transform

    def vjp(self, vjp: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``jax.vjp``, which itself is no execution that could end an iteration."""

        @functools.wraps(vjp)
        def noted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as JAX'
            self._differentiates()
            return vjp(*args, **kwargs)

        return noted

    def run(
        self,
        function: Callable[..., Any],
        of: Any,  # noqa: ANN401 - the function as the user wrote it
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        differentiates: bool = False,
    ) -> Any:  # noqa: ANN401 - as the function's
        """Call a function; waits for admission if that ends an iteration."""
        around = self._inside.__dict__.setdefault("functions", [])
        around.append(of)
        try:
            returned = function(*args, **kwargs)
        finally:
            around.pop()
        if differentiates or (_can_be_kept(of) and of in self._differentiating):
            self._differentiates()
            if not around and not _is_traced(returned):
                if self._waits:
                    importlib.import_module("jax").block_until_ready(returned)
                self._session.stepped(of if _can_be_kept(of) else self)
        return returned

    def _differentiates(self) -> None:
        """Note that what is executed now computes gradients."""
        self._differentiating.update(filter(_can_be_kept, self._inside.__dict__.get("functions", ())))


def _can_be_kept(function: Any) -> bool:  # noqa: ANN401 - anything callable
    """Tell whether a weak set can have it."""
    try:
        hash(weakref.ref(function))
    except TypeError:
        return False
    return True


def _is_traced(returned: Any) -> bool:  # noqa: ANN401 - any tree of arrays
    """Tell whether this is part of a larger function."""
    jax: Any = importlib.import_module("jax")
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(returned))


class Watched:
    """A jitted function whose executions are watched; anything else is that function's."""

    def __init__(self, jitted: Callable[..., Any], of: Callable[..., Any], marker: GradientMarker) -> None:
        """Watch the executions of ``jitted``, which was made of ``of``."""
        functools.update_wrapper(self, jitted)
        self._jitted = jitted
        self._of = of
        self._marker = marker

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function's
        """Execute it."""
        return self._marker.run(self._jitted, self._of, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:  # noqa: ANN401 - as a function's
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
    marker = GradientMarker(joined, waits=kind == "host")
    for name in ("jit", "pmap"):
        setattr(jax, name, marker.jit(getattr(jax, name)))
    for name in ("grad", "value_and_grad", "jacrev", "hessian"):
        setattr(jax, name, marker.transform(getattr(jax, name)))
    jax.vjp = marker.vjp(jax.vjp)
    joined.shares_by(_frozen)
    return joined


def _frozen(joined: Session) -> FrozenSharing:
    from zico.adapters.jax_frozen import FrozenSharing

    return FrozenSharing(joined)


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


joining.enter()  # the import is the front door
