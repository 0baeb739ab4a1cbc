"""A paged job's memory, made in the job, and its pager, in the broker and in the job.

Everything a pager needs travels as descriptors: the job's faults, its memory, the page table, an
eventfd, and the tiers. Who has them can be the pager; one at a time is (``PAGE_TABLE.pager_pid``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from zico.base.errors import ConfigError
from zico.base.units import MIB, format_bytes
from zico.device.api import close_descriptors
from zico.device.host import RESERVED, HostDriver
from zico.device.userfault import USERFAULT, Reach, fill_userfault, open_userfault, watch
from zico.paging.layout import ALL, DEGREE, Sizes, lay_out
from zico.paging.page_table import MAGIC, NO_TICKET, PAGE_TABLE, PAGER, VERSION, offsets
from zico.pool.layout import NOBODY
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from zico.base.records import Layout
    from zico.device.api import Owned

BLOCK_BYTES = 2 * MIB
OWN_DESCRIPTORS = 4
"""Faults, memory, page table, eventfd; behind them come those of the tiers."""
LEAST_SHIFT = 12
_MOST_SHIFT = 63  # of what a file's size can have: the page table's numbers are another process's
_LOOK_S = 0.0005
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
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
        with contextlib.ExitStack() as undo:
            self.userfault_fd, reach = open_userfault()
            undo.callback(os.close, self.userfault_fd)
            self.memory_fd = _sealed(undo, "pages", size_bytes)
            n_blocks = size_bytes // block_bytes
            self.table_fd = _sealed(undo, "page-table", offsets(n_blocks, n_regions)[1])
            self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self.wake_fd)
            self.tiers = tiers
            self.address = _map_whole(undo, self.table_fd)
            self.page_table: Any = _view(self.address, PAGE_TABLE, 1)[0]
            self.page_table["window"], self.page_table["reach"] = base, reach
            self.page_table["flags"], self.page_table["degree"] = flags, degree
            self._fill(n_blocks, n_regions, region_bytes)
            _map_at(base, self.memory_fd, size_bytes)
            watch(self.userfault_fd, base, size_bytes)
            self._undo = undo.pop_all()

    def _fill(self, n_blocks: int, n_regions: int, region_bytes: int) -> None:
        table = self.page_table
        table["version"] = VERSION
        table["n_blocks"] = n_blocks
        table["block_shift"] = block_bytes_for(region_bytes).bit_length() - 1
        table["n_regions"] = n_regions
        table["region_shift"] = region_bytes.bit_length() - 1
        table["pid"] = os.getpid()
        table["tier_blocks"] = int(self.tiers.shared["n_blocks"].sum())
        self.arrays = {name: self.address + at for name, at in offsets(n_blocks, n_regions)[0].items()}
        _view(self.arrays["tickets_address"], np.dtype("i4"), n_blocks)[:] = NO_TICKET
        _view(self.arrays["regions_address"], np.dtype("i4"), n_regions)[:] = NOBODY
        table["magic"] = MAGIC

    @property
    def reach(self) -> Reach:
        """Return whose faults are shown."""
        return Reach(int(self.page_table["reach"]))

    @property
    def live(self) -> Any:  # noqa: ANN401 - an array
        """Return how many tensors lie in each block."""
        return _view(self.arrays["live_address"], np.dtype("i4"), int(self.page_table["n_blocks"]))

    # -- forks -------------------------------------------------------------------------------------

    def close_in_child(self) -> None:
        """Close a forked child's copies of the descriptors: the parent's memory is not its own."""
        for fd in (self.userfault_fd, self.memory_fd, self.wake_fd):
            os.close(fd)

    # -- the pager ---------------------------------------------------------------------------------

    def export(self) -> list[int]:
        """Return new descriptors for a ``Pager``; the caller owns them."""
        own = (self.userfault_fd, self.memory_fd, self.table_fd, self.wake_fd)
        return [*(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in own), *self.tiers.export()]

    def close(self) -> None:
        """Unmap the page table and close; the window itself stays as it is, and must not be touched any more."""
        self._undo.close()


class Pager:
    """One process's way to a paged job. Owns what came with it; close it when no thread is in ``run`` any more."""

    def __init__(
        self,
        descriptors: Sequence[int],
        member: Any,  # noqa: ANN401 - a MEMBER record
        wait_limit_s: float = 600.0,
        *,
        pid: int | None = None,
    ) -> None:
        """Take over the descriptors that ``PagedMemory.export`` gave, also when this fails.

        Args:
            descriptors: Of the job.
            member: A MEMBER record of this process whose ``job`` is the paged one, in an array of
                one.
            wait_limit_s: How long a fault waits for room.
            pid: Of the job as this process sees it, ``None``: this process.

        Raises:
            ConfigError: They are none of a paged job, or of another version of Zico.
        """
        self.record: Any = np.zeros(1, PAGER)
        self.member = member
        left = list(descriptors)
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: close_descriptors(left))
            if len(left) <= OWN_DESCRIPTORS:
                raise ConfigError(f"{len(left)} descriptors came, a paged job has more than {OWN_DESCRIPTORS}")
            own, of_tiers = left[:OWN_DESCRIPTORS], left[OWN_DESCRIPTORS:]
            del left[:]
            undo.callback(close_descriptors, own)
            self.tiers = undo.enter_context(TierStack(of_tiers))
            self._user = np.zeros(1, USERFAULT)
            fill_userfault(self._user[0], own[0])
            self._join(undo, *own[1:])
            self.record["pid"] = os.getpid() if pid is None else pid
            self.record["starving_limit_ns"] = int(wait_limit_s * 1e9)
            self._undo = undo.pop_all()

    def _join(self, undo: contextlib.ExitStack, memory_fd: int, table_fd: int, wake_fd: int) -> None:
        record = self.record[0]
        for fd in (memory_fd, table_fd):
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ConfigError("the memory of a paged job could be made smaller while it is used")
        if os.fstat(table_fd).st_size < PAGE_TABLE.itemsize:
            raise ConfigError("what came is no page table of a paged job")
        address = _map_whole(undo, table_fd)
        self.page_table: Any = _view(address, PAGE_TABLE, 1)[0]
        _check(self.page_table, os.fstat(table_fd).st_size, os.fstat(memory_fd).st_size)
        n_blocks, block_bytes = int(self.page_table["n_blocks"]), 1 << int(self.page_table["block_shift"])
        record["page_table_address"] = address
        record["needed"] = int(self.page_table["n_regions"])  # until an iteration has shown less
        for name, at in offsets(n_blocks, int(self.page_table["n_regions"]))[0].items():
            record[name] = address + at
        record["memory_fd"], record["wake_fd"] = memory_fd, wake_fd
        record["memory_address"] = _map_whole(undo, memory_fd)
        record["user_address"] = self._user.ctypes.data
        record["stack_address"] = self.tiers.record.ctypes.data
        record["member_address"] = self.member.ctypes.data
        sizes = Sizes(blocks=n_blocks, rows=ROWS)
        self._tables = _zeros(sizes.total_bytes)
        lay_out(self._tables, sizes, int(self.page_table["flags"]), int(self.page_table["degree"]))
        record["paging_address"] = self._tables.ctypes.data
        self._bounce = _zeros(block_bytes)
        self._drain = np.zeros(1, np.int64)
        self._message = np.frombuffer(self._last_words(), np.uint8).copy()
        record["bounce_address"] = self._bounce.ctypes.data
        record["drain_address"] = self._drain.ctypes.data
        record["message_address"], record["message_bytes"] = self._message.ctypes.data, len(self._message)
        for field in ("fallocate", "read", "write", "kill"):
            record[field] = ctypes.cast(getattr(_libc, field), ctypes.c_void_p).value

    def _last_words(self) -> bytes:
        tiers = ", ".join(f"{use.kind} {format_bytes(use.capacity_bytes)}" for use in self.tiers.usage())
        return (
            f"zico: process {int(self.page_table['pid'])} ends by SIGBUS: memory that it touches cannot be brought "
            f"back from where it went ({tiers}), or nothing can make room for it\n"
        ).encode()

    def load(self) -> None:
        """Compile or load what ``run`` and ``stand_by`` call, so that neither has to when it matters."""
        from zico.paging.loop import stand_by

        self.record["stops"] = 1
        stand_by(self.record[0], -1)
        self.record["stops"] = 0
        self.record["runs"] = 0

    def run(self) -> None:
        """Be the pager until ``stop``: holds no GIL."""
        from zico.paging.loop import page

        self.page_table["pager_pid"] = os.getpid()
        page(self.record[0])

    def stand_by(self, pidfd: int) -> None:
        """Be the pager as soon as the process of ``pidfd`` is dead or lets go, until ``stop``: holds no GIL."""
        from zico.paging.loop import stand_by

        stand_by(self.record[0], pidfd)

    def start(self, target: Callable[..., None], *arguments: int) -> threading.Thread:
        """Let a thread of the job run ``run`` or ``stand_by``; waits until it needs no GIL any more.

        A thread that faults may hold the GIL, and keep it until the fault is served.
        """
        self.load()
        thread = threading.Thread(target=target, args=arguments, name="zico-pager", daemon=True)
        thread.start()
        while not self.record[0]["runs"]:
            select.select([], [], [], _LOOK_S)
        return thread

    def stop(self) -> None:
        """Let ``run`` end soon; waits for nothing."""
        self.record["stops"] = 1
        self.wake()

    def wake(self) -> None:
        """Let ``run`` look whether there is something to do that no fault tells."""
        os.eventfd_write(int(self.record[0]["wake_fd"]), 1)

    def let_go(self) -> None:
        """Tell the job to be its own pager; only when ``run`` has ended."""
        self.page_table["pager_pid"] = 0

    @property
    def memory_fd(self) -> int:
        """Return the descriptor of the job's memory (not a copy)."""
        return int(self.record[0]["memory_fd"])

    def close(self) -> None:
        """Unmap and close; a second time does nothing."""
        self._undo.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()


