"""Jobs without a framework, forked from a process that has loaded all compiled code; driven by ``harness.Nursery``."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from support import forking
from support.hammering import blocks_of_nobody, hammer
from zico.base.errors import DriverError
from zico.base.warming import JOBS, PAGING
from zico.base.warming import load as load_programs
from zico.broker.client import BrokerClient
from zico.device.userfault import open_userfault
from zico.heap import allocator
from zico.heap.build import Heap
from zico.heap.fork import ForkGuard
from zico.heap.layout import GRANULE_BYTES, HEAP
from zico.job.paged_job import serve_pages
from zico.paging.pager import block_bytes_for
from zico.pool import mutex
from zico.pool.layout import NOBODY
from zico.pool.table import PoolTable
from zico.tiers.destinations import parse_tiers
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCKS = 24
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
FIGURES = ("faults", "evicted", "peak_resident")


def _tiers(pool: PoolTable) -> TierStack:
    """Return the tiers of a job that is paged: as its environment says, else memory."""
    wishes = parse_tiers(os.environ.get("LIGHT_TIER", "memory:16MiB"))
    return TierStack.create(wishes, block_bytes=block_bytes_for(pool.region_bytes))


class Job:
    """One job's side of the dialogue."""

    def __init__(self, path: Path, name: str, connection: socket.socket, run: str = "") -> None:
        """Join the pool and say so."""
        self._connection = connection
        self._orders = connection.makefile("r")
        self._answers = connection.makefile("w")
        self._membership = BrokerClient(path).join(name, "light", run=run)
        m = self._membership
        self._pool = PoolTable.join_pool(m.memory_fd, m.table_fd, m.notify_fd, m.job)
        self._heap = Heap(self._pool, np.zeros(1, HEAP), tiers=_tiers(self._pool) if name.startswith("paged") else None)
        if self._heap.paged is not None:
            serve_pages(self._heap)
            ForkGuard(self._heap, m.leave)
            self._heap.enable()
        self._record = self._heap.record[0]
        self._held: list[tuple[int, int]] = []
        self._say("joined", os.getpid(), m.job)

    def _say(self, *words: object) -> None:
        self._answers.write(" ".join(map(str, words)) + "\n")
        self._answers.flush()

    def serve(self) -> None:
        """Do what each line says until there are no more."""
        for line in self._orders:
            name, *numbers = line.split()
            try:
                getattr(self, name)(*map(int, numbers))
            except KeyboardInterrupt:
                self._say("interrupted")

    def heed(self) -> None:
        """Say so whenever SIGTERM comes, and raise at SIGINT, as Python does by itself; says that it does."""
        signal.signal(signal.SIGTERM, lambda *_: os.write(self._connection.fileno(), b"handled\n"))  # unbuffered
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._say("heeds")

    def hold(self, n_regions: int) -> None:
        """Allocate one block of so many regions and fill it; says 1, or 0 if it was refused."""
        size_bytes = n_regions * self._pool.region_bytes
        address = allocator.allocate(self._record, size_bytes, 64)
        if address > 0:
            ctypes.memset(address, os.getpid() & 0xFF, size_bytes)
            self._held.append((address, size_bytes))
        self._say(int(address > 0))

    def fill(self, n: int, seed: int) -> None:
        """Allocate so many blocks of a region, each filled with its own numbers; says how many it has got."""
        region_bytes = self._pool.region_bytes
        self._filled = []
        for i in range(n):
            address = allocator.allocate(self._record, region_bytes, 64)
            if address <= 0:
                break
            words = np.frombuffer((ctypes.c_char * region_bytes).from_address(address), np.int64)
            words[:] = seed + i
            self._filled.append((address, words))
        self._say(len(self._filled))

    def verify(self, seed: int) -> None:
        """Say how many of the blocks that were filled are not as they were."""
        self._say("lost", self._lost(seed))

    def _lost(self, seed: int) -> int:
        return sum(bool((words != seed + i).any()) for i, (_, words) in enumerate(self._filled))

    def empty(self) -> None:
        """Free what was filled; says so."""
        for address, _ in self._filled:
            allocator.free(self._record, address)
        self._filled = []
        self._say("freed")

    def fork(self, seed: int) -> None:
        """Fork a child that looks at what was filled and overwrites it; says what it found lost, and what is now."""
        pid = os.fork()
        if pid == 0:
            lost = self._lost(seed)
            for _, words in self._filled:
                words[:] = -1
            os._exit(min(lost, 255))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._say("lost", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), self._lost(seed))

    def leave_child(self) -> None:
        """Fork a child that sleeps until this process is dead and its end of a pipe is closed; says its number."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.write(writing, b"1")
            signal.pause()
        os.close(writing)
        os.read(reading, 1)
        self._say(pid)

    def fork_beside_threads(self) -> None:
        """Fork at moments at which a thread is, or wants to be, inside the heap; says what was wrong at each."""
        self._say(*forking.fork_beside_threads(self._heap, self._membership.leave))

    def figure(self, which: int) -> None:
        """Say one of the figures of its paging."""
        assert self._heap.paged is not None
        self._say(int(self._heap.paged.page_table[FIGURES[which]]))

    def free(self) -> None:
        """Free the block held last; says so, or else that it was not what has been written there."""
        address, size_bytes = self._held.pop()
        intact = ctypes.string_at(address, size_bytes) == bytes([os.getpid() & 0xFF]) * size_bytes
        allocator.free(self._record, address)
        self._say("freed" if intact else "lost")

    def mark(self) -> None:
        """End the iteration; says so when the next one has begun."""
        allocator.mark(self._record)
        self._say("began")

    def vary(self, iterations: int, seed: int) -> None:
        """Train with a peak of 5, 8 or 9 regions by chance, which profiles do not tell; says as ``train`` does."""
        chance = random.Random(seed)  # noqa: S311 - for tests
        self._train(chance.choice((5, 8, 9)) for _ in range(iterations))

    def train(self, iterations: int, peak_regions: int) -> None:
        """Rise region by region to a peak and fall again, each iteration the same; says how often a block was lost."""
        self._train(itertools.repeat(peak_regions, iterations))

    def _train(self, peaks: Iterable[int]) -> None:
        lost = 0
        for peak_regions in peaks:
            blocks = []
            for _ in range(peak_regions):
                blocks.append(allocator.allocate(self._record, self._pool.region_bytes, 64))
                ctypes.memset(blocks[-1], os.getpid() & 0xFF, self._pool.region_bytes)
            for address in reversed(blocks):
                lost += ctypes.string_at(address + self._pool.region_bytes - 1, 1)[0] != os.getpid() & 0xFF
                allocator.free(self._record, address)
            allocator.mark(self._record)
        self._say("lost", lost)

    def churn(self, seed: int, largest_regions: int, frees_every: int) -> None:
        """Allocate and free at random for ever, freeing everything and ending an iteration now and then."""
        blocks, faults = blocks_of_nobody(BLOCKS), np.zeros(2, np.int64)
        most_bytes = largest_regions * self._pool.region_bytes - GRANULE_BYTES
        while not faults[0]:
            seed = hammer(self._record, seed, frees_every, most_bytes, os.getpid(), blocks, faults)
            allocator.mark(self._record)
        self._say("lost", int(faults[0]))

    def stop_inside(self) -> None:
        """Stop inside the table's mutex, as Ctrl-Z might; says when it is out."""
        mutex.lock_for_python(self._pool.member[0])
        os.kill(os.getpid(), signal.SIGSTOP)
        mutex.unlock_for_python(self._pool.member[0])
        self._say("out")

    def die_inside(self) -> None:
        """Die in the middle of a grant, inside the table's mutex, with counters and list half changed."""
        pool = self._pool
        mutex.lock_for_python(pool.member[0])
        region = int(pool.header["free_head"])
        pool.header["free_head"] = pool.regions[region]["next"]
        pool.regions[region]["owner"] = self._membership.job
        pool.header["granted"] += 2
        pool.regions[region]["next"] = NOBODY
        os.kill(os.getpid(), signal.SIGKILL)


