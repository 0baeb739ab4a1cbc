"""Page faults of a window served by the compiled pager: contents, bounds, what is copied and what is not."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu.support.faulty_tier import FaultyTier
from cpu.support.members import join, make_pool
from cpu.support.paged_window import BLOCK_BYTES, BLOCKS, JOIN_S, PagedWindow, ring_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.harness import until

from zico.base.compiled import array_at, compiled
from zico.base.errors import ConfigError, DriverError
from zico.device.userfault import open_userfault
from zico.heap import allocator
from zico.heap.build import Heap
from zico.heap.layout import HEAP, Arena, Attached
from zico.paging.layout import ALL, APART, BLOCK, DEEPUM, INACTIVE, INVALIDATE, PAGING, PREEVICT, PREFETCH
from zico.paging.page_table import State, birth_of, death_of
from zico.paging.pager import Pager
from zico.tiers.destinations import TierWish
from zico.tiers.stack import TierStack

FRAMES = 6
PARTS = {"demand": 0, "prefetch": PREFETCH, "preevict": PREFETCH | PREEVICT, "all": ALL}
_I64 = np.dtype("i8")


def refused() -> str:
    """Return why this process may not serve its own faults, empty if it may."""
    try:
        descriptor, _ = open_userfault()
    except DriverError as error:
        return str(error)
    os.close(descriptor)
    return ""


pytestmark = pytest.mark.skipif(bool(refused()), reason=refused() or "it may")


@pytest.mark.parametrize("flags", PARTS.values(), ids=PARTS)
def test_what_does_not_fit_comes_back(flags: int) -> None:
    """Invariant 4: every word of five times what may be resident is read as it was written, whatever parts are on."""
    with PagedWindow(FRAMES, flags=flags) as window:
        for turn in range(3):
            for block in range(BLOCKS):
                window.blocks[block] = turn * 1000 + block
                assert window.resident <= FRAMES, "invariant 1, by the kernel"
            for block in reversed(range(BLOCKS)):
                assert (window.blocks[block] == turn * 1000 + block).all()
                assert window.resident <= FRAMES, "invariant 1, by the kernel"
        assert window.page_table["peak_resident"] <= FRAMES
        assert window.page_table["evicted"] >= BLOCKS - FRAMES


def test_a_file_serves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tier is a file, every word comes back, too, also when the file's directory is removed meanwhile."""
    directory = tmp_path / "tier"
    directory.mkdir()
    monkeypatch.setenv("ZICO_SPILL_DIR", str(directory))
    with PagedWindow(FRAMES, tiers=[TierWish("file", 2 * BLOCKS * BLOCK_BYTES)]) as window:
        for block in range(BLOCKS):
            window.blocks[block] = block
            if block == BLOCKS // 2:
                directory.rmdir()
        for block in range(BLOCKS):
            assert (window.blocks[block] == block).all()


def test_a_disk_that_takes_nothing_any_more_costs_no_contents() -> None:
    """Where every second write to the file is an error, the next tier takes the block, and every word comes back."""
    size_bytes = 2 * BLOCKS * BLOCK_BYTES
    with PagedWindow(FRAMES, tiers=[TierWish("file", size_bytes), TierWish("memory", size_bytes)]) as window:
        FaultyTier(window.tiers, 0).on("pwrite", lambda n, asked: -errno.EIO if n % 2 else asked)
        for turn in range(2):
            for block in range(BLOCKS):
                window.blocks[block] = 1000 * turn + block
            for block in range(BLOCKS):
                assert (window.blocks[block] == 1000 * turn + block).all()
        assert all(use.used_bytes for use in window.tiers.usage())


def test_the_pager_looks_as_far_ahead_as_the_job_says() -> None:
    """The parts and the degree that a heap was given are those of its paged memory, and the degree is the pager's."""
    with PagedWindow(FRAMES, degree=3) as window:
        address = int(window.pager.record[0]["paging_address"])
        paging = np.frombuffer((ctypes.c_char * PAGING.itemsize).from_address(address), PAGING)[0]
        assert paging["degree"] == 3
        heap = Heap(window.pool, np.zeros(1, HEAP), tiers=window.tiers, paging={"flags": 1, "degree": 5})
        assert heap.paged is not None
        assert (heap.paged.flags, heap.paged.degree) == (1, 5)
        heap.close()
        window.memory.degree = 0
        with pytest.raises(ConfigError, match="degree 0 cannot be used"):
            Pager(window.memory, window.member)


