"""Memory of a paused job leaves a GPU for pinned memory and comes back, on the software twin."""

from __future__ import annotations

import contextlib
import threading
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.threads import in_thread, until
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, Tensor, World
from twin.entry import SUCCESS

from zico.heap import allocator
from zico.job.context_aside import ContextAside
from zico.pool import regions
from zico.pool.layout import NO_MORE, NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUDGET = 4
HOST_BYTES = 64 * REGION_BYTES
SMALL = 100
PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile what jobs call, so that no test's deadline pays for it."""
    with worlds() as (world, job, _):
        job.allocate(REGION_BYTES)
        with paused(world, job):
            until(lambda: evicted(job) == 1)


@contextlib.contextmanager
def worlds(**settings: Any) -> Iterator[tuple[World, TwinTenant, TwinTenant]]:  # noqa: ANN401 - the twin's
    """Make a world with a job and a neighbour; at its end nothing may have been wrong."""
    with (
        World(BUDGET, host_bytes=HOST_BYTES, **settings) as world,
        TwinTenant(world) as job,
        TwinTenant(world) as other,
    ):
        yield world, job, other
        other.leave()
        job.leave()
        world.check()
        assert world.twin.pinned_bytes == 0


@contextlib.contextmanager
def paused(world: World, job: TwinTenant) -> Iterator[None]:
    """Keep a job at its boundary, to move what it holds; it has begun its next iteration when the block has ended."""
    world.pool.pause(job.place, move=True)
    thread = threading.Thread(target=job.mark)
    thread.start()
    try:
        yield
        relocate(world, job)
    finally:
        world.pool.resume(job.place)
        until(lambda: world.pool.admit(job.place) or not thread.is_alive())
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        relocate(world, job)


def relocate(world: World, job: TwinTenant) -> None:
    """Let the world know where a job's tensors lie now: kernels find their bytes, and no longer the same memory."""
    with world.twin.lock:
        for tensor in job.live:
            tensor.pieces = world._pieces(tensor.address, tensor.size_bytes)


def evicted(job: TwinTenant) -> int:
    """Return the regions' worth of memory that a job has evicted."""
    return int(job.job["evicted"])


def got(tensor: Tensor | None) -> Tensor:
    """Return a tensor that must have been had."""
    assert tensor is not None
    return tensor


def use_all(*tensors: Tensor) -> None:
    """Let kernels look for what they wrote, and wait for them."""
    for tensor in tensors:
        tensor.owner.use_on(tensor, 1 - tensor.stream)
        for handle in tensor.owner.handles:
            tensor.owner.driver.synchronize(handle)


@pytest.mark.parametrize("isolate", [False, True])
def test_what_a_paused_job_keeps_is_anothers_until_it_goes_on(isolate: bool) -> None:  # noqa: FBT001 - a parameter
    """Invariants 1, 2, 4, 11: all of the budget is the neighbour's meanwhile, and every byte is back afterwards."""
    with worlds(isolate=isolate) as (world, job, other):
        kept = [got(job.allocate(size, stream)) for size in (REGION_BYTES, SMALL) for stream in (0, 1)]
        n = int(job.job["held"])
        with paused(world, job):
            until(lambda: evicted(job) == n)
            assert (job.job["held"], world.twin.pinned_bytes) == (0, n * REGION_BYTES)
            relocate(world, job)
            theirs = got(other.allocate(BUDGET * REGION_BYTES))
            use_all(theirs)
            other.free(theirs)
            other.settle()
        assert (evicted(job), job.job["held"], world.twin.pinned_bytes) == (0, n, 0)
        mine = world.pool.regions["owner"] == job.place
        assert (world.pool.regions["last_owner"][mine] == job.place).all() or not isolate  # no other's bytes are there
        use_all(*kept)


def test_regions_come_back_behind_what_the_device_still_does_there() -> None:
    """The copy waits on the device for the neighbour's kernels, which no processor waits for."""
    with worlds() as (world, job, other):
        kept = got(job.allocate(BUDGET * REGION_BYTES))
        addresses = world.twin._addresses.do
        synchronize = addresses["cuCtxSynchronize"]
        with paused(world, job):
            until(lambda: evicted(job) == BUDGET)
            relocate(world, job)
            theirs = got(other.allocate(BUDGET * REGION_BYTES))
            busy, copying = (world.twin._streams[int(one)] for one in (other.handles[0], own_stream(job)))
            other.driver.synchronize(other.handles[0])
            busy.hold(busy.done)
            other.free(theirs)
            other.settle()
            addresses["cuCtxSynchronize"] = lambda: (SUCCESS,)  # else it waits for the neighbour, in the same context
            release = in_thread(lambda: (until(lambda: not copying.is_idle()), busy.release()))
        release.join(PATIENCE_S)
        addresses["cuCtxSynchronize"] = synchronize
        assert theirs.is_over
        use_all(kept)


