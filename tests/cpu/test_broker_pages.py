"""Physical memory follows what the jobs hold: what nobody has needed for a while goes back to the kernel."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

import pytest
from cpu.support.members import check_counters, grab, join, make_pool, release

from zico.broker.pool_manager import EMPTIED_BYTES, KEPT_NS, PoolManager
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zico.pool.table import PoolTable

REGIONS = 48
AT_A_TIME = 16
REGION_BYTES = EMPTIED_BYTES // AT_A_TIME


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool whose pages go back in three turns."""
    with make_pool(REGIONS, region_bytes=REGION_BYTES, claims=False) as pool:
        yield pool


@pytest.fixture
def member(pool: PoolTable) -> Iterator[PoolTable]:
    """Join the pool."""
    with join(pool) as member:
        yield member


def hold(pool: PoolTable, member: PoolTable, n: int) -> list[int]:
    """Let a job have so many regions more, and write a byte to each."""
    these: Sequence[int] = grab(member, n)
    with pool.driver.reserve(REGIONS * REGION_BYTES) as window:
        pool.driver.map(window, 0, pool.memory, 0, REGIONS * REGION_BYTES)
        for region in these:
            ctypes.memset(window.handle + region * REGION_BYTES, 1, 1)
    return these


def touched(pool: PoolTable) -> int:
    """Return how many regions have their page, by the kernel's account."""
    return pool.physical_bytes() // mmap.PAGESIZE


def turns(manager: PoolManager, now_ns: int) -> int:
    """Let the broker do all that is due in the next half of the time that pages are kept; returns how often."""
    count = 0
    end_ns = now_ns + KEPT_NS // 2
    while (due_ns := max(manager.due_ns, now_ns)) < end_ns:
        manager.act(due_ns)
        count += 1
    return count


def test_an_idle_pool_gives_its_pages_back(pool: PoolTable, member: PoolTable) -> None:
    """What nobody needs goes within two periods, some at a time, and what is held stays."""
    manager = PoolManager(pool, [], policy_named("none"))
    turns(manager, 0)
    kept, these = hold(pool, member, 4), hold(pool, member, REGIONS - 4)
    release(member, these)
    for period in range(2):
        assert touched(pool) == REGIONS, period
        count = turns(manager, (period + 1) * KEPT_NS)
    assert count >= (REGIONS - 4) / AT_A_TIME
    assert touched(pool) == 4
    check_counters(pool)
    release(member, kept)
    hold(pool, member, 4)
    assert touched(pool) == 4, "the regions that still have pages are granted first"
    hold(pool, member, REGIONS - 4)
    assert touched(pool) == REGIONS


def test_jobs_in_their_steady_state_keep_their_pages(pool: PoolTable, member: PoolTable) -> None:
    """A peak that comes once a period touches no page anew, and what is beyond it goes."""
    manager = PoolManager(pool, [], policy_named("none"))
    release(member, hold(pool, member, 40))
    for period in range(5):
        turns(manager, period * KEPT_NS)
        release(member, grab(member, 20))
        assert touched(pool) == (20 if period else 40), period
        assert int(pool.header["granted"]) == 0
