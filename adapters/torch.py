"""PyTorch: tensors live in the pool, an optimizer step ends an iteration.

Where there is no optimizer, gradients end one (``zico.adapters.torch_gradients``).

On a CUDA device the allocator is Zico's (``zico.adapters.torch_cuda``). On the host tensors over
the threshold are the pool's. ``libc10.so`` takes CPU tensor memory from ``posix_memalign`` and
returns it by ``free``. Both are redirected in its global offset table. A build that does not import
them gets another allocator (``zico.adapters.torch_cpu``). Tested with the versions in
``TESTED_VERSION``; another is used too if it has one of the two doors. Jobs of one before 2.8 do not swap.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zico.base.errors import HookError, ZicoError
from zico.base.saying import inform
from zico.heap.layout import Attached
from zico.job import joining, session
from zico.job.autoload import complain
from zico.planning.saving.registry import AUTO_PLANNERS, LONGEST, REDUCING, SAVE_PLANNERS, is_encoding
from zico.swap.state_return import StateOffload
from zico.swap.swapper import LEAST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zico.adapters.torch_frozen import FrozenSharing
    from zico.adapters.torch_saving import Saving

    from zico.job.session import Session
    from zico.swap.swapper import Swapper

TESTED_VERSION = "2.8, 2.11, 2.13, 2.14, 2.15"


class StepMarker(session.Watcher):
    """Marks an iteration at each step of the job's main optimizer."""

    def __init__(self, of: Session) -> None:
        self._session = of

    def end_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401 - torch's hook signature
        """Note a finished step; waits for admission if it ends an iteration."""
        if optimizer not in self._session.parts:
            self._session.stepped(optimizer)


def _expecting_marks(init: Callable[..., None], joined: Session) -> Callable[..., None]:
    """Wrap ``Optimizer.__init__``: whoever makes an optimizer is going to step it."""

    @functools.wraps(init)
    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807 - as torch's
        joined.expect_marks()
        init(optimizer, *args, **kwargs)

    return __init__


@session.once
def enable() -> Session | None:
    """Take PyTorch's memory from the pool of the broker that ``ZICO_SOCKET`` names.

    Returns:
        The session, or ``None`` if there is no broker to join.

    Raises:
        HookError: Zico cannot redirect this build of PyTorch, which works as without Zico.
        ZicoError: The broker or the device refuses this process.
    """
    from zico.adapters import torch_ranks

    if session.socket_named():
        torch_ranks.watch(enable)
    kind = session.pool_kind()
    joined = session.attach("torch", kind=kind)
    if joined is None:
        return None
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    if kind == "host":
        _take_host_memory(joined)
        if joined.is_to_swap:
            _swap(joined)
        elif joined.settings.wish.save is None and _tells_hooks():
            joined.watchers.append(_SwappingWhenNeeded(joined))
    else:
        from zico.adapters import torch_cuda

        torch_cuda.enable(joined)
        if joined.is_to_swap:
            _swap(joined)
    joined.shares_by(_frozen, on_gpu=True)
    marker = StepMarker(joined)
    joined.watchers.append(marker)
    register_optimizer_step_post_hook(marker.end_step)
    Optimizer.__init__ = _expecting_marks(Optimizer.__init__, joined)
    from zico.adapters.torch_gradients import GradientMarker

    GradientMarker(joined).install()
    if joined.settings.ops and joined.heap.ring is not None:
        from zico.adapters.torch_ops import OpRecorder, Sampling

        joined.watchers.append(Sampling(OpRecorder(joined.heap)))
    return joined


def _take_host_memory(joined: Session) -> None:
    """Take what PyTorch allocates on the host from the pool, by the door that this build has."""
    try:
        joined.redirect("libc10.so", ("posix_memalign", "free"))
    except HookError:
        from zico.adapters import torch_cpu

        torch_cpu.enable(joined)


def _frozen(joined: Session) -> FrozenSharing:
    if joined.membership.device.kind != "host":
        from zico.adapters.torch_cuda_frozen import CudaFrozenSharing

        return CudaFrozenSharing(joined)
    from zico.adapters.torch_frozen import FrozenSharing

    return FrozenSharing(joined)


