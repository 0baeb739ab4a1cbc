"""Modules of a PyTorch model run again in the backward pass, by ``torch.utils.checkpoint``: segments.

Theory of operation
    One iteration is watched: what each module saves inside, and how long it runs. Blocks that are
    cheap for what they save become *segments*, until what is left fits. In the next iteration each
    segment is tried: it runs as ever, and once more with what it was given, and all that it returns
    and saves is compared. From then on it runs under ``checkpoint(use_reentrant=False)``::

        forward   block 1 saves its input only | block 2 saves its input only | loss
        backward  block 2 runs again, saves all, backward | block 1 runs again, saves all, backward

    Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174),
    section 4, with modules for segments.

Guarantees
    6. Backward passes see the same bits.
    A segment runs again with the random state, the settings and the buffers that it had. Buffers
    that it changes are then put back. If its parameters or inputs have been changed meanwhile,
    the backward pass raises, as PyTorch does for saved tensors.
    A module is refused, with one line, if its second run gives other bits. So is one that changes
    attributes, reads tensors of others, draws from generators of NumPy or Python, or has hooks.

Known limitations
    The user's code runs more often than without. What it does to other objects, it does twice.
"""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
# ruff: noqa: ANN401 - modules take and return anything
from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import threading
import time
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import nn
from torch._C import _autograd
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zico.adapters.torch_recipes import AsBefore, can_be_remade
from zico.adapters.torch_saving import is_plain, is_transformed, storage_of

from zico.job.autoload import inform
from zico.offload.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.adapters.torch_saving import Saving

SMALLEST = 1 << 20
"""Bytes: a module that saves less inside is no segment."""
LARGEST_SHARE = 0.25
"""Of all that is saved: a module that saves more inside is too large, for all of it is here when it runs again."""
MOST_WATCHES = 8
"""Iterations of a process that are watched while there are no segments."""
_TENSORS = (torch.Tensor, nn.Parameter)
_NO_TENSORS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CHANGED = (
    "{} runs again for the backward pass, and its parameters, buffers or inputs have been changed in place since its "
    "forward pass: change them after the backward pass, or run without --save segments"
)


class Block(NamedTuple):
    """What a call of a module does to memory."""

    module: nn.Module
    saved_bytes: int
    """By operations inside, but for what it returns."""
    took_ns: int
    inside: tuple[Block, ...]


# -- watching --------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Call:
    began_ns: int
    saved_before: int
    inside: list[Block] = dataclasses.field(default_factory=list)


class Watch:
    """Sees all calls of modules, while it is on."""

    def __init__(self, saving: Saving) -> None:
        """Count what these hooks save."""
        self._saving = saving
        self._thread = threading.get_ident()
        self._calls: list[_Call] = []
        self.blocks: list[Block] = []
        """Of modules that no other module calls."""
        self.counts: dict[nn.Module, int] = {}
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._begin),
            module_hooks.register_module_forward_hook(self._end, always_call=True),
        ]

    def stop(self) -> None:
        """See no more."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._calls.append(_Call(time.monotonic_ns(), self._saving.saved_bytes))

    def _end(self, module: nn.Module, _args: Any, result: Any) -> None:
        if threading.get_ident() != self._thread or not self._calls:  # it was running when the watch began
            return
        call = self._calls.pop()
        saved_bytes = self._saving.saved_bytes - call.saved_before
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and is_plain(tensor):
                known = self._saving.known.get(storage_of(tensor)._cdata)
                saved_bytes -= known.size_bytes if known is not None else 0
        took_ns = time.monotonic_ns() - call.began_ns
        block = Block(module, max(saved_bytes, 0), took_ns, tuple(call.inside))
        self.counts[module] = self.counts.get(module, 0) + 1
        (self._calls[-1].inside if self._calls else self.blocks).append(block)


def chosen(blocks: Sequence[Block], lacking_bytes: int, counts: dict[nn.Module, int]) -> list[Block]:
    """Return the blocks to run again: the cheapest for what they save, until so much is saved.

    Args:
        blocks: Of the iteration, with those inside them.
        lacking_bytes: What the iteration holds too much.
        counts: How often each module was called; those called once can be segments.
    """
    most_bytes = LARGEST_SHARE * sum(block.saved_bytes for block in blocks)

    def candidates(some: Sequence[Block]) -> Iterator[Block]:
        for block in some:
            fits = SMALLEST <= block.saved_bytes <= most_bytes and counts[block.module] == 1
            if fits and not _unfit(block.module):
                yield block
            else:
                yield from candidates(block.inside)

    found: list[Block] = []
    largest = 0
    for block in sorted(candidates(blocks), key=lambda each: each.took_ns / each.saved_bytes):
        if sum(each.saved_bytes for each in found) >= lacking_bytes + largest:
            break
        found.append(block)
        largest = max(largest, block.saved_bytes)
    return found


_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") and "state_dict" not in name)


def _unfit(module: nn.Module) -> str:
    """Return why a module is no segment whatever it computes; empty: nothing speaks against it."""
    for each in module.modules():
        if isinstance(each, torch.jit.ScriptModule) or not isinstance(type(each).forward, types.FunctionType):
            return "it is compiled"
        if "forward" in vars(each) or any(getattr(each, name, None) for name in _HOOKS):
            return "it has hooks"
    return ""


# -- what a module is and has ----------------------------------------------------------------------


def _digest_of(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor's numbers, in their order."""
    whole = tensor.detach().contiguous()
    return digest(whole.data_ptr(), whole.nbytes) if whole.nbytes else 0


