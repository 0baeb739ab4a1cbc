"""A GPU's next tier, on the software twin: tensors in pinned memory of the host when nobody in the pool can go on."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, World
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.libc import libc_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpu.support.twin_world import Tensor

BUDGET = 4
HOST_BYTES = 64 * REGION_BYTES
SMALL = 100


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile what jobs call, so that no test's deadline pays for it."""
    with World(2, host_bytes=HOST_BYTES) as world, TwinTenant(world) as job, TwinTenant(world) as other:
        taken = other.allocate(2 * REGION_BYTES)
        for size_bytes in (SMALL, REGION_BYTES):
            tensor = job.allocate(size_bytes)
            assert tensor is not None
            job.use_on(tensor, 1)
            job.free(tensor, 1)
        assert taken is not None
        other.free(taken)
        job.leave()
        other.leave()


@contextlib.contextmanager
def full_world(**settings: Any) -> Iterator[tuple[World, TwinTenant]]:  # noqa: ANN401 - the twin's
    """Make a world whose budget a neighbour holds that does nothing; returns a job that nobody can help."""
    with World(BUDGET, **settings) as world, TwinTenant(world) as job, TwinTenant(world) as neighbour:
        taken = got(neighbour.allocate(BUDGET * REGION_BYTES))
        yield world, job
        neighbour.free(taken)
        neighbour.leave()
        job.leave()
        world.check()


def got(tensor: Tensor | None) -> Tensor:
    """Return a tensor that must have been had."""
    assert tensor is not None
    return tensor


def test_a_job_that_nobody_can_help_goes_on_in_pinned_memory() -> None:
    """Its tensors, small and large, on any stream, keep what kernels write; none of it is in the pool's budget."""
    with full_world(host_bytes=HOST_BYTES) as (world, job):
        tensors = [got(job.allocate(size, stream)) for size in (3 * REGION_BYTES, SMALL, 65536) for stream in (0, 1)]
        assert all(job.is_spilled(tensor) for tensor in tensors)
        assert job.job["held"] == job.job["live_bytes"] == 0
        assert job.job["spilled_bytes"] == sum(tensor.size_bytes for tensor in tensors)
        assert world.twin.pinned_bytes == job.record[0]["spill"]["live_bytes"] > 0
        job.check()
        for number, tensor in enumerate(tensors):
            job.use_on(tensor, 1 - tensor.stream)
            job.free(tensor, number % 2)
        assert world.twin.pinned_bytes == job.record[0]["spill"]["live_bytes"] == 0
        job.check_empty()


def test_what_one_stream_frees_another_gets_when_the_device_is_done() -> None:
    """A range of the next tier goes from stream to stream, in a piece that stays mapped, and no kernel comes late."""
    with full_world(host_bytes=HOST_BYTES) as (world, job):
        kept = got(job.allocate(65536))
        for turn in range(8):
            tensor = got(job.allocate(300_000, turn % 2))
            assert tensor.address < kept.address + REGION_BYTES, "it is in the same piece"
            job.free(tensor)
        job.free(kept)
        assert not world.faults


def test_a_tensor_is_in_the_pool_again_when_there_is_room() -> None:
    """Only what was allocated meanwhile lies in the next tier; nothing has to be moved."""
    with World(2, host_bytes=HOST_BYTES) as world, TwinTenant(world) as job, TwinTenant(world) as neighbour:
        taken = got(neighbour.allocate(2 * REGION_BYTES))
        first = got(job.allocate(REGION_BYTES))
        neighbour.free(taken)
        second = got(job.allocate(REGION_BYTES))
        assert (job.is_spilled(first), job.is_spilled(second)) == (True, False)
        for one in (neighbour, job):
            one.leave()
        world.check()


def test_what_the_jobs_limit_holds_back_overflows_soon() -> None:
    """Above its own limit a job does not wait until its deadline, which is far, for what may never come."""
    with World(BUDGET, host_bytes=HOST_BYTES) as world, TwinTenant(world, wait_limit_s=1e6) as job:
        world.pool.set_limit(job.place, 1)
        tensor = got(job.allocate(3 * REGION_BYTES))
        assert job.is_spilled(tensor)
        job.leave()
        world.check()


