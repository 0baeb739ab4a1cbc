"""What autograd saves for the backward pass leaves and comes back by PyTorch's own hooks for saved tensors.

Theory of operation
    Every tensor that an operation saves comes by ``pack``, and what that returns stands in the
    graph instead; ``unpack`` turns it into a tensor again. Of memory of the pool that is a
    ``Saved``: an alias of the tensor and its version. All that is saved of the same memory has one
    ``Storage`` in common, so that it leaves once and returns once. It is idle when nothing but such
    aliases refers to it: then nobody can read or write it until one of them is unpacked. So the
    copy is of what it holds for good; what somebody still holds stays, since to copy it would free
    nothing.

Guarantees
    6. Backward passes see the same bits, at other addresses.
    A tensor that has been changed in place after it was saved raises when it is unpacked, as
    without Zico. A user's own hooks come first, those of ``torch.utils.checkpoint`` among them;
    where PyTorch wants no hooks (``torch.func``) there are none.

Known limitations
    Threads that Python's ``threading`` has not started, or before this, save without these hooks.
"""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._C import TensorBase, _autograd, _storage_Use_Count
from torch._C._dynamo import eval_frame as _eval_frame
from torch.autograd import forward_ad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._device import DeviceContext

from zico.base.saying import inform
from zico.job.session import Watcher
from zico.swap.digest import digest
from zico.swap.mover import Idle, Place
from zico.tiers.encodings import SIGNS, ZEROS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zico.adapters.torch_recipes import Recipe

    from zico.swap.state_return import StateOffload
    from zico.swap.swapper import Swapper

storage_of = TensorBase.untyped_storage
"""Returns a tensor's memory."""
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_mode = torch._C._get_function_stack_at
_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that no Python stands behind."""
_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} {shape}] "
    "is at version {now}; expected version {then} instead. Hint: enable anomaly detection to find the operation that "
    "failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
)
_REDUCED = (
    "Zico has kept only the signs of this result of ReLU (--save gist), which is all that its backward pass reads: "
    "to read the result itself, keep it, or train with another --save"
)


def _references(storage: Any) -> tuple[int, int]:  # noqa: ANN401 - torch has no types
    """Return how many refer to a storage in C++, and to the Python object that stands for it."""
    return _storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _unshared() -> tuple[int, int]:
    """Return what ``_references`` says of a storage that one tensor and one variable refer to, by this PyTorch."""
    tensor = torch.empty(1)
    storage = storage_of(tensor)
    return _references(storage)


_USES, _OBJECT_REFERENCES = _unshared()


def has_memory_alone(tensor: torch.Tensor) -> bool:
    """Tell whether nothing but this tensor refers to its memory."""
    storage = storage_of(tensor)
    return _references(storage) == (_USES, _OBJECT_REFERENCES)


def _maker(tensor: torch.Tensor) -> str:
    """Return autograd's name of the operation that made a tensor's memory; empty: it does not know."""
    made = tensor._base if tensor._is_view() else tensor
    node = None if made is None else made.grad_fn
    return "" if node is None else node.name()


def _reader() -> str:
    """Return autograd's name of the operation whose backward pass runs in this thread; empty: none does."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def digest_of(storage: Any) -> int:  # noqa: ANN401 - torch has no types
    """Return the digest of a tensor's memory."""
    return digest(storage.data_ptr(), storage.nbytes())


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is read as it is written."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())


def is_traced() -> bool:
    """Tell whether calls become a graph of TorchScript, in which even a size is recorded."""
    return torch._C._get_tracing_state() is not None


def is_transformed() -> bool:
    """Tell whether this thread's calls go to somebody else first: to a mode, a tracer, or a transformation.

    The mode of ``torch.set_default_device`` changes nothing about tensors that are there.
    """
    return (
        _dispatch_modes() > 0
        or forward_ad._current_level >= 0
        or any(type(_function_mode(i)) is not DeviceContext for i in range(torch._C._len_torch_function_stack()))
        or torch._C._functorch.peek_interpreter_stack() is not None
        or is_traced()
    )


