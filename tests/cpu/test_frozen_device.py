"""Frozen memory on a GPU, on the software twin: jobs of one process share contents, write them, and leave."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, World
from hypothesis import given, settings
from hypothesis import strategies as st
from support.frozen_membership import session_of
from twin.entry import Refused

from zico.base.errors import DriverError
from zico.broker import frozen
from zico.broker.frozen import FrozenMemory
from zico.broker.protocol import messages as m
from zico.broker.views import ProfileCache, pool_view
from zico.job import frozen_device
from zico.job.frozen import Bytes
from zico.job.frozen_device import DeviceSharing, packed
from zico.pool.layout import NOBODY, JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.job.frozen_device import Part

REGIONS = 24
ONE = (REGION_BYTES + 1,)
TENSORS = (3 * REGION_BYTES, REGION_BYTES // 2 + 512, 2 * REGION_BYTES - 100)


class Job:
    """A job with equal weights in memory of the pool, until it shares them."""

    def __init__(self, world: World, shared: FrozenMemory, seed: int = 0, sizes: tuple[int, ...] = TENSORS) -> None:
        """Join, and write the weights."""
        self.sizes = sizes
        self.tenant = TwinTenant(world, streams=1)
        self.twin = world.twin
        place, heap = self.tenant.place, self.tenant.heap
        self.sharing = DeviceSharing(session_of(shared, place, heap, self.tenant.member))
        self.own = [self.tenant.allocate(size_bytes) for size_bytes in sizes]
        self.tenant.driver.synchronize(self.tenant.handles[0])
        self.now = [weights(size_bytes, seed) for size_bytes in sizes]
        self.parts: list[Any] = [None] * len(sizes)
        for tensor, expected in zip(self.own, self.now, strict=True):
            self.tenant.driver.put(tensor.address, expected.ctypes.data, len(expected))

    def share(self) -> int:
        """Share the weights; returns how many are shared."""
        at = {id(tensor): number for number, tensor in enumerate(self.own) if tensor is not None}

        def move(bytes_: Bytes, part: Part) -> bool:
            number = at[id(bytes_.of)]
            self.parts[number] = part
            self.own[number] = None
            self.tenant.live.remove(bytes_.of)
            return True

        wanted = [
            Bytes(one.address, size, one) for one, size in zip(self.own, self.sizes, strict=True) if one is not None
        ]
        self.sharing.share(wanted, move)
        self.sharing.tell()
        return sum(part is not None for part in self.parts)

    def check(self) -> None:
        """Every weight has the bytes that it should have, wherever it is."""
        for part, tensor, expected in zip(self.parts, self.own, self.now, strict=True):
            address = part.address if part is not None else tensor.address if tensor is not None else 0
            if address:
                assert self.twin.read(address, len(expected)) == expected.tobytes(), "invariant 6"

    def write(self, number: int, byte: int) -> bool:
        """Write a shared weight, once it is this job's own; false: there was no room."""
        if not self.parts[number].content.own():
            return False
        self.now[number] = np.full(self.sizes[number], byte, np.uint8)
        self.twin.write(self.parts[number].address, self.now[number].tobytes())
        return True

    def drop(self) -> None:
        """Let go of what is shared."""
        self.parts = [None] * len(self.sizes)
        self.sharing.tell()


@functools.cache
def weights(size_bytes: int, seed: int) -> Any:  # noqa: ANN401 - an array
    """Return the bytes of a weight."""
    return np.random.default_rng([size_bytes, seed]).integers(0, 256, size_bytes, np.uint8)


@contextlib.contextmanager
def pool(n_regions: int = REGIONS) -> Iterator[tuple[World, FrozenMemory, list[Job]]]:
    """Give a pool, what its broker knows of shared memory, and a list for jobs, which end with it."""
    with World(n_regions) as world:
        shared = FrozenMemory(world.pool)
        jobs: list[Job] = []
        try:
            yield world, shared, jobs
        finally:
            for job in jobs:
                job.drop()
                job.tenant.live.clear()
                job.tenant.__exit__(None, None, None)
            shared.close()


def regions_of(job: Job) -> set[tuple[int, ...]]:
    """Return the regions of each content that a job has."""
    return {part.content.held.regions for part in job.parts}


def held(world: World) -> int:
    """Return the regions that the holder of shared memory has, counted one by one."""
    regions, jobs = world.pool.regions, world.pool.jobs
    places = [place for place in range(len(jobs)) if jobs[place]["name"] == b"frozen memory"]
    return sum(int((regions["owner"] == place).sum()) for place in places)


def test_two_jobs_hold_equal_weights_once() -> None:
    """The second maps what the first has filled; nobody can write it, and it goes with the last one."""
    with pool() as (world, shared, jobs):
        jobs += [Job(world, shared), Job(world, shared)]
        assert [job.share() for job in jobs] == [len(TENSORS)] * 2
        first, second = (regions_of(job) for job in jobs)
        assert held(world) == 6
        assert len(first) == 1
        assert first == second
        for job in jobs:
            job.check()
            with pytest.raises(Refused):
                world.twin.write(job.parts[1].address, b"x")
        jobs[0].drop()
        jobs[1].check()
        assert held(world) == 6
        jobs[1].drop()
        assert held(world) == 0


def test_to_a_policy_shared_memory_is_not_in_the_budget() -> None:
    """Its holder is no job that anybody would wait for."""
    with pool() as (world, shared, jobs):
        jobs.append(Job(world, shared))
        jobs[0].share()
        view = pool_view(*world.pool.snapshot(), time.monotonic_ns(), ProfileCache())
        assert view.budget == REGIONS - 6
        assert [one.job for one in view.jobs] == [jobs[0].tenant.place]


def test_who_writes_has_regions_of_its_own_at_the_same_addresses() -> None:
    """Invariants 4 and 12: nobody else sees the write, and it counts within the budget."""
    with pool() as (world, shared, jobs):
        jobs += [Job(world, shared), Job(world, shared)]
        for job in jobs:
            job.share()
        address = jobs[0].parts[2].address
        assert jobs[0].write(2, 7)
        assert jobs[0].parts[2].address == address
        assert jobs[0].write(0, 9), "the whole pack is its own"
        assert held(world) == 12
        for job in jobs:
            job.check()
        jobs[0].drop()
        assert held(world) == 6


def test_other_weights_are_not_shared() -> None:
    """A pack of which one bit differs is a content of its own."""
    with pool() as (world, shared, jobs):
        jobs += [Job(world, shared), Job(world, shared, seed=1)]
        for job in jobs:
            job.share()
            job.check()
        assert held(world) == 12


def test_equal_digests_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 6: a job whose bytes differ keeps its own."""
    monkeypatch.setattr(frozen_device, "digest", lambda _address, _size: 1)
    with pool() as (world, shared, jobs):
        jobs += [Job(world, shared), Job(world, shared, seed=1)]
        assert [job.share() for job in jobs] == [len(TENSORS), 0]
        for job in jobs:
            job.check()
        jobs[1].sharing.tell()
        assert held(world) == 6


def test_what_was_in_the_regions_is_not_shown() -> None:
    """Behind a content are zeros, not what another job has left there."""
    with pool() as (world, shared, jobs):
        jobs.append(Job(world, shared))
        jobs[0].share()
        begin, end = jobs[0].parts[0].address, jobs[0].parts[0].content.size_bytes
        rest = 6 * REGION_BYTES - end
        assert rest > 0
        assert world.twin.read(begin + end, rest) == bytes(rest)


def test_a_budget_without_room_shares_nothing_and_refuses_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 1: sharing needs regions beside the job's own; so does a write, which is refused before it is made."""
    monkeypatch.setattr(frozen_device, "WAIT_S", 0.0)
    with pool(8) as (world, shared, jobs):
        jobs.append(Job(world, shared))
        assert jobs[0].share() == 0
        jobs[0].check()
    with pool(12) as (world, shared, jobs):
        jobs.append(Job(world, shared))
        assert jobs[0].share() == len(TENSORS)
        assert not jobs[0].write(0, 3)
        jobs[0].check()
        with pytest.raises(Refused):
            world.twin.write(jobs[0].parts[0].address, b"x")


def test_who_dies_while_filling_is_waited_for_until_its_context_has_ended() -> None:
    """Invariant 5: its regions are nobody else's before, since the device may still write them."""
    with pool() as (world, shared, jobs):
        jobs += [Job(world, shared), Job(world, shared)]
        question = m.ShareRequest("1" * 32, REGION_BYTES)
        assert jobs[0].sharing._membership.ask(question)[0].found == "fill"
        for _ in range(2):
            assert jobs[1].sharing._membership.ask(question)[0].found == "busy"
        assert held(world) == 1
        shared.depart(jobs[0].tenant.place)
        assert jobs[1].sharing._membership.ask(question)[0].found == "fill"
        assert held(world) == 1
        jobs[1].sharing._membership.tell(m.Unshare(question.key))
        assert held(world) == 0


