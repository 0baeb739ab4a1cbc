"""Tensors of jobs on the software twin leave and come back by side streams, in any order that a device may have."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.swapping_job import MIB, PINNED, Saved, SwappingJob, got, swapping
from cpu.support.swapping_parts import DEADLINE_S
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, World
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError, SwapError
from zico.heap.cuda import on_stream
from zico.pool.layout import JobState, SaveMode
from zico.swap import joining as swap_joining
from zico.swap.device_tier import DeviceTier
from zico.swap.mover import Place
from zico.tiers.destinations import TierWish
from zico.tiers.layout import Rates

if TYPE_CHECKING:
    from collections.abc import Sequence


BELOW = {"file": (TierWish("file", 64 * MIB),), "compressed": (TierWish("compressed", 64 * MIB),)}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile what jobs call, so that no test's deadline pays for it."""
    with World(2) as world, swapping(world) as job:
        leave_and_return(job, REGION_BYTES)


def leave_and_return(job: SwappingJob, size_bytes: int) -> None:
    """Let one tensor leave, come back, and be looked at."""
    saved = got(job.save(size_bytes))
    assert job.mover.send(saved)
    assert job.mover.settle(DEADLINE_S)
    assert saved.place is Place.AWAY
    job.free(saved)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_a_tensor_leaves_another_job_has_its_memory_and_it_comes_back(seed: int) -> None:
    """Invariants 2 and 7: memory goes to a neighbour and comes from it while the device stands still, in any order.

    Nothing waits on the processor: all is queued before the device does its first step.
    """
    with World(2) as world, swapping(world) as job, TwinTenant(world) as other, contextlib.ExitStack() as undo:
        undo.callback(world.twin.release)
        world.twin.pause()
        saved = got(job.save(REGION_BYTES))
        assert job.mover.send(saved)
        assert job.mover.settle(DEADLINE_S)
        assert saved.place is Place.AWAY, "its memory is free, though the device has done nothing"
        job.tenant.settle()
        other.free(got(other.allocate(2 * REGION_BYTES)))
        job.free(saved)
        assert world.handed_on == 2
        world.twin.run_shuffled(seed)
        assert all(stream.is_idle() for stream in world.twin._all_streams())
        world.check()
        world.twin.release()
        other.leave()


def test_the_memory_goes_to_others_only_behind_the_copy() -> None:
    """What left is not given to another job before the device has copied it, unless that waits for the copy."""
    with World(1) as world, swapping(world) as job, TwinTenant(world) as other, contextlib.ExitStack() as undo:
        undo.callback(world.twin.release)
        saved = got(job.save(REGION_BYTES))
        job.tenant.driver.synchronize(job.tenant.handles[0])
        world.twin.pause()
        assert job.mover.send(saved)
        assert job.mover.settle(DEADLINE_S)
        job.tenant.settle()
        taken = got(other.allocate(REGION_BYTES))
        theirs, ours = (world.twin.stream(handle) for handle in (other.handles[0], job.tenant.handles[0]))
        assert not theirs.can_step(), "it waits for the first job's main stream"
        ours.step()
        assert not ours.can_step(), "which has marked its own work, and waits for the copy"
        world.twin.run_shuffled(0)
        other.free(taken)
        world.twin.release()
        job.free(saved)
        other.leave()
        world.check()


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_whatever_leaves_and_returns_is_as_it_was(seed: int) -> None:
    """Invariants 2, 4 and 7: tensors of two jobs leave, return, are used on two streams and freed, in any order."""
    rng = random.Random(seed)  # noqa: S311 - a test's
    with World(8) as world, swapping(world) as one, swapping(world) as other:
        jobs: list[tuple[SwappingJob, list[Saved]]] = [(one, []), (other, [])]
        world.twin.pause()
        for _ in range(60):
            work(*rng.choice(jobs), rng)
            for _ in range(rng.randrange(6)):
                ready = [stream for stream in world.twin._all_streams() if stream.can_step()]
                if ready:
                    rng.choice(ready).step()
            world.check()
        world.twin.run_shuffled(seed)
        world.twin.release()
        for job, alive in jobs:
            for saved in alive:
                job.free(saved)
        world.check()


