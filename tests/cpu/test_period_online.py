"""Telling beginnings of iterations while a job runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu.support.training_loops import Network, Recording, trained
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.trace import online
from zico.trace.online import HISTORY, MEMORY_BYTES, TRACKER
from zico.trace.repeats import STRICT, mark_at


def boundaries(job: Recording) -> list[int]:
    """Return the allocations with which, as they came, an iteration seemed to begin."""
    memory = np.full(MEMORY_BYTES, 0xA5, np.uint8)
    tracker = np.zeros(1, TRACKER)[0]
    tracker["memory_address"] = memory.ctypes.data
    events = zip(*job.arrays(), strict=True)
    return [i for i, (size, live) in enumerate(events) if online.begins(tracker, size, live)]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.booleans(), st.integers(0, 3), st.integers(12, 30))
def test_after_a_few_iterations_each_is_seen(layers: int, keeps: bool, temporaries: int, steps: int) -> None:  # noqa: FBT001
    """From the ninth iteration at the latest, exactly the beginnings are told."""
    job = trained(Network(layers, keeps_gradients=keeps, temporaries=temporaries), steps)
    found = boundaries(job)
    assert [start for start in found if start >= job.starts[8]] == job.starts[8:]


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("keeps", [False, True])
def test_micro_batches_give_way_to_the_optimizer_step(micro_batches: int, keeps: bool) -> None:  # noqa: FBT001
    """What first looks like an iteration is given up for the outer one, after which that alone is told."""
    job = trained(Network(micro_batches=micro_batches, keeps_gradients=keeps), 60)
    assert [start for start in boundaries(job) if start >= job.starts[30]] == job.starts[30:]


def test_validation_costs_no_more_than_the_step_after_it() -> None:
    """No boundary is told within validation, and all steps but the first after it are seen."""
    job, network = Recording(), Network()
    network.set_up(job)
    firsts, ends = [], []
    for _ in range(6):
        firsts.append(job.allocations)
        for _ in range(10):
            network.step(job)
        ends.append(job.allocations)
        for _ in range(8):
            network.validate(job)
    found = [start for start in boundaries(job) if start >= firsts[2]]
    owed = [start for start in job.starts if start >= firsts[2] and start not in firsts]
    assert set(owed) <= set(found)
    assert set(found) - set(owed) <= set(firsts) | set(ends)


@pytest.mark.parametrize("batches", [(32, 64), (64, 32), (8, 16, 32, 64)])
def test_another_batch_size_is_found_within_a_few_iterations(batches: tuple[int, ...]) -> None:
    """After a change of all sizes no old boundary is told, and the new ones are from the eighth iteration on."""
    job = Recording()
    Network().set_up(job)
    for batch in batches:
        for _ in range(20):
            Network(batch=batch).step(job)
    found = boundaries(job)
    assert {start for start in found if start > job.starts[3]} <= set(job.starts)
    late = [start for i, start in enumerate(job.starts) if i % 20 >= 8]
    assert set(late) <= set(found)


def test_threads_that_reorder_shift_no_boundary() -> None:
    """With one in a hundred neighbours swapped, and as many extra temporaries, most are told in place."""
    job = trained(Network(), 60).disturbed(0.01, 0.01)
    found = np.array(boundaries(job))
    reached = [start for start in job.starts[10:] if np.abs(found - start).min() <= 2]
    assert len(reached) >= 0.8 * len(job.starts[10:])
    assert (np.diff(found) > 100).all()


def test_an_iteration_of_twenty_thousand_allocations_is_found() -> None:
    """The history is long enough for three of them, and goes on when it is full."""
    network = Network(layers=1600, temporaries=4)
    job = trained(network, 7)
    length = job.starts[1] - job.starts[0]
    assert length < HISTORY // 3 < HISTORY < job.allocations
    assert set(boundaries(job)) & set(job.starts[5:])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=300))
def test_anything_may_come(events: list[tuple[int, int]]) -> None:
    """Any sequence is taken; no two boundaries are nearer to each other than the shortest iteration allows."""
    job = Recording([(i, size) for i, (size, _) in enumerate(events)], [], len(events))
    assert all(np.diff(boundaries(job)) >= 3)


def test_the_lost_loop_comes_back_at_its_first_sighting() -> None:
    """After a long pause with other work, the very first ordinary beginning counts again."""
    job, network = Recording(), Network()
    network.set_up(job)
    for _ in range(12):
        network.step(job)
    other = dataclasses.replace(network, layers=5, batch=7)
    for _ in range(6):
        other.validate(job)
    back = len(job.starts)
    for _ in range(4):
        network.step(job)
    assert set(job.starts[back + 1 :]) <= set(boundaries(job))


def test_a_mark_within_an_iteration_is_no_boundary() -> None:
    """A mark that is seen at every allocation begins an iteration only when the last one is nearly over."""
    events = np.full(300, 7, np.int64)
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    tracker = np.zeros(1, TRACKER)[0]
    tracker["memory_address"] = memory.ctypes.data
    tracker["gap"], tracker["width"], tracker["next_search"] = 100, STRICT, 1 << 40
    tracker["mark"] = mark_at(events, events, 2, STRICT)
    found = [i for i in range(len(events)) if online.begins(tracker, 7, 7)]
    assert np.diff(found).tolist() == [94, 94]