def own_stream(job: TwinTenant) -> int:
    """Return the stream that copies."""
    return int(job.record[0]["captures"]["stream"])


def test_a_job_goes_on_in_pinned_memory_and_has_its_own_at_the_next_boundary() -> None:
    """A neighbour that keeps all of the budget keeps nobody from training."""
    with worlds() as (world, job, other):
        kept, dropped = got(job.allocate(2 * REGION_BYTES)), got(job.allocate(REGION_BYTES))
        with paused(world, job):
            until(lambda: evicted(job) == 3)
            relocate(world, job)
            theirs = got(other.allocate(BUDGET * REGION_BYTES))
        assert evicted(job) == 3
        use_all(kept, dropped)
        job.free(dropped)
        assert (evicted(job), world.twin.pinned_bytes) == (2, 2 * REGION_BYTES)
        other.free(theirs)
        other.settle()
        theirs = got(other.allocate((BUDGET - 2) * REGION_BYTES))
        large = got(
            job.allocate((BUDGET - 1) * REGION_BYTES)
        )  # for which there is no room, as there is for what is away
        assert job.is_spilled(large)
        assert evicted(job) == 2, "nothing comes back in an iteration: kernels may run"
        job.free(large)
        other.free(theirs)
        other.settle()
        job.mark()
        relocate(world, job)
        assert (evicted(job), world.twin.pinned_bytes) == (0, 0)
        use_all(kept)


def test_a_job_whose_threads_ask_for_memory_is_left_alone() -> None:
    """A thread that fills batches launches copies at any time; the job waits, and keeps what it holds."""
    with worlds() as (world, job, _):
        got(job.allocate(REGION_BYTES))
        done = threading.Event()

        def prefetch() -> None:
            world.use_context()
            while not done.wait(0.01):
                tensor = got(job.allocate(SMALL, 1))
                job.free(tensor)

        thread = threading.Thread(target=prefetch)
        thread.start()
        try:
            with paused(world, job):
                until(lambda: int(job.job["evict"]) == NO_MORE)
                assert evicted(job) == world.twin.pinned_bytes == 0
        finally:
            done.set()
            thread.join(PATIENCE_S)


@contextlib.contextmanager
def refusing(world: World, function: str, which: int) -> Iterator[Callable[[], bool]]:
    """Have the driver refuse one call of a function, counted from 0; yields what tells whether it has."""
    addresses = world.twin._addresses
    original, calls = addresses.do[function], []

    def sometimes(*args: Any) -> Any:  # noqa: ANN401 - as the function
        calls.append(args)
        if len(calls) == which + 1:
            world.twin.fail_next(function)
        return original(*args)

    addresses.do[function] = sometimes
    try:
        yield lambda: len(calls) > which
    finally:
        addresses.do[function] = original


CALLS = [
    ("cuMemCreate", 1),
    *(("cuMemMap", which) for which in (0, 1, 2, 3)),
    *(("cuMemSetAccess", which) for which in (0, 1, 2, 3)),
    *(("cuMemUnmap", which) for which in (1, 3)),
    ("cuMemcpyAsync", 1),
    ("cuCtxSynchronize", 0),
]


@pytest.mark.parametrize(("function", "which"), CALLS)
def test_what_the_driver_refuses_on_the_way_out_stays(function: str, which: int) -> None:
    """What has moved until then has moved, the rest is where it was, and all of it comes back."""
    with worlds() as (world, job, _):
        kept = [got(job.allocate(REGION_BYTES)) for _ in range(2)]
        with refusing(world, function, which) as has_refused, paused(world, job):
            until(has_refused)
            until(lambda: int(job.job["evict"]) in (0, NO_MORE) and evicted(job) + job.job["held"] == 2)
        world.twin.refused.clear()
        assert (evicted(job), job.job["held"], world.twin.pinned_bytes) == (0, 2, 0)
        job.record[0]["streams"]["failures"] = 0
        use_all(*kept)


