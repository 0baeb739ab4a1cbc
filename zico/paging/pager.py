"""A paged job's memory and its pager, a thread of the job.

Both end with the process, whatever ends it. A forked child keeps neither: it inherits no mapping of
the memory, and closes its copies of the descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.records import view_at
from zico.base.units import MIB, format_bytes
from zico.device.api import Owned
from zico.device.host import RESERVED, HostDriver
from zico.device.userfault import USERFAULT, fill_userfault, keep_from_children, open_userfault, watch
from zico.paging.layout import ALL, DEGREE, Sizes, lay_out
from zico.paging.page_table import NO_TICKET, PAGE_TABLE, PAGER, offsets
from zico.pool.layout import NOBODY

if TYPE_CHECKING:
    from zico.tiers.stack import TierStack

BLOCK_BYTES = 2 * MIB
_LOOK_S = 0.0005
ROWS = 256
"""Of a block table: an execution, which here is one allocation, touches few blocks before the next."""
_libc = ctypes.CDLL(None)


class PagedMemory:
    """The pages of one window of this process, whose faults a pager serves. Owns its descriptors and mappings."""

    def __init__(
        self,
        base: int,
        size_bytes: int,
        *,
        n_regions: int,
        region_bytes: int,
        tiers: TierStack,
        flags: int = ALL,
        degree: int = DEGREE,
    ) -> None:
        """Put sparse memory behind a range of reserved addresses, and watch it.

        Args:
            base: Where the range begins, a multiple of a block.
            size_bytes: Whole regions.
            n_regions: Of the pool.
            region_bytes: Of each.
            tiers: Where blocks go, its blocks no smaller than ``block_bytes_for(region_bytes)``;
                stays the caller's.
            flags: Parts of ``zico.paging.layout`` that are on.
            degree: Executions that the chain is ahead, 1 to ``MOST_DEGREE``; with ``TUNE``, at
                first.

        Raises:
            DriverError: The kernel or the privileges of this process refuse to show faults; nothing
                has changed.
        """
        block_bytes = block_bytes_for(region_bytes)
        n_blocks = size_bytes // block_bytes
        places, table_bytes = offsets(n_blocks, n_regions)
        self.tiers, self.flags, self.degree = tiers, flags, degree
        self._table = _zeros(table_bytes)
        self.address = self._table.ctypes.data
        self.page_table: Any = view_at(self.address, PAGE_TABLE, 1)[0]
        self.page_table["window"] = base
        self.page_table["n_blocks"], self.page_table["n_regions"] = n_blocks, n_regions
        self.page_table["block_shift"] = block_bytes.bit_length() - 1
        self.page_table["region_shift"] = region_bytes.bit_length() - 1
        self.page_table["tier_blocks"] = int(tiers.shared["n_blocks"].sum())
        self.arrays = {name: self.address + at for name, at in places.items()}
        view_at(self.arrays["tickets_address"], np.dtype("i4"), n_blocks)[:] = NO_TICKET
        view_at(self.arrays["regions_address"], np.dtype("i4"), n_regions)[:] = NOBODY
        driver = HostDriver()
        with contextlib.ExitStack() as undo:
            self.userfault_fd, self.reach = open_userfault()
            undo.callback(os.close, self.userfault_fd)
            memory = undo.enter_context(driver.create_memory(size_bytes, "pages"))
            self.memory_fd = memory.handle
            self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self.wake_fd)
            second = undo.enter_context(driver.reserve(size_bytes))
            driver.map(second, 0, memory, 0, size_bytes)
            keep_from_children(second.handle, size_bytes)
            self.second_address = second.handle
            driver.map(Owned("window", base, size_bytes, lambda _address, _size: None), 0, memory, 0, size_bytes)
            watch(self.userfault_fd, base, size_bytes)
            self._undo = undo.pop_all()

    def close_in_child(self) -> None:
        """Let a forked child, which has copies of what it needs, keep none of its parent's memory and tiers."""
        for fd in (self.userfault_fd, self.memory_fd, self.wake_fd):
            os.close(fd)
        self.tiers.close()

    def close(self) -> None:
        """Close, when no pager runs; the window itself stays as it is, and must not be touched any more."""
        self._undo.close()