class Storage(Idle):
    """Memory of the pool that only saved tensors refer to, sooner or later."""

    def __init__(self, saving: Saving, storage: Any) -> None:  # noqa: ANN401 - torch has no types
        super().__init__(storage.nbytes())
        self._saving = saving
        self._storage = storage
        self._settled: Any = None
        self._saved: list[weakref.ref[Saved]] = []
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self.recipe: Recipe | None = None
        """How it can be made again; ``None``: it cannot."""
        self.recipe_version = 0
        """Version of the tensors that the recipe makes."""
        self.is_source = False
        """Something is made of it."""
        self._left_digest: Any = None
        """Digest of a source that is away."""
        self.is_reduced = False
        """Not all of its bits were kept while it was away."""
        self._kept: list[Saved] = []
        """What it is made of, while it is dropped."""

    def __del__(self) -> None:
        self._saving.swapper.forget(self)

    def add(self, saved: Saved) -> None:
        """Note something that is saved of it."""
        self._saved.append(weakref.ref(saved))

    def _aliases(self) -> list[Saved]:
        living = [saved for reference in self._saved if (saved := reference()) is not None]
        return [saved for saved in living if saved.alias is not None]

    def unchanged(self) -> list[Saved]:
        """Return what is saved of it, as long as it has not been changed in place since then."""
        return [saved for saved in self._aliases() if not saved.is_changed()]

    def is_changed(self) -> bool:
        """Tell whether it has been changed in place since any of it was saved."""
        return any(saved.is_changed() for saved in self._aliases())

    def keep_sources(self) -> bool:
        """Keep what it is made of, if all that is as it was and nobody can change it any more; tells whether."""
        sources = self.made_of()
        pairs = None if sources is None else self.compared(sources)
        if sources is None or pairs is None or not are_same(pairs):
            return False
        self._kept = sources
        return True

    def made_of(self) -> list[Saved] | None:
        """Return what it is made of; ``None``: some of that is lost, or it has been changed in place."""
        recipe = self.recipe
        if recipe is None or any(each.version != self.recipe_version for each in self._aliases()):
            return None
        return recipe.saved()

    def compared(self, sources: Sequence[Saved]) -> list[tuple[Any, Any]] | None:
        """Return digests of now, each beside that of when the recipe was made; ``None``: somebody can reach one."""
        recipe = self.recipe
        if recipe is None:
            return None
        then = [recipe.digest, *(source.digest for source in recipe.inputs())]
        pairs: list[tuple[Any, Any]] = list(recipe.doubts)
        for storage, before in zip([self, *(saved.storage for saved in sources)], then, strict=True):
            now = storage.digest_now()
            if now is None or before is None:
                return None
            pairs.append((now, before))
        return pairs

    def digest_now(self) -> Any:  # noqa: ANN401 - an ``int``, or what another device has
        """Return the digest of its contents; ``None``: somebody can reach them, or it has not been taken."""
        if self.is_dropped:
            return None if self.recipe is None else self.recipe.digest
        if self.place in (Place.AWAY, Place.COMING):
            return self._left_digest
        return self._saving.digest(self._storage) if self.address_if_idle() != 0 else None

    def sources(self) -> list[Idle]:
        """Return what it is made of, while it is dropped."""
        return [saved.storage for saved in self._kept]

    def make(self, bring: Callable[..., Any]) -> None:
        """Make it again."""
        from zico.adapters.torch_recipes import remade

        if self.recipe is None:
            message = "there is no recipe"
            raise RuntimeError(message)
        self._settled = storage_of(remade(self.recipe, self._kept, bring, self._saving.kind))

    def address_if_idle(self) -> int:
        """Return its address if only saved tensors refer to it and none has been changed since."""
        uses, objects = _references(self._storage)
        if uses > _USES - 1 + len(self._saved) + len(self._bases):  # whatever lives of those: most calls end here
            return 0
        aliases = self._aliases()
        own = len(aliases) + len(self._bases)
        if uses != _USES - 1 + own or objects > _OBJECT_REFERENCES:
            return 0
        if self.is_changed() or not self._saving.owns(self._storage):
            return 0
        return int(self._storage.data_ptr())

    def encoding(self) -> int:
        """Return what a tier may keep: signs, if none of what is saved of it is read for more."""
        if self._saving.encoding is None:
            return ZEROS
        aliases = self._aliases()
        if any(each.dtype is not torch.float32 for each in aliases):
            return ZEROS
        return self._saving.encoding if any(each.is_read for each in aliases) else SIGNS

    def let_go(self) -> None:
        """Free it: from now on what is saved of it is descriptions."""
        self.is_reduced |= self.encoding() == SIGNS
        if self.is_source and not self.is_dropped:
            self._left_digest = self.last_digest()
        for saved in self._aliases():
            saved.alias = None
        self._bases.clear()
        self._saving.known.pop(self._storage._cdata, None)
        self._storage = None

    def last_digest(self) -> Any:  # noqa: ANN401 - as ``digest_now``
        """Return the digest of what is about to be freed."""
        return self._saving.digest(self._storage)

    def note_use(self) -> None:
        """Let whatever computes in this thread use it."""

    def settle(self) -> int:
        """Allocate as PyTorch does."""
        self._settled = storage_of(torch.empty(self.size_bytes, dtype=torch.uint8, device="cpu"))
        return int(self._settled.data_ptr())

    def arrive(self) -> None:
        """Be here again, at another address."""
        self._storage, self._settled = self._settled, None
        self.recipe, self._kept = None, []  # versions count anew
        self._saving.known[self._storage._cdata] = self

    def view(self, saved: Saved) -> torch.Tensor:
        """Return an alias like the one that was saved; those of one type share a version, as those did."""
        base = self._bases.get(saved.dtype)
        if base is None:
            base = torch.empty(0, dtype=saved.dtype, device=self._storage.device)
            n = self.size_bytes // saved.dtype.itemsize
            self._bases[saved.dtype] = base = TensorBase.set_(base, self._storage, 0, (n,), (1,))
        return base.as_strided(saved.size, saved.stride, saved.offset)


