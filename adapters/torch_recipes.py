"""How a tensor that autograd saves is made again: of which others, by which function, in which settings.

A *rule* says what a function of PyTorch makes its result of; ``zico.adapters.torch_rebuilding``
asks it around each call.
"""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
# ruff: noqa: A002, ANN401, ARG001, FBT001, FBT002, FBT003, PLR0913, PLR0917 - signatures are PyTorch's
from __future__ import annotations

import ctypes
import functools
import math
import re
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch._C import TensorBase
from zico.adapters.torch_saving import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.adapters.torch_saving import Saved, Storage

    Bring = Callable[[Storage, Callable[[], torch.Tensor]], torch.Tensor]

_CHANCE = math.log(1e-12)
"""Logarithm of the chance that two masks drawn from different states begin alike."""
_SMALLEST, _ONE = 5e-324, 1.0


class Source:
    """An input that autograd has saved. Keeps nothing alive."""

    __slots__ = ("_saved", "digest", "dtype", "offset", "size", "stride")

    def __init__(self, storage: Storage, tensor: torch.Tensor, digest: Any) -> None:
        """Stand for a tensor as it is now, of memory that is saved; ``None``: its digest has not been taken."""
        self.digest = digest
        self._saved = tuple(weakref.ref(each) for each in storage.unchanged() if each.dtype is tensor.dtype)
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()

    def saved(self) -> Saved | None:
        """Return what has been saved of the same memory; ``None``: nothing lives that is unchanged since."""
        living = (reference() for reference in self._saved)
        return next((each for each in living if each is not None and not each.is_changed()), None)

    def of(self, saved: Saved) -> torch.Tensor:
        """Return the input; its memory is here."""
        return saved.take().as_strided(self.size, self.stride, self.offset)


def can_be_remade(kind: str) -> bool:
    """Tell whether a device's results of this moment can be made again later: in a process that computes as most do."""
    if kind != "cpu":
        return bool(torch._C._get_cudnn_enabled())
    return bool(torch._C._get_mkldnn_enabled()) and _SMALLEST * _ONE > 0.0


class AsBefore:
    """Lets this thread compute with so many threads, with oneDNN and with denormal numbers, for a while.

    oneDNN is on or off for the whole process, so one thread at a time has it on where it was off.
    """

    _lock = threading.RLock()

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        """Begin; waits for another thread that has oneDNN on for a while."""
        self._before = torch.get_num_threads(), torch._C._get_mkldnn_enabled(), _SMALLEST * _ONE > 0.0
        threads, has_onednn, has_denormals = self._before
        if threads != self._threads:
            set_own_threads(self._threads)
        if not has_onednn:
            self._lock.acquire()
            torch._C._set_mkldnn_enabled(True)
        if not has_denormals:
            torch.set_flush_denormal(False)

    def __exit__(self, *_: object) -> None:
        threads, has_onednn, has_denormals = self._before
        if threads != self._threads:
            set_own_threads(threads)
        if not has_onednn:
            torch._C._set_mkldnn_enabled(False)
            self._lock.release()
        if not has_denormals:
            torch.set_flush_denormal(True)


class WithCudnn:
    """Lets this process compute with cuDNN for a while, which batch norms on a GPU choose their kernels by.

    One thread at a time has it on where it was off.
    """

    _lock = threading.RLock()

    def __enter__(self) -> None:
        """Begin; waits for another thread that has it on for a while."""
        self._is_off = not torch._C._get_cudnn_enabled()
        if self._is_off:
            self._lock.acquire()
            torch._C._set_cudnn_enabled(True)

    def __exit__(self, *_: object) -> None:
        if self._is_off:
            torch._C._set_cudnn_enabled(False)
            self._lock.release()


