"""PyTorch's allocator of the host, replaced by way of ``c10::SetCPUAllocator``: for builds that import no C allocator.

PyTorch's builds for aarch64 have had mimalloc inside ``libc10.so`` since 2.10. They import no
``posix_memalign`` that could be redirected. ``SetCPUAllocator`` takes an object of a C++ class. It
is made here as a compiler lays it out (Itanium C++ ABI). Its table of virtual functions is a copy of
the original's, with two functions of ours.

Guarantees
    * Before anything is replaced, the original's functions are called, and what they return must be
      what their places in the table promise. Else ``HookError`` says so and nothing has changed.
    * What the original has allocated is freed by the original.

Known limitations
    A tensor that the budget can never hold raises PyTorch's own error with another size in it. Storage
    that is made without the allocator, such as by ``torch.from_file``, stays outside, as it always does.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types

from zico.base.compiled import call, callback, record_at, symbol_address
from zico.base.errors import HookError
from zico.base.records import I8, Record, dtype_of
from zico.heap import allocator, hooks, layout
from zico.heap.layout import HEAP, Attached
from zico.job import lookup

if TYPE_CHECKING:
    from zico.job.session import Session

SET = "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh"
GET = "_ZN3c1015GetCPUAllocatorEv"
REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
NOTE_NEW = "_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm"
NOTE_DELETED = "_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv"
_ALIGNMENT = 64  # c10::gAlignment
_WORD_BYTES = 8
_BEFORE = 2
"""Words of a table before its first function: the offset to the whole object, and its type."""
_ALLOCATE, _IS_SIMPLE, _RAW_DELETER, _COPY_DATA = 2, 3, 4, 5
"""Places of ``c10::Allocator``'s functions, behind its two destructors."""
_FUNCTIONS = 6
_PROBE_BYTES = 256
_HIGHEST_PRIORITY = 255
_ATTACHED = int(Attached.YES)
_CPU = 0  # c10::DeviceType
_NO_INDEX = 0xFF  # c10::DeviceIndex, -1
_OUTGROWN = 1 << 62  # bytes, which the original refuses


class DataPtr(ctypes.Structure):
    """``c10::DataPtr``: an address, what frees it and by which context, and a device."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("deleter", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("device", ctypes.c_uint8),
        ("index", ctypes.c_uint8),
    )


class Known(Record):
    """What the compiled functions know of PyTorch."""

    deleter: I8  # of the original
    own_deleter: I8
    reporter: I8  # c10::ProfiledCPUMemoryReporter, which tells PyTorch's profiler
    note_new: I8
    note_deleted: I8


KNOWN = dtype_of(Known)
_SYMBOL = "zico_torch_cpu_known"
_KNOWN = np.zeros(1, KNOWN)  # never freed: PyTorch frees tensors when the interpreter is gone
llvmlite.binding.add_symbol(_SYMBOL, _KNOWN.ctypes.data)
_known_address = symbol_address(_SYMBOL)
_heap_address = symbol_address(layout.SYMBOL)


@callback(types.int64(types.int64))
def serve(size_bytes: int) -> int:
    """Return an address in the pool, or why there is none (``zico.heap.hooks.from_pool``)."""
    address = hooks.from_pool(record_at(_heap_address(), HEAP), size_bytes, _ALIGNMENT)
    if address > 0:
        known = record_at(_known_address(), KNOWN)
        call(known.note_new, (known.reporter, address, size_bytes))
    return address


@callback(types.void(types.int64))
def release(address: int) -> None:
    """Stand in for the original's deleter."""
    heap, known = record_at(_heap_address(), HEAP), record_at(_known_address(), KNOWN)
    offset = address - heap.base
    if not 0 <= offset < heap.window_bytes:
        call(known.deleter, (address,))
    elif heap.attached == _ATTACHED:
        call(known.note_deleted, (known.reporter, address))
        allocator.free(heap, address)


@callback(types.int64(types.int64))
def raw_deleter(_this: int) -> int:
    """Stand in for ``raw_deleter``: what frees whatever this allocator has made."""
    return record_at(_known_address(), KNOWN).own_deleter


def enable(joined: Session) -> None:
    """Take PyTorch's memory of the host from the pool.

    Raises:
        HookError: This build of PyTorch has no such functions, or other ones; nothing has been
            changed.
    """
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        set_allocator, get_allocator, get_reporter = library[SET], library[GET], library[REPORTER]
        new, deleted = (ctypes.cast(library[name], ctypes.c_void_p).value for name in (NOTE_NEW, NOTE_DELETED))
    except AttributeError as error:
        message = f"PyTorch {torch.__version__} has no allocator for the host that could be replaced: {error}"
        raise HookError(message) from None
    get_allocator.restype = get_reporter.restype = ctypes.c_uint64
    set_allocator.restype, set_allocator.argtypes = None, (ctypes.c_uint64, ctypes.c_uint8)
    original = get_allocator()
    functions = _functions_of(original, torch.__version__)
    table = _Table(original, functions)
    _KNOWN[0] = _KNOWN[0]["deleter"], release.address, get_reporter(), new, deleted
    lookup.keep(joined, table, serve, release, raw_deleter)
    set_allocator(table.address, _HIGHEST_PRIORITY)


def _functions_of(original: int, version: str) -> list[int]:
    """Return the original's table, from two words before its first function on, once each has done what it should."""
    first = ctypes.c_uint64.from_address(original).value
    words = (ctypes.c_uint64 * (_BEFORE + _FUNCTIONS)).from_address(first - _BEFORE * _WORD_BYTES)
    functions = list(words)
    allocate = ctypes.CFUNCTYPE(DataPtr, ctypes.c_uint64, ctypes.c_uint64)(functions[_BEFORE + _ALLOCATE])
    raw = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)(functions[_BEFORE + _RAW_DELETER])
    is_simple = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint64)(functions[_BEFORE + _IS_SIMPLE])
    copy = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)(
        functions[_BEFORE + _COPY_DATA]
    )
    made = allocate(original, _PROBE_BYTES)
    is_one = made.data != 0 and made.context == made.data and (made.device, made.index) == (_CPU, _NO_INDEX)
    if is_one and raw(original) == made.deleter and is_simple(original, ctypes.addressof(made)):
        text = ctypes.create_string_buffer(b"zico" * (_PROBE_BYTES // 4), _PROBE_BYTES)
        copy(original, made.data, ctypes.addressof(text), _PROBE_BYTES)
        is_one = ctypes.string_at(made.data, _PROBE_BYTES) == text.raw
        _KNOWN[0]["deleter"] = made.deleter
        ctypes.CFUNCTYPE(None, ctypes.c_uint64)(made.deleter)(made.data)
        if is_one:
            return functions
    message = f"PyTorch {version} allocates on the host in a way that Zico does not know"
    raise HookError(message)


class _Table:
    """An object of a class derived from ``c10::Allocator``: the address of its table, and the table."""

    def __init__(self, original: int, functions: list[int]) -> None:
        self._engine, allocate = _compile(original, functions[_BEFORE + _ALLOCATE])
        self._words = np.array([0, *functions], np.uint64)
        self._words[0] = self._words.ctypes.data + _WORD_BYTES * (1 + _BEFORE)
        self._words[1 + _BEFORE + _ALLOCATE] = allocate
        self._words[1 + _BEFORE + _RAW_DELETER] = raw_deleter.address
        self.address = int(self._words.ctypes.data)


def _compile(original: int, allocate: int) -> tuple[Any, int]:
    """Return ``DataPtr allocate(Allocator*, size_t)`` with what holds its code.

    It has no frame of its own where the original is called: an exception passes by.
    """
    word, byte = ir.IntType(64), ir.IntType(8)
    data_ptr = ir.LiteralStructType([word, word, word, byte, byte])
    kind = ir.FunctionType(ir.VoidType(), [data_ptr.as_pointer(), word, word])
    module = ir.Module("zico_torch_cpu")
    module.triple = llvmlite.binding.get_process_triple()
    function = ir.Function(module, kind, "zico_torch_cpu_allocate")
    function.args[0].add_attribute("sret")
    made, _this, size = function.args
    builder = ir.IRBuilder(function.append_basic_block())

    def constant(value: int) -> Any:  # noqa: ANN401 - an LLVM value
        return ir.Constant(word, value)

    def otherwise(of: Any) -> None:  # noqa: ANN401 - an LLVM value
        target = builder.inttoptr(constant(allocate), kind.as_pointer())
        builder.call(target, [made, constant(original), of], tail="musttail", arg_attrs={0: ["sret"]})
        builder.ret_void()

    serves = builder.inttoptr(constant(serve.address), ir.FunctionType(word, [word]).as_pointer())
    address = builder.call(serves, [size])
    is_ours = builder.icmp_signed(">", address, constant(0))
    ours, not_ours = (function.append_basic_block() for _ in range(2))
    builder.cbranch(is_ours, ours, not_ours)
    builder.position_at_end(ours)
    for i, value in enumerate((address, constant(release.address), address)):
        builder.store(value, builder.gep(made, [ir.Constant(ir.IntType(32), k) for k in (0, i)]))
    for i, value in ((3, _CPU), (4, _NO_INDEX)):
        builder.store(ir.Constant(byte, value), builder.gep(made, [ir.Constant(ir.IntType(32), k) for k in (0, i)]))
    builder.ret_void()
    builder.position_at_end(not_ours)
    fails = builder.icmp_signed("==", address, constant(hooks.REFUSED))
    otherwise(builder.select(fails, constant(_OUTGROWN), size))

    parsed = llvmlite.binding.parse_assembly(str(module))
    parsed.verify()
    machine = llvmlite.binding.Target.from_default_triple().create_target_machine()
    engine = llvmlite.binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine, engine.get_function_address(function.name)