def test_what_was_only_read_is_not_copied() -> None:
    """A block that comes back and is not written to leaves without a copy."""
    with PagedWindow(FRAMES, flags=0) as window:
        for block in range(BLOCKS):
            window.blocks[block] = block
        assert window.blocks[:, 0].tolist() == list(range(BLOCKS))
        copied = int(window.page_table["out_bytes"])
        for _ in range(3):
            assert window.blocks[:, 0].tolist() == list(range(BLOCKS))
        assert window.page_table["out_bytes"] <= copied + FRAMES * BLOCK_BYTES  # those there from the first turn
        assert window.page_table["dropped"] >= 2 * BLOCKS


def test_what_nobody_needs_is_neither_copied_out_nor_in() -> None:
    """Blocks in which nothing lives any more are given up, also those in the tier, and read as zeros when used anew."""
    with PagedWindow(FRAMES) as window:
        for block in range(BLOCKS):
            window.blocks[block] = -1
        for block in range(BLOCKS):
            window.free(block)
        for block in range(BLOCKS):
            window.use(block)
        before = int(window.page_table["in_bytes"])
        out = [block for block in range(BLOCKS - FRAMES) if not window.blocks[block].any()]
        assert len(out) == BLOCKS - FRAMES
        assert window.page_table["in_bytes"] == before


def test_contents_stay_where_all_that_lives_fits() -> None:
    """Blocks in which nothing lives make way, also where something is expected to come to live there again."""
    kept, passing = range(3), range(3, 3 + FRAMES)
    with PagedWindow(FRAMES) as window:
        for block in range(len(kept), BLOCKS):
            window.free(block)
        for block in kept:
            window.blocks[block] = block
        for _ in range(4):
            for block in passing:  # one at a time lives beside what is kept
                window.tell(block)
                window.use(block)
                window.tell(birth_of(block))
                window.blocks[block] = -1
                window.free(block)
                window.tell(death_of(block))
        assert window.page_table["dropped"] > 0, "blocks have come and gone"
        window.pool.set_limit(window.job, len(kept))
        window.pager.wake()
        until(lambda: window.resident <= len(kept), JOIN_S, "regions have gone back")
        assert [int(window.page_table[field]) for field in ("evicted", "out_bytes", "in_bytes")] == [0, 0, 0]
        assert window.blocks[: len(kept), 7].tolist() == list(kept)


def test_the_pager_takes_births_for_births_and_deaths_for_deaths() -> None:
    """What the heap puts in the ring is what the pager knows: in which blocks nothing lives."""
    with PagedWindow(FRAMES) as window:
        address = int(window.pager.record[0]["paging_address"])
        paging = np.frombuffer((ctypes.c_char * PAGING.itemsize).from_address(address), PAGING)[0]
        blocks = np.frombuffer(
            (ctypes.c_char * (BLOCKS * BLOCK.itemsize)).from_address(int(paging["blocks_address"])), BLOCK
        )
        window.blocks[0] = 1  # once that is served, the pager has looked at all blocks, and reads the ring
        for event in (7, death_of(4), birth_of(4), death_of(3)):
            window.tell(event)
        window.pager.wake()

        def is_empty() -> list[int]:
            return [block for block in range(BLOCKS) if blocks["state"][block] & INACTIVE]

        until(lambda: is_empty() == [3], JOIN_S, "block 3 alone is empty")