@functools.cache
def _openmp() -> Any:
    """Return the OpenMP library that PyTorch computes with; ``None``: it is not found."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if re.search(r"/lib(gomp|omp|iomp5)[^/]*\.so", line)}
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None


def set_own_threads(threads: int) -> None:
    """Let this thread, and no other, compute with so many; ``torch.set_num_threads`` is for those to come, too."""
    openmp = _openmp()
    if openmp is None:
        torch.set_num_threads(threads)
    else:
        openmp.omp_set_num_threads(threads)


class Recipe:
    """How a tensor is made."""

    __slots__ = ("digest", "doubts", "function", "kind", "name", "numbers", "sources", "steps", "threads")

    steps: int
    """Functions that it calls."""
    doubts: list[tuple[Any, Any]]
    """Digests of what was made on the way, when it was made and when it was used: they must be equal."""
    numbers: frozenset[int]
    """Its own, and those of the recipes that it is made by."""

    def __init__(
        self,
        name: str,
        function: Callable[..., torch.Tensor],
        sources: Sequence[Any],
        kind: int,
        threads: int,
        digest: Any = None,
        number: int = 0,
    ) -> None:
        """Make it by a function of tensors.

        Args:
            name: Of the function, in messages.
            function: Makes it of ``sources``; writes to none of them but to those that are recipes.
            sources: A ``Source``, a recipe, a small tensor, or ``None``, each.
            kind: What recipes have in common that make tensors in the same way.
            threads: With so many it was made.
            digest: Of the memory that it makes; ``None``: it has not been taken.
            number: Among the recipes of its iteration, in the order in which they are made.
        """
        self.name, self.function, self.sources, self.kind, self.threads = name, function, sources, kind, threads
        self.digest = digest
        recipes = [each for each in sources if isinstance(each, Recipe)]
        self.steps = 1 + sum(each.steps for each in recipes)
        self.doubts = [pair for each in recipes for pair in each.doubts]
        self.numbers: frozenset[int] = frozenset((number,)).union(*(each.numbers for each in recipes))

    def used(self, digest: Any) -> Recipe:
        """Return the recipe of what it has made, which had this digest when it was used; ``None``: none was taken."""
        if digest is None and self.digest is None:
            return self
        again = Recipe(self.name, self.function, self.sources, self.kind, self.threads, self.digest)
        again.doubts.append((digest, self.digest))
        again.numbers = self.numbers
        return again

    def inputs(self) -> list[Source]:
        """Return what it is made of in the end, in the order of use."""
        found: list[Source] = []
        for source in self.sources:
            if isinstance(source, Recipe):
                found += source.inputs()
            elif isinstance(source, Source):
                found.append(source)
        return found

    def saved(self) -> list[Saved] | None:
        """Return what of its inputs has to be kept; ``None``: some of it is lost."""
        found = [saved for source in self.inputs() if (saved := source.saved()) is not None]
        return found if len(found) == len(self.inputs()) else None

    def make(self, saved: Iterator[Saved], bring: Bring) -> torch.Tensor:
        """Return the tensor, made anew of what ``saved`` returned; waits until that is here."""
        arguments = []
        for source in self.sources:
            if isinstance(source, Recipe):
                arguments.append(source.make(saved, bring))
            elif isinstance(source, Source):
                each = next(saved)
                arguments.append(bring(each.storage, functools.partial(source.of, each)))
                each.storage.note_use()
            else:
                arguments.append(source)
        return self.function(*arguments)


def remade(recipe: Recipe, saved: Sequence[Saved], bring: Bring, kind: str) -> torch.Tensor:
    """Return what a recipe makes on a kind of device, outside of any graph and mode, computed as the first time."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.no_grad(),
        torch.autocast(kind, enabled=False),
        AsBefore(recipe.threads) if kind == "cpu" else WithCudnn(),
    ):
        return recipe.make(iter(saved), bring)


def shape_of(source: Any) -> tuple[Any, ...]:
    """Return what must agree of two tensors, or a ``Source`` or ``Saved``, to be an input of the same kind."""
    if isinstance(source, torch.Tensor):
        return tuple(source.size()), source.stride(), source.dtype
    return tuple(source.size), source.stride, source.dtype


# -- the rules: what a function makes its result of ------------------------------------------------


