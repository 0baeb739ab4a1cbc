"""What a kernel and a disk may do to a tier in the middle of a copy: by fault injection at the call."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.faulty_tier import FaultyTier

from zico.base.errors import ConfigError
from zico.tiers import destinations
from zico.tiers import stack as stacks
from zico.tiers.destinations import TierWish
from zico.tiers.layout import FAILED, FULL, TIER_MASK
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 8192
SIZE = 3 * BLOCK + 77
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[TierStack]:
    """Give a file for eight blocks above another tier, memory for four."""
    wishes = (TierWish("file", 8 * BLOCK), TierWish("memory", 4 * BLOCK))
    with TierStack.create(wishes, block_bytes=BLOCK, directory=str(tmp_path)) as made:
        yield made


def some(size_bytes: int = SIZE) -> np.ndarray:
    """Return bytes."""
    return np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)


def put(stack: TierStack, data: np.ndarray) -> int:
    """Put an array."""
    return stack.put(data.ctypes.data, data.nbytes)


def got(stack: TierStack, ticket: int, size_bytes: int) -> np.ndarray:
    """Return what comes back."""
    back = np.zeros(size_bytes, np.uint8)
    assert stack.get(ticket, back.ctypes.data, size_bytes) == 0
    return back


def test_interrupted_and_short_calls_are_gone_on_with(stack: TierStack) -> None:
    """Every second call is interrupted by a signal, the others move a page: all of the payload goes and comes."""
    faulty = FaultyTier(stack, 0)
    for name in ("pwrite", "pread"):
        faulty.on(name, lambda n, asked: -errno.EINTR if n % 2 else min(asked, 4096))
    data = some()
    ticket = put(stack, data)
    assert ticket & TIER_MASK == 0
    assert np.array_equal(got(stack, ticket, SIZE), data)


@pytest.mark.parametrize("status", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_write_that_fails_half_way_leaves_the_source_and_no_block(stack: TierStack, status: int) -> None:
    """The payload goes to the next tier, the source is unchanged, and the blocks that it had are free again."""
    faulty = FaultyTier(stack, 0)
    faulty.on("pwrite", lambda n, asked: -status if n > 1 else min(asked, 4096))
    data = some()
    ticket = put(stack, data)
    assert ticket & TIER_MASK == 1
    assert np.array_equal(data, some())
    assert np.array_equal(got(stack, ticket, SIZE), data)
    assert [use.used_bytes for use in stack.usage()] == [0, 4 * BLOCK]


def test_no_space_below_the_last_tier_is_full_and_an_error_is_failed(stack: TierStack) -> None:
    """A disk that is full is ``FULL``, as a tier that is; a disk that is broken is ``FAILED`` and its errno is kept."""
    held = [put(stack, some(8 * BLOCK)), put(stack, some(4 * BLOCK))]
    assert put(stack, some()) == FULL
    for ticket in held:
        stack.drop(ticket)
    FaultyTier(stack, 1).on("pwrite", lambda _n, _asked: -errno.EIO)
    faulty = FaultyTier(stack, 0)
    faulty.on("pwrite", lambda _n, _asked: -errno.ENOSPC)
    stack.shared["used"][1] = 4  # as if somebody had filled it: then only the file is asked
    assert put(stack, some()) == FULL
    faulty.on("pwrite", lambda _n, _asked: -errno.EIO)
    assert put(stack, some()) == FAILED
    assert errno.EIO in stack.shared["error"]
    assert np.array_equal(some(), some())


def test_a_read_that_fails_says_so_and_the_payload_stays(stack: TierStack) -> None:
    """An error of the disk is the errno; the next try, when it works again, finds everything."""
    data = some()
    ticket = put(stack, data)
    healthy = int(stack.record["tiers"][0][0]["pread"])
    FaultyTier(stack, 0).on("pread", lambda n, asked: -errno.EIO if n > 1 else min(asked, 4096))
    back = np.zeros(SIZE, np.uint8)
    assert stack.get(ticket, back.ctypes.data, SIZE) == errno.EIO
    assert stack.shared["error"][0] == errno.EIO
    stack.record["tiers"][0][0]["pread"] = healthy
    assert np.array_equal(got(stack, ticket, SIZE), data)


def test_a_stale_ticket_is_an_error_and_no_crash(stack: TierStack) -> None:
    """What has been dropped cannot be got, nor dropped again, nor more than was put."""
    data = some()
    ticket = put(stack, data)
    back = np.zeros(2 * SIZE, np.uint8)
    assert stack.get(ticket, back.ctypes.data, 2 * SIZE) == errno.EINVAL
    stack.drop(ticket)
    stack.drop(ticket)
    assert stack.get(ticket, back.ctypes.data, SIZE) == errno.EINVAL
    assert stack.usage()[0].used_bytes == 0


def test_space_is_set_aside_before_it_is_needed(tmp_path: Path) -> None:
    """A disk that has no more space makes the tier ``FULL`` before a byte is written; the last of it is used."""
    wishes = (TierWish("file", 64 * BLOCK),)
    with TierStack.create(wishes, block_bytes=BLOCK, directory=str(tmp_path)) as stack:
        stack.shared["prepared"] = 3
        faulty = FaultyTier(stack, 0)
        faulty.on("fallocate", lambda _n, _offset: -errno.ENOSPC)
        written: list[int] = []
        faulty.on("pwrite", lambda _n, size_bytes: written.append(size_bytes) or size_bytes)  # type: ignore[func-returns-value]
        assert put(stack, some(4 * BLOCK)) == FULL
        assert written == []
        assert stack.usage()[0].used_bytes == 0
        assert put(stack, some(3 * BLOCK)) >= 0


def test_the_last_of_a_disk_is_used(tmp_path: Path) -> None:
    """Where the disk has less than is asked for ahead it is asked for what is needed."""
    with TierStack.create((TierWish("file", 64 * BLOCK),), block_bytes=BLOCK, directory=str(tmp_path)) as stack:
        stack.shared["prepared"] = 0
        FaultyTier(stack, 0).on("fallocate", lambda n, offset: -errno.ENOSPC if n % 2 else offset)
        assert put(stack, some(6 * BLOCK)) >= 0
        assert stack.shared["prepared"][0] == 6


def test_a_new_tier_that_takes_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full from the start shows when the tier is made, and nothing stays open."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    monkeypatch.setattr(stacks, "open_nameless", lambda *_: os.open("/dev/full", os.O_RDWR))
    with pytest.raises(ConfigError, match="the file tier cannot be used"):
        TierStack.create((TierWish("file", 64 * BLOCK),), block_bytes=BLOCK, directory=str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - a count


def test_a_file_system_that_cannot_set_space_aside_is_used_all_the_same(tmp_path: Path) -> None:
    """``EOPNOTSUPP`` is no reason to refuse."""
    with TierStack.create((TierWish("file", 64 * BLOCK),), block_bytes=BLOCK, directory=str(tmp_path)) as stack:
        stack.shared["prepared"] = 0
        FaultyTier(stack, 0).on("fallocate", lambda _n, _asked: -errno.EOPNOTSUPP)
        data = some()
        assert np.array_equal(got(stack, put(stack, data), SIZE), data)


def test_without_direct_access_a_file_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that refuses ``O_DIRECT`` is used without; with it unaligned payloads come through all the same."""
    found = []
    for direct in (True, False):
        if not direct:
            monkeypatch.setattr(destinations, "_try_direct", lambda _descriptor: None)
        with TierStack.create((TierWish("file", 64 * BLOCK),), block_bytes=BLOCK, directory=str(tmp_path)) as stack:
            found.append(bool(stack.record["tiers"][0][0]["direct"]))
            data = some(SIZE + 1)[1:]
            assert np.array_equal(got(stack, put(stack, data), SIZE), data)
    assert not found[1]


def test_a_directory_without_room_or_rights_is_refused_at_once(tmp_path: Path) -> None:
    """The error names the directory and what to set; a refused stack leaves no descriptor."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    wishes = (TierWish("memory", 64 * BLOCK), TierWish("file", 64 * BLOCK))
    with pytest.raises(ConfigError, match=r"cannot be made in '.*nowhere'.*Set ZICO_SPILL_DIR"):
        TierStack.create(wishes, block_bytes=BLOCK, directory=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="less than one block"):
        TierStack.create((TierWish("memory", BLOCK - 1),), block_bytes=BLOCK)
    with pytest.raises(ConfigError, match="multiple of 4096"):
        TierStack.create(wishes, block_bytes=1000)
    with pytest.raises(ConfigError, match="0 tiers"):
        TierStack.create((), block_bytes=BLOCK)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - a count