def are_same(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Tell whether the digests of each pair are equal."""
    return all(now == then for now, then in pairs)


class Saved:
    """What stands in the graph for a tensor of a ``Storage``."""

    __slots__ = ("__weakref__", "alias", "dtype", "is_read", "offset", "size", "storage", "stride", "version")

    def __init__(self, storage: Storage, tensor: torch.Tensor) -> None:
        self.storage = storage
        self.alias: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.is_read = True
        """More than the signs of its numbers is used in the backward pass."""
        storage.add(self)

    def is_changed(self) -> bool:
        """Tell whether the tensor has been changed in place since it was saved."""
        return self.alias is not None and self.alias._version != self.version

    def take(self) -> torch.Tensor:
        """Return a tensor like the one that was saved; its memory is here.

        Raises:
            RuntimeError: It has been changed.
        """
        if self.alias is None:
            self.alias = self.storage.view(self)
            self.version = self.alias._version
        _check_version(self.alias, self.version)
        return self.alias.detach()  # of its own, so that whoever keeps it is seen


def _check_version(alias: torch.Tensor, version: int) -> None:
    now = alias._version
    if now != version:
        shape = list(alias.size())
        raise RuntimeError(_CHANGED.format(kind=alias.type(), shape=shape, now=now, then=version))


class Saving(Watcher):
    """The hooks, for as long as the process lives."""

    storage_type = Storage
    kind = "cpu"
    """Kind of the pool's device, in PyTorch's words."""
    is_ours = staticmethod(operator.attrgetter("is_cpu"))
    """Tells whether a tensor is on the pool's device."""
    digest: Callable[[Any], Any] = staticmethod(digest_of)
    """Returns what tells whether memory is what it was; ``None``: nothing can."""

    def __init__(self, swapper: Swapper, begin: int, end: int, least_bytes: int) -> None:
        """Swap what is saved of memory from ``begin`` to ``end``, in pieces of ``least_bytes`` or more."""
        self.swapper = swapper
        self.known: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        self._begin = begin
        self._end = end
        self.least_bytes = least_bytes
        self.on_saved: Callable[[Saved, torch.Tensor], None] | None = None
        """Told of what has been saved of the pool's memory."""
        self.encoding: int | None = None
        """What tiers may keep of 4-byte floats that leave; ``None``: all, also of what nobody reads."""
        self._away = threading.local()
        self._is_there: Callable[[], bool] = lambda: True
        self._pending: Any = None
        self._disable = _autograd._saved_tensors_hooks_disable
        self._enable = _autograd._saved_tensors_hooks_enable

    def take_digests(self) -> None:
        """Be ready to take digests.

        Raises:
            ZicoError: The device cannot.
        """

    def is_capturing(self) -> bool:
        """Tell whether what this thread computes may become a graph instead."""
        return False

    @contextlib.contextmanager
    def timed(self) -> Iterator[Callable[[], int]]:
        """Give what returns, behind the block, the nanoseconds that the device has computed in it."""
        ends_ns: list[int] = []
        began_ns = time.perf_counter_ns()
        yield lambda: ends_ns[0] - began_ns
        ends_ns.append(time.perf_counter_ns())

    # -- the hooks ---------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Saved | tuple[torch.Tensor, int]:
        """Return what stands for a tensor in the graph."""
        if _dispatch_modes() > 0:
            with torch._C._DisableTorchDispatch():  # a user's mode sees what the user does
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Saved | tuple[torch.Tensor, int]:
        if self.is_ours(tensor) and type(tensor) in PLAIN and tensor.layout is torch.strided:
            storage = storage_of(tensor)
            if storage.nbytes() >= self.least_bytes and is_dense(tensor):
                known = self.known.get(storage._cdata)
                if known is None and self.owns(storage):
                    known = self.known[storage._cdata] = self.storage_type(self, storage)
                    self.swapper.saved(known, _maker(tensor))
                if known is not None:
                    saved = Saved(known, tensor)
                    if self.on_saved is not None:
                        self.on_saved(saved, tensor)
                    return saved
        return tensor.detach(), tensor._version

    def owns(self, storage: Any) -> bool:  # noqa: ANN401 - torch has no types
        """Tell whether memory is the pool's, and that of no other storage or array: PyTorch resizes none of those."""
        return self._begin <= storage.data_ptr() < self._end and storage.resizable()

    def unpack(self, packed: Saved | tuple[torch.Tensor, int]) -> torch.Tensor:
        """Return the tensor again; waits until its memory is here."""
        if isinstance(packed, Saved):
            if packed.storage.is_reduced and torch._C._current_graph_task_id() < 0:
                raise RuntimeError(_REDUCED)
            if _dispatch_modes() > 0:
                with torch._C._DisableTorchDispatch():
                    return self.swapper.used(packed.storage, packed.take, _reader())
            return self.swapper.used(packed.storage, packed.take, _reader())
        alias, version = packed
        if alias._version != version:
            _check_version(alias, version)
        return alias

    # -- where they are ----------------------------------------------------------------------------

    def install(self) -> None:
        """Save by these hooks in this thread and in all that ``threading`` starts from now on."""
        self._push()
        self._guard()

    def install_later(self, is_there: Callable[[], bool]) -> None:
        """Install the hooks while the job runs, from any thread: in the main thread before its next bytecodes.

        A thread that has hooks of its user's at that moment, or may have none, is left to ``come_in``.

        Args:
            is_there: Tells whether this process still is the job.
        """
        self._is_there = is_there
        self._guard()
        self._pending = _PENDING(self._come_in_pending)
        ctypes.pythonapi.Py_AddPendingCall(self._pending, None)

    def _come_in_pending(self, _nothing: int | None) -> int:
        self.come_in()
        return 0

    def come_in(self) -> None:
        """Save by these hooks in this thread, if it does not yet and has none of its user's now."""
        may: bool = _autograd._saved_tensors_hooks_is_enabled() and self._is_there()  # type: ignore[attr-defined]
        if may and _autograd._top_saved_tensors_default_hooks(False) is None:  # noqa: FBT003 - by position
            self._push()

    def at_boundary(self) -> None:
        """Save by these hooks in this thread only while something has to leave: each call of them takes Python's time.

        For the boundaries of a job whose limit may change while it runs.
        """
        if not self.swapper.stands_by():
            self.come_in()
        elif self.is_in_force():
            _autograd._pop_saved_tensors_default_hooks()

    def is_in_force(self) -> bool:
        """Tell whether what this thread saves comes to these hooks, and to no others first."""
        return bool(_autograd._top_saved_tensors_default_hooks(False) == (self.pack, self.unpack))  # noqa: FBT003 - by position

    def _guard(self) -> None:
        with contextlib.suppress(AttributeError):  # a PyTorch without it compiles hooks in other ways
            skip = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
            for hook in (type(self).pack, type(self).unpack):  # nor what they call
                _eval_frame.set_code_exec_strategy(hook.__code__, skip)
        _autograd._saved_tensors_hooks_disable = self._make_way  # type: ignore[assignment] # by position, as it is called
        _autograd._saved_tensors_hooks_enable = self._come_back
        threading.Thread._bootstrap_inner = self._pushing(threading.Thread._bootstrap_inner)  # type: ignore[attr-defined]

    def _push(self) -> None:
        _autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def _pushing(self, begin: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """Wrap what a thread does first."""

        def _bootstrap_inner(thread: threading.Thread) -> None:
            self._push()
            try:
                begin(thread)
            finally:  # what a thread still has is freed when it is gone, which may be after the interpreter
                if self.is_in_force():
                    _autograd._pop_saved_tensors_default_hooks()

        return _bootstrap_inner

    def _make_way(self, *arguments: Any) -> None:  # noqa: ANN401 - PyTorch's own
        """Stand in for ``_saved_tensors_hooks_disable``, which refuses where there are hooks: ours are not a user's."""
        top = _autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003 - by position
        if top is not None and top[0] == self.pack:
            _autograd._pop_saved_tensors_default_hooks()
            self._away.there = True
        self._disable(*arguments)

    def _come_back(self) -> None:
        """Stand in for ``_saved_tensors_hooks_enable``."""
        self._enable()
        if getattr(self._away, "there", False):
            self._away.there = False
            self._push()


# --------------------------------------------------------------------------------------------------
# The state of PyTorch's optimizers leaves between their steps: by PyTorch's own hooks around every
# step.
#
# An optimizer makes its state in its first step, or when a state is loaded into it. What is
# allocated then is put where it can leave from (``zico.heap.state_offload``).


def _stepped(optimizer: Optimizer) -> tuple[int, ...]:
    """Return what tells which parameters a step is for."""
    return tuple(id(group["params"][0]) for group in optimizer.param_groups if group["params"])


class Stepping:
    """The hooks, for as long as the process lives."""

    def __init__(self, offload: StateOffload | None, parts: Mapping[Any, str]) -> None:
        """Tell of every step of every optimizer, if there is somebody to be told.

        Args:
            offload: Who is told.
            parts: Optimizers of libraries, and who offloads their state (``Session.parts``).
        """
        self.offload = offload
        """``None`` until the job begins to save memory."""
        self._parts = parts
        self._begun: weakref.WeakKeyDictionary[Optimizer, set[Any]] = weakref.WeakKeyDictionary()
        """What has a state: a library may step one group after the other by the same optimizer."""
        self._said: set[str] = set()

    def install(self) -> None:
        """Begin; before whoever ends an iteration behind a step."""
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        Optimizer.load_state_dict = self._apart(Optimizer.load_state_dict)

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401 - torch's hook signature
        if self.offload is not None and not self._is_left_alone(optimizer):
            self.offload.begin_step()
            self.offload.put_apart(on=_stepped(optimizer) not in self._begun.get(optimizer, ()))

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401 - torch's hook signature
        self._begun.setdefault(optimizer, set()).add(_stepped(optimizer))
        if self.offload is not None and not self._is_left_alone(optimizer):
            self.offload.put_apart(on=False)
            self.offload.end_step()

    def _is_left_alone(self, optimizer: Optimizer) -> bool:
        """Tell whether a library offloads this optimizer's state; says so, once."""
        keeper = self._parts.get(optimizer, "")
        if keeper and self.offload is not None and keeper not in self._said:
            self._said.add(keeper)
            inform(
                f"{keeper} offloads the optimizer's state, so Zico leaves that state alone; without that, Zico moves "
                "it out of the budget between steps"
            )
        return bool(keeper)

    def _apart(self, load: Callable[..., None]) -> Callable[..., None]:
        """Wrap what makes copies of a state."""

        @functools.wraps(load)
        def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
            offload = None if self._is_left_alone(optimizer) else self.offload
            if offload is not None:
                offload.begin_step()
            with offload.apart() if offload is not None else contextlib.nullcontext():
                load(optimizer, *args, **kwargs)
            self._begun.setdefault(optimizer, set()).add(_stepped(optimizer))

        return load_state_dict
