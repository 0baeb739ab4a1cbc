"""PyTorch on a CUDA device: the whole allocator is Zico's, so that every tensor's free is seen with its stream.

Questions about memory are answered by ``zico.adapters.torch_cuda_memory``. What CUDA graph trees ask
of PyTorch's caching allocator is answered by ``zico.adapters.torch_graphs``.

Rejected: ``torch.cuda.MemPool`` over an allocator of ours keeps PyTorch's statistics and its
out-of-memory error. But the caching allocator in front of it gives back segments only when it is
emptied. So nobody else could use what an iteration has finished with.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from zico.adapters import torch_graphs

from zico.base.compiled import call, callback, inlined, record_at, symbol_address
from zico.base.errors import HookError
from zico.base.records import I8, Numbers, Record, dtype_of
from zico.base.saying import inform
from zico.heap.cuda import hooks
from zico.job import lookup
from zico.job.autoload import complain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.job.session import Session

OTHER_DEVICE = (
    "zico: this tensor is for another GPU than the pool's, cuda:{ordinal}: put it there, or let the process see "
    "that GPU alone by CUDA_VISIBLE_DEVICES={uuid} (zico run does)"
)


def enable(joined: Session) -> None:
    """Take PyTorch's CUDA memory from the pool.

    Raises:
        HookError: PyTorch's allocator is in use already, or this build cannot be redirected.
    """
    import torch
    from zico.adapters import torch_cuda_memory, torch_pools

    if ignored := torch_cuda_memory.settle(os.environ):
        inform(ignored)

    facts = joined.pool.driver.facts  # type: ignore[attr-defined]  # a CUDA device's driver
    refusal = OTHER_DEVICE.format(ordinal=facts.ordinal, uuid=facts.uuid)
    others = hooks.OTHERS_RECORD[0]
    others["out_of_memory"] = prepare(torch)
    others["lost"] = prepare_lost(torch)
    others["device"] = facts.ordinal
    others["refuse"] = prepare_refusals(torch, (refusal, torch_graphs.SECOND_CAPTURE, torch_graphs.TOO_MANY))
    core, memory = torch._C, torch.cuda.memory  # noqa: SLF001 - the only door
    try:
        backend = memory.get_allocator_backend()
        if torch.cuda.is_initialized() or backend not in torch_cuda_memory.BACKENDS:
            message = (
                f"PyTorch's CUDA allocator ({backend}) is in use already, and PyTorch changes it only before the first "
                "tensor: let Zico come first"
            )
            raise HookError(message)
        allocator = core._cuda_customAllocator(hooks.allocate.address, hooks.free.address)  # noqa: SLF001
        allocator.set_record_stream_fn(hooks.record_stream.address)
        allocator.set_begin_allocate_to_pool(hooks.begin_allocate_to_pool.address)
        allocator.set_end_allocate_to_pool_fn(hooks.end_allocate_to_pool.address)
        allocator.set_release_pool(hooks.release_pool.address)
        # PyTorch's static destructors free tensors and graphs after the interpreter is gone.
        tensors = (hooks.allocate, hooks.free, hooks.record_stream)
        graphs = (hooks.begin_allocate_to_pool, hooks.end_allocate_to_pool, hooks.release_pool)
        lookup.keep(joined, RAISERS, *hooks.NEEDED_TO_THE_END, *tensors, *graphs)
        memory.change_current_allocator(memory._CUDAAllocator(allocator))  # noqa: SLF001 - as CUDAPluggableAllocator does
    except (AttributeError, TypeError, RuntimeError) as error:
        message = f"PyTorch {torch.__version__} does not take Zico's allocator: {error}"
        raise HookError(message) from error
    try:
        install(torch)
    except HookError as error:
        complain("cuDNN cannot time its algorithms in this job", error)
    torch_cuda_memory.Answers(joined, torch).install()
    torch_pools.serve(torch)
    torch_graphs.watch(joined.heap, torch)
    torch_graphs.serve(joined, torch)


# -- raise PyTorch's own errors from compiled code, where PyTorch checks no result -----------------
#
# A pluggable CUDA allocator that returns null makes a tensor at address 0: PyTorch does not look
# (``CUDAPluggableAllocator::allocate``), and the next kernel faults. So the failure is thrown as
# PyTorch's own C++ exception. The unwinder passes through Numba's machine code, which has unwind
# tables.
#
# ``c10::OutOfMemoryError`` derives from ``c10::Error`` and adds no member. So both are made as a
# compiler makes them: ``c10::Error``'s constructor runs, then the first word becomes the address of
# the class's virtual functions. The builds of PyTorch 2.11 and 2.12 export no constructor of the
# former.
#
# Guarantees
#     Nothing is allocated but the exception and its strings, about 900 bytes, which are not freed.
#     No Python runs, so the GIL may be held or not. Where PyTorch's libraries lack a symbol,
#     ``prepare`` and ``prepare_refusals`` say so and nothing has been changed.

_CHECK = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"
CHECKS = (_CHECK, f"{_CHECK}PNS0_19CUDAErrorLogCaptureE")
"""``c10_cuda_check_implementation(status, file, function, line, device_assertions)`` throws what PyTorch throws for a
status, since its own checks call it. Read in the build of PyTorch 2.11 for CUDA 13. Since 2.14 it has one argument
more, which may be null."""
CONSTRUCTOR = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
"""The one that constructors of derived classes call."""
TYPE_INFO, TABLE = "_ZTIN3c10{}E", "_ZTVN3c10{}E"
FUNCTIONS_OFFSET = 16  # in a table of virtual functions, behind offset to top and type (Itanium C++ ABI, 2.5.2)
OUT_OF_MEMORY_ERROR, ERROR = "16OutOfMemoryError", "5Error"
"""Classes of the namespace ``c10``, as the symbols above name them."""
_EXCEPTION_BYTES = 1024  # more than any version's c10::Error, whose size no symbol tells

SYMBOL = "zico_torch_raiser"
_FIELD = "         0"  # a number in MiB, right-aligned
_TEXT = (
    f"CUDA out of memory. zico: needs {_FIELD} MiB more while holding {_FIELD} MiB, and may hold {_FIELD} MiB: "
    "raise --budget, or --limit where it has one, or use a smaller batch"
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
    check: I8  # throws what PyTorch does for a status of CUDA's, 0: this build has no such function
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


RAISERS = np.zeros(1 + len(hooks.Refusal), RAISER)
"""What raises that memory is out, and what raises each refusal."""
_RAISER_BYTES = RAISER.itemsize
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
    # The constructor moves from its argument, which it is handed by reference, and keeps these
    # bytes. The exception is thrown without a destructor, which would free them.
    raiser.text[0] = raiser.text_bytes_address
    raiser.text[1] = raiser.text_length
    raiser.text[2] = raiser.text_length
    first = (raiser.constructor, raiser.allocate, raiser.throw, raiser.type_info, raiser.functions_address)
    _throw(first, raiser.text_address, raiser.location_address)


@callback(types.void(types.int64, types.int64, types.int64))
def raise_out_of_memory(requested_bytes: int, held_bytes: int, most_bytes: int) -> None:
    """Throw ``c10::OutOfMemoryError`` through the caller; the message has the three figures. Never returns.

    Threads that fail at once may mix up each other's figures.
    """
    raiser = record_at(_raiser_address(), RAISER)
    _write(raiser.text_bytes, _LAST_DIGITS[0], requested_bytes)
    _write(raiser.text_bytes, _LAST_DIGITS[1], held_bytes)
    _write(raiser.text_bytes, _LAST_DIGITS[2], most_bytes)
    _raise(raiser)


@callback(types.void(types.int64))
def raise_refusal(which: int) -> None:
    """Throw ``c10::Error`` with one of the texts given to ``prepare_refusals``. Never returns."""
    _raise(record_at(_raiser_address() + (1 + which) * _RAISER_BYTES, RAISER))


@callback(types.void(types.int64))
def raise_lost(status: int) -> None:
    """Throw what PyTorch's own checks throw for a status of CUDA's through the caller. Never returns."""
    raiser = record_at(_raiser_address(), RAISER)
    call(raiser.check, (status, raiser.location[1], raiser.location[0], 0, 0, 0))  # the last one since PyTorch 2.14


def prepare_lost(torch: Any) -> int:  # noqa: ANN401 - the module
    """Find PyTorch's check; returns the address of ``raise_lost``, 0 where this build has none.

    A lost context's status is the same number in CUDA's runtime, whose statuses PyTorch checks.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
    except OSError:
        return 0
    for name in CHECKS:
        with contextlib.suppress(ValueError):
            RAISERS[0]["check"] = address_in(library, name)
            return int(raise_lost.address)
    return 0