def _tells_hooks() -> bool:
    """Tell whether this PyTorch says whose hooks save a tensor; those before 2.8 do not."""
    from torch._C import _autograd

    return hasattr(_autograd, "_top_saved_tensors_default_hooks")


def _swap(joined: Session) -> None:
    """Let what autograd saves leave the pool and come back, from the beginning."""
    if not _tells_hooks():
        complain("this process does not swap", HookError("PyTorch 2.8 or later is needed: this one hides its hooks"))
        return
    from zico.adapters.torch_saving import Stepping

    as_auto = joined.settings.wish.save == "auto"
    saving = _save(joined, AUTO_PLANNERS if as_auto else (joined.settings.wish.planner or LONGEST,), as_auto=as_auto)
    if saving is None:
        return
    saving.install()
    if not joined.heap.pool.header["on_timeline"]:  # a GPU has no pages of a process's own, so no state leaves
        Stepping(StateOffload(joined.heap, saving.swapper), joined.parts).install()
    if as_auto:
        joined.watchers.append(saving)


def _save(joined: Session, planners: Sequence[str], *, as_auto: bool) -> Saving | None:
    """Return hooks for saved tensors; where that cannot be, says so, and the job goes on without."""
    from zico.adapters.torch_rebuilding import Rebuilding
    from zico.adapters.torch_saving import Saving

    def prepare(planner: str) -> None:
        if planner in SAVE_PLANNERS:
            try:
                saving.take_digests()
            except ZicoError as error:
                complain("this process makes no tensor again", error)
            else:
                rebuilding.install()
        elif is_encoding(planner):
            from zico.adapters.torch_encoding import Readers

            from zico.tiers import encodings

            Readers(saving, encodings.NAMES.index(REDUCING.get(planner, "zeros"))).install()

    swapper = _start(joined, planners, as_auto=as_auto, prepare=prepare)
    if swapper is None:
        return None
    place = (swapper, *_pooled(joined), LEAST_BYTES)
    if joined.heap.pool.header["on_timeline"]:
        from zico.adapters.torch_cuda_saving import DeviceSaving

        saving = DeviceSaving(*place, joined.heap)
    else:
        saving = Saving(*place)
    rebuilding = Rebuilding(saving)
    prepare(planners[0])
    return saving


def _start(
    joined: Session,
    planners: Sequence[str],
    *,
    as_auto: bool,
    prepare: Callable[[str], None] = lambda _planner: None,
) -> Swapper | None:
    """Return the job's swapper; where that cannot be, says so, and the job goes on without."""
    from zico.swap import joining as swap_joining

    try:
        joined.swapper = swap_joining.start(
            joined.heap,
            joined.settings.wish.tier or ("compressed" if is_encoding(planners[0]) else ""),
            joined.settings.heap.get("spill_directory"),
            as_auto=as_auto,
            planners=planners,
            prepare=prepare,
        )
    except ZicoError as error:
        complain("this process does not swap", error)
        return None
    swapper: Swapper = joined.swapper
    return swapper


def _pooled(joined: Session) -> tuple[int, int]:
    """Return where the addresses of the pool begin and end, without the next tier."""
    return joined.heap.base, joined.heap.base + int(joined.heap.record[0]["spill_offset"])


class _SwappingWhenNeeded(session.Watcher):
    """Lets the job begin to swap once its own peak exceeds what it may hold, and says so then."""

    def __init__(self, joined: Session) -> None:
        """Watch the steps of optimizers from now on."""
        from zico.adapters.torch_saving import Stepping

        self._session, self._stepping = joined, Stepping(None, joined.parts)
        self._stepping.install()

    def begins_to_save(self, lacks: str) -> bool:
        """Save memory as under ``auto``; waits for the tier."""
        joined = self._session
        inform(
            f"{lacks}: from now on it saves memory by swapping, as with --save auto; with --save none "
            "it ends out of memory"
        )
        saving = _save(joined, AUTO_PLANNERS, as_auto=True)
        if saving is not None:
            self._stepping.offload = StateOffload(joined.heap, saving.swapper)
            saving.install_later(lambda: joined.heap.record[0]["attached"] == Attached.YES)
            joined.watchers.append(saving)
        return True


joining.enter()  # the import is the front door
