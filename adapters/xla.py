"""What JAX and TensorFlow have in common on a CUDA device: XLA's device memory comes from the pool.

XLA finds each function of the driver by ``dlsym`` when it first calls it. With its stream-ordered
allocator all its arrays and its programs' workspaces come by ``cuMemAllocFromPoolAsync`` and go by
``cuMemFreeAsync``, on one stream a device. Both are answered with Zico's. The driver's own pool,
which XLA still sets up, stays empty. Which binaries were looked at, and what was run without a GPU:
``docs/design/cuda_frameworks.md``.

Known limitations
    XLA holds its allocator's lock while it waits for memory, and its frees wait for that lock. What
    another thread of the same job would free meanwhile is not seen. What libraries allocate by
    themselves (cuBLAS, cuDNN, NCCL), and XLA for its own (constants, collectives), lies outside the
    pool, with the contexts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from zico.job.session import Session

ALLOCATIONS = {
    "cuMemAllocAsync": "mem_alloc_async",
    "cuMemAllocFromPoolAsync": "mem_alloc_from_pool_async",
    "cuMemFreeAsync": "mem_free_async",
}
"""The driver's name and the function of ``zico.heap.cuda.hooks`` that stands in."""

QUERIES = {"cuMemGetInfo_v2": "mem_get_info", "cuDeviceTotalMem_v2": "device_total_mem"}
"""The driver's name and the function of ``zico.heap.cuda.hooks`` that stands in."""

SETTINGS = {"TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC": ("0",)}
"""Settings of XLA's allocator in both frameworks; see ``settle``."""


def enable(joined: Session, environment: MutableMapping[str, str], settings: Mapping[str, tuple[str, ...]]) -> None:
    """Let the framework's own settings lead its memory to the driver's stream-ordered functions.

    Raises:
        HookError: The process sees several GPUs, or a setting of the user's leads elsewhere;
            nothing has been changed.
    """
    _refuse_several_devices(joined)
    settle(environment, {**SETTINGS, **settings})
    from zico.job import lookup

    lookup.keep(joined)


def settle(environment: MutableMapping[str, str], settings: Mapping[str, tuple[str, ...]]) -> None:
    """Set what is missing: the first of the values that a variable may have.

    Raises:
        HookError: One has another value; nothing has been changed.
    """
    for name, values in settings.items():
        if (given := environment.get(name)) and given.lower() not in values:
            message = (
                f"{name}={given} keeps memory from the driver's stream-ordered allocator, which is where Zico stands "
                f"in: unset it, or set {name}={values[0]}"
            )
            raise HookError(message)
    for name, values in settings.items():
        environment[name] = environment.get(name) or values[0]


def redirect(library_prefix: str) -> None:
    """Let a loaded library that contains XLA take its device memory from this process's heap.

    What the library has looked up before keeps going to the driver, so nobody may have allocated
    yet.

    Raises:
        HookError: The library is not loaded, or does not look functions up; nothing has been
            changed.
    """
    from zico.heap.cuda import hooks
    from zico.job import lookup

    functions = {name: getattr(hooks, function) for name, function in ALLOCATIONS.items()}
    functions |= {name: getattr(hooks, function) for name, function in QUERIES.items()}
    originals = {name: _place(function) for name, function in (QUERIES | {"cuMemFreeAsync": "free_async"}).items()}
    replacements = {name: int(function.address) for name, function in functions.items()}
    lookup.substitute(library_prefix, replacements, originals)
    # XLA frees what is left when its library is unloaded, after the interpreter is gone.
    lookup.keep(*hooks.NEEDED_TO_THE_END, *functions.values())


def _place(field: str) -> int:
    """Return where the hooks look for one of the driver's functions."""
    from zico.heap.cuda import hooks

    return int(hooks.OTHERS_RECORD.ctypes.data + hooks.OTHERS.fields[field][1])


def _refuse_several_devices(joined: Session) -> None:
    """Refuse a process whose framework would put arrays on a GPU that is not the pool's."""
    facts = joined.pool.driver.facts  # type: ignore[attr-defined]  # a CUDA device's driver
    if facts.count > 1:
        message = (
            f"this process sees {facts.count} GPUs and its pool is on one of them: set CUDA_VISIBLE_DEVICES="
            f"{facts.uuid} (zico run does)"
        )
        raise HookError(message)
