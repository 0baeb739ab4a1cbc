"""A job on a GPU that may hold less than it needs, on the software twin: its window is managed memory."""

from __future__ import annotations

import contextlib
import ctypes
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, World
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError, DriverError
from zico.heap.cuda.managed_window import FLAGS, SIDE_STREAMS, SLOT_BYTES, cut, open_window
from zico.heap.layout import Arena
from zico.paging.layout import PAGING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpu.support.twin_world import Tensor

BUDGET = 6
SLOTS = 48
DEVICE_BYTES = 128 * REGION_BYTES
MAPS = 10
FEW_AHEAD = 4
"""Executions that the chain is ahead, of about twenty an iteration."""
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE, of device 0
LEARNED = 6
"""Iterations after which the tables know what comes."""


@contextlib.contextmanager
def paged(world: World, **options: Any) -> Iterator[TwinTenant]:  # noqa: ANN401 - the tenant's
    """Give a job whose window has twice as many slots as are live at most."""
    options.setdefault("wait_limit_s", 0.05)
    with TwinTenant(world, managed_bytes=2 * SLOTS * SLOT_BYTES, **options) as job:
        yield job
        job.leave()


@pytest.fixture
def world() -> Iterator[World]:
    """Return a device with a pool of few regions, as large as blocks."""
    with World(BUDGET, total_bytes=DEVICE_BYTES) as made:
        yield made
        made.check()


@pytest.fixture
def job(world: World) -> Iterator[TwinTenant]:
    """Return a paged job."""
    with paged(world) as made:
        yield made


def got(tensor: Tensor | None) -> Tensor:
    """Return a tensor that must have been had."""
    assert tensor is not None
    return tensor


def settle(job: TwinTenant) -> None:
    """Wait until the device has done everything, our own stream included."""
    for handle in (*job.handles, job.heap.managed.stream):
        job.driver.synchronize(handle)


