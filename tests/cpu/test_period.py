"""Cutting traces of training loops into iterations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.training_loops import Network, Recording, trained
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zico.trace.iterations import NO_PERIOD, Segmentation, segment

if TYPE_CHECKING:
    from collections.abc import Sequence

NETWORKS = st.builds(
    Network,
    layers=st.integers(2, 60),
    batch=st.sampled_from([8, 32, 100]),
    micro_batches=st.sampled_from([1, 2, 3, 4, 8]),
    keeps_gradients=st.booleans(),
    temporaries=st.integers(1, 3),
)


def cut(job: Recording) -> Segmentation:
    """Segment what a job did."""
    return segment(*job.arrays())


def typical(found: Segmentation) -> list[int]:
    """Return where the typical iterations begin."""
    starts: list[int] = found.starts[found.typical].tolist()
    return starts


def near(starts: Sequence[int], found: Sequence[int], reach: int) -> int:
    """Return how many of the starts have a found one within reach."""
    return sum(min((abs(start - other) for other in found), default=reach + 1) <= reach for start in starts)


@settings(max_examples=60, deadline=None)
@given(NETWORKS, st.integers(3, 12))
def test_every_iteration_of_a_training_loop_is_found(network: Network, steps: int) -> None:
    """The starts are exactly the optimizer steps' beginnings, however many micro-batches each has.

    With few steps the micro-batches may be all that has been seen often enough.
    """
    assume(steps > 5 or network.micro_batches == 1)
    job = trained(network, steps)
    found = cut(job)
    assert typical(found) == job.starts
    assert found.period == job.starts[1] - job.starts[0]


@settings(max_examples=30, deadline=None)
@given(NETWORKS, st.integers(4, 12))
def test_identical_micro_batches_are_iterations(network: Network, steps: int) -> None:
    """Without anything that tells micro-batches apart, each is an iteration."""
    single = dataclasses.replace(network, keeps_gradients=True, temporaries=0, micro_batches=1)
    several = dataclasses.replace(single, micro_batches=network.micro_batches)
    found = cut(trained(several, steps))
    assert typical(found) == trained(single, steps * network.micro_batches).starts


@settings(max_examples=40, deadline=None)
@given(NETWORKS, st.integers(4, 20), st.integers(1, 30), st.integers(3, 6))
def test_validation_in_between_is_set_apart(network: Network, every: int, batches: int, epochs: int) -> None:
    """Validation is no typical iteration, and all training steps around it are."""
    network = dataclasses.replace(network, micro_batches=1)
    job = Recording()
    network.set_up(job)
    for _ in range(epochs):
        for _ in range(every):
            network.step(job)
        for _ in range(batches):
            network.validate(job)
    found = cut(job)
    assert typical(found) == job.starts
    assert found.starts[-1] > job.starts[-1]


def test_epochs_are_no_iterations() -> None:
    """However regularly validation comes, a step is the iteration, and not a step's epoch."""
    job, network = Recording(), Network()
    network.set_up(job)
    for _ in range(12):
        for _ in range(5):
            network.step(job)
        for _ in range(3):
            network.validate(job)
    assert typical(cut(job)) == job.starts


def test_an_optimizer_that_does_the_same_for_each_layer_is_no_loop_of_its_own() -> None:
    """Although most allocations repeat layer by layer, the iteration is what memory rises in."""
    job = trained(Network(layers=60, temporaries=30), 8)
    assert typical(cut(job)) == job.starts


@settings(max_examples=40, deadline=None)
@given(NETWORKS, st.lists(st.sampled_from([8, 16, 64, 128]), min_size=2, max_size=4, unique=True), st.integers(6, 12))
def test_each_batch_size_has_iterations_of_its_own(network: Network, batches: list[int], steps: int) -> None:
    """All beginnings are found after each change of the batch size; one of the sizes is the typical one."""
    job = Recording()
    network.set_up(job)
    for batch in batches:
        for _ in range(steps):
            dataclasses.replace(network, batch=batch).step(job)
    found = cut(job)
    assert near(job.starts, found.starts.tolist(), 0) >= len(job.starts) - 2 * len(batches)
    assert steps - 1 <= len(typical(found)) <= steps


# Always the same examples: of noise nothing holds without exception, and one case in thousands is
# somewhat worse.
@settings(max_examples=100, deadline=None, derandomize=True)
@given(NETWORKS, st.integers(12, 30), st.integers(0, 1 << 20))
def test_reordered_and_extra_allocations_do_no_harm(network: Network, steps: int, seed: int) -> None:
    """With one in a hundred neighbours swapped, and as many extra temporaries, nine in ten iterations are found."""
    network = dataclasses.replace(network, layers=max(8, network.layers), micro_batches=min(2, network.micro_batches))
    network = dataclasses.replace(network, keeps_gradients=network.micro_batches == 1)
    job = trained(network, steps).disturbed(0.01, 0.01, seed)
    found = cut(job)
    length = (job.starts[-1] - job.starts[0]) / (steps - 1)
    assert found.period == pytest.approx(length, rel=1 / 16)
    assert 0.9 * steps <= len(typical(found)) <= steps + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=200))
def test_any_sequence_is_cut_into_all_of_its_parts(events: list[tuple[int, int]]) -> None:
    """Starts rise from 0 and stay inside; a typical iteration exists if and only if there is a period."""
    sizes, live = (np.array([event[i] for event in events], np.int64) for i in (0, 1))
    found = segment(sizes, live)
    assert len(found.starts) == len(found.typical)
    assert (np.diff(found.starts) > 0).all()
    assert not len(events) or (found.starts[0] == 0 and found.starts[-1] < len(events))
    assert found.typical.any() == (found.period != NO_PERIOD)


def test_set_up_alone_has_no_iteration() -> None:
    """Equal layers built one after the other are one piece."""
    job = Recording()
    for _ in range(1000):
        job.alloc(100)
    assert cut(job).starts.tolist() == [0]


def test_memory_that_grows_is_cut_by_sizes() -> None:
    """Where every iteration leaves something behind, levels never come back, and single sizes mark the beginnings."""
    job = Recording()
    for _ in range(20):
        job.starts.append(job.allocations)
        tensors = [job.alloc(size * 1000) for size in range(5, 55)]
        job.alloc(1000)
        for tensor in reversed(tensors):
            job.free(tensor)
    found = cut(job)
    assert found.period == 51
    assert len(typical(found)) >= 18
