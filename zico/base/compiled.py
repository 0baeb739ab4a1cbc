"""Compiled code without Python: how Zico uses Numba for what runs inside an allocator.

Guarantees:
    * Functions decorated here hold no GIL, raise nothing and allocate nothing.
    * Machine code is kept on disk under a key of all sources that it is made of.
      ``zico.base.programs`` compiles functions together, whole; on a version of Numba that it does
      not know, Numba compiles and keeps each by itself.

Known limitations:
    * Linux on x86-64 and aarch64 only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic

from zico.base.paths import code_directory
from zico.base.programs import Callback, Function, argument, fault
from zico.base.sources import closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.base.records import Layout, R, Records

F = TypeVar("F")


@functools.cache
def cache_directory(source: Path) -> Path:
    """Return where the machine code of a source file's functions is kept, as long as nothing it is made of changes."""
    digest = hashlib.sha256()
    for file in closure(source):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return code_directory() / f"{source.stem}-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def _project_cache(function: Callable[..., Any]) -> Iterator[None]:
    """Let a function that is decorated inside use Zico's cache, and nobody else's functions."""
    names = ("CACHE_DIR", "CACHE_LOCATOR_CLASSES")
    before = [getattr(config, name, "") for name in names]  # an older Numba lacks the second
    config.CACHE_DIR = str(cache_directory(Path(function.__code__.co_filename)))
    # Numba's other locators load from unchecked directories, under keys of a function's own file
    # alone.
    config.CACHE_LOCATOR_CLASSES = "UserProvidedCacheLocator"
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(config, name, value)


def compiled(function: F) -> F:
    """Compile ``function`` for compiled callers, and for Python at its first call: no GIL, no Python objects."""
    if fault():
        return _decorated(function, njit(nogil=True, cache=True, error_model="numpy"))
    return _built(function)


def inlined(function: F) -> F:
    """Compile as ``compiled`` does, and merge the body into its compiled callers."""
    if fault():
        return _decorated(function, njit(nogil=True, error_model="numpy", forceinline=True))
    return _built(function, in_line=True)


def entry(*kinds: Any) -> Callable[[F], F]:  # noqa: ANN401 - types of arguments
    """Compile as ``compiled`` does, and for Python together with the other entries of its program.

    Args:
        kinds: Of the arguments that Python gives. ``int``, ``float``, ``bool``, the ``dtype`` of a
            record, ``[dtype]`` for an array of one dimension, a named tuple of such, or a type of
            Numba.
    """

    def decorate(function: F) -> F:
        return compiled(function) if fault() else _built(function, (tuple(argument(kind) for kind in kinds),))

    return decorate


def _built(function: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - the decorated one, as Numba's
    return Function(function, *args, **options)


def interpreted(function: F) -> F:
    """Return a compiled function as Python runs it, for few calls: nothing is compiled for it."""
    return function.py_func  # type: ignore[attr-defined]


def callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:  # noqa: ANN401 - a Numba signature
    """Compile a function with a C address, together with the other entries of its program.

    ``.address`` loads the program, or compiles it.
    """

    def decorate(function: Callable[..., Any]) -> Any:  # noqa: ANN401 - a Callback
        if fault():
            return _decorated(function, cfunc(signature, nopython=True, cache=True, error_model="numpy"))
        return Callback(function, signature)

    return decorate


def _decorated(function: Any, decorator: Any) -> Any:  # noqa: ANN401 - Numba's decorators
    with _project_cache(function):
        return decorator(function)


# -- advice to the optimizer -----------------------------------------------------------------------


def _attribute(*names: str) -> Any:  # noqa: ANN401 - a Numba intrinsic
    """Make a compiled statement that gives the function it stands in some LLVM attributes."""

    @intrinsic
    def advise(_typing: Any) -> Any:  # noqa: ANN401 - Numba types
        def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:  # noqa: ANN401 - LLVM builders
            attributes = builder.function.attributes
            for name in names:
                if name != "noinline" or "alwaysinline" not in attributes:  # Numba inlines one-block functions
                    attributes.add(name)
            return context.get_dummy_value()

        return types.void(), codegen

    return advise


keep_small = _attribute("optsize")
"""Functions that run between a framework's own are small: unrolled and vectorised loops would only evict its code."""

keep_out_of_line = _attribute("cold", "noinline", "optsize")
"""What hardly ever runs does not stand in the way of what always does."""

keep_in_line = _attribute("alwaysinline")
"""What is shared has this: ``inlined`` would pass its advice on to all that it calls, and compile for minutes."""


# -- memory at an address --------------------------------------------------------------------------


@intrinsic
def _record_at(_typing: Any, address: Any, dtype: Any) -> Any:  # noqa: ANN401, ARG001 - Numba's protocol
    """View the record of a NumPy ``dtype`` that lies at an integer address, without a copy."""
    record = dtype.dtype

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401 - LLVM builders
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64, dtype), codegen