@pytest.mark.parametrize(("function", "which"), [one for one in CALLS if one[0] != "cuMemCreate"])
def test_what_the_driver_refuses_on_the_way_back_comes_later(function: str, which: int) -> None:
    """Until the next boundary kernels find it in pinned memory; no region is lost."""
    with worlds() as (world, job, _):
        kept = [got(job.allocate(REGION_BYTES)) for _ in range(2)]
        with contextlib.ExitStack() as stack:
            with paused(world, job):
                until(lambda: evicted(job) == 2)
                has_refused = stack.enter_context(refusing(world, function, which))
            assert has_refused()
        world.twin.refused.clear()
        job.record[0]["streams"]["failures"] = 0
        assert evicted(job) + job.job["held"] == 2
        use_all(*kept)
        job.record[0]["wait"]["again_ns"] = 0
        job.mark()
        relocate(world, job)
        assert (evicted(job), job.job["held"], world.twin.pinned_bytes) == (0, 2, 0)
        use_all(*kept)


def test_a_copy_that_cannot_be_waited_for_is_the_last_one() -> None:
    """It may still run: what it reads and writes stays mapped, and everything stays where it is."""
    with worlds() as (world, job, _):
        kept = [got(job.allocate(REGION_BYTES)) for _ in range(2)]
        with refusing(world, "cuStreamSynchronize", 0) as has_refused, paused(world, job):
            until(has_refused)
            until(lambda: int(job.job["evict"]) == NO_MORE)
        assert (evicted(job), job.job["held"]) == (0, 2)
        with paused(world, job):
            until(lambda: int(job.job["evict"]) == NO_MORE)
        assert (evicted(job), job.job["held"]) == (0, 2)
        world.twin.refused.clear()
        use_all(*kept)
        with job.driver.context.current():
            job.driver.call("cuMemUnmap", int(job.record[0]["spill"]["staging_address"]), REGION_BYTES)


# -- the context, too ------------------------------------------------------------------------------

CONTEXT_BYTES = 3 * REGION_BYTES


def aside_of(job: TwinTenant) -> ContextAside:
    """Return what puts a job's context aside; a session is more than it needs."""
    named = types.SimpleNamespace(name="job")
    session: Any = types.SimpleNamespace(record=job.job, pool=job.member, settings=named)
    return ContextAside(session, job.driver.call)


@contextlib.contextmanager
def moved_aside(world: World, job: TwinTenant) -> Iterator[threading.Thread]:
    """Keep a job at its boundary with nothing in the budget, and put its context aside until it is resumed."""
    world.pool.pause(job.place, move=True)
    aside = aside_of(job)

    def stand() -> None:
        begins = allocator.end_by_mark(job.record[0])
        while not begins:
            aside.rest()
            begins = allocator.begin_by_mark(job.record[0])

    thread = in_thread(stand)
    yield thread
    world.pool.resume(job.place)
    until(lambda: world.pool.admit(job.place) or not thread.is_alive())
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    relocate(world, job)


def test_the_context_leaves_the_gpu_when_all_that_the_job_keeps_is_away() -> None:
    """Its memory is the device's again until the job goes on; then every byte is there, and calls go on."""
    with worlds(context_bytes=CONTEXT_BYTES) as (world, job, _):
        kept = [got(job.allocate(REGION_BYTES)) for _ in range(2)]
        before = world.twin.used_bytes
        with moved_aside(world, job):
            until(lambda: world.twin.is_aside)
            assert evicted(job) == 2
            assert world.twin.used_bytes == before - CONTEXT_BYTES
        assert (world.twin.is_aside, world.twin.is_unlocked.is_set(), world.twin.used_bytes) == (False, True, before)
        use_all(*kept)


