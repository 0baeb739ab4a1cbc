"""Device kernels on this processor: what Numba made of them, over instructions in Python, one thread after another."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import TYPE_CHECKING

from zico.kernels import compilation
from zico.kernels.compilation import for_processor

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.kernels.compilation import Kernel

_I64 = ctypes.c_int64
_U32 = ctypes.c_uint32


class Processor:
    """Runs kernels on this process's memory and keeps what they did."""

    def __init__(self) -> None:
        """Bind the instructions; a kernel is compiled over them at its first run."""
        self.stores: list[tuple[int, int]] = []
        """Address and size of each store, in order."""
        self.rests_ns: list[int] = []
        self.on_rest: Callable[[], None] = lambda: None
        self._place = (0, 1, 0, 1)
        kinds = {
            "zico_store_release": (self._store_release, _I64, (_I64, _I64)),
            "zico_load_acquire": (lambda address: _I64.from_address(address).value, _I64, (_I64,)),
            "zico_store_zeros": (self._store_zeros, _I64, (_I64,)),
            "zico_load_word": (lambda address: _U32.from_address(address).value, _I64, (_I64,)),
            "zico_store_word": (self._store_word, _I64, (_I64, _I64)),
            "zico_load_long": (lambda address: _I64.from_address(address).value, _I64, (_I64,)),
            "zico_add_long": (self._add_long, _I64, (_I64, _I64)),
            "zico_rest": (self._rest, _I64, (_I64,)),
            "zico_thread": (lambda: self._place[0], _I64, ()),
            "zico_threads": (lambda: self._place[1], _I64, ()),
            "zico_block": (lambda: self._place[2], _I64, ()),
            "zico_blocks": (lambda: self._place[3], _I64, ()),
        }
        self._functions = {
            name: ctypes.CFUNCTYPE(result, *parameters)(function)
            for name, (function, result, parameters) in kinds.items()
        }
        compilation.bind({name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in self._functions.items()})
        self._compiled = functools.cache(for_processor)

    def run(self, kernel: Kernel, *arguments: int, blocks: int = 1, threads: int = 1) -> None:
        """Run a kernel to its end: so many blocks of so many threads."""
        function = self._compiled(kernel).ctypes
        self.stores.clear()
        self.rests_ns.clear()
        for block, thread in itertools.product(range(blocks), range(threads)):
            self._place = (thread, threads, block, blocks)
            function(*arguments)

    def _store_release(self, address: int, value: int) -> int:
        self.stores.append((address, 8))
        _I64.from_address(address).value = value
        return 0

    def _store_word(self, address: int, value: int) -> int:
        self.stores.append((address, 4))
        _U32.from_address(address).value = value & 0xFFFFFFFF
        return 0

    def _add_long(self, address: int, value: int) -> int:
        self.stores.append((address, 8))
        there = _I64.from_address(address)
        there.value += value
        return 0

    def _store_zeros(self, address: int) -> int:
        self.stores.append((address, 16))
        ctypes.memset(address, 0, 16)
        return 0

    def _rest(self, ns: int) -> int:
        self.rests_ns.append(ns)
        self.on_rest()
        return 0


@functools.cache
def processor() -> Processor:
    """Return the one of this process: compiled code keeps calling the functions that it was bound to."""
    return Processor()