def test_a_broker_that_takes_too_long_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host another job fills what one has not filled in time; on a device the first one may still write."""
    monkeypatch.setattr(frozen, "FILL_S", 0.0)
    with pool() as (world, shared, jobs):
        jobs += [Job(world, shared), Job(world, shared)]
        question = m.ShareRequest("1" * 32, REGION_BYTES)
        assert jobs[0].sharing._membership.ask(question)[0].found == "fill"
        assert jobs[1].sharing._membership.ask(question)[0].found == "busy"
        jobs[0].sharing._membership.tell(m.Unshare(question.key))
        assert held(world) == 0


def calls_of(twin: Any, act: Callable[[], object]) -> int:  # noqa: ANN401 - a twin
    """Return how many calls of the driver something makes."""
    before = twin.calls
    act()
    return int(twin.calls) - before


def refused_at_each_call(act: Callable[[Job], object], *, are_shared: bool) -> None:
    """Refuse each call of the driver once that a job makes when it does something: no weight changes then.

    What was taken comes back when nothing refers to it any more.
    """
    call, n = 1, 1
    while call <= n:
        with pool(8) as (world, shared, jobs):
            jobs += [Job(world, shared, sizes=ONE) for _ in range(2 if are_shared else 1)]
            if are_shared:
                assert [job.share() for job in jobs] == [1, 1]
            if call == 1:
                n = calls_of(world.twin, lambda jobs=jobs: act(jobs[0]))  # type: ignore[misc]
            else:
                world.twin.fail_at = world.twin.calls + call - 1
                with contextlib.suppress(DriverError):
                    act(jobs[0])
                world.twin.fail_at = 0
            for job in jobs:
                job.check()
            for job in jobs:
                job.drop()
            assert held(world) == 0
        call += 1
    assert n > 10


def test_whatever_the_driver_refuses_of_sharing_the_bytes_stay() -> None:
    """Invariants 2 and 6: for every call of the driver that sharing makes."""
    refused_at_each_call(Job.share, are_shared=False)


def test_whatever_the_driver_refuses_of_a_write_the_bytes_stay() -> None:
    """Invariants 4 and 6: for every call of the driver that the way to memory of its own makes."""
    refused_at_each_call(lambda job: job.write(0, 5), are_shared=True)


def test_ctrl_c_on_the_way_to_memory_of_its_own_loses_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 6: a job that catches it, to save what it has, saves its weights."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pool(8) as (world, shared, jobs):
        jobs.append(Job(world, shared, sizes=ONE))
        jobs[0].share()
        with monkeypatch.context() as patched:
            patched.setattr(jobs[0].tenant.driver, "put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                jobs[0].write(0, 5)
        jobs[0].check()
        assert held(world) == 2
        assert jobs[0].write(0, 5)
        jobs[0].check()


def test_packs_are_whole_regions_and_the_same_in_every_job() -> None:
    """A pack ends once it has eight regions; one that fills less than half of its last ones is left out."""
    sizes = (1, 8 * REGION_BYTES, REGION_BYTES, REGION_BYTES // 4)
    wanted = [Bytes(0, size_bytes, number) for number, size_bytes in enumerate(sizes)]
    first, second = packed(wanted, REGION_BYTES)
    assert [offset for offset, _ in first.parts] == [0, 512]
    assert first.size_bytes == 8 * REGION_BYTES + 512
    assert [bytes_.of for _, bytes_ in second.parts] == [2, 3]
    assert packed([Bytes(0, REGION_BYTES // 4, 0)], REGION_BYTES) == []


class Model:
    """Two jobs that do anything, beside what their bytes should be."""

    def __init__(self, world: World, shared: FrozenMemory, jobs: list[Job]) -> None:
        """Begin with two that share nothing."""
        self.world, self.shared, self.jobs = world, shared, jobs
        jobs += [Job(world, shared), Job(world, shared)]

    def share(self, which: int) -> None:
        """Share what can be."""
        self.jobs[which].share()

    def write(self, which: int) -> None:
        """Write a weight that is shared."""
        if self.jobs[which].parts[1] is not None:
            self.jobs[which].write(1, which + 1)

    def drop(self, which: int) -> None:
        """Let go."""
        self.jobs[which].drop()

    def check(self) -> None:
        """All bytes are right, and all counters agree with the owners."""
        table = self.world.pool
        owners = table.regions["owner"]
        for place in np.flatnonzero(table.jobs["state"] != JobState.EMPTY):
            assert int((owners == place).sum()) == int(table.jobs[place]["held"]), "held"
        assert int((owners != NOBODY).sum()) == int(table.header["granted"]) <= int(table.header["budget_regions"])
        assert sum(len(one.regions) for one in self.shared._contents.values()) == held(self.world)
        for job in self.jobs:
            job.check()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((Model.share, Model.write, Model.drop)), st.integers(0, 1)), max_size=10))
def test_whatever_jobs_do_each_has_its_bytes(steps: list[tuple[Any, int]]) -> None:
    """Invariants 1, 2, 6 and 12, for any order of sharing, writing and letting go."""
    with pool() as (world, shared, jobs):
        model = Model(world, shared, jobs)
        for act, which in steps:
            act(model, which)
            model.check()
