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
    6. Backward passes see the same bits, or raise.
    A segment runs again with the generators, settings, attributes and small buffers that it had,
    and all that is put back afterwards. What it returns then is compared with what it returned
    first; so are parameters and inputs. Where they differ, the backward pass raises.
    A module is refused, with one line, if its second run gives other bits, and if it changes more
    than small buffers, draws from generators that nobody else knows, uses containers or tensors of
    others, has hooks, or calls functions with a backward pass of their own. A module that becomes
    another one, by a switch, a hook or a replaced part, is tried again, three times.

Known limitations
    The user's code runs more often than without. What it does to objects that neither it nor its
    attributes hold, it does twice. The backward pass raises where inputs or parameters are changed
    in place before it, though autograd alone may have no use for them.
"""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
# ruff: noqa: ANN401 - modules take and return anything
from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import nn
from torch._C import _autograd
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zico.adapters.torch_module_state import (
    Draws,
    ModuleState,
    are_plain,
    digest_of_tensor,
    digests_of,
    fingerprint,
    unfit,
)
from zico.adapters.torch_recipes import can_be_remade
from zico.adapters.torch_saving import is_plain, is_transformed, storage_of

from zico.base.saying import inform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zico.adapters.torch_saving import Saving

SMALLEST = 1 << 20
"""Bytes: a module that saves less inside is no segment."""
LARGEST_SHARE = 0.25
"""Of all that is saved: a module that saves more inside is too large, for all of it is here when it runs again."""
MOST_WATCHES = 8
"""Iterations of a process that are watched while there are no segments."""
MOST_BLOCKS = 10_000
"""Calls of modules in an iteration that is watched: one with more is something else than training."""
MOST_TRIALS = 3
_REMEDY = "do that after the backward pass, or run without --save segments"
_CHANGED = f"{{}} runs again for the backward pass, and its parameters or inputs have been changed in place: {_REMEDY}"
_DIFFERS = f"{{}} has run again for the backward pass with another result, as what it reads has changed: {_REMEDY}"


class Block(NamedTuple):
    """What a call of a module does to memory."""

    module: weakref.ref[nn.Module]
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
    """Sees the calls of modules in this thread, while it is on."""

    def __init__(self, saving: Saving) -> None:
        """Count what these hooks save."""
        self._saving = saving
        self._thread = threading.get_ident()
        self._calls: list[_Call] = []
        self.blocks: list[Block] = []
        """Of modules that no other module calls."""
        self.counts: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._seen = 0
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._begin),
            module_hooks.register_module_forward_hook(self._end, always_call=True),
        ]

    def stop(self) -> None:
        """See no more."""
        for handle in self._handles:
            handle.remove()

    def _is_mine(self) -> bool:
        return not is_transformed() and threading.get_ident() == self._thread and self._seen < MOST_BLOCKS

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling() and self._is_mine():
            self._calls.append(_Call(time.monotonic_ns(), self._saving.saved_bytes))

    def _end(self, module: nn.Module, _args: Any, result: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_mine() or not self._calls:  # it ran when the watch began
            return
        call = self._calls.pop()
        saved_bytes = self._saving.saved_bytes - call.saved_before
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and is_plain(tensor):
                known = self._saving.known.get(storage_of(tensor)._cdata)
                saved_bytes -= known.size_bytes if known is not None else 0
        took_ns = time.monotonic_ns() - call.began_ns
        block = Block(weakref.ref(module), max(saved_bytes, 0), took_ns, tuple(call.inside))
        self._seen += 1
        self.counts[module] = self.counts.get(module, 0) + 1
        (self._calls[-1].inside if self._calls else self.blocks).append(block)


def chosen(blocks: Sequence[Block], lacking_bytes: int, counts: Mapping[nn.Module, int]) -> list[Block]:
    """Return the blocks to run again: the cheapest for what they save, until so much is saved.

    Args:
        blocks: Of the iteration, with those inside them.
        lacking_bytes: What the iteration holds too much.
        counts: How often each module was called; those called once can be segments.
    """
    most_bytes = LARGEST_SHARE * sum(block.saved_bytes for block in blocks)

    def candidates(some: Sequence[Block]) -> Iterator[Block]:
        for block in some:
            module = block.module()
            if module is None:
                continue
            if SMALLEST <= block.saved_bytes <= most_bytes and counts[module] == 1 and not unfit(module):
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


# -- a trial ---------------------------------------------------------------------------------------


class _Unfit(Exception):  # noqa: N818 - nothing has failed
    """Ends a trial before it changes anything of others."""


class _Own(TorchDispatchMode):  # type: ignore[misc] # torch has no types
    """Stops a run at the first operation that reads tensors of others, or draws from their generators."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        self.has_drawn = False
        """From PyTorch's own generator."""
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
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        is_number = func is torch.ops.aten.lift_fresh.default
        if not is_number and not all(self._knows(each) for each in given if isinstance(each, torch.Tensor)):
            message = "it reads tensors that are neither its own nor given to it"
            raise _Unfit(message)
        result = func(*args, **(kwargs or {}))
        self._note(result)
        return result