class Pager:
    """Serves the faults of a paged memory."""

    def __init__(self, memory: PagedMemory, member: Any, wait_limit_s: float = 600.0) -> None:  # noqa: ANN401 - a MEMBER record
        """Have a fault wait ``wait_limit_s`` for room at most.

        Args:
            memory: Of this process.
            member: The MEMBER record of the job, in an array of one.
            wait_limit_s: How long a fault waits for room.

        Raises:
            ConfigError: The memory's degree cannot be used.
        """
        self.record: Any = np.zeros(1, PAGER)
        self._keep = [memory, member]
        record, table = self.record[0], memory.page_table
        record["page_table_address"] = memory.address
        for name, address in memory.arrays.items():
            record[name] = address
        record["memory_fd"], record["wake_fd"] = memory.memory_fd, memory.wake_fd
        record["memory_address"] = memory.second_address
        user = np.zeros(1, USERFAULT)
        fill_userfault(user[0], memory.userfault_fd)
        record["stack_address"] = memory.tiers.record.ctypes.data
        record["member_address"] = member.ctypes.data
        record["needed"] = table["n_regions"]  # until an iteration has shown less
        record["starving_limit_ns"] = int(wait_limit_s * 1e9)
        record["pid"] = os.getpid()
        sizes = Sizes(blocks=int(table["n_blocks"]), rows=ROWS)
        tables = _zeros(sizes.total_bytes)
        lay_out(tables, sizes, memory.flags, memory.degree)
        message = np.frombuffer(_last_words(memory.tiers), np.uint8).copy()
        record["message_bytes"] = len(message)
        of = {
            "user": user,
            "paging": tables,
            "bounce": _zeros(1 << int(table["block_shift"])),
            "drain": np.zeros(1, np.int64),
            "message": message,
        }
        for name, array in of.items():
            record[f"{name}_address"] = array.ctypes.data
            self._keep.append(array)
        for field in ("fallocate", "read", "write", "kill"):
            record[field] = ctypes.cast(getattr(_libc, field), ctypes.c_void_p).value

    def start(self) -> threading.Thread:
        """Serve faults from now on, in a thread that holds no GIL; waits until it needs none any more.

        A thread that faults may hold the GIL, and keep it until the fault is served.
        """
        self.record["stops"] = 1
        self._run()  # compiles or loads it
        self.record["stops"] = self.record["runs"] = 0
        thread = threading.Thread(target=self._run, name="zico-pager", daemon=True)
        thread.start()
        while not self.record[0]["runs"]:
            select.select([], [], [], _LOOK_S)
        return thread

    def _run(self) -> None:
        from zico.paging.loop import page

        page(self.record[0])

    def stop(self) -> None:
        """Let the thread end soon; waits for nothing."""
        self.record["stops"] = 1
        self.wake()

    def wake(self) -> None:
        """Let the pager look whether there is something to do that no fault tells."""
        os.eventfd_write(int(self.record[0]["wake_fd"]), 1)


def _last_words(tiers: TierStack) -> bytes:
    kinds = ", ".join(f"{use.kind} {format_bytes(use.capacity_bytes)}" for use in tiers.usage())
    return (
        f"zico: process {os.getpid()} ends by SIGBUS: memory that it touches cannot be brought back from where it "
        f"went ({kinds}), or nothing can make room for it\n"
    ).encode()


def block_bytes_for(region_bytes: int) -> int:
    """Return what is moved at once where regions are so large."""
    return min(BLOCK_BYTES, region_bytes)


def _zeros(size_bytes: int) -> Any:  # noqa: ANN401 - an array of bytes
    """Return zeroed memory that costs nothing until it is touched."""
    return np.frombuffer(mmap.mmap(-1, size_bytes, RESERVED), np.uint8)