def train(job: TwinTenant, maps: int = MAPS) -> None:
    """Do an iteration: feature maps forth, each touched again and freed on the way back, behind a gradient."""
    made = [got(job.allocate(SLOT_BYTES)) for _ in range(maps)]
    for tensor in reversed(made):
        gradient = got(job.allocate(SLOT_BYTES // 4))
        job.free(tensor)
        job.free(gradient)
    job.mark()


def steering(job: TwinTenant, name: str) -> int:
    """Return a figure of the job's."""
    return int(job.heap.steering[0][name])


# -- what is there ---------------------------------------------------------------------------------


def test_a_job_that_needs_more_than_the_budget_trains(world: World, job: TwinTenant) -> None:
    """Invariants 1 and 9: kernels find what they wrote, and what is resident stays within the regions held."""
    weights = [got(job.allocate(SLOT_BYTES)) for _ in range(2)]
    for _ in range(3):
        made = [got(job.allocate(SLOT_BYTES)) for _ in range(MAPS)]
        settle(job)
        assert job.job["held"] == BUDGET
        assert world.twin.managed_resident_bytes <= BUDGET * SLOT_BYTES
        assert job.job["live_bytes"] > BUDGET * REGION_BYTES
        for tensor in reversed(made):
            job.free(tensor)
        job.mark()
        settle(job)
        assert world.twin.managed_resident_bytes <= int(job.job["held"]) * SLOT_BYTES
    assert job.job["out_bytes"] > 0
    for tensor in weights:
        job.free(tensor)


def test_what_is_learned_is_there_in_time() -> None:
    """Once the tables know the iteration, hardly a touched tensor is out; without them, most are."""
    missed = []
    for flags in (FLAGS, 0):
        with World(BUDGET, total_bytes=DEVICE_BYTES) as world, paged(world) as job:
            paging_of(job)["flags"] = flags
            paging_of(job)["degree"] = FEW_AHEAD
            for _ in range(LEARNED):
                train(job)
            before = steering(job, "missed")
            train(job)
            missed.append(steering(job, "missed") - before)
            assert (steering(job, "prefetched") > 0) == (flags != 0)
    learned, unlearned = missed
    assert unlearned >= MAPS - BUDGET
    assert learned * 2 <= unlearned


def paging_of(job: TwinTenant) -> Any:  # noqa: ANN401 - a PAGING record
    """Return the job's tables."""
    memory: Any = (ctypes.c_char * PAGING.itemsize).from_address(steering(job, "paging_address"))
    return np.frombuffer(memory, PAGING)[0]


def test_prefetches_follow_the_tables(world: World, job: TwinTenant) -> None:
    """What comes in on the way back comes in the order in which it is touched: the reverse of its allocation."""
    paging_of(job)["degree"] = FEW_AHEAD
    for _ in range(LEARNED):
        train(job)
    made = [got(job.allocate(SLOT_BYTES)) for _ in range(MAPS)]
    settle(job)
    out = [tensor for tensor in made if not world.twin.is_on_device(tensor.address, SLOT_BYTES)]
    with orders(world) as given_orders:
        for tensor in reversed(made):
            gradient = got(job.allocate(SLOT_BYTES // 4))
            job.free(tensor)
            job.free(gradient)
    came = [
        one for address, size, place in given_orders for one in out if place == ON_DEVICE and covers(address, size, one)
    ]
    assert len(out) >= MAPS - BUDGET
    assert len(came) >= len(out) - 1
    assert came == sorted(came, key=lambda tensor: -tensor.number)
    job.mark()


def covers(address: int, size_bytes: int, tensor: Tensor) -> bool:
    """Tell whether a range has a tensor's first byte."""
    return address <= tensor.address < address + size_bytes


@contextlib.contextmanager
def orders(world: World) -> Iterator[list[tuple[int, int, int]]]:
    """Note each order to move: address, bytes, place."""
    functions = world.twin._addresses.do
    real = functions["cuMemPrefetchAsync_v2"]
    noted: list[tuple[int, int, int]] = []

    def note(*args: Any) -> Any:  # noqa: ANN401 - as the function
        noted.append(args[:3])
        return real(*args)

    functions["cuMemPrefetchAsync_v2"] = note
    yield noted
    functions["cuMemPrefetchAsync_v2"] = real


def test_weights_that_nothing_is_seen_to_touch_stay(world: World, job: TwinTenant) -> None:
    """What lives over an iteration untouched goes last, though it came first."""
    weights = [got(job.allocate(SLOT_BYTES)) for _ in range(3)]
    for _ in range(4):
        train(job)
    settle(job)
    assert all(world.twin.is_on_device(tensor.address, SLOT_BYTES // 2) for tensor in weights)
    assert steering(job, "n_silent") >= len(weights)
    for tensor in weights:
        job.free(tensor)


def test_what_no_kernel_may_be_using_goes(world: World, job: TwinTenant) -> None:
    """Invariant 2: an order out waits for what the job's streams were given, and no stream ever waits for ours."""
    world.twin.pause()
    made = [got(job.allocate(SLOT_BYTES)) for _ in range(MAPS)]
    ours = world.twin._streams[job.heap.managed.stream]
    steps = 0
    while ours.can_step():
        steps += bool(ours.step())
    assert steps > 0
    assert world.twin.moved_out_bytes == 0, "the device has not come to what fills the tensors"
    world.twin.release()
    settle(job)
    assert world.twin.moved_out_bytes > 0
    for tensor in made:
        job.free(tensor)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=12, deadline=None)
def test_whatever_a_job_does_its_tensors_hold_what_was_written(seed: int) -> None:
    """Invariant 4: of random work on three streams, beside an ordinary job, every kernel finds its tensor's bytes."""
    rng = random.Random(seed)  # noqa: S311 - a test's
    with World(BUDGET, total_bytes=DEVICE_BYTES) as world:
        with paged(world, streams=3) as job, TwinTenant(world) as neighbour:
            for _ in range(60):
                work(rng.choice([job, job, neighbour]), rng)
            settle(job)
            assert world.twin.managed_resident_bytes <= max(int(job.job["held"]), 2) * SLOT_BYTES
            job.check()
            neighbour.leave()
        world.check()


def work(job: TwinTenant, rng: random.Random) -> None:
    """Let a job do one thing."""
    doing, stream = rng.choice("aaaafffue"), rng.randrange(len(job.handles))
    if doing == "a" and len(job.live) < MAPS:
        if job.heap.managed is not None or job.job["held"] < 2:
            job.allocate(rng.choice([100, 70_000, SLOT_BYTES // 2, SLOT_BYTES]), stream)
    elif doing == "e" and rng.random() < 0.3:
        job.end_iteration()
    elif job.live and doing in "fu":
        tensor = rng.choice(job.live)
        (job.free if doing == "f" else job.use_on)(tensor, stream)


# -- what is held ----------------------------------------------------------------------------------


def test_a_limit_is_what_may_be_resident(world: World, job: TwinTenant) -> None:
    """A job with a limit of its own holds no more, and lets go when the limit is lowered."""
    world.pool.set_limit(job.place, 4)
    made = [got(job.allocate(SLOT_BYTES)) for _ in range(MAPS)]
    settle(job)
    assert job.job["held"] == 4
    assert world.twin.managed_resident_bytes <= 4 * SLOT_BYTES
    world.pool.set_limit(job.place, 2)
    job.settle()
    settle(job)
    assert job.job["held"] == 2
    assert world.twin.managed_resident_bytes <= 2 * SLOT_BYTES
    for tensor in made:
        job.free(tensor)


def test_who_waits_gets_what_nothing_lives_for(world: World, job: TwinTenant) -> None:
    """Invariant 7: under pressure a paged job gives back what it holds beyond its live tensors, and takes no more."""
    made = [got(job.allocate(SLOT_BYTES)) for _ in range(MAPS)]
    with TwinTenant(world) as neighbour:
        for tensor in made[1:]:
            job.free(tensor)
        assert job.job["held"] == BUDGET, "nobody waits: what is there is kept"
        assert neighbour.allocate(2 * REGION_BYTES) is None
        world.pool.header["boundary_waiters"] += 1
        job.settle()
        world.pool.header["boundary_waiters"] -= 1
        assert job.job["held"] == 1
        taken = got(neighbour.allocate(5 * REGION_BYTES))
        more = [got(job.allocate(SLOT_BYTES)) for _ in range(4)]
        assert job.job["held"] == 1, "it goes on with what it has"
        neighbour.free(taken)
        neighbour.leave()
    for tensor in (made[0], *more):
        job.free(tensor)


def test_without_a_single_region_the_job_waits(world: World) -> None:
    """Where others hold all, a paged job is refused after the wait limit like any, and nothing of it stays."""
    with TwinTenant(world) as neighbour, paged(world) as job:
        taken = got(neighbour.allocate(BUDGET * REGION_BYTES))
        assert job.allocate(SLOT_BYTES) is None
        assert (job.job["held"], steering(job, "live")) == (0, 0)
        neighbour.free(taken)
        job.free(got(job.allocate(SLOT_BYTES)))
        neighbour.leave()


def test_a_window_that_is_full_refuses(job: TwinTenant) -> None:
    """A tensor for which the window has no room is refused, and the sentence names the setting."""
    made = []
    while (tensor := job.allocate(4 * SLOT_BYTES)) is not None:
        made.append(tensor)
    assert len(made) * 4 >= SLOTS
    assert job.job["oom_count"] > 0
    assert "ZICO_PAGED_BYTES" in job.heap.no_next_tier
    for tensor in made:
        job.free(tensor)
    job.free(got(job.allocate(4 * SLOT_BYTES)))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 5])
def test_an_order_that_is_refused_leaves_the_count_right(world: World, job: TwinTenant, which: int) -> None:
    """What the driver does not move counts as where it was; later orders set it right, and contents are never lost."""
    real, calls = world.twin._addresses.do["cuMemPrefetchAsync_v2"], []

    def sometimes(*args: Any) -> Any:  # noqa: ANN401 - as the function
        calls.append(args)
        if len(calls) == which + 1:
            world.twin.fail_next("cuMemPrefetchAsync")
        return real(*args)

    world.twin._addresses.do["cuMemPrefetchAsync_v2"] = sometimes
    made = [got(job.allocate(SLOT_BYTES)) for _ in range(MAPS)]
    world.twin._addresses.do["cuMemPrefetchAsync_v2"] = real
    made.append(got(job.allocate(SLOT_BYTES)))
    settle(job)
    assert job.record[0]["streams"]["failures"] == 1
    assert world.twin.managed_resident_bytes <= (BUDGET + 1) * SLOT_BYTES
    for tensor in made:
        job.free(tensor)
    job.record[0]["streams"]["failures"] = 0
    world.twin.refused.clear()


def test_failure_of_every_call_at_the_beginning_leaves_nothing() -> None:
    """Whichever call of the driver fails while a paged job is set up: one error, and nothing is held afterwards."""
    with World(2, total_bytes=DEVICE_BYTES) as world:
        before = world.twin.leaks()
        failed = 0
        for fail_at in range(1, 1000):
            world.twin.fail_at = world.twin.calls + fail_at
            try:
                with paged(world):
                    world.twin.fail_at = 0
                break
            except DriverError:
                failed += 1
                world.twin.fail_at = 0
                assert world.twin.leaks() == before
        assert failed > 20
        world.twin.refused.clear()


# -- the window ------------------------------------------------------------------------------------


def test_a_window_is_cut_without_a_hole() -> None:
    """Arenas are whole blocks side by side in the order in which offsets find them; nothing is outside."""
    made = cut(100 * SLOT_BYTES + 4096)
    main, spill, sides = made.ranges[: Arena.SPILL], made.ranges[Arena.SPILL], made.ranges[Arena.SPILL + 1 :]
    assert [start for start, _ in main[1:]] == [start + size_bytes for start, size_bytes in main[:-1]]
    assert sides == [(made.side_offset + i * made.side_bytes, made.side_bytes) for i in range(SIDE_STREAMS)]
    assert spill == (made.end, 0)
    assert made.end == made.side_offset + SIDE_STREAMS * made.side_bytes == 100 * SLOT_BYTES
    assert all(size_bytes % SLOT_BYTES == 0 for _, size_bytes in made.ranges)
    with pytest.raises(ConfigError, match="ZICO_PAGED_BYTES must be 96 MiB or more"):
        cut(SLOTS * SLOT_BYTES - 1)


def test_windows_together_fit_into_what_is_free(world: World) -> None:
    """A second window gets what the first has left; what does not fit is refused with the figures, and not recorded."""
    free_bytes = world.driver.free_bytes()
    with TwinTenant(world) as one, TwinTenant(world) as other:
        with open_window(one.member, one.place, "60%") as first:
            assert one.job["managed_bytes"] == first.size_bytes == free_bytes * 60 // 100
            with pytest.raises(DriverError, match=r"other jobs' windows may take 146.* of it: more could hang the GPU"):
                open_window(other.member, other.place, str(free_bytes // 2))
            assert other.job["managed_bytes"] == 0
            left = free_bytes - first.size_bytes
            with open_window(other.member, other.place, "") as second:
                assert second.size_bytes == left - left // 8
        for job in (one, other):
            job.leave()