def prepare(torch: Any) -> int:  # noqa: ANN401 - the module
    """Find PyTorch's symbols; returns the address of ``raise_out_of_memory``.

    Raises:
        HookError: This build of PyTorch lacks one.
    """
    _fill(0, torch, OUT_OF_MEMORY_ERROR, _TEXT)
    return int(raise_out_of_memory.address)


def prepare_refusals(torch: Any, texts: Sequence[str]) -> int:  # noqa: ANN401 - the module
    """Find PyTorch's symbols; returns the address of ``raise_refusal``.

    In Python that is a ``RuntimeError`` with one of these texts, of at most 256 characters each.

    Raises:
        HookError: This build of PyTorch lacks one.
    """
    for number, text in enumerate(texts, 1):
        _fill(number, torch, ERROR, text)
    return int(raise_refusal.address)


def _fill(number: int, torch: Any, name: str, text: str) -> None:  # noqa: ANN401 - the module
    """Fill one of the records: which class of exception to throw, with which text."""
    folder = Path(torch.__file__).parent / "lib"
    raiser = RAISERS[number]
    try:
        core = ctypes.CDLL(str(folder / "libc10.so"))
        # Each library may have a type_info of its own; what counts is the one of the library that
        # catches.
        catching = ctypes.CDLL(str(folder / "libtorch_python.so"))
        runtime = ctypes.CDLL("libstdc++.so.6")
        raiser["constructor"] = address_in(core, CONSTRUCTOR)
        raiser["type_info"] = address_in(catching, TYPE_INFO.format(name))
        raiser["functions_address"] = address_in(catching, TABLE.format(name)) + FUNCTIONS_OFFSET
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