@pytest.mark.parametrize("function", ["cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"])
def test_a_driver_that_cannot_put_a_context_aside_is_asked_once(
    function: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job says so in one line, and its memory is away all the same."""
    with worlds() as (world, job, _):
        kept = got(job.allocate(REGION_BYTES))
        world.twin.fail_next(function, "NOT_SUPPORTED")
        with moved_aside(world, job):
            until(lambda: evicted(job) == 1)
            until(lambda: world.twin.counts[function] or "stays on the GPU" in capfd.readouterr().err)
        assert not world.twin.is_aside
        assert world.twin.is_unlocked.is_set()
        assert world.twin.counts["cuCheckpointProcessRestore"] == 0
        use_all(kept)


def test_a_context_waits_for_room_on_the_gpu() -> None:
    """What others have taken meanwhile keeps the job waiting, and loses nothing."""
    with worlds(context_bytes=CONTEXT_BYTES) as (world, job, _):
        kept = got(job.allocate(REGION_BYTES))
        with moved_aside(world, job):
            until(lambda: world.twin.is_aside)
            all_bytes, world.twin.device_bytes = world.twin.device_bytes, world.twin.used_bytes
            world.pool.resume(job.place)
            until(lambda: world.twin.counts["cuCheckpointProcessRestore"] > 2)
            assert world.twin.is_aside
            world.twin.device_bytes = all_bytes
        assert not world.twin.is_aside
        use_all(kept)


# -- where it cannot be ----------------------------------------------------------------------------


def test_without_memory_of_the_host_a_job_keeps_what_it_has() -> None:
    """An older driver maps none: the job is paused, and nothing moves."""
    with World(BUDGET) as world, TwinTenant(world) as job:
        kept = got(job.allocate(REGION_BYTES))
        assert job.heap.no_next_tier
        with paused(world, job):
            until(lambda: int(job.job["evict"]) == NO_MORE)
            assert (evicted(job), job.job["held"]) == (0, 1)
        use_all(kept)
        job.leave()
        world.check()


def test_a_job_that_could_not_move_tries_again_when_it_is_told_again() -> None:
    """What a pause found in vain counts neither for the next order nor for the next pause."""
    with worlds() as (world, job, _):
        kept = got(job.allocate(REGION_BYTES))
        with paused(world, job):
            until(lambda: evicted(job) == 1)
        for again in (False, True):
            with refusing(world, "cuMemCreate", 0), paused(world, job):
                until(lambda: int(job.job["evict"]) == NO_MORE)
                if again:
                    world.pool.pause(job.place, move=True)
                    until(lambda: evicted(job) == 1)
        world.twin.refused.clear()
        with paused(world, job):
            until(lambda: evicted(job) == 1)
        use_all(kept)


def test_a_thread_that_asks_for_memory_in_a_pause_brings_nothing_back() -> None:
    """Invariant 1: what is away stays away until the job begins its next iteration."""
    with worlds() as (world, job, other):
        kept = got(job.allocate(2 * REGION_BYTES))
        with paused(world, job):
            until(lambda: evicted(job) == 2)
            relocate(world, job)
            theirs = got(other.allocate(2 * REGION_BYTES))
            large = got(job.allocate((BUDGET - 1) * REGION_BYTES))
            assert job.is_spilled(large)
            assert evicted(job) == 2
            job.free(large)
            other.free(theirs)
            other.settle()
        assert evicted(job) == 0
        use_all(kept)


@pytest.mark.parametrize("function", ["cuMemUnmap", "cuStreamSynchronize"])
def test_a_region_that_a_copy_has_reached_is_nobodys_until_it_is_scrubbed(function: str) -> None:
    """Invariant 11: where the way back ends behind the copy, the next owner takes the region for unclean."""
    with worlds(isolate=True) as (world, job, other):
        kept = got(job.allocate(REGION_BYTES))
        with contextlib.ExitStack() as stack:
            with paused(world, job):
                until(lambda: evicted(job) == 1)
                relocate(world, job)
                other.free(got(other.allocate(BUDGET * REGION_BYTES)))
                other.settle()
                assert (world.pool.regions["last_owner"] == other.place).all()
                has_refused = stack.enter_context(refusing(world, function, 1 if function == "cuMemUnmap" else 0))
            assert has_refused()
        owner, last_owner = world.pool.regions["owner"], world.pool.regions["last_owner"]
        reached = np.flatnonzero(last_owner == NOBODY)
        assert len(reached) > 0
        assert (owner[last_owner == job.place] == job.place).all(), "what came back at the next try"
        world.twin.refused.clear()
        if function == "cuStreamSynchronize":
            (kept_back,) = reached[owner[reached] == job.place]
            assert job.job["held"] == 1, "a copy may still write there"
            with job.driver.context.current():
                job.driver.call("cuMemUnmap", int(job.record[0]["spill"]["staging_address"]), REGION_BYTES)
            regions.release(job.member.member[0], np.array([kept_back], np.int32), 1)
        use_all(kept)