def serve(connection: socket.socket) -> None:
    """Fork a job for each request until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead disappear at once
    parent = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
        if not request:
            return
        with socket.socket(fileno=descriptors[0]) as theirs:
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
                connection.close()
                if os.getppid() == parent:
                    path, name, *run = request.decode().split()
                    Job(Path(path), name, theirs, *run).serve()
                os._exit(0)


def can_page() -> bool:
    """Tell whether a process of this user may serve its own faults."""
    try:
        descriptor, _ = open_userfault()
    except DriverError:
        return False
    os.close(descriptor)
    return True


def load() -> None:
    """Load or compile everything that a job calls."""
    load_programs(*JOBS, *(PAGING if can_page() else ()))
    region_bytes = 1 << 16
    made = PoolTable.create(budget_bytes=4 * region_bytes, region_bytes=region_bytes, use_claims=True, self_admit=True)
    with made:
        job = made.join(os.getpid(), "warm")
        with PoolTable.join_pool(
            *[os.dup(fd) for fd in (made.memory_fd, made.table_fd, made.notify_fd)], job
        ) as member:
            heap = Heap(member, np.zeros(1, HEAP))
            hammer(heap.record[0], 1, 4, 64, 1, blocks_of_nobody(2), np.zeros(2, np.int64))
            forking.load(heap)
            mutex.lock_for_python(member.member[0])
            mutex.unlock_for_python(member.member[0])
            heap.close()


if __name__ == "__main__":
    load()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        requests.sendall(b"ready")
        serve(requests)