def test_the_heap_tells_which_blocks_come_into_use_and_which_fall_out_of_it() -> None:
    """Two tensors are born and die; each has two blocks of its own."""
    with contextlib.ExitStack() as stack:
        member = stack.enter_context(join(stack.enter_context(make_pool(BLOCKS, region_bytes=BLOCK_BYTES))))
        tiers = stack.enter_context(TierStack.create([TierWish("memory", BLOCK_BYTES)], block_bytes=BLOCK_BYTES))
        heap = Heap(member, np.zeros(1, HEAP), tiers=tiers)
        assert heap.paged is not None
        heap.record[0]["attached"] = Attached.YES
        addresses = [allocator.allocate(heap.record[0], 2 * BLOCK_BYTES, 64) for _ in range(2)]
        assert min(addresses) > 0
        blocks = [(address - heap.base) // BLOCK_BYTES + i for address in addresses for i in range(2)]
        for address in addresses:
            allocator.free(heap.record[0], address)
        told = ring_of(heap.paged.arrays["ring_address"])[: int(heap.paged.page_table["events"])]
        assert [event for event in told if event < 0] == [*map(birth_of, blocks), *map(death_of, blocks)]
        heap.close()


@pytest.mark.parametrize(("flags", "place"), [(DEEPUM | APART, Arena.SHORT), (DEEPUM, Arena.LONG)])
def test_temporaries_lie_apart_where_they_are_to(flags: int, place: Arena) -> None:
    """Beside a tensor that lives for long there is room in its region: a temporary goes there, or into one of its own.

    Where it may not, no plan is made that would put it there.
    """
    with contextlib.ExitStack() as stack:
        member = stack.enter_context(join(stack.enter_context(make_pool(BLOCKS, region_bytes=4 * BLOCK_BYTES))))
        tiers = stack.enter_context(TierStack.create([TierWish("memory", 1 << 20)], block_bytes=4 * BLOCK_BYTES))
        heap = Heap(member, np.zeros(1, HEAP), tiers=tiers, paging={"flags": flags})
        stack.callback(heap.close)
        heap.enable(plan=flags & APART != 0)
        assert heap.planning is None
        for _ in range(4):
            long = allocator.allocate(heap.record[0], 2 * BLOCK_BYTES, 64)
            for _ in range(10):
                short = allocator.allocate(heap.record[0], BLOCK_BYTES, 64)
                allocator.free(heap.record[0], short)
            allocator.free(heap.record[0], long)
            allocator.mark(heap.record[0])
        assert next(arena for arena in Arena if short - heap.base < heap.arenas[arena]["end"]) == place


def test_without_invalidation_everything_is_copied() -> None:
    """Control: with that part off a block in which nothing lives is copied as any other."""
    with PagedWindow(FRAMES, flags=ALL & ~INVALIDATE) as window:
        for block in range(BLOCKS):
            window.blocks[block] = -1
            window.free(block)
        assert window.page_table["evicted"] >= BLOCKS - FRAMES
        assert window.blocks[0].all()


def test_system_calls_reach_what_is_out() -> None:
    """read(2) into memory that is out and write(2) from it work, as does a read across many such blocks."""
    with PagedWindow(FRAMES) as window, contextlib.ExitStack() as undo:
        for block in range(BLOCKS):
            window.blocks[block] = block
        file = os.memfd_create("copied")
        undo.callback(os.close, file)
        assert os.writev(file, [window.blocks[:]]) == window.blocks.nbytes
        found = np.frombuffer(os.pread(file, window.blocks.nbytes, 0), np.int64).reshape(window.blocks.shape)
        assert (found[:, -1] == np.arange(BLOCKS)).all()
        window.blocks[:] = -1
        assert os.preadv(file, [window.blocks[:]], 0) == window.blocks.nbytes
        assert (window.blocks[:, 0] == np.arange(BLOCKS)).all()


@compiled
def count_up(base: int, words: int, stride: int, turns: int) -> None:
    """Add one to every word of a stretch, so often, the words of a block far apart."""
    numbers = array_at(base, words, _I64)
    for _ in range(turns):
        for first in range(stride):
            for i in range(first, words, stride):
                numbers[i] += 1


@compiled
def add(base: int, words: int, amount: int) -> None:
    """Add to every word of a stretch."""
    numbers = array_at(base, words, _I64)
    for i in range(words):
        numbers[i] += amount


def test_no_write_is_lost_while_blocks_leave() -> None:
    """Invariant 4: threads that write to every block all the while find each of their writes there."""
    turns, n_threads = 6, 4
    with PagedWindow(FRAMES) as window:
        window.blocks[:] = 0
        words = window.blocks.size // n_threads
        count_up(window.base, 0, 1, 0)
        threads = [
            threading.Thread(target=count_up, args=(window.base + 8 * i * words, words, 512, turns))
            for i in range(n_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * JOIN_S)
        assert window.page_table["evicted"] > n_threads * turns, "blocks have left meanwhile"
        assert (window.blocks == turns).all()


FALLOCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def waits_for_a_page(thread_id: int) -> bool:
    """Tell whether a thread sleeps outside of all system calls, as one in a page fault does (proc(5))."""
    return Path(f"/proc/self/task/{thread_id}/syscall").read_text().startswith("-1 ")


def test_a_write_between_the_copy_and_the_end_of_the_pages_is_not_lost() -> None:
    """Invariant 4: whoever writes to a block that has been copied waits until its pages are gone, and writes then."""
    libc = ctypes.CDLL(None, use_errno=True)
    leaving: list[int] = []
    done = threading.Event()
    with PagedWindow(FRAMES, flags=0) as window:
        add(window.base, 0, 1)

        def write() -> None:
            add(window.base + leaving[0], BLOCK_BYTES // 8, 1000)
            done.set()

        writer = threading.Thread(target=write)

        @FALLOCATE
        def give_back(descriptor: int, mode: int, offset: int, length: int) -> int:
            if not leaving:
                leaving.append(offset)
                writer.start()
                until(lambda: done.is_set() or waits_for_a_page(writer.native_id or 0), JOIN_S, "it writes or waits")
            return int(libc.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length)))

        ours, window.pager.record["fallocate"] = window.pager.record["fallocate"].copy(), address_of(give_back)
        for block in range(BLOCKS):
            window.blocks[block] = block
        writer.join(JOIN_S)
        window.pager.record["fallocate"] = ours
        expected = np.arange(BLOCKS)
        expected[leaving[0] // BLOCK_BYTES] += 1000
        assert (window.blocks == expected[:, None]).all()


def address_of(function: Any) -> int:  # noqa: ANN401 - a C function of ctypes
    """Return where a function is."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def test_a_region_goes_back_when_the_job_may_hold_less() -> None:
    """Invariant 1: a limit that is lowered is kept to, with the contents, and the pool has the regions again."""
    with PagedWindow(2 * FRAMES) as window:
        window.blocks[:, :] = np.arange(BLOCKS)[:, None]
        window.pool.set_limit(window.job, FRAMES)
        window.pager.wake()
        assert (window.blocks[:, 7] == np.arange(BLOCKS)).all()
        deadline = threading.Event()
        for _ in range(1000):
            if window.pool.jobs[window.job]["held"] == FRAMES:
                break
            deadline.wait(0.01)
        assert window.pool.jobs[window.job]["held"] == FRAMES == (window.pool.regions["owner"] == window.job).sum()
        assert window.resident <= FRAMES
        assert (window.blocks[:, 8] == np.arange(BLOCKS)).all()


@pytest.mark.parametrize(("apart", "stay"), [(2, 2), (0, 0), (BLOCKS, 2)])
def test_where_temporaries_lie_apart_their_blocks_stay(apart: int, stay: int) -> None:
    """Fewer than half of what may be there; else none stays. When the job may hold one region, they leave, too."""
    with PagedWindow(FRAMES, flags=DEEPUM) as window:
        window.page_table["apart_to"] = apart
        window.pool.jobs[window.job]["iteration"] += 1
        window.tell(1)
        window.pager.wake()
        until(lambda: window.pager.record[0]["events"] == 1, JOIN_S, "the pager knows of the iteration")
        states = window.array("states_address")
        for turn in range(3):
            for block in range(BLOCKS):
                window.blocks[block] = 1000 * turn + block
                there = int(np.isin(states[:3], (State.WRITTEN, State.CLEAN)).sum())
            assert there == stay
        window.pool.set_limit(window.job, 1)
        window.pager.wake()
        until(lambda: window.resident <= 1, JOIN_S, "regions have gone back")
        assert window.blocks[:, 7].tolist() == [2000 + block for block in range(BLOCKS)]


class PagedMachine(RuleBasedStateMachine):
    """Blocks written, read, freed and used again, and a limit that changes, against a dictionary."""

    @initialize(frames=st.integers(2, 8), flags=st.sampled_from(sorted(PARTS.values())), apart=st.integers(0, 16))
    def begin(self, frames: int, flags: int, apart: int) -> None:
        """Begin with every block in use and nothing written; some stay from the first iteration on."""
        self.window = PagedWindow(frames, blocks=16, flags=flags)
        self.window.page_table["apart_to"] = apart
        self.frames = frames
        self.model: dict[int, int] = {}
        self.living = set(range(16))

    @rule(block=st.integers(0, 15), value=st.integers(-5, 5))
    def write(self, block: int, value: int) -> None:
        """Write to all of a block, if it is in use."""
        if block in self.living:
            self.window.blocks[block] = value
            self.model[block] = value

    @rule(block=st.integers(0, 15))
    def read(self, block: int) -> None:
        """Read a block: all of it is as it was written."""
        if block in self.model:
            assert (self.window.blocks[block] == self.model[block]).all()

    @rule(block=st.integers(0, 15))
    def free(self, block: int) -> None:
        """Free a block, or use it again with nothing known of it."""
        if block in self.living:
            self.window.free(block)
            self.living.remove(block)
            self.model.pop(block, None)
        else:
            self.window.use(block)
            self.living.add(block)

    @rule()
    def iterate(self) -> None:
        """Begin an iteration."""
        self.window.pool.jobs[self.window.job]["iteration"] += 1

    @rule()
    def hold_more(self) -> None:
        """Hold a region more."""
        if self.frames < 12:
            self.window.allow(1)
            self.frames += 1

    @invariant()
    def fits(self) -> None:
        """Invariant 1: what the kernel has is no more than what is held."""
        if hasattr(self, "window"):
            assert self.window.resident <= self.frames

    def teardown(self) -> None:
        """Read everything once more."""
        if hasattr(self, "window"):
            for block in self.model:
                self.read(block)
            self.window.__exit__()


TestPagedMachine = PagedMachine.TestCase
TestPagedMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