def block_bytes_for(region_bytes: int) -> int:
    """Return what is moved at once where regions are so large."""
    return min(BLOCK_BYTES, region_bytes)


def _check(table: Any, table_bytes: int, memory_bytes: int) -> None:  # noqa: ANN401 - a PAGE_TABLE record
    """Refuse a page table that is none, of another version, or of a memory of another size."""
    if (int(table["magic"]), int(table["version"])) != (MAGIC, VERSION):
        raise ConfigError(f"the job's page table has version {int(table['version'])}, this Zico reads {VERSION}")
    n_blocks, shift = int(table["n_blocks"]), int(table["block_shift"])
    shifts = LEAST_SHIFT <= shift <= int(table["region_shift"]) < _MOST_SHIFT
    fits = n_blocks > 0 and shifts and n_blocks << shift == memory_bytes
    if not fits or int(table["n_regions"]) < 1 or offsets(n_blocks, int(table["n_regions"]))[1] != table_bytes:
        raise ConfigError("the job's page table says other sizes than its memory has")


def _sealed(undo: contextlib.ExitStack, label: str, size_bytes: int) -> int:
    """Return a memfd whose size stays what it is."""
    descriptor = os.memfd_create(f"zico-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    undo.callback(os.close, descriptor)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _map_whole(undo: contextlib.ExitStack, descriptor: int) -> int:
    """Map all of a memfd; returns where."""
    driver = HostDriver()
    with driver.import_memory(os.dup(descriptor)) as memory:
        window: Owned = undo.enter_context(driver.reserve(memory.size_bytes))
        driver.map(window, 0, memory, 0, memory.size_bytes)
    return window.handle


def _map_at(base: int, descriptor: int, size_bytes: int) -> None:
    """Map a memfd over reserved addresses."""
    from zico.device.api import Owned

    driver = HostDriver()
    with driver.import_memory(os.dup(descriptor)) as memory:
        driver.map(Owned("window", base, size_bytes, lambda _address, _size: None), 0, memory, 0, size_bytes)


def _zeros(size_bytes: int) -> Any:  # noqa: ANN401 - an array of bytes
    """Return zeroed memory that costs nothing until it is touched."""
    return np.frombuffer(mmap.mmap(-1, size_bytes, RESERVED), np.uint8)


def _view(address: int, dtype: np.dtype[Any] | Layout[Any], count: int) -> Any:  # noqa: ANN401 - records by field name
    buffer: Any = (ctypes.c_char * (dtype.itemsize * count)).from_address(address)
    return np.frombuffer(buffer, dtype, count)
