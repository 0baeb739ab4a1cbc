"""The functions of a device's timeline, called as compiled code calls them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

from cpu.support.twin_device import MIB, TwinDevice

from zico.job.device_timeline import DeviceTimeline
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

REGION_BYTES = 2 * MIB
WITHOUT_KERNELS = {"COMPUTE_CAPABILITY_MAJOR": 6}
"""The twin runs no PTX: marks and waits are stream operations, as on a device too old for Zico's kernels."""
WORD_BYTES = 64
"""Between two counters, as the pool lays them out."""
_FOUR = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
_ONE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


@contextlib.contextmanager
def pool_on(device: TwinDevice, *, isolate: bool = False) -> Iterator[PoolTable]:
    """Give this process's place in a pool on the device."""
    sizes = {"budget_bytes": 4 * REGION_BYTES, "region_bytes": REGION_BYTES}
    ways = {"use_claims": False, "self_admit": True, "isolate": isolate}
    with PoolTable.create(**sizes, **ways, driver=device.driver) as made:
        job = made.join(os.getpid(), "a")
        copies = (device.driver.export_pieces(made.memory), os.dup(made.table_fd), os.dup(made.notify_fd))
        with PoolTable.join_pool(*copies, job, device.driver) as member:
            yield member


class Functions:
    """A timeline as the heap sees it: three functions by address."""

    def __init__(self, device: TwinDevice, member: PoolTable) -> None:
        """Build it."""
        self.device = device
        self.timeline = DeviceTimeline(member)
        functions = self.timeline.functions
        self._context = functions.context_address
        self._mark, self._wait = _FOUR(functions.mark_address), _FOUR(functions.await_address)
        self._synchronize, self._look = _ONE(functions.synchronize_address), _ONE(functions.look_address)
        self.counters = functions.counters_address
        self._counters_here = int(member.member[0]["counters_address"])

    def mark(self, stream: int, word: int, value: int) -> int:
        """Put a mark on a stream."""
        return self._mark(self._context, stream, self.counters + WORD_BYTES * word, value) & 0xFFFFFFFF

    def wait(self, stream: int, word: int, value: int) -> int:
        """Put a wait on a stream."""
        return self._wait(self._context, stream, self.counters + WORD_BYTES * word, value) & 0xFFFFFFFF

    def synchronize(self) -> int:
        """Wait for everything."""
        return self._synchronize(self._context) & 0xFFFFFFFF

    def look(self) -> int:
        """Ask by which status the context is lost."""
        return self._look(self._context) & 0xFFFFFFFF

    def counter(self, word: int) -> int:
        """Return a counter as every process sees it."""
        return ctypes.c_int64.from_address(self._counters_here + WORD_BYTES * word).value