class Made(NamedTuple):
    """Tensors, and what makes the result of them."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[Any, ...]
    constants: tuple[Any, ...] = ()


def _relu(input: Any) -> Made:
    return Made(torch.ops.aten.relu, (input,))


def _relu_(input: Any) -> Made:
    return Made(torch.ops.aten.relu_, (input,))


def _gelu(input: Any, *, approximate: str = "none") -> Made:
    again = functools.partial(torch.ops.aten.gelu, approximate=approximate)
    return Made(again, (input,), (approximate,))


def _silu(input: Any) -> Made:
    return Made(torch.ops.aten.silu, (input,))


def _softmax(input: Any, dim: int, dtype: Any = None) -> Made | None:
    if dtype is not None:
        return None
    return Made(lambda x: torch.ops.aten._softmax(x, dim, False), (input,), (dim,))


def _add(input: Any, other: Any) -> Made | None:
    return Made(torch.ops.aten.add, (input, other)) if isinstance(other, torch.Tensor) else None


def _iadd(input: Any, other: Any) -> Made | None:
    return Made(torch.ops.aten.add_, (input, other)) if isinstance(other, torch.Tensor) else None


def _layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Made:
    shape = list(normalized_shape)
    return Made(
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
) -> Made:
    """Leave statistics as they are: those of the batch are computed anew, kept ones are copied as they were."""
    mean, var = (None, None) if training else (running_mean, running_var)

    def again(x: Any, w: Any, b: Any, mean: Any, var: Any) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten._batch_norm_impl_index(
            x, w, b, mean, var, training, 0.0, eps, cudnn_enabled
        )[0]
        return made

    return Made(again, (input, weight, bias, mean, var), (training, eps, cudnn_enabled))


class Rule(NamedTuple):
    """What is known of a function of PyTorch."""

    paths: tuple[str, ...]
    """Where it is found, ``module:qualified.name``."""
    made: Callable[..., Made | None]
    """Arguments -> what is made of them; ``None`` or a ``TypeError``: results of such a call have no recipes."""
    compiled: Callable[..., Any]
    """The same, as compilers know it."""
    writes: bool = False
    """Over its first input."""
    is_cast: bool = False
    """Autocast may have it compute in another type."""


_NUMBERS = (torch.Tensor, bool, int, float, complex, np.generic)


def _added(x: Any, other: Any) -> Any:
    return x.add(other) if isinstance(other, _NUMBERS) else NotImplemented


def _added_to(x: Any, other: Any) -> Any:
    return x.add_(other) if isinstance(other, _NUMBERS) else NotImplemented


RULES = (
    Rule(("torch:relu", "torch:Tensor.relu"), _relu, torch.relu),
    Rule(("torch:relu_", "torch:Tensor.relu_"), _relu_, torch.relu_, writes=True),
    Rule(("torch:batch_norm",), _batch_norm, torch.batch_norm),
    Rule(("torch:layer_norm",), _layer_norm, torch.layer_norm, is_cast=True),
    Rule(("torch.nn.functional:gelu",), _gelu, torch.nn.functional.gelu),
    Rule(("torch._C._nn:silu",), _silu, torch._C._nn.silu),
    Rule(("torch:softmax", "torch:Tensor.softmax"), _softmax, torch.softmax, is_cast=True),
    Rule(("torch:Tensor.__add__",), _add, _added),
    Rule(("torch:Tensor.__iadd__",), _iadd, _added_to, writes=True),
)


class Masking:
    """Draws dropout's mask as PyTorch did in some state of its generator."""

    def __init__(self, state: torch.Tensor, p: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Draw it from this state on."""
        self._state, self._p, self._shape, self._dtype = state, p, shape, dtype

    def __call__(self) -> torch.Tensor:
        """Return the mask."""
        return self._drawn(self._shape)

    def begins(self, mask: torch.Tensor) -> bool:
        """Tell whether a mask was drawn from this state: another thread may have drawn in between."""
        n = math.ceil(_CHANCE / math.log(max(self._p, 1 - self._p)))
        if n > mask.numel():
            return False
        seen = TensorBase.set_(torch.empty(0, dtype=self._dtype), storage_of(mask), 0, (n,), (1,))
        return torch.equal(self._drawn((n,)), seen)

    def _drawn(self, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator()
        generator.set_state(self._state)
        drawn = torch.empty(shape, dtype=self._dtype).bernoulli_(1 - self._p, generator=generator)
        return drawn.div_(1 - self._p)
