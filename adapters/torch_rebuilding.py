"""What autograd saves can be made again from what else it saves, by a fixed list of rules.

Theory of operation
    Each rule stands around one function of PyTorch. When that has returned, the rule knows which
    inputs the result was made of, and how. An input that is saved anyway, one that can be made
    again itself, and a copy of a small one are *sources*; a result of other inputs has no recipe.
    When a saved tensor with a recipe has been dropped, unpacking runs the function again, in the
    thread that unpacks. No code of the user runs again.

    Random numbers come from a generator of our own, set to the state that the user's had.

Guarantees
    6. Backward passes see the same bits.
    A recipe is followed only if another one of the same function, shapes and constants has given
    the same bits as the tensor itself, in this process. A source that has been changed in place
    since raises, as autograd does for tensors that it saved.

Known limitations
    Only functions called from Python are seen, in threads that save by our hooks. Under autocast
    and in compiled graphs there are no recipes. A source that has been changed in place raises even
    where the operation that autograd saved it for is never differentiated. What changes memory
    without PyTorch's knowledge (``.data``, NumPy views) is not seen.
"""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
# ruff: noqa: A002, ANN401, ARG001, FBT001, FBT002, FBT003, PLR0913, PLR0917 - signatures are PyTorch's
from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.jit import _builtins

from zico.job.autoload import inform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zico.adapters.torch_saving import Saved, Saving, Storage

    Bring = Callable[[Storage, Callable[[], torch.Tensor]], torch.Tensor]