def work(job: SwappingJob, alive: list[Saved], rng: random.Random) -> None:
    """Let a job do one thing."""
    doing = rng.choice("aassssufe")
    if doing == "a" and len(alive) < 3:
        saved = job.save(rng.choice([100_000, REGION_BYTES // 2, REGION_BYTES]), rng.randrange(2))
        if saved is not None:
            alive.append(saved)
    elif doing == "e":
        job.tenant.settle()
    elif alive and doing != "a":
        saved = rng.choice(alive)
        if doing == "s":
            job.mover.send(saved)
            assert job.mover.settle(DEADLINE_S)
            return
        with contextlib.suppress(SwapError):  # no room now, while the device stands still
            if doing == "u":
                saved.use(rng.randrange(2))
            else:
                job.free(saved)
                alive.remove(saved)


@pytest.mark.parametrize("kind", sorted(BELOW))
def test_other_tiers_take_what_memory_has_no_room_for(kind: str) -> None:
    """Payloads go through pinned memory to the processor's tiers and back, the larger one first."""
    with World(4) as world, swapping(world, (*BELOW[kind], TierWish("memory", 2 * REGION_BYTES))) as job:
        saved = [got(job.save(size)) for size in (REGION_BYTES, REGION_BYTES, REGION_BYTES, 100_000)]
        for one in saved:
            assert job.mover.send(one)
        assert job.mover.settle(DEADLINE_S)
        assert [one.place for one in saved] == [Place.AWAY] * 4
        assert [job.tier._payloads[one.ticket].buffer is None for one in saved] == [False, False, True, True]
        assert len(job.tier.rates()) == 2
        for one in reversed(saved):
            job.free(one)
        world.check()


def test_a_memory_tier_that_holds_no_tensor_is_refused() -> None:
    """One sentence with its size and the least that is of use; nothing is left behind."""
    with World(2) as world, TwinTenant(world) as job:
        before = world.twin.leaks()
        with pytest.raises(ConfigError, match=r"the memory tier has 0 B, .* give at least 1 MiB"):
            DeviceTier(job.heap, (TierWish("memory", 0), *BELOW["file"]))
        assert world.twin.leaks() == before


def test_a_buffer_serves_the_next_payload_of_its_size() -> None:
    """An iteration pins nothing that the last one has pinned."""
    with World(2) as world, swapping(world) as job:
        before = registrations(world)
        for _ in range(3):
            leave_and_return(job, 2 * MIB)
            assert job.mover.settle(DEADLINE_S)
        assert registrations(world) == before + 1


def test_buffers_that_are_free_make_room_for_another_size() -> None:
    """They go when the tier has no room for a payload beside them."""
    with World(2) as world, swapping(world, (TierWish("memory", 2 * MIB),)) as job:
        leave_and_return(job, 2 * MIB)
        assert job.mover.settle(DEADLINE_S)
        leave_and_return(job, MIB)
        assert job.mover.settle(DEADLINE_S)
        assert job.tier._buffers._held_bytes == MIB


def test_what_the_driver_does_not_pin_goes_to_the_next_tier() -> None:
    """Pinned memory that cannot be had is as a tier without room."""
    with World(2) as world, swapping(world, (*PINNED, *BELOW["file"])) as job:
        saved = got(job.save(REGION_BYTES))
        world.twin.fail_next("cuMemHostRegister")
        assert job.mover.send(saved)
        assert job.mover.settle(DEADLINE_S)
        assert saved.place is Place.AWAY
        assert job.tier._payloads[saved.ticket].buffer is None
        job.free(saved)
        world.check()


def registrations(world: World) -> int:
    """Return how much memory of the host is registered."""
    return world.twin.leaks()["registrations"]


def test_a_buffer_is_not_written_while_it_is_still_read() -> None:
    """What leaves next waits on the device for the copy in that its buffer is read by, though that is far behind."""
    with World(4) as world, swapping(world, (TierWish("memory", REGION_BYTES),)) as job:
        first, second = got(job.save(REGION_BYTES)), got(job.save(REGION_BYTES))
        assert job.mover.send(first)
        assert job.mover.settle(DEADLINE_S)
        world.twin.pause()
        first.use(1, keep=True)
        job.give_up(first.tensor)
        assert job.mover.settle(DEADLINE_S), "the buffer is free"
        assert job.mover.send(second)
        assert job.mover.settle(DEADLINE_S)
        assert second.place is Place.AWAY
        run_alone(world, (job.tenant.handles[0], job.tier.outgoing))
        world.twin.run_shuffled(0)
        world.twin.release()
        job.free(second)
        world.check()


def test_the_way_back_through_pinned_memory_is_free_before_it_is_used_again() -> None:
    """A payload of another tier is not read over one that the device has yet to copy in."""
    with World(8) as world, swapping(world, BELOW["file"]) as job:
        both = [got(job.save(REGION_BYTES)) for _ in range(2)]
        for saved in both:
            assert job.mover.send(saved)
        assert job.mover.settle(DEADLINE_S)
        incoming, wait = world.twin.stream(job.tier.incoming), world.twin.cuStreamSynchronize
        incoming.hold(incoming.done)

        def go_on_and_wait(stream: Any) -> Any:  # noqa: ANN401 - as the driver's
            incoming.release()
            return wait(stream)

        both[0].use(0)
        world.twin.cuStreamSynchronize = go_on_and_wait  # type: ignore[method-assign]
        both[1].use(1)
        incoming.release()
        world.twin.cuStreamSynchronize = wait  # type: ignore[method-assign]
        for saved in both:
            job.free(saved)
        world.check()


def run_alone(world: World, handles: Sequence[int]) -> None:
    """Run streams as far as they get while all others are held."""
    streams = [world.twin.stream(handle) for handle in handles]
    while ready := [stream for stream in streams if stream.can_step()]:
        ready[0].step()


@pytest.mark.parametrize("function", ["cuMemHostRegister", "cuMemcpyDtoHAsync", "cuStreamIsCapturing"])
def test_what_the_driver_refuses_to_copy_stays(function: str) -> None:
    """The tensor is here, as it was; nothing is kept, and it is not tried again."""
    with World(2) as world, swapping(world) as job:
        saved = got(job.save(REGION_BYTES))
        world.twin.fail_next(function)
        if function == "cuStreamIsCapturing":
            world.twin.fail_next("cuCtxSynchronize")
        assert job.mover.send(saved)
        assert job.mover.settle(DEADLINE_S)
        assert (saved.place, saved.stays, job.tier._payloads) == (Place.HERE, True, {})
        job.free(saved)
        world.twin.refused.clear()
        job.tenant.record[0]["streams"]["failures"] = 0


def test_what_cannot_be_copied_back_raises_and_comes_later() -> None:
    """Whoever needs it is told; the payload is still there, and the memory that it was to have is not lost."""
    with World(2) as world, swapping(world) as job:
        saved = got(job.save(REGION_BYTES))
        assert job.mover.send(saved)
        assert job.mover.settle(DEADLINE_S)
        world.twin.fail_next("cuMemcpyHtoDAsync")
        with pytest.raises(SwapError, match="cannot be read back"):
            saved.use(0)
        job.give_up(saved.came)  # as PyTorch does with memory that nobody refers to
        job.free(saved)


def test_a_refused_mark_or_wait_is_waited_for_here() -> None:
    """Where the device takes no mark behind a copy, or no wait for it, the thread that asks waits."""
    with World(2) as world, swapping(world) as job:
        saved = got(job.save(REGION_BYTES))
        job.tenant.driver.synchronize(job.tenant.handles[0])
        on_stream.use_behind(job.tenant.record[0], saved.tensor.address, job.tier.outgoing)
        world.twin.fail_next("cuStreamIsCapturing")
        assert job.tier.mark(job.tier.outgoing) == 0
        assert world.twin.stream(job.tier.outgoing).is_idle()
        job.free(saved)
        world.twin.refused.clear()
        job.tenant.record[0]["streams"]["failures"] = 0


def test_nobody_counts_on_a_job_that_swaps_on_a_gpu() -> None:
    """At its boundary it is not called to evict what another lacks, since it could not."""
    with World(1) as world, TwinTenant(world) as job, TwinTenant(world) as other:
        taken = got(job.allocate(REGION_BYTES))
        state, calls = int(job.job["state"]), int(job.job["broker_admits"])
        job.job["save"], job.job["state"] = SaveMode.SWAP, JobState.BOUNDARY
        assert other.allocate(REGION_BYTES) is None
        assert int(job.job["broker_admits"]) == calls
        job.job["state"] = state
        job.free(taken)
        for one in (job, other):
            one.leave()


# -- by plan ---------------------------------------------------------------------------------------


def loads_at_uses(plan: Any) -> list[int]:  # noqa: ANN401 - a Plan
    """Return what was alive or away at each use of the iteration that a plan was made for."""
    seen = plan.observed
    return [int(seen.load_bytes[tick]) for code, tick in zip(seen.sequence, seen.event_tick, strict=True) if code & 1]


def test_a_job_follows_a_plan_within_its_limit() -> None:
    """Invariant 8: a job with less than its peak trains by plan, and every tensor is as it was.

    Iterations are forward and backward passes over eight tensors of a region each.
    """
    layers, limit = 8, 6
    with World(12) as world, TwinTenant(world, wait_limit_s=DEADLINE_S) as tenant, contextlib.ExitStack() as undo:
        world.pool.set_limit(tenant.place, limit)
        swapper = swap_joining.start(tenant.heap, "memory:64MiB")
        tier = swapper.tier
        tier._link = Rates(1e12, 1e12, 0.0, 0.0)  # the twin's iterations take no time, and its copies would
        undo.callback(tier.close)
        undo.callback(swapper._mover.close)
        job = SwappingJob(tenant, tier, swapper._mover)
        for _ in range(8):
            saved = []
            for _ in range(layers):
                saved.append(got(job.save(REGION_BYTES)))
                swapper.saved(saved[-1])
            while saved:
                one = saved.pop()
                swapper.used(one, one.hold)
                job.free(one)
                swapper.forget(one)
            tenant.mark()
            if swapper._learner.planning is not None:
                swapper._learner.planning.join(DEADLINE_S)
        assert swapper.planned_iterations >= 3
        assert loads_at_uses(swapper._plan) == [i * REGION_BYTES for i in range(layers, 0, -1)]
        assert swapper.figures.out_bytes >= 8 * (layers - limit) * REGION_BYTES
        assert int(tenant.job["peak_held"]) <= limit
        assert swapper.settle(DEADLINE_S)
        for handle in (*tenant.handles, tier.outgoing):
            tenant.driver.synchronize(handle)
        tenant.settle()
        tenant.check_empty()
        world.check()