class _Noting:
    """Notes the digests of all that is saved, on its way to the hooks below."""

    def __init__(self) -> None:
        self.digests: list[int] = []
        self.is_used = False
        self.before_use: Callable[[], None] | None = None
        """Called before the first of it is used."""
        self._below: Any = _autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003 - by position

    def __enter__(self) -> Self:
        _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        return self

    def __exit__(self, *_: object) -> None:
        _autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: torch.Tensor) -> Any:
        with torch._C._DisableTorchDispatch():
            self.digests.append(digest_of_tensor(tensor))
        return self._below[0](tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        self.is_used = True
        call, self.before_use = self.before_use, None
        if call is not None:
            call()
        tensor: torch.Tensor = self._below[1](packed)
        return tensor


def _has_own_backward(result: Any, given: Any) -> bool:
    """Tell whether a function with a backward pass of the user's lies between: it may read what is saved twice."""
    ends = {each.grad_fn for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)}
    ahead = [each.grad_fn for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    seen = set(ends) | {None}
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            return True
        ahead += [each for each, _ in node.next_functions]
    return False


def _compared(module: nn.Module, call: Any, given: Any, result: Any, first: _Noting) -> tuple[str, bool]:
    """Return how another run differs, empty: it gives the same bits; and whether it draws random numbers."""

    def apart(each: Any) -> Any:
        return each.detach().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each

    args, kwargs = pytree.tree_map(apart, given)
    own = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    has_cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # what is in it is not of this run
    try:
        with _Noting() as second, _Own([*own, *module.parameters(), *module.buffers()]) as watched:
            made = call(module, *args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(has_cache)
    one, other = pytree.tree_flatten(result), pytree.tree_flatten(made)
    is_same = first.digests == second.digests and one[1] == other[1] and all(map(_is_same, one[0], other[0]))
    return "" if is_same else "run again, its bits would differ", watched.has_drawn


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.shape == other.shape) and digest_of_tensor(one) == digest_of_tensor(other)
    return bool(one == other)


# -- segments --------------------------------------------------------------------------------------


class _Segment:
    """One module that runs again."""

    def __init__(self, name: str, saved_bytes: int) -> None:
        self.name, self.saved_bytes = name, saved_bytes
        self.tried: set[tuple[Any, ...]] = set()
        """Fingerprints with which it has been tried."""
        self.thread = threading.get_ident()
        """The one that may run it again: others may train it at the same time."""
        self.good: dict[tuple[Any, ...], bool] = {}
        """Those of them with which it can run again, and whether it draws random numbers then."""


class _Given:
    """What a module reads and does not change, and its digests."""

    def __init__(self, tensors: Any) -> None:
        self._tensors, self._digests = tensors, digests_of(tensors)

    def has_changed(self) -> bool:
        return digests_of(self._tensors) != self._digests


def _fingerprint(module: nn.Module) -> tuple[Any, ...] | None:
    """Return what a module is; ``None``: something in it cannot be looked at."""
    try:
        found = fingerprint(module)
        hash(found)
    except Exception:  # noqa: BLE001 - attributes of the user's, of any kind
        return None
    return found


class Segments:
    """Modules that run again, for as long as the process lives."""

    def __init__(self, saving: Saving) -> None:
        """Choose among modules whose operations are saved by these hooks."""
        self._saving = saving
        self._watch: Watch | None = None
        self._of: weakref.WeakKeyDictionary[nn.Module, _Segment] = weakref.WeakKeyDictionary()
        self._call: Any = None
        """How PyTorch calls a module."""
        self._watches = 0

    def boundary(self) -> None:
        """Go on at the end of an iteration: watch one whose memory is known, then choose; again for another model."""
        if self._watch is None:
            may_watch = not self._of and self._watches < MOST_WATCHES
            if may_watch and self._saving.swapper.lacking_bytes > 0:
                self._watch, self._watches = Watch(self._saving), self._watches + 1
            return
        watch, self._watch = self._watch, None
        watch.stop()
        found = chosen(watch.blocks, self._saving.swapper.lacking_bytes, watch.counts)
        if not found and self._watches == 1:
            inform("no module is a segment: none is called once, saves enough inside, and can run again")
        roots = [root for block in watch.blocks if (root := block.module()) is not None]
        names = {module: name for root in roots for name, module in root.named_modules()}
        for block in found:
            module = block.module()
            if module is not None:
                self.add(module, names.get(module) or type(module).__name__, block.saved_bytes)

    def add(self, module: nn.Module, name: str, saved_bytes: int) -> None:
        """Try a module when it is called next, and let it run again from then on if it can."""
        self._of[module] = _Segment(name, saved_bytes)
        if self._call is None:  # for all modules: nothing is put into one, or into a class of the user's
            self._call = nn.Module.__call__
            nn.Module.__call__ = self._around(self._call)

    def _around(self, call: Any) -> Any:
        @functools.wraps(call)
        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - as PyTorch's
            segment = None if torch.compiler.is_compiling() else self._of.get(module)
            if segment is None or not self._may_run_again(segment) or not are_plain((args, kwargs)):
                return call(module, *args, **kwargs)
            now = _fingerprint(module)
            if now in segment.good:
                return self._run(segment, module, args, kwargs, draws=segment.good[now])
            if now is not None and now not in segment.tried and len(segment.tried) < MOST_TRIALS:
                segment.tried.add(now)
                return self._try(segment, module, now, args, kwargs)
            return call(module, *args, **kwargs)

        return __call__

    def _may_run_again(self, segment: _Segment) -> bool:
        if segment.thread != threading.get_ident() or not torch.is_grad_enabled():
            return False
        return self._saving.is_in_force() and not is_transformed() and can_be_remade(self._saving.kind)

    # -- the trial ---------------------------------------------------------------------------------

    def _try(self, segment: _Segment, module: nn.Module, now: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        """Run a module as ever, and again for comparison; one that differs is no segment any more."""
        given = (args, kwargs)
        why = unfit(module)
        if not why and not are_plain((list(module.parameters()), list(module.buffers()))):
            why = "its parameters are more than their memory"
        if why:
            self._refuse(segment, module, why)
            return self._call(module, *args, **kwargs)
        before = ModuleState(module)
        fixed, inputs = _Given(before.fixed), _Given(given)
        with _Noting() as first:
            result = self._call(module, *args, **kwargs)
        after = Draws()
        changes = {
            "it changes what it is given": inputs.has_changed(),
            "it changes its parameters or large buffers": fixed.has_changed(),
            "it changes its attributes": _fingerprint(module) != now,
            "it draws from a generator of NumPy or Python": before.draws.differ_outside_torch(after),
            "it has a backward pass inside": first.is_used,
            "it calls a function with a backward pass of its own": _has_own_backward(result, given),
        }
        why, draws = next((change for change, is_so in changes.items() if is_so), ""), True
        if not why:
            try:
                with before.again(after):
                    why, draws = _compared(module, self._call, given, result, first)
            except _Unfit as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the user's own call has worked
                why = f"to run it again fails: {error}"
        if why:
            self._refuse(segment, module, why)
        else:
            tensors = _Given((before.fixed, given))
            confirm = functools.partial(self._confirm, segment, weakref.ref(module), now, tensors)
            first.before_use = functools.partial(confirm, draws=draws)
        return result

    def _confirm(
        self, segment: _Segment, module: weakref.ref[nn.Module], now: tuple[Any, ...], given: _Given, *, draws: bool
    ) -> None:
        """Run a module again from now on, if all that it read is still the same in its backward pass."""
        living = module()
        if living is None:
            return
        found = _fingerprint(living)
        if found is None or found[1] != now[1] or given.has_changed():
            self._refuse(segment, living, "what it reads changes before its backward pass")
        else:
            segment.good[now] = draws

    def _refuse(self, segment: _Segment, module: nn.Module, why: str) -> None:
        if self._of.pop(module, None) is not None:
            inform(f"{segment.name} keeps what it saves: {why}")

    # -- running again -----------------------------------------------------------------------------

    def _run(self, segment: _Segment, module: nn.Module, args: Any, kwargs: Any, *, draws: bool) -> Any:
        """Run a module that saves nothing but what it is given."""
        args, kwargs = pytree.tree_map(lambda each: each, (args, kwargs))  # containers of our own
        before, inputs, runs = ModuleState(module), digests_of((args, kwargs)), itertools.count()
        after, fixed, returned = before.draws, _Given(()), [-1]  # a backward pass inside would find another result

        def run(*args: Any) -> Any:
            if next(runs) == 0:
                return self._call(module, *args, **kwargs)
            began_ns = time.monotonic_ns()
            if fixed.has_changed() or digests_of((args, kwargs)) != inputs:
                raise RuntimeError(_CHANGED.format(segment.name))
            with before.again(after):
                result = self._call(module, *args, **kwargs)
            if digests_of(result) != returned:
                raise RuntimeError(_DIFFERS.format(segment.name))
            self._saving.swapper.figures.making_ns += time.monotonic_ns() - began_ns
            return result

        result = checkpoint(run, *args, use_reentrant=False, early_stop=False, preserve_rng_state=False)
        after = Draws(None if draws else before.draws)
        fixed, returned = _Given(before.fixed), digests_of(result)
        self._saving.swapper.figures.dropped_bytes += segment.saved_bytes
        return result