SMALL = 64
"""An input so many times smaller than the result is copied: layers' weights, which optimizers change."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Recipe:
    """How a tensor is made."""

    __slots__ = ("constants", "function", "name", "sources")

    def __init__(
        self, name: str, function: Callable[..., torch.Tensor], sources: Sequence[Any], constants: tuple[Any, ...]
    ) -> None:
        """Make it by a function of tensors.

        Args:
            name: Of the function, in messages.
            function: Makes it of ``sources``; writes to none of them but to those that are recipes.
            sources: ``Saved`` tensors, recipes, small tensors, or ``None``.
            constants: What else the function depends on.
        """
        self.name, self.function, self.sources, self.constants = name, function, sources, constants

    def make(self, bring: Bring) -> torch.Tensor:
        """Return the tensor, made anew; waits until its sources are here."""
        arguments = []
        for source in self.sources:
            if isinstance(source, Recipe):
                arguments.append(source.make(bring))
            elif source is None or isinstance(source, torch.Tensor):
                arguments.append(source)
            else:
                arguments.append(bring(source.storage, source.take))
        return self.function(*arguments)

    def storages(self) -> list[Storage]:
        """Return what has to be here."""
        found: list[Storage] = []
        for source in self.sources:
            if isinstance(source, Recipe):
                found += source.storages()
            elif source is not None and not isinstance(source, torch.Tensor):
                found.append(source.storage)
        return found

    def kind(self) -> tuple[Any, ...]:
        """Return what recipes have in common that make tensors in the same way."""
        parts = [
            source.kind() if isinstance(source, Recipe) else _shape_of(source) if source is not None else None
            for source in self.sources
        ]
        return self.name, self.constants, *parts


def _shape_of(source: Any) -> tuple[Any, ...]:
    if isinstance(source, torch.Tensor):
        return tuple(source.size()), source.stride(), source.dtype
    return tuple(source.size), source.stride, source.dtype


class _Known(NamedTuple):
    """A tensor whose memory lives and that has a recipe."""

    storage: weakref.ref[Any]
    version: int
    shape: tuple[Any, ...]
    recipe: Recipe

    def is_of(self, storage: Any, version: int) -> bool:
        """Tell whether memory is still what the recipe makes."""
        return self.storage() is storage and self.version == version


class Rebuilding:
    """The rules, for as long as the process lives."""

    def __init__(self, saving: Saving) -> None:
        """Give recipes to what these hooks save."""
        self._saving = saving
        self._known: dict[int, _Known] = {}
        self._cost_ns: dict[tuple[Any, ...], int | None] = {}
        """Of each kind of recipe; ``None``: its bits differ."""
        self._calls = threading.local()
        saving.on_saved = self._note_saved

    def install(self) -> None:
        """Put the rules around PyTorch's functions, under names by which pickles find them without Zico, too."""
        functional, tensor = torch.nn.functional, torch.Tensor
        for owner, path, rule in (
            (torch, "torch:relu", _relu),
            (tensor, "torch:Tensor.relu", _relu),
            (torch, "torch:relu_", _relu_),
            (tensor, "torch:Tensor.relu_", _relu_),
            (torch, "torch:batch_norm", _batch_norm),
            (torch, "torch:layer_norm", _layer_norm),
            (functional, "torch.nn.functional:gelu", _gelu),
            (torch._C._nn, "torch._C._nn:silu", _silu),
            (torch, "torch:softmax", _softmax),
            (tensor, "torch:Tensor.softmax", _softmax),
            (tensor, "torch:Tensor.__add__", _add),
            (tensor, "torch:Tensor.__iadd__", _iadd),
        ):
            _replace(owner, path, functools.partial(self._ruled, rule))
        _replace(functional._VF, "torch._VF:dropout", self._dropping)

    # -- around functions --------------------------------------------------------------------------

    def _is_watching(self) -> bool:
        """Tell whether what runs now is saved by our hooks, and not compiled or traced."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        return torch.is_grad_enabled() and self._saving.is_in_force()

    def _ruled(self, rule: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of PyTorch."""
        writes = rule in (_relu_, _iadd)
        name = original.__name__.strip("_")

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            made = self._ask(rule, args, kwargs) if self._is_watching() else None
            before = self._source(made.inputs[0], 0) if made is not None and writes else None
            result = original(*args, **kwargs)
            if made is not None and self._is_worth_it(result):
                rest = made.inputs[1:] if writes else made.inputs
                sources = [before] if writes else []
                sources += [self._source(each, result.nbytes) for each in rest]
                if all(each is not _NONE for each in sources) and not (writes and not isinstance(before, Recipe)):
                    self._give(result, Recipe(name, made.function, sources, made.constants))
            return result

        return function

    def _dropping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap dropout, of which the mask is saved, too."""

        @functools.wraps(original)
        def dropout(input: Any, p: float, train: bool) -> Any:
            state = None
            if self._is_watching() and train and 0 < p < 1 and self._is_worth_it(input):
                state = torch.default_generator.get_state()
                self._calls.saved = []
            try:
                result = original(input, p, train)
            finally:
                saved = self._take_saved() if state is not None else ()
            for mask in saved:
                if state is not None and mask.storage.size_bytes == input.nbytes and mask.alias is not None:
                    masking = _masking(state, p, tuple(mask.size), mask.dtype)
                    self._give(mask.alias, Recipe("dropout's mask", masking, (), (p, *_shape_of(mask))))
                    source = self._source(input, result.nbytes)
                    if source is not _NONE:
                        self._give(result, Recipe("dropout", torch.mul, (source, mask), (p,)))
            return result

        return dropout

    def _take_saved(self) -> list[Saved]:
        """Return what has been saved since this thread began to collect it, and end that."""
        saved: list[Saved] = self._calls.saved
        self._calls.saved = None
        return saved

    @staticmethod
    def _ask(rule: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Made | None:
        try:
            made: _Made | None = rule(*args, **kwargs)
        except TypeError:  # called in a way that the rule does not know
            return None
        return made

    def _is_worth_it(self, tensor: Any) -> bool:
        """Tell whether it can be a saved tensor of ours: plain, dense, of the pool, and large."""
        return (
            type(tensor) in _PLAIN
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.nbytes >= self._saving.least_bytes
            and tensor.untyped_storage().nbytes() == tensor.nbytes
            and self._saving.owns(tensor.data_ptr())
            and not torch.is_autocast_enabled("cpu")
        )

    def _source(self, tensor: Any, result_bytes: int) -> Any:
        """Return how an input can be had again; ``_NONE``: it cannot."""
        if tensor is None:
            return None
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
            return _NONE
        if tensor.nbytes * SMALL <= result_bytes:
            with torch.no_grad():
                return tensor.detach().clone()
        storage = tensor.untyped_storage()
        living = self._saving.known.get(storage._cdata)
        if living is not None:
            return self._saving.saved_of(living, tensor)
        known = self._known.get(storage._cdata)
        if known is None or not known.is_of(storage, tensor._version) or known.shape != _shape_of(tensor):
            return _NONE  # a view of what the recipe makes would be another input
        return known.recipe

    # -- recipes -----------------------------------------------------------------------------------

    def _give(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        """Let a tensor be made by a recipe from now on, wherever it is saved."""
        storage: Any = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known.storage() is storage:
            reference = known.storage
        else:
            reference = weakref.ref(storage, lambda gone: self._forget(key, gone))
        self._known[key] = _Known(reference, tensor._version, _shape_of(tensor), recipe)
        saved = self._saving.known.get(key)
        if saved is not None and not saved.is_changed():
            self._settle(saved, tensor, recipe)

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        if key in self._known and self._known[key].storage is gone:
            del self._known[key]

    def _note_saved(self, saved: Saved, tensor: torch.Tensor) -> None:
        """Give a tensor that is being saved its recipe."""
        calls = getattr(self._calls, "saved", None)
        if calls is not None:
            calls.append(saved)
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if saved.storage.recipe is None and known is not None and known.is_of(storage, tensor._version):
            self._settle(saved.storage, tensor, known.recipe)

    def _settle(self, storage: Storage, tensor: torch.Tensor, recipe: Recipe) -> None:
        """Let what is saved, or a view of it, be made by a recipe whose kind has been tried."""
        kind = recipe.kind()
        if kind not in self._cost_ns:
            self._cost_ns[kind] = self._try(tensor, recipe)
        cost_ns = self._cost_ns[kind]
        if cost_ns is not None:
            storage.recipe = recipe
            self._saving.swapper.can_be_made(storage, cost_ns, recipe.storages())

    def _try(self, tensor: torch.Tensor, recipe: Recipe) -> int | None:
        """Return what a recipe takes; ``None``, and one line, if the memory that it makes has other bytes."""
        took_ns = 0
        for _ in range(2):  # the first one pays for what is made once
            began_ns = time.perf_counter_ns()
            made = remade(recipe, lambda _storage, take: take())
            took_ns = time.perf_counter_ns() - began_ns
        if torch.equal(_bytes_of(made), _bytes_of(tensor)):
            return took_ns
        inform(f"{recipe.name} of {list(tensor.size())} is kept: made again, its bits would differ")
        return None


def remade(recipe: Recipe, bring: Bring) -> torch.Tensor:
    """Return what a recipe makes, as outside of any graph and of autocast."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return recipe.make(bring)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _replace(owner: Any, path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let a function be wrapped. Pickles name it by ``path``; TorchScript takes it for the original."""
    module, _, name = path.partition(":")
    attribute = name.rpartition(".")[2]
    original = getattr(owner, attribute)
    function = wrap(original)
    function.__module__, function.__qualname__ = module, name
    builtin = _builtins._find_builtin(original)
    if builtin is not None:
        _builtins._register_builtin(function, builtin)
    setattr(owner, attribute, function)


