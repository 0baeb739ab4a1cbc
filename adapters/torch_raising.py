"""Raise PyTorch's own errors from compiled code, where PyTorch checks no result.

A pluggable CUDA allocator that returns null makes a tensor at address 0: PyTorch does not look
(``CUDAPluggableAllocator::allocate``), and the next kernel faults. So the failure is thrown as
PyTorch's own C++ exception. The unwinder passes through Numba's machine code, which has unwind tables.

``c10::OutOfMemoryError`` derives from ``c10::Error`` and adds no member. So both are made as a
compiler makes them: ``c10::Error``'s constructor runs, then the first word becomes the address of the
class's virtual functions. The builds of PyTorch 2.11 and 2.12 export no constructor of the former.

Guarantees
    Nothing is allocated but the exception and its strings, about 900 bytes, which are not freed.
    No Python runs, so the GIL may be held or not.
    Where PyTorch's libraries lack a symbol, ``prepare`` and ``prepare_refusal`` say so and nothing
    has been changed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Annotated, Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from zico.compiled import callback, inlined, record_at, symbol_address
from zico.errors import HookError
from zico.records import I8, Numbers, Record, dtype_of

_CONSTRUCTOR = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
"""The one that constructors of derived classes call."""
_TYPE_INFO, _TABLE = "_ZTIN3c10{}E", "_ZTVN3c10{}E"
FUNCTIONS_OFFSET = 16  # in a table of virtual functions, behind offset to top and type (Itanium C++ ABI, 2.5.2)
_OUT_OF_MEMORY_ERROR, _ERROR = "16OutOfMemoryError", "5Error"
"""Classes of the namespace ``c10``, as the symbols above name them."""
_EXCEPTION_BYTES = 1024  # more than any version's c10::Error, whose size no symbol tells

SYMBOL = "zico_torch_raiser"
_FIELD = "         0"  # a number in MiB, right-aligned
_TEXT = (
    f"CUDA out of memory. zico: needs {_FIELD} MiB more while holding {_FIELD} MiB, and the whole budget is {_FIELD} "
    "MiB: raise --budget or use a smaller batch"
)
_LAST_DIGITS = tuple(i for i, character in enumerate(_TEXT) if character == "0")
_MIB_SHIFT = 20
_ROUND_UP = (1 << _MIB_SHIFT) - 1


class Raiser(Record):
    """What it takes to throw one exception."""

    constructor: I8
    allocate: I8  # __cxa_allocate_exception
    throw: I8  # __cxa_throw
    type_info: I8
    functions_address: I8  # the exception's first word
    location: Annotated[Numbers, "i8", (3,)]  # c10::SourceLocation: function, file, line
    text: Annotated[Numbers, "i8", (4,)]  # std::string of the C++11 ABI: address, length, capacity
    text_bytes_address: I8
    text_address: I8
    location_address: I8
    text_length: I8
    text_bytes: Annotated[Numbers, "u1", (256,)]
    function: Annotated[Numbers, "u1", (16,)]
    file: Annotated[Numbers, "u1", (16,)]


RAISER = dtype_of(Raiser)

_I64 = ir.IntType(64)


@intrinsic
def _throw(_typing: Any, raiser: Any, text_address: Any, location_address: Any) -> Any:  # noqa: ANN401 - Numba's protocol
    """Construct the exception and throw it. ``raiser`` is its first five fields."""

    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:  # noqa: ANN401 - LLVM builders
        fields = (builder.extract_value(values[0], i) for i in range(5))
        constructor, allocate, throw, type_info, functions_address = fields
        location = ir.LiteralStructType(
            [_I64] * 3
        ).as_pointer()  # larger than two registers: on the stack (psABI 3.2.3)

        def function(address: Any, result: Any, *arguments: Any) -> Any:  # noqa: ANN401 - LLVM types
            return builder.inttoptr(address, ir.FunctionType(result, arguments).as_pointer())

        size = ir.Constant(_I64, _EXCEPTION_BYTES)
        exception = builder.call(function(allocate, _I64, _I64), [size])
        builder.call(
            function(constructor, ir.VoidType(), _I64, location, _I64),
            [exception, builder.inttoptr(values[2], location), values[1]],
            arg_attrs={1: ["byval"]},
        )
        builder.store(functions_address, builder.inttoptr(exception, _I64.as_pointer()))
        no_destructor = ir.Constant(_I64, 0)
        builder.call(function(throw, ir.VoidType(), _I64, _I64, _I64), [exception, type_info, no_destructor])
        return ir.Constant(_I64, 0)

    del raiser, text_address, location_address
    return types.int64(types.UniTuple(types.int64, 5), types.int64, types.int64), codegen


RAISERS = np.zeros(2, RAISER)
"""What raises that memory is out, and what raises a refusal."""
_REFUSAL_OFFSET = RAISER.itemsize
llvmlite.binding.add_symbol(SYMBOL, RAISERS.ctypes.data)  # before what refers to it is compiled
_raiser_address = symbol_address(SYMBOL)


@inlined
def _write(text: Any, last: int, size_bytes: int) -> None:  # noqa: ANN401 - an array of bytes
    """Write a size in MiB, rounded up, so that its last digit stands at ``last``."""
    mib = (size_bytes + _ROUND_UP) >> _MIB_SHIFT
    i = last
    while i == last or (mib > 0 and i > last - len(_FIELD)):
        text[i] = 48 + mib % 10
        mib //= 10
        i -= 1
    while i > last - len(_FIELD):
        text[i] = 32
        i -= 1


@inlined
def _raise(raiser: Raiser) -> None:
    """Throw what a record describes."""
    # The constructor moves from its argument, which it is handed by reference, and keeps these bytes. The exception is
    # thrown without a destructor, which would free them.
    raiser.text[0] = raiser.text_bytes_address
    raiser.text[1] = raiser.text_length
    raiser.text[2] = raiser.text_length
    first = (raiser.constructor, raiser.allocate, raiser.throw, raiser.type_info, raiser.functions_address)
    _throw(first, raiser.text_address, raiser.location_address)


@callback(types.void(types.int64, types.int64, types.int64))
def raise_out_of_memory(requested_bytes: int, held_bytes: int, budget_bytes: int) -> None:
    """Throw ``c10::OutOfMemoryError`` through the caller; the message has the three figures. Never returns.

    Threads that fail at once may mix up each other's figures.
    """
    raiser = record_at(_raiser_address(), RAISER)
    _write(raiser.text_bytes, _LAST_DIGITS[0], requested_bytes)
    _write(raiser.text_bytes, _LAST_DIGITS[1], held_bytes)
    _write(raiser.text_bytes, _LAST_DIGITS[2], budget_bytes)
    _raise(raiser)


@callback(types.void())
def raise_refusal() -> None:
    """Throw ``c10::Error`` with the text given to ``prepare_refusal``. Never returns."""
    _raise(record_at(_raiser_address() + _REFUSAL_OFFSET, RAISER))


def prepare(torch: Any) -> int:  # noqa: ANN401 - the module
    """Find PyTorch's symbols; returns the address of ``raise_out_of_memory``.

    Raises:
        HookError: This build of PyTorch lacks one.
    """
    _fill(0, torch, _OUT_OF_MEMORY_ERROR, _TEXT)
    return int(raise_out_of_memory.address)


def prepare_refusal(torch: Any, text: str) -> int:  # noqa: ANN401 - the module
    """Find PyTorch's symbols; returns the address of ``raise_refusal``.

    In Python that is a ``RuntimeError`` with this text, of at most 256 characters.

    Raises:
        HookError: This build of PyTorch lacks one.
    """
    _fill(1, torch, _ERROR, text)
    return int(raise_refusal.address)


def _fill(number: int, torch: Any, name: str, text: str) -> None:  # noqa: ANN401 - the module
    """Fill one of the records: which class of exception to throw, with which text."""
    folder = Path(torch.__file__).parent / "lib"
    raiser = RAISERS[number]
    try:
        core = ctypes.CDLL(str(folder / "libc10.so"))
        # Each library may have a type_info of its own; what counts is the one of the library that catches.
        catching = ctypes.CDLL(str(folder / "libtorch_python.so"))
        runtime = ctypes.CDLL("libstdc++.so.6")
        raiser["constructor"] = address_in(core, _CONSTRUCTOR)
        raiser["type_info"] = address_in(catching, _TYPE_INFO.format(name))
        raiser["functions_address"] = address_in(catching, _TABLE.format(name)) + FUNCTIONS_OFFSET
        raiser["allocate"] = address_in(runtime, "__cxa_allocate_exception")
        raiser["throw"] = address_in(runtime, "__cxa_throw")
    except (OSError, ValueError) as error:
        message = f"PyTorch {torch.__version__} has no exception that Zico could raise: {error}"
        raise HookError(message) from error
    address = RAISERS.ctypes.data + number * RAISER.itemsize
    for field, written in (("text_bytes", text), ("function", "allocate"), ("file", "zico")):
        raiser[field][: len(written)] = np.frombuffer(written.encode(), np.uint8)
    raiser["text_length"] = len(text)
    raiser["text_bytes_address"] = address + RAISER.fields["text_bytes"][1]
    raiser["location"] = address + RAISER.fields["function"][1], address + RAISER.fields["file"][1], 0
    raiser["text_address"] = address + RAISER.fields["text"][1]
    raiser["location_address"] = address + RAISER.fields["location"][1]


def address_in(library: ctypes.CDLL, symbol: str) -> int:
    """Return the address of a library's symbol.

    Raises:
        ValueError: It has none of that name.
    """
    return ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
