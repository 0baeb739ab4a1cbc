"""What autograd saves can be made again from what else it saves, by a fixed list of rules.

Theory of operation
    Each rule stands around one function of PyTorch. When that has returned, the rule knows which
    inputs the result was made of, and how. An input that is saved anyway, one that can be made
    again itself, and a copy of a small one are *sources*. A result of other inputs has no recipe.
    When a saved tensor with a recipe has been dropped, unpacking runs the function again, in the
    thread that unpacks. No code of the user runs again.

    Random numbers come from a generator of our own, set to the state that the user's had.

Guarantees
    6. Backward passes see the same bits.
    A recipe is followed only if one like it has given the same bits as the tensor, in this process.
    Alike are recipes of the same function, shapes, constants and settings.
    A tensor is dropped only while nobody can reach it or its sources. Digests of their memory say
    that they are what they were when the function ran, whoever may have written to them. So nobody
    can change them until it has been made again.
    A recipe keeps nothing alive until its tensor is dropped.

Known limitations
    ``torch.relu`` and its like are no builtins any more: they equal PyTorch's, but are not the same.
    Only functions called from Python are seen, in threads that save by our hooks. Under modes for
    dispatch or functions, and in compiled graphs, there are no recipes. Under autocast there are none
    for functions that it may cast, such as softmax, nor on a GPU for dropout.
"""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
# ruff: noqa: A002, ANN401, FBT001 - signatures are PyTorch's
from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import TensorBase
from torch.jit import _builtins
from zico.adapters.torch_recipes import RULES, Made, Masking, Recipe, Source, can_be_remade, remade, shape_of
from zico.adapters.torch_saving import PLAIN, is_dense, is_traced, is_transformed, storage_of

from zico.base.saying import inform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zico.adapters.torch_recipes import Rule
    from zico.adapters.torch_saving import Saved, Saving, Storage

SMALL = 64
"""An input so many times smaller than the result is copied: layers' weights, which optimizers change."""
ALIGNED = 16
"""What addresses of copied inputs are multiples of, as those of copies are: elsewhere a GPU adds in another order.

Source: PyTorch, aten/src/ATen/native/cuda/layer_norm_kernel.cu, ``LayerNormKernelImplInternal``."""
MOST_STEPS = 16
"""Functions that one recipe calls, those of the recipes among its sources included."""
MOST_KINDS = 4096
"""Kinds of recipes that a process tries. A trial takes twice as long as its function."""
MOST_TRIES = 3
"""Trials of a kind that may fail, for lack of memory or another reason."""
_WIDEST = 16
"""Bytes of the largest number."""
_NONE = object()
"""A recipe that lacks a source has this in its place."""


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as integers, the largest that it is whole ones of: a GPU compares each into a byte."""
    storage = storage_of(tensor)
    kind = torch.uint8 if storage.nbytes() % torch.int64.itemsize else torch.int64
    return TensorBase.set_(torch.empty(0, dtype=kind, device=tensor.device), storage)


class _Known(NamedTuple):
    """A tensor whose memory lives and that has a recipe."""

    storage: weakref.ref[Any]
    version: int
    shape: tuple[Any, ...]
    recipe: Recipe

    def is_of(self, storage: Any, version: int) -> bool:
        """Tell whether memory is still what the recipe makes."""
        return self.storage() is storage and self.version == version


# -- the rules around PyTorch's functions ----------------------------------------------------------


class Rebuilding:
    """The rules, for as long as the process lives."""

    def __init__(self, saving: Saving) -> None:
        """Give recipes to what these hooks save, once installed."""
        self._saving = saving
        self._is_installed = False
        self._known: dict[int, _Known] = {}
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._cost_ns: dict[int, int | None] = {}
        """Kind of recipe -> what it costs; ``None``: its bits differ, or it cannot be followed."""
        self._failures: collections.Counter[int] = collections.Counter()
        """Trials of each kind that have failed."""
        self._failed_in: dict[int, int] = {}
        """The iteration in which the last one failed."""
        self._calls = threading.local()
        self._turns, self._made = -1, 0
        self._numbers: dict[int, frozenset[int]] = {}
        """Of this iteration's recipes, by the number of the tensor that has them."""
        self._wanted: frozenset[int] | None = None
        """Numbers of recipes that may be followed in this iteration; ``None``: that is not known."""

    def install(self) -> None:
        """Put the rules around PyTorch's functions, once, under names by which pickles find them without Zico, too."""
        if self._is_installed:
            return
        self._is_installed = True
        self._saving.on_saved = self._note_saved
        for rule in RULES:
            for path in rule.paths:
                replace(path, functools.partial(self._ruled, rule))
        replace("torch._VF:dropout", self._dropping)

    # -- around functions --------------------------------------------------------------------------

    def _is_watching(self) -> bool:
        """Tell whether what runs now is saved by our hooks, and not transformed."""
        return (
            torch.is_grad_enabled()
            and self._saving.is_in_force()
            and not is_transformed()
            and can_be_remade(self._saving.kind)
            and not self._saving.is_capturing()
        )

    def _ruled(self, rule: Rule, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of PyTorch that gives its results recipes."""
        name = original.__name__.strip("_")

        def function(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return rule.compiled(*args, **kwargs)
            if is_traced() or not (args and self._may_be_worth_it(args[0]) and self._is_watching()):
                return original(*args, **kwargs)
            if rule.is_cast and self._is_autocast():
                return original(*args, **kwargs)
            made, sources = self._ask(rule.made, args, kwargs), None
            if made is not None and rule.writes:
                sources = self._sources_of_written(made)
            result = original(*args, **kwargs)
            if made is not None and self._is_worth_it(result):
                if not rule.writes:
                    sources = [self._source(each, result.nbytes) for each in made.inputs]
                if sources is not None:
                    self._give(result, name, made.function, sources, made.constants)
            return result

        return function

    def _sources_of_written(self, made: Made) -> list[Any] | None:
        """Return what a function is given that writes its result over its first input; ``None``: there is no recipe."""
        over = made.inputs[0]
        first = self._source(over, 0)
        if not isinstance(first, Recipe):  # what was there is gone
            return None
        return [first, *(self._source(each, over.nbytes) for each in made.inputs[1:])]

    def _dropping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return dropout with recipes, for its mask, too, which autograd saves."""

        def dropout(input: Any, p: float, train: bool) -> Any:
            if (
                torch.compiler.is_compiling()
                or is_traced()
                or not (train and 0 < p < 1 and self._saving.kind == "cpu")  # a GPU's generator is another one
                or not (self._is_watching() and self._is_worth_it(input) and not self._is_autocast())
            ):
                return original(input, p, train)
            state = torch.default_generator.get_state()
            self._calls.saved = []
            try:
                result = original(input, p, train)
            finally:
                saved: list[Saved] = self._calls.saved
                self._calls.saved = None
            for mask in saved:
                if mask.storage.size_bytes != input.nbytes or mask.alias is None:
                    continue
                masking = Masking(state, p, tuple(mask.size), mask.dtype)
                if masking.begins(mask.alias):
                    self._give(mask.alias, "dropout's mask", masking, (), (p, *shape_of(mask)))
                    if self._is_worth_it(result):
                        sources = self._source(input, result.nbytes), self._source_of(mask.storage, mask.alias)
                        self._give(result, "dropout", torch.ops.aten.mul, sources, (p,))
            return result

        return dropout

    @staticmethod
    def _ask(rule: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | None:
        try:
            made: Made | None = rule(*args, **kwargs)
        except TypeError:  # called in a way that the rule does not know
            return None
        return made

    def _may_be_worth_it(self, tensor: Any) -> bool:
        """Tell whether a result of this tensor can be a saved tensor of ours."""
        return type(tensor) in PLAIN and tensor.numel() * _WIDEST >= self._saving.least_bytes and self._is_ours(tensor)

    def _is_worth_it(self, tensor: Any) -> bool:
        """Tell whether it can be a saved tensor of ours: plain, whole, of the pool, and large."""
        if not self._is_ours(tensor) or tensor.nbytes < self._saving.least_bytes:
            return False
        storage = storage_of(tensor)
        return storage.nbytes() == tensor.nbytes and self._saving.owns(storage)

    def _is_ours(self, tensor: Any) -> bool:
        """Tell whether it is nothing but memory of the pool's device, to ``torch.func``, too."""
        is_plain = type(tensor) in PLAIN and self._saving.is_ours(tensor) and is_dense(tensor)
        return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)

    def _is_autocast(self) -> bool:
        return torch.is_autocast_enabled(self._saving.kind)

    def _source(self, tensor: Any, result_bytes: int) -> Any:
        """Return how an input can be had again; ``_NONE``: it cannot."""
        if tensor is None:
            return None
        if not self._is_ours(tensor):
            return _NONE
        if tensor.nbytes * SMALL <= result_bytes:
            if tensor.data_ptr() % ALIGNED:
                return _NONE
            with torch.no_grad():
                return tensor.detach().clone()
        storage = storage_of(tensor)
        living = self._saving.known.get(storage._cdata)
        if living is not None:
            return self._source_of(living, tensor)
        known = self._known.get(storage._cdata)
        is_it = (
            known is not None
            and known.is_of(storage, tensor._version)
            and known.shape == shape_of(tensor)  # a view of what the recipe makes would be another input
            and known.recipe.threads == torch.get_num_threads()
        )
        return known.recipe.used(self._digest(storage)) if known is not None and is_it else _NONE

    def _source_of(self, storage: Storage, tensor: torch.Tensor) -> Any:
        source = Source(storage, tensor, self._digest(storage_of(tensor)))
        storage.is_source |= source.digest is not None
        return source if source.saved() is not None else _NONE

    def _digest(self, storage: Any) -> Any:
        """Return memory's digest, where the recipe that is being made may be followed in this iteration."""
        number = self._number()
        is_wanted = self._wanted is None or number in self._wanted
        return self._saving.digest(storage) if is_wanted and self._saving.swapper.drops else None

    def _number(self) -> int:
        """Return the number of the next recipe of this iteration; as it begins, learn from the last one what is wanted.

        Recipes that no dropped tensor had need no digests. Where iterations differ, some are
        missing, and what they are about is kept.
        """
        swapper = self._saving.swapper
        if self._turns != swapper.turns:
            self._turns, self._made = swapper.turns, 0
            before, self._numbers = self._numbers, {}
            known = [before[number] for number in swapper.drops if number in before]
            is_known = len(known) == len(swapper.drops)
            self._wanted = frozenset(itertools.chain.from_iterable(known)) if is_known else None
        return self._made

    # -- who has recipes ---------------------------------------------------------------------------

    def _give(
        self,
        tensor: torch.Tensor,
        name: str,
        function: Callable[..., torch.Tensor],
        sources: Sequence[Any],
        constants: tuple[Any, ...],
    ) -> None:
        """Let a tensor be made by a recipe from now on, wherever it is saved."""
        storage = storage_of(tensor)
        key = storage._cdata
        if any(source is _NONE for source in sources):
            return
        threads = torch.get_num_threads()
        parts = [
            source.kind if isinstance(source, Recipe) else None if source is None else shape_of(source)
            for source in sources
        ]
        kind = self._kind(name, constants, threads, tensor.dtype, *parts)
        recipe = Recipe(name, function, sources, kind, threads, self._digest(storage), self._number())
        self._made += 1
        if kind < 0 or recipe.steps > MOST_STEPS:
            return
        known = self._known.get(key)
        if known is not None and known.storage() is storage:
            reference = known.storage
        else:
            reference = weakref.ref(storage, functools.partial(self._forget, key))
        self._known[key] = _Known(reference, tensor._version, shape_of(tensor), recipe)
        saved = self._saving.known.get(key)
        if saved is not None and not saved.is_changed():
            self._settle(saved, tensor, recipe)

    def _kind(self, *parts: Any) -> int:
        """Return the number of a kind; -1: there are too many."""
        kind = self._kinds.get(parts, -1)
        if kind < 0 and len(self._kinds) < MOST_KINDS:
            kind = self._kinds[parts] = len(self._kinds)
        return kind

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        """Forget memory that is dead."""
        known = self._known.get(key)
        if known is not None and known.storage is gone:
            self._known.pop(key, None)

    def _note_saved(self, saved: Saved, tensor: torch.Tensor) -> None:
        """Give a tensor that is being saved its recipe."""
        calls = getattr(self._calls, "saved", None)
        if calls is not None:
            calls.append(saved)
        if is_transformed():
            return
        storage = storage_of(tensor)
        known = self._known.get(storage._cdata)
        has = saved.storage.recipe is not None and saved.storage.recipe_version == tensor._version
        if not has and known is not None and known.is_of(storage, tensor._version):
            self._settle(saved.storage, tensor, known.recipe)

    def _settle(self, storage: Storage, tensor: torch.Tensor, recipe: Recipe) -> None:
        """Let what is saved, or a view of it, be made by a recipe whose kind has been tried."""
        saved = recipe.saved()
        if saved is None or self._saving.is_capturing():  # nothing is computed there now, a trial neither
            return
        if recipe.kind not in self._cost_ns and self._failed_in.get(recipe.kind) != self._saving.swapper.turns:
            self._try(tensor, recipe, saved)
        cost_ns = self._cost_ns.get(recipe.kind)
        if cost_ns is not None:
            storage.recipe, storage.recipe_version = recipe, tensor._version
            self._numbers[storage.ordinal] = recipe.numbers
            self._saving.swapper.can_be_made(storage, cost_ns, [each.storage for each in saved])

    def _try(self, tensor: torch.Tensor, recipe: Recipe, saved: list[Saved]) -> None:
        """Note what a recipe takes; ``None``, and one line, if the memory that it makes has other bytes, or never is.

        It may fail for lack of memory, so a tensor of its kind is tried in the next iteration then.
        """
        what = f"{recipe.name} of {list(tensor.size())} is kept"
        took_ns = 0
        try:
            for _ in range(2):  # the first one pays for what is made once
                with self._saving.timed() as took:
                    made = remade(recipe, saved, self._saving.swapper.bring, self._saving.kind)
                took_ns = took()
            is_equal = torch.equal(_bits_of(made), _bits_of(tensor))  # which takes memory on a GPU
        except Exception as error:  # noqa: BLE001 - whatever it is, the user's own call has worked
            self._failures[recipe.kind] += 1
            self._failed_in[recipe.kind] = self._saving.swapper.turns
            if self._failures[recipe.kind] == MOST_TRIES:
                self._cost_ns[recipe.kind] = None
                inform(f"{what}: to make it again fails: {error}")
            return
        self._cost_ns[recipe.kind] = took_ns if is_equal else None
        if not is_equal:
            inform(f"{what}: made again, its bits would differ")


class _Function:
    """A function of PyTorch with something around it; equal to the one that it stands for, as a key, too.

    As PyTorch's own, it does not become a method where a class has it as an attribute.
    """

    def __init__(self, original: Callable[..., Any], path: str, call: Callable[..., Any]) -> None:
        """Stand for a function.

        Args:
            original: The function.
            path: By which it is found, ``module:qualified.name``.
            call: What is called instead.
        """
        self.__doc__ = original.__doc__
        self.__module__, _, self.__qualname__ = path.partition(":")
        self.__name__ = self.__qualname__.rpartition(".")[2]
        self._original, self._call = original, call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """Tell whether it is this one, or PyTorch's."""
        return other is self or other is self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return repr(self._original)

    def __reduce__(self) -> str:
        return self.__qualname__


def replace(path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let a function be wrapped. Pickles name it by its path; TorchScript takes it for the original."""
    module, _, name = path.partition(":")
    *within, attribute = name.split(".")
    owner = functools.reduce(getattr, [*module.split(".")[1:], *within], torch)
    original = getattr(owner, attribute)
    function: Any = wrap(original)
    if isinstance(owner, type):
        function = functools.wraps(original)(function)  # compilers know no methods but functions
        function.__module__, function.__qualname__ = module, name
    else:
        function = _Function(original, path, function)
    builtin = _builtins._find_builtin(original)
    if builtin is not None:
        _builtins._register_builtin(function, builtin)
    setattr(owner, attribute, function)