# -- the rules: what a function makes its result of ------------------------------------------------

_NONE = object()
"""Instead of a source: there is none."""


class _Made(NamedTuple):
    """Tensors, and what makes the result of them."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[Any, ...]
    constants: tuple[Any, ...] = ()


def _relu(input: Any) -> _Made:
    return _Made(torch.ops.aten.relu, (input,))


def _relu_(input: Any) -> _Made:
    return _Made(torch.ops.aten.relu_, (input,))


def _gelu(input: Any, *, approximate: str = "none") -> _Made:
    again = functools.partial(torch.ops.aten.gelu, approximate=approximate)
    return _Made(again, (input,), (approximate,))


def _silu(input: Any) -> _Made:
    return _Made(torch.ops.aten.silu, (input,))


def _softmax(input: Any, dim: int, dtype: Any = None) -> _Made | None:
    if dtype is not None:
        return None
    return _Made(lambda x: torch.ops.aten._softmax(x, dim, False), (input,), (dim,))


def _add(input: Any, other: Any) -> _Made | None:
    return _Made(torch.ops.aten.add, (input, other)) if isinstance(other, torch.Tensor) else None


def _iadd(input: Any, other: Any) -> _Made | None:
    return _Made(torch.ops.aten.add_, (input, other)) if isinstance(other, torch.Tensor) else None


def _layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> _Made:
    shape = list(normalized_shape)
    return _Made(
        lambda x, w, b: torch.ops.aten.native_layer_norm(x, shape, w, b, eps)[0],
        (input, weight, bias),
        (tuple(shape), eps),
    )


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> _Made:
    """Leave statistics as they are: those of the batch are computed anew, kept ones are copied as they were."""
    mean, var = (None, None) if training else (running_mean, running_var)

    def again(x: Any, w: Any, b: Any, mean: Any, var: Any) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.native_batch_norm(x, w, b, mean, var, training, 0.0, eps)[0]
        return made

    return _Made(again, (input, weight, bias, mean, var), (training, eps))


def _masking(state: torch.Tensor, p: float, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Return what draws dropout's mask as PyTorch did in that state."""

    def mask() -> torch.Tensor:
        generator = torch.Generator()
        generator.set_state(state)
        return torch.empty(shape, dtype=dtype).bernoulli_(1 - p, generator=generator).div_(1 - p)

    return mask