def test_one_call_fills_a_tensor_of_several_pieces() -> None:
    """A driver refuses that where the processor may touch the pieces, as an H200's does: so it may not."""
    with full_world(host_bytes=HOST_BYTES) as (world, job):
        tensor = got(job.allocate(3 * REGION_BYTES))
        stream = job.handles[tensor.stream]
        job.driver.synchronize(stream)
        before = world.twin.read(tensor.address, 3 * REGION_BYTES)
        with job.driver.context.current():
            job.driver.call("cuMemsetD8Async", tensor.address, 7, 3 * REGION_BYTES, stream)
        job.driver.synchronize(stream)
        assert world.twin.read(tensor.address, 3 * REGION_BYTES) == bytes([7]) * 3 * REGION_BYTES
        world.twin.write(tensor.address, before)  # what the tensor's last kernel looks for
        job.free(tensor)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_whatever_jobs_do_where_memory_is_short_is_right(seed: int) -> None:
    """Invariants 1, 2 and 4: of random work much overflows; kernels find what they wrote, the budget is kept."""
    rng = random.Random(seed)  # noqa: S311 - a test's
    with World(BUDGET, host_bytes=HOST_BYTES, isolate=rng.random() < 0.3) as world:
        with contextlib.ExitStack() as stack:
            jobs = [stack.enter_context(TwinTenant(world, streams=3)) for _ in range(2)]
            for _ in range(50):
                work(rng.choice(jobs), rng)
            for job in jobs:
                job.check()
                (job.die if rng.random() < 0.3 else job.leave)()
        assert world.twin.pinned_bytes == 0
        world.check()