def _digests_of(tensors: Any) -> list[int]:
    return [_digest_of(each) for each in pytree.tree_leaves(tensors) if isinstance(each, torch.Tensor)]


class _State:
    """All that a module's run can depend on or change, as it is now."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        self._module = module
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._torch = torch.get_rng_state()
        self.given = _digests_of(arguments)
        self.attributes = [
            (key, id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
            for each in module.modules()
            for key, value in (*vars(each).items(), *each._buffers.items())
        ]
        numpy: Any = np.random.get_state()  # noqa: NPY002 - whatever the user draws from
        self.drawn = random.getstate(), numpy[1].tobytes(), numpy[2:]

    def restore(self) -> None:
        """Let the module and PyTorch's generator be as they were."""
        for name, buffer in self._module.named_buffers():
            buffer.data.copy_(self._buffers[name])
        torch.set_rng_state(self._torch)

    def changed_buffers(self, later: _State) -> tuple[str, ...]:
        """Return the names of the buffers that differ."""
        return tuple(name for name, buffer in self._buffers.items() if not _same(buffer, later._buffers.get(name)))


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and _digest_of(one) == _digest_of(other)


class _Unfit(Exception):  # noqa: N818 - nothing has failed
    """Ends a trial before it changes anything of others."""


class _Own(TorchDispatchMode):  # type: ignore[misc] # torch has no types
    """Stops a run at the first operation that reads tensors of others, or draws from their generators."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        self._note(own)

    def _note(self, tensors: Any) -> None:
        for each in pytree.tree_leaves(tensors):
            if isinstance(each, torch.Tensor):
                storage = storage_of(each)
                self._known[storage._cdata] = weakref.ref(storage)

    def _knows(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        known = self._known.get(storage._cdata)  # of another one, perhaps, that is dead
        return known is not None and known() is storage

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        if any(isinstance(each, torch.Generator) for each in given):
            message = "it draws from a generator of its own"
            raise _Unfit(message)
        is_number = func is torch.ops.aten.lift_fresh.default
        if not is_number and not all(self._knows(each) for each in given if isinstance(each, torch.Tensor)):
            message = "it reads tensors that are neither its own nor given to it"
            raise _Unfit(message)
        result = func(*args, **(kwargs or {}))
        self._note(result)
        return result


class _Noting:
    """Notes the digests of all that is saved, on its way to the hooks below or to nobody."""

    def __init__(self, *, is_kept: bool) -> None:
        self.digests: list[int] = []
        self.before_use: Callable[[], None] | None = None
        """Called before the first of it is used."""
        self._below = _autograd._top_saved_tensors_default_hooks(False) if is_kept else None  # noqa: FBT003

    def __enter__(self) -> Self:
        _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        return self

    def __exit__(self, *_: object) -> None:
        _autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: torch.Tensor) -> Any:
        with torch._C._DisableTorchDispatch():
            self.digests.append(_digest_of(tensor) if type(tensor) in _TENSORS and is_plain(tensor) else id(tensor))
        return self._below[0](tensor) if self._below is not None else None

    def _unpack(self, packed: Any) -> torch.Tensor:
        call, self.before_use = self.before_use, None
        if call is not None:
            call()
        if self._below is None:
            message = "a trial of a segment has no backward pass"
            raise RuntimeError(message)
        tensor: torch.Tensor = self._below[1](packed)
        return tensor


# -- segments --------------------------------------------------------------------------------------


class _Segment:
    """One module that runs again."""

    def __init__(self, name: str, block: Block) -> None:
        self.name, self.saved_bytes = name, block.saved_bytes
        self.is_tried = self.is_good = False
        self.changing: tuple[str, ...] = ()
        """Buffers that a run changes."""


class _Given:
    """What a module reads and does not change, and its digests."""

    def __init__(self, segment: _Segment, module: nn.Module, given: Any) -> None:
        buffers = [buffer for name, buffer in module.named_buffers() if name not in segment.changing]
        self._tensors = [*module.parameters(), *buffers, given]
        self._digests = _digests_of(self._tensors)

    def has_changed(self) -> bool:
        return _digests_of(self._tensors) != self._digests


class Segments:
    """Modules that run again, for as long as the process lives."""

    def __init__(self, saving: Saving) -> None:
        """Choose among modules whose operations are saved by these hooks."""
        self._saving = saving
        self._watch: Watch | None = None
        self._of: weakref.WeakKeyDictionary[nn.Module, _Segment] = weakref.WeakKeyDictionary()
        self._patched: set[type] = set()
        self._watches = 0

    def boundary(self) -> None:
        """Go on at the end of an iteration: watch one whose memory is known, then choose; again for another model."""
        lacking_bytes = self._saving.swapper.lacking_bytes
        if self._watch is None:
            if lacking_bytes > 0 and not self._of and self._watches < MOST_WATCHES:
                self._watch, self._watches = Watch(self._saving), self._watches + 1
            return
        watch, self._watch = self._watch, None
        watch.stop()
        found = chosen(watch.blocks, lacking_bytes, watch.counts)
        if not found and self._watches == 1:
            inform("no module is a segment: none is called once, saves enough inside, and has no hooks")
        names = {module: name for root in watch.blocks for name, module in root.module.named_modules()}
        for block in found:
            self._of[block.module] = _Segment(names[block.module] or type(block.module).__name__, block)
            self._patch(type(block.module))

    def _patch(self, kind: type) -> None:
        """Let modules of a class that are segments run as such; nothing is put into a module itself."""
        if kind in self._patched:
            return
        self._patched.add(kind)
        forward: Any = kind.forward  # type: ignore[attr-defined] # a module's

        @functools.wraps(forward)
        def segmented(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            segment = None if torch.compiler.is_compiling() else self._of.get(module)
            if segment is None or not self._may_run_again():
                return forward(module, *args, **kwargs)
            if not segment.is_tried:
                return self._try(segment, module, forward, args, kwargs)
            if segment.is_good and _are_plain((args, kwargs)):
                return self._run(segment, module, forward, args, kwargs)
            return forward(module, *args, **kwargs)

        kind.forward = segmented  # type: ignore[attr-defined]

    def _may_run_again(self) -> bool:
        return torch.is_grad_enabled() and self._saving.is_in_force() and not is_transformed() and can_be_remade()

    # -- the trial ---------------------------------------------------------------------------------

    def _try(self, segment: _Segment, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a module as ever, and again for comparison; one that differs is no segment any more."""
        segment.is_tried = True
        given = (args, kwargs)
        why = _unfit(module)
        if not why and not _are_plain((given, list(module.parameters()), list(module.buffers()))):
            why = "it is given something else than tensors and numbers"
        if why:
            self._refuse(segment, module, why)
            return forward(module, *args, **kwargs)
        before = _State(module, given)
        with _Noting(is_kept=True) as first:
            result = forward(module, *args, **kwargs)
        after = _State(module, given)
        segment.changing = before.changed_buffers(after)
        why = _refused(before, after)
        if not why:
            before.restore()
            try:
                why = _compared(module, forward, given, result, first)
            except _Unfit as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the user's own call has worked
                why = f"to run it again fails: {error}"
            finally:
                after.restore()
        if why:
            self._refuse(segment, module, why)
        else:
            first.before_use = functools.partial(self._confirm, segment, module, _Given(segment, module, given))
        return result

    def _confirm(self, segment: _Segment, module: nn.Module, given: _Given) -> None:
        """Run a module again from now on, if all that it read is still the same in its backward pass."""
        segment.is_good = not given.has_changed()
        if not segment.is_good:
            self._refuse(segment, module, "its parameters or inputs change before its backward pass")

    def _refuse(self, segment: _Segment, module: nn.Module, why: str) -> None:
        del self._of[module]
        inform(f"{segment.name} keeps what it saves: {why}")

    # -- running again -----------------------------------------------------------------------------

    def _run(self, segment: _Segment, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a module that saves nothing but what it is given."""
        buffers = dict(module.named_buffers())
        had = {name: buffers[name].detach().clone() for name in segment.changing}
        fixed, threads = _Given(segment, module, kwargs), torch.get_num_threads()
        inputs = _digests_of(args)
        runs = itertools.count()

        def run(*args: Any) -> Any:
            if next(runs) == 0:
                return forward(module, *args, **kwargs)
            began_ns = time.monotonic_ns()
            if fixed.has_changed() or _digests_of(args) != inputs:
                raise RuntimeError(_CHANGED.format(segment.name))
            now = {name: buffer.detach().clone() for name, buffer in module.named_buffers() if name in had}
            _put(module, had)
            try:
                with AsBefore(threads):
                    return forward(module, *args, **kwargs)
            finally:
                _put(module, now)
                self._saving.swapper.figures.making_ns += time.monotonic_ns() - began_ns

        self._saving.swapper.figures.dropped_bytes += segment.saved_bytes
        return checkpoint(run, *args, use_reentrant=False, early_stop=False)


def _put(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Set buffers; graphs that have saved them do not count that as a change, for they are put back."""
    buffers = dict(module.named_buffers())
    for name, value in values.items():
        buffers[name].data.copy_(value)


def _are_plain(given: Any) -> bool:
    """Tell whether these are numbers, text, and tensors that are nothing but their memory."""
    return all(
        is_plain(each) if type(each) in _TENSORS else isinstance(each, _NO_TENSORS)
        for each in pytree.tree_leaves(given)
    )


def _refused(before: _State, after: _State) -> str:
    """Return what a run has changed that another one would change again; empty: nothing but buffers."""
    if before.given != after.given:
        return "it changes what it is given"
    if before.attributes != after.attributes:
        return "it changes its attributes"
    if before.drawn != after.drawn:
        return "it draws from a generator of NumPy or Python"
    return ""


def _compared(module: nn.Module, forward: Any, given: Any, result: Any, first: _Noting) -> str:
    """Return how another run differs; empty: it gives the same bits."""

    def apart(each: Any) -> Any:
        return each.detach().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each

    args, kwargs = pytree.tree_map(apart, given)
    own = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    has_cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # what is in it is not of this run
    try:
        with _Noting(is_kept=False) as second, _Own([*own, *module.parameters(), *module.buffers()]):
            made = forward(module, *args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(has_cache)
    one, other = pytree.tree_flatten(result), pytree.tree_flatten(made)
    if first.digests != second.digests or one[1] != other[1]:
        return "run again, its bits would differ"
    for mine, its in zip(one[0], other[0], strict=True):
        is_same = _same(mine, its) if isinstance(mine, torch.Tensor) else mine == its
        if not is_same:
            return "run again, its bits would differ"
    return ""
