"""Tiers of a GPU, over the driver's software twin: pinned memory, then what is below it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from twin_device import MIB, TwinDevice

from zico.errors import ConfigError, DriverError
from zico.tiers.layout import FAILED, FULL
from zico.tiers.pinned import PinnedStack
from zico.tiers.stack import TierStack
from zico.tiers.transfers import Outcome, Transfers
from zico.tiers.wishes import TierWish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 1 << 16
UNIT = 2 * MIB
SOON_S = 30.0


class World:
    """A twin with memory, a stream of the job's, and a stack with four pinned blocks above a file of eight."""

    def __init__(self, undo: contextlib.ExitStack, directory: Path) -> None:
        """Make all of it."""
        self.device = undo.enter_context(TwinDevice(total_bytes=16 * MIB))
        self.driver = self.device.driver
        memory = undo.enter_context(self.driver.create_memory(UNIT, "t", UNIT))
        self.window = undo.enter_context(self.driver.reserve(UNIT))
        self.driver.map(self.window, 0, memory, 0, UNIT)
        self.address = self.window.handle
        self.stream = undo.enter_context(self.driver.create_stream())
        self.directory = str(directory)

    def stack(self, *kinds: str) -> TierStack:
        """Make a stack without anything pinned yet."""
        sizes = {"memory": 4 * BLOCK, "file": 8 * BLOCK, "compressed": 8 * BLOCK}
        wishes = [TierWish(kind, sizes[kind]) for kind in kinds]
        return TierStack.create(wishes, block_bytes=BLOCK, directory=self.directory)

    def pinned(self) -> PinnedStack:
        """Make the stack."""
        return PinnedStack(self.stack("memory", "file"), self.driver)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Give such a world; at its end the twin has nothing left."""
    with contextlib.ExitStack() as undo:
        yield World(undo, tmp_path)


def some(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("size_bytes", [1, BLOCK, 3 * BLOCK + 5, 9 * BLOCK + 77])
def test_what_leaves_the_device_comes_back(world: World, size_bytes: int) -> None:
    """Payloads come back from pinned memory, from the file, and from both, to another place of the device."""
    with contextlib.closing(world.pinned()) as stack, contextlib.closing(Transfers(stack)) as transfers:
        data = some(size_bytes)
        world.device.write(world.address, data)
        out = transfers.out(world.address, size_bytes)
        assert out.wait(SOON_S)
        assert out.outcome is Outcome.COPIED
        world.device.write(world.address, bytes(size_bytes))
        there = world.address + UNIT // 2
        back = transfers.back(out.ticket, there, size_bytes)
        assert back.wait(SOON_S)
        assert back.outcome is Outcome.COPIED
        assert world.device.read(there, size_bytes) == data
        transfers.drop(out.ticket)
        assert [use.used_bytes for use in stack._stack.usage()] == [0, 0]


def test_memory_is_pinned_while_the_stack_is_open(world: World) -> None:
    """The whole first tier and a piece for each direction are registered, and keep their pages; closed, nothing is."""
    stack = world.pinned()
    assert stack.pageable == ""
    assert sorted(world.device.twin._registered.values()) == [BLOCK, BLOCK, 4 * BLOCK]
    ticket = stack.put(world.address, BLOCK)
    stack.drop(ticket)
    assert stack._stack.trim() == stack._stack.trim() == 0
    stack.close()
    assert world.device.twin._registered == {}


def test_a_driver_that_pins_nothing_is_said_and_copies_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence names the size and the reason; payloads come back all the same."""

    def refuse(_address: int, _size_bytes: int) -> Any:  # noqa: ANN401 - never returns
        raise DriverError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(world.driver, "register_host", refuse)
    with contextlib.closing(world.pinned()) as stack:
        assert stack.pageable.startswith("256 KiB of memory could not be pinned, copies are slower: cuMemHostRegister")
        world.device.write(world.address, some(2 * BLOCK))
        ticket = stack.put(world.address, 2 * BLOCK)
        world.device.write(world.address, bytes(2 * BLOCK))
        assert stack.get(ticket, world.address, 2 * BLOCK) == 0
        assert world.device.read(world.address, 2 * BLOCK) == some(2 * BLOCK)