if TYPE_CHECKING:  # what a caller sees; the function itself is written to Numba's protocol

    def record_at(address: int, dtype: Layout[R]) -> R:
        """View the record of a dtype that lies at an integer address, without a copy."""

else:
    record_at = _record_at


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:  # noqa: ANN401, ARG001 - Numba's protocol
    """Turn an integer address into a ``void *``."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401 - LLVM builders
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@overload
def array_at(address: int, length: int, dtype: Layout[R]) -> Records[R]: ...
@overload
def array_at(address: int, length: int, dtype: Any) -> Any: ...  # noqa: ANN401 - an array of dtype
@inlined
def array_at(address: int, length: int, dtype: Any) -> Any:
    """View ``length`` elements of ``dtype`` at an integer address as an array, without a copy."""
    return carray(_pointer(address), length, dtype)


def symbol_address(name: str) -> Any:  # noqa: ANN401 - a Numba intrinsic
    """Make a compiled function that returns the address of the external symbol ``name``.

    A callback has no user data, and Numba would freeze an address into the cached machine code. A
    symbol registered by ``llvmlite.binding.add_symbol`` is resolved at load time, so the same
    cached code finds each process's own page.
    """

    @intrinsic
    def address(_typing: Any) -> Any:  # noqa: ANN401 - Numba types
        def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:  # noqa: ANN401 - LLVM builders
            module = builder.module
            known = name in module.globals
            symbol = module.globals[name] if known else ir.GlobalVariable(module, ir.IntType(8), name)
            return builder.ptrtoint(symbol, ir.IntType(64))

        return types.int64(), codegen

    return address


# -- numbers ---------------------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@inlined
def spread(value: Any, shift: int) -> int:  # noqa: ANN401 - an integer of either sign
    """Return the bits from ``shift`` on of a 64-bit product that depends on all bits of a value: a hash.

    Unsigned, since signed overflow is undefined in compiled code. Source: Fibonacci hashing, D.
    Knuth, TAOCP 3, 6.4.
    """
    return int(np.int64((np.uint64(value) * _GOLDEN) >> np.uint64(shift)))


# -- calls out -------------------------------------------------------------------------------------

_I64 = ir.IntType(64)


@intrinsic
def call(_typing: Any, address: Any, args: Any) -> Any:  # noqa: ANN401, ARG001 - Numba's protocol
    """Call the C function at an address with a tuple of integers or addresses; returns ``rax`` as an int64."""

    def codegen(_context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ANN401 - LLVM builders
        count = signature.args[1].count
        function_type = ir.FunctionType(_I64, [_I64] * count)
        function = builder.inttoptr(values[0], function_type.as_pointer())
        return builder.call(function, [builder.extract_value(values[1], i) for i in range(count)])

    return types.int64(types.int64, types.UniTuple(types.int64, args.count)), codegen


@intrinsic
def release_fence(_typing: Any) -> Any:  # noqa: ANN401 - Numba types
    """Let no write before this be seen after one behind it."""

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:  # noqa: ANN401 - LLVM builders
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def exchange(_typing: Any, address: Any, value: Any) -> Any:  # noqa: ANN401, ARG001 - Numba's protocol
    """Swap the 32-bit word at an address for a value in one step; returns the old one. A full barrier."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401 - LLVM builders
        word = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.atomic_rmw("xchg", word, args[1], "seq_cst")

    return types.int32(types.int64, types.int32), codegen


@intrinsic
def compare_exchange(_typing: Any, address: Any, expected: Any, value: Any) -> Any:  # noqa: ANN401, ARG001 - as above
    """Set the 32-bit word at an address to a value if it is as expected, in one step; returns what it was."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401 - LLVM builders
        word = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        pair = builder.cmpxchg(word, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int32(types.int64, types.int32, types.int32), codegen


@intrinsic
def add_at(_typing: Any, address: Any, amount: Any) -> Any:  # noqa: ANN401, ARG001 - Numba's protocol
    """Add to the 64-bit number at an address in one step; returns what it was."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401 - LLVM builders
        number = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", number, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen
