"""Putting work on a stream from compiled code: no GIL, no Python, only C functions by address.

A *launcher* is a record with what that takes: addresses of the driver's C functions, handles of
loaded kernels. It is written once (``zico.kernels.prepare``) and only read from then on, so any
number of threads may use it. Parameters lie on the caller's stack: ``cuLaunchKernel`` copies them
before it returns.

Each function returns a ``CUresult`` (0: success) and needs the device's context current in the
calling thread.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from zico.base.compiled import call, compiled, inlined
from zico.base.records import I8, Record, dtype_of


class Launcher(Record, align=False):
    """What it takes to put work on a stream."""

    launch_kernel: I8  # C functions of the driver
    write_value: I8
    wait_value: I8  # both 0: the device has no stream memory operations
    progress: I8  # kernels, each 0: it is not needed, or the device is too old for it
    spin: I8
    scrub: I8
    digest: I8  # loaded where they are needed alone (zico.swap.device_digests)
    tell_digest: I8
    stop: I8  # words that the device can reach: see zico.kernels.spin
    given_up: I8


LAUNCHER = dtype_of(Launcher)

SUCCESS = 0
INVALID_VALUE = 1
"""``CUDA_ERROR_INVALID_VALUE``: what the driver itself would answer."""
NOT_SUPPORTED = 801
"""``CUDA_ERROR_NOT_SUPPORTED``."""
WORD_BYTES = 8

_WRITE_VALUE_DEFAULT = 0
"""``CU_STREAM_WRITE_VALUE_DEFAULT``: a fence of system scope stands before the write."""
_WAIT_VALUE_GEQ = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``: until the signed difference of word and value is not negative."""
_STATUS = 0xFFFFFFFF
"""``call`` returns a whole register, of which a C function that returns an ``int`` sets the lower half."""

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


@intrinsic
def _cu_launch_kernel(
    _typing: Any,  # noqa: ANN401 - as all: Numba types
    address: Any,  # noqa: ANN401, ARG001
    kernel: Any,  # noqa: ANN401, ARG001
    blocks: Any,  # noqa: ANN401, ARG001
    threads: Any,  # noqa: ANN401, ARG001
    stream: Any,  # noqa: ANN401, ARG001
    arguments: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Call ``cuLaunchKernel`` at an address: a line of blocks of a line of threads, 64-bit arguments."""
    count = arguments.count

    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:  # noqa: ANN401 - LLVM builders
        with builder.goto_entry_block():
            words = builder.alloca(ir.ArrayType(_I64, count))
            pointers = builder.alloca(ir.ArrayType(_I64, count))
        zero = ir.Constant(_I32, 0)
        for i in range(count):
            at = [zero, ir.Constant(_I32, i)]
            word = builder.gep(words, at)
            builder.store(builder.extract_value(values[5], i), word)
            builder.store(builder.ptrtoint(word, _I64), builder.gep(pointers, at))
        kind = ir.FunctionType(_I32, [_I64, *[_I32] * 7, _I64, _I64, _I64])
        one = ir.Constant(_I32, 1)
        blocks_x, threads_x = (builder.trunc(value, _I32) for value in values[2:4])
        grid = (blocks_x, one, one, threads_x, one, one)
        parameters = builder.ptrtoint(pointers, _I64)
        launch = builder.inttoptr(values[0], kind.as_pointer())
        status = builder.call(launch, [values[1], *grid, zero, values[4], parameters, ir.Constant(_I64, 0)])
        return builder.zext(status, _I64)

    return types.int64(*[types.int64] * 5, types.UniTuple(types.int64, count)), codegen


@inlined
def launch(launcher: Launcher, kernel: int, blocks: int, threads: int, stream: int, arguments: tuple[int, ...]) -> int:
    """Put a kernel on a stream: ``blocks`` of ``threads``, with 64-bit arguments."""
    return _cu_launch_kernel(launcher.launch_kernel, kernel, blocks, threads, stream, arguments)


@compiled
def write_value(launcher: Launcher, stream: int, counter: int, value: int) -> int:
    """Let the stream write a value to the counter at a device address when its work so far is done."""
    return call(launcher.write_value, (stream, counter, value, _WRITE_VALUE_DEFAULT)) & _STATUS


@compiled
def wait_value(launcher: Launcher, stream: int, counter: int, value: int) -> int:
    """Let the stream go on only when the counter at a device address has reached a value."""
    return call(launcher.wait_value, (stream, counter, value, _WAIT_VALUE_GEQ)) & _STATUS