# -- answer PyTorch's question for the largest workspace that cuDNN may try ------------------------
#
# With ``torch.backends.cudnn.benchmark = True`` PyTorch asks ``CUDAAllocator::cacheInfo`` before it
# times algorithms. ``CUDAPluggableAllocator`` raises there, and neither C++ nor Python has a setter
# for an answer. So the one allocator that is Zico's gets a copy of its class's table of virtual
# functions, with Zico's function in place of PyTorch's.
#
# Guarantees
#     The place is found by the address of PyTorch's function, so versions may order their tables.
#     Nothing is written unless the object is of that class and the table has the function once.
#     One object changes, by one aligned store; the class and its other objects do not.
#
# The symbols and the table's entries were read in the builds of PyTorch 2.11.0, 2.12.0 and 2.13.0
# for CUDA 13 on x86-64. ``install`` has run on those libraries without a GPU, and on an H200,
# where no job has set ``benchmark``.

CURRENT_ALLOCATOR = "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
ALLOCATOR_TABLE = "_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE"
CACHE_INFO = "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoEaPm"

_WITH_SYMBOL = 1  # RTLD_DL_SYMENT


class _Place(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("file_address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _Symbol(ctypes.Structure):
    """``Elf64_Sym`` of elf(5)."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size_bytes", ctypes.c_uint64),
    )


def install(torch: Any) -> None:  # noqa: ANN401 - the module
    """Let PyTorch's present allocator, which is Zico's, answer ``cacheInfo``.

    Raises:
        HookError: This build lacks a symbol or is laid out otherwise; nothing has been changed.
    """
    folder = Path(torch.__file__).parent / "lib"
    try:
        allocator = word_at(address_in(ctypes.CDLL(str(folder / "libc10_cuda.so")), CURRENT_ALLOCATOR))
        library = ctypes.CDLL(str(folder / "libtorch_cuda.so"))
        table_address, function = address_in(library, ALLOCATOR_TABLE), address_in(library, CACHE_INFO)
    except (OSError, AttributeError, ValueError) as error:
        raise _refusal(torch, str(error)) from error
    table = words_of(table_address)
    (places,) = np.nonzero(table == function)
    if allocator.value == 0 or word_at(allocator.value).value != table_address + FUNCTIONS_OFFSET:
        raise _refusal(torch, "its current allocator is no CUDAPluggableAllocator")
    if len(places) != 1:
        raise _refusal(torch, f"its table of virtual functions names cacheInfo {len(places)} times")
    table[places[0]] = hooks.cache_info.address
    lookup.keep(table, hooks.cache_info)
    word_at(allocator.value).value = table.ctypes.data + FUNCTIONS_OFFSET


def _refusal(torch: Any, why: str) -> HookError:  # noqa: ANN401 - the module
    return HookError(f"PyTorch {torch.__version__}: {why}; leave torch.backends.cudnn.benchmark at False")


def word_at(address: int) -> ctypes.c_uint64:
    """Return the word at an address; writing its value writes there."""
    return ctypes.c_uint64.from_address(address)


def words_of(address: int) -> Any:  # noqa: ANN401 - an array of words
    """Return a copy of the object that begins at a symbol's address; empty where no symbol does."""
    place, symbol = _Place(), ctypes.POINTER(_Symbol)()
    dladdr1 = ctypes.CDLL(None).dladdr1
    found = dladdr1(ctypes.c_void_p(address), ctypes.byref(place), ctypes.byref(symbol), _WITH_SYMBOL)
    is_there = found and symbol and place.address == address
    size_bytes = symbol.contents.size_bytes if is_there else 0
    return np.frombuffer(ctypes.string_at(address, size_bytes), np.uint64).copy()
