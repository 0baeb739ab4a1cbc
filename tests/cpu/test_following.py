"""Plans that the heap follows: learned from what iterations do, left where they do not fit."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.members import Tenant, tenants

from zico.heap.layout import GRANULE_BYTES, PLACE, PLAN_ENTRIES
from zico.heap.plan_thread import Planning
from zico.pool.results import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEADLINE_S = 30.0
REGIONS = 256

# An iteration as (tensor, size in granules), a negative size frees it: feature maps and temporaries
# going up, freed in reverse, gradients that the next iteration frees first.
Step = tuple[str, int]


def training(layers: int = 8) -> list[Step]:
    """Return an iteration in which tensors of several sizes live like those of training."""
    steps: list[Step] = [(f"gradient{i}", -1) for i in range(layers)]
    for i in range(layers):
        steps += [(f"map{i}", 1 + i % 3), (f"temporary{i}", 2), (f"temporary{i}", -1)]
    for i in reversed(range(layers)):
        steps += [(f"gradient{i}", 1), (f"workspace{i}", 3), (f"workspace{i}", -1), (f"map{i}", -1)]
    return steps


class Loop:
    """Runs iterations on a tenant and keeps what the tensors of the last one were given."""

    def __init__(self, tenant: Tenant) -> None:
        """Nothing lives yet."""
        self.tenant = tenant
        self.alive: dict[str, int] = {}
        self.places: dict[str, int] = {}

    def iterate(self, steps: Sequence[Step]) -> None:
        """Run one iteration and end it."""
        self.places = {}
        for name, granules in steps:
            if granules < 0:
                if name in self.alive:
                    self.tenant.free(self.alive.pop(name))
                continue
            address = self.tenant.allocate(granules * GRANULE_BYTES)
            assert address > 0
            self.alive[name] = address
            self.places[name] = address - self.tenant.base
        self.tenant.check_structure()
        self.tenant.mark()

    @property
    def planned(self) -> set[str]:
        """Return which tensors of the last iteration lay in the arena that plans are made for."""
        start = int(self.tenant.record[0]["planned_offset"])
        end = start + self.tenant.heap.arena_bytes
        return {name for name, offset in self.places.items() if start <= offset < end}

    def learn(self, steps: Sequence[Step], iterations: int = 8) -> None:
        """Iterate, planning at once whenever the heap asks."""
        for _ in range(iterations):
            self.iterate(steps)
            if self.tenant.record[0]["planning"]["asked"] and not self.tenant.record[0]["planning"]["next_address"]:
                assert self.tenant.heap.planning is not None
                self.tenant.heap.planning.plan_handed()


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Make a job that plans when a test lets it."""
    with tenants(REGIONS) as (tenant,):
        tenant.heap.planning = Planning(tenant.heap)
        yield Loop(tenant)


def test_a_repeated_iteration_is_planned_and_followed(loop: Loop) -> None:
    """After some equal iterations every tensor that dies within an iteration's length has the same place each time."""
    steps = training()
    loop.learn(steps)
    assert loop.planned == set(loop.places)
    before = loop.places
    loop.iterate(steps)
    assert loop.places == before
    assert loop.tenant.record[0]["planning"]["followed"] == 1


def test_an_iteration_of_two_tensors_is_planned_too(loop: Loop) -> None:
    """A plan may be of any number of tensors."""
    steps: list[Step] = [("map", 3), ("temporary", 2), ("temporary", -1), ("map", -1)]
    loop.learn(steps)
    assert loop.planned == {"map", "temporary"}
    assert loop.tenant.record[0]["planning"]["followed"] == 1


def test_a_followed_plan_holds_no_more_than_learned_classes_do(loop: Loop) -> None:
    """The most regions that an iteration holds by plan are at most those it held before there was a plan."""
    steps = training(16)
    loop.iterate(steps)
    loop.iterate(steps)
    without = int(max(loop.tenant.job["profile"]["held"]))
    loop.learn(steps)
    loop.iterate(steps)
    assert loop.planned == set(loop.places)
    held = loop.tenant.job["current"]["held"][: loop.tenant.job["current"]["n_bins"]]
    assert int(max(held)) <= without


def test_following_maps_nothing_in_the_steady_state(loop: Loop) -> None:
    """Planned slots keep their mappings, so iterations after the first by plan make no system call."""
    steps = training()
    loop.learn(steps, 10)
    before = int(loop.tenant.job["maps"])
    for _ in range(3):
        loop.iterate(steps)
    assert loop.tenant.job["maps"] == before


def test_reordered_tensors_of_different_sizes_keep_their_places(loop: Loop) -> None:
    """Threads that swap allocations of different sizes change no place, as long as lifetimes do not collide."""
    steps: list[Step] = [(f"t{i}", i) for i in range(1, 9)] + [(f"t{i}", -1) for i in range(1, 9)]
    loop.learn(steps)
    before = loop.places
    assert loop.planned == set(before)
    swapped = steps[:8]
    random.Random(1).shuffle(swapped)  # noqa: S311 - no secret
    loop.iterate(swapped + steps[8:])
    assert loop.places == before