def work(job: TwinTenant, rng: random.Random) -> None:
    """Let a job do one thing."""
    doing, stream = rng.choice("aaaaffuue"), rng.randrange(3)
    if doing == "a":
        size_bytes = rng.randint(1, rng.choice([32_000, 400_000, 2 * REGION_BYTES]))
        if (
            int(job.job["held"]) + size_bytes // REGION_BYTES + 2 <= BUDGET
        ):  # else it is refused, after a fifth of a second
            record = job.record[0]
            spilled_bytes = int(record["spill"]["live_bytes"]) + -(-size_bytes // REGION_BYTES) * REGION_BYTES
            # The next tier has a limit, too, which a slow device lets a job reach.
            assert job.allocate(size_bytes, stream) or spilled_bytes > record["spill"]["limit_bytes"]
    elif doing == "e" and rng.random() < 0.3:
        job.end_iteration()
    elif job.live and doing != "e":
        tensor = rng.choice(job.live)
        (job.free if doing == "f" else job.use_on)(tensor, stream)


# -- where there is none, or no more ---------------------------------------------------------------


def test_an_older_driver_has_no_next_tier_and_says_so() -> None:
    """The request is refused, as it always was, and the heap has a sentence about why."""
    with full_world() as (world, job):
        assert job.heap.no_next_tier.startswith("cuDeviceGetAttribute")
        assert job.allocate(REGION_BYTES) is None
        assert not world.faults


def test_pieces_of_the_host_that_are_too_large_are_no_next_tier() -> None:
    """Where the host's granularity is no part of a region, the sentence has both numbers."""
    with full_world(host_bytes=HOST_BYTES, host_granularity_bytes=2 * REGION_BYTES) as (_, job):
        assert f"multiples of {2 * REGION_BYTES} bytes, regions have {REGION_BYTES}" in job.heap.no_next_tier
        assert job.allocate(REGION_BYTES) is None


@pytest.mark.parametrize("short", ["of the driver", "by the limit", "of the machine"])
def test_too_little_pinned_memory_refuses_and_keeps_nothing(short: str) -> None:
    """What does not fit is refused whole; what fits still comes."""
    host_bytes = 2 * REGION_BYTES if short == "of the driver" else HOST_BYTES
    with full_world(host_bytes=host_bytes) as (world, job):
        if short == "by the limit":
            job.record[0]["spill"]["limit_bytes"] = 2 * REGION_BYTES
        if short == "of the machine":
            good = int(job.heap.device[0]["sysconf"])
            job.heap.device[0]["sysconf"] = libc_address("usleep")  # 0 for so short an interval: no page is free
        before = state(world, job)
        assert job.allocate(3 * REGION_BYTES) is None
        assert state(world, job) == before
        if short == "of the machine":
            assert job.allocate(SMALL) is None
            job.heap.device[0]["sysconf"] = good
        job.free(got(job.allocate(REGION_BYTES)))
        world.twin.refused.clear()


def state(world: World, job: TwinTenant) -> Any:  # noqa: ANN401 - to be compared
    """Return what must be as it was after a refusal."""
    slots = job.heap.slots[["live", "region"]].tolist(), job.heap.slots["mapped"].tolist()
    record = job.record[0]
    held = {kind: count for kind, count in world.twin.leaks().items() if kind != "events"}
    gaps = job.heap.arenas["n_gaps"].tolist()
    return slots, job.heap.pinned_handles.tolist(), held, gaps, int(record["spill"]["live_bytes"]), int(job.job["held"])


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_refusal_at_any_call_leaves_everything_as_it_was(function: str, which: int) -> None:
    """Whichever call for whichever piece fails: the tensor is refused, nothing is kept, and the next request works."""
    with full_world(host_bytes=HOST_BYTES) as (world, job):
        before = state(world, job)
        real, calls = world.twin._addresses.do[function], []

        def sometimes(*args: Any) -> Any:  # noqa: ANN401 - as the function
            calls.append(args)
            if len(calls) == which + 1:
                world.twin.fail_next(function)
            return real(*args)

        with replaced(world, function, sometimes):
            assert job.allocate(3 * REGION_BYTES) is None
        assert len(world.twin.refused) == 1
        assert len(calls) == which + 1
        assert state(world, job) == before
        world.twin.refused.clear()
        job.free(got(job.allocate(3 * REGION_BYTES)))


@contextlib.contextmanager
def replaced(world: World, function: str, by: Any) -> Iterator[None]:  # noqa: ANN401 - a function of the driver
    """Let compiled code call something else for a function of the driver."""
    addresses = world.twin._addresses
    original = addresses.do[function]
    addresses.do[function] = by
    try:
        yield
    finally:
        addresses.do[function] = original


def test_memory_that_the_driver_does_not_unmap_serves_the_next_tensor() -> None:
    """It is counted as long as it is there, used again, and given back at the end."""
    with full_world(host_bytes=HOST_BYTES) as (world, job):
        world.twin.fail_next("cuMemUnmap")
        job.free(got(job.allocate(REGION_BYTES)))
        assert job.record[0]["spill"]["live_bytes"] == world.twin.pinned_bytes == REGION_BYTES
        tensor = got(job.allocate(REGION_BYTES))
        assert world.twin.pinned_bytes == REGION_BYTES
        job.free(tensor)
        assert job.record[0]["spill"]["live_bytes"] == world.twin.pinned_bytes == 0
        world.twin.refused.clear()


def test_a_device_that_cannot_be_waited_for_keeps_the_tensors_memory_until_it_can() -> None:
    """What kernels may still touch is not given back before the device says that they have ended."""
    with World(1, host_bytes=HOST_BYTES) as world:
        with TwinTenant(world) as job, TwinTenant(world) as neighbour:
            got(neighbour.allocate(REGION_BYTES))
            tensor = got(job.allocate(REGION_BYTES))
            world.twin.fail_next("cuCtxSynchronize")
            job.free(tensor)
            assert world.twin.pinned_bytes == REGION_BYTES
            job.settle()
            assert world.twin.pinned_bytes == 0
        assert not world.faults