def test_a_copy_waits_on_the_device_for_the_stream_that_it_follows(world: World) -> None:
    """What a stream still has to write to the source is in the payload, and nothing is copied before."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    words = np.frombuffer(page, np.int64)
    with (
        contextlib.closing(world.pinned()) as stack,
        world.driver.register_host(words.ctypes.data, mmap.PAGESIZE) as gate,
        contextlib.closing(Transfers(stack)) as transfers,
    ):
        world.device.write(world.address, bytes(BLOCK))
        world.driver.wait_value(world.stream.handle, gate.device_address, 1)
        with world.driver.context.current():
            world.driver.call("cuMemsetD8Async", world.address, 7, BLOCK, world.stream.handle)
        stack.follow(world.stream.handle)
        out = transfers.out(world.address, BLOCK)
        assert not out.wait(0.05)
        words[0] = 1
        assert out.wait(SOON_S)
        back = transfers.back(out.ticket, world.address + BLOCK, BLOCK)
        assert back.wait(SOON_S)
        assert world.device.read(world.address + BLOCK, BLOCK) == b"\7" * BLOCK


def test_a_payload_without_room_leaves_nothing(world: World) -> None:
    """Where both tiers are too small the answer is ``FULL``, and all pieces that had room are free again."""
    with contextlib.closing(world.pinned()) as stack:
        assert stack.put(world.address, 13 * BLOCK) == FULL
        assert "no room is left where memory goes (memory 256 KiB, file 512 KiB)" in stack.why(FULL)
        assert [use.used_bytes for use in stack._stack.usage()] == [0, 0]
        assert stack.put(world.address, 12 * BLOCK) > 0


def test_an_error_of_the_device_is_failed_and_leaves_nothing(world: World) -> None:
    """An address that is not mapped is ``FAILED`` out and an errno in, and the reason is said."""
    with contextlib.closing(world.pinned()) as stack:
        assert stack.put(world.address + UNIT, BLOCK) == FAILED
        assert "the device: cuMemcpyDtoHAsync failed" in stack.why(FAILED)
        assert [use.used_bytes for use in stack._stack.usage()] == [0, 0]
        ticket = stack.put(world.address, BLOCK)
        assert stack.get(ticket, world.address + UNIT, BLOCK) == errno.EIO
        assert stack.get(ticket, world.address, 2 * BLOCK) == errno.EINVAL
        stack.drop(ticket)
        assert stack.get(ticket, world.address, BLOCK) == errno.EINVAL


def test_a_stack_without_memory_first_is_refused(world: World) -> None:
    """A GPU's memory goes to memory first; a refused stack is closed."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    with pytest.raises(ConfigError, match="name it first"):
        PinnedStack(world.stack("file", "memory"), world.driver)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - a count


def test_every_call_that_fails_leaves_nothing(world: World) -> None:
    """Whichever call of the driver fails while the stack is made, nothing stays registered, created or open."""
    before = len(os.listdir("/proc/self/fd")), dict(world.device.twin.leaks())  # noqa: PTH208 - a count
    real = world.driver.create_stream
    for fail_at in (1, 2):
        count = []

        def create_stream(fail_at: int = fail_at, count: list[int] = count) -> Any:  # noqa: ANN401 - an Owned
            count.append(1)
            if len(count) == fail_at:
                raise DriverError("cuStreamCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY")
            return real()

        world.driver.create_stream = create_stream
        with pytest.raises(DriverError, match="cuStreamCreate"):
            world.pinned()
        assert (len(os.listdir("/proc/self/fd")), dict(world.device.twin.leaks())) == before  # noqa: PTH208 - a count