def test_a_deviation_stays_where_it_is(loop: Loop) -> None:
    """Extra tensors, other sizes and longer lives go elsewhere or stay; all others keep their places; no new plan."""
    steps = training()
    loop.learn(steps)
    before = loop.places
    extra: list[Step] = [("extra", 7), *steps[:20], ("another", 5), *steps[20:], ("extra", -1), ("another", -1)]
    loop.iterate(extra)
    assert {name: place for name, place in loop.places.items() if name in before} == before
    assert not {"extra", "another"} & loop.planned
    longer = [step for step in steps if step != ("map3", -1)]
    loop.iterate(longer)
    kept = loop.alive.pop("map3")
    loop.iterate(steps)
    moved = {name for name in before if loop.places[name] != before[name]}
    assert "map3" in moved, "its place was taken by its own forerunner"
    loop.tenant.free(kept)
    loop.iterate(steps)
    assert loop.places == before
    assert loop.tenant.record[0]["planning"]["followed"] == 1


def test_a_lasting_change_brings_a_new_plan(loop: Loop) -> None:
    """When iterations change for good, a new plan takes over, and everything is placed by it."""
    loop.learn(training())
    larger = [(name, granules * 2 if granules > 0 else granules) for name, granules in training(12)]
    loop.learn(larger, 12)
    assert loop.planned == set(loop.places)
    assert loop.tenant.record[0]["planning"]["followed"] == 2


def test_a_plan_is_made_round_what_persists() -> None:
    """Tensors that outlive iterations stay where they are, and what is planned fills the regions they leave open."""
    with tenants(REGIONS, region_bytes=16 * GRANULE_BYTES) as (tenant,):
        tenant.heap.planning = Planning(tenant.heap)
        loop = Loop(tenant)
        steps = training()
        loop.iterate(steps)
        kept = [tenant.allocate(5 * GRANULE_BYTES + 64) for _ in range(6)]
        loop.learn(steps, 10)
        assert loop.planned == set(loop.places)
        for address in kept:
            tenant.check(address)
        assert tenant.record[0]["planning"]["n_pinned"] == len(kept)
        shared = {(address - tenant.base) // tenant.member.region_bytes for address in kept}
        assert shared & {place // tenant.member.region_bytes for place in loop.places.values()}


def test_an_unplanned_tensor_never_takes_a_planned_place(loop: Loop) -> None:
    """While a plan is in force, what it does not know goes to other arenas, however little room is there."""
    steps = training()
    loop.learn(steps)
    assert loop.planned == set(loop.places)
    start = int(loop.tenant.record[0]["planned_offset"])
    strange = [loop.tenant.allocate(GRANULE_BYTES * 3 // 2 + 64 * i) for i in range(20)]
    inside = [a for a in strange if start <= a - loop.tenant.base < start + loop.tenant.heap.arena_bytes]
    assert inside == []


def test_iterations_that_never_repeat_ask_less_and_less(loop: Loop) -> None:
    """Where no plan is ever followed, the intervals between plans double."""
    rng = random.Random(2)  # noqa: S311 - no secret
    asked = []
    for iteration in range(80):
        steps = [(f"t{i}", rng.randrange(1, 20)) for i in range(12)]
        loop.iterate(steps + [(f"t{i}", -1) for i in range(12)])
        if loop.tenant.record[0]["planning"]["asked"] and not loop.tenant.record[0]["planning"]["next_address"]:
            asked.append(iteration)
            assert loop.tenant.heap.planning is not None
            loop.tenant.heap.planning.plan_handed()
    gaps = np.diff(asked)
    assert len(asked) > 2
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-1] >= 4 * gaps[0] or gaps[-1] >= 16


def test_the_thread_answers_without_being_waited_for() -> None:
    """A heap with its planner's thread comes to follow a plan, and no iteration waits for it."""
    with tenants(REGIONS) as (tenant,):
        tenant.heap.planning = Planning(tenant.heap)
        tenant.heap.planning.start()
        loop = Loop(tenant)
        steps = training()
        deadline = time.monotonic() + DEADLINE_S
        while not tenant.record[0]["planning"]["followed"] and time.monotonic() < deadline:
            loop.iterate(steps)
            threading.Event().wait(0.001)
        loop.iterate(steps)
        assert loop.planned == set(loop.places)


def test_a_table_finds_every_key_that_was_written(loop: Loop) -> None:
    """All keys of a full-sized plan are found with their offsets, others are not."""
    from zico.heap import history

    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(1, 1 << 50, 60_000))
    offsets = np.arange(len(keys)) * 64
    table = loop.tenant.heap.zeros(PLACE, PLAN_ENTRIES)
    history.fill_plan(table.ctypes.data, keys, offsets, len(keys))
    written = table[table["key"] != 0]
    assert dict(zip(written["key"].tolist(), written["offset"].tolist(), strict=True)) == dict(
        zip(keys.tolist(), offsets.tolist(), strict=True)
    )
    loop.tenant.record[0]["plan_address"] = table.ctypes.data
    start = int(loop.tenant.record[0]["planned_offset"])
    for i in (0, 1, len(keys) // 2, len(keys) - 1):
        assert history.planned_place(loop.tenant.record[0], keys[i]) == start + offsets[i]
        assert history.planned_place(loop.tenant.record[0], keys[i] + 1) == NOTHING
