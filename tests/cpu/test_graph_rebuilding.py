"""What a training step computes again: graphs that mean the same, within what may be kept, without cycles."""

from __future__ import annotations

import dataclasses
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.planning.saving.graph_rebuilding import PIVOT_BYTES, Operation, Rebuilding, StepGraph
from zico.planning.saving.problem import LEAST_BYTES

MIB = 1 << 20


def forward(*inputs: int, mib: float = 1, passes: float | None = 1.0) -> Operation:
    """Return a forward operation of one result."""
    return Operation(tuple((i, 0) for i in inputs), output_bytes=(int(mib * MIB),), passes=passes, can_be_pivot=True)


def backward(*inputs: int, mib: float = 1) -> Operation:
    """Return a backward operation of one result."""
    return Operation(tuple((i, 0) for i in inputs), output_bytes=(int(mib * MIB),), is_gradient=True)


def source() -> Operation:
    """Return the step's argument."""
    return Operation((), output_bytes=(MIB,), lasts=True)


CHAIN = [
    source(),
    forward(0, mib=10, passes=None),
    forward(1, mib=10),
    forward(2, mib=10),
    forward(3, mib=1, passes=None),
    backward(4),
    backward(5, 3),
    backward(6, 2),
    backward(7, 1),
]
"""x, y = f(x), z = g(y), w = h(z), the loss's part, and backward operations that read w, z and y."""


def test_what_is_cheap_runs_again_from_what_is_kept() -> None:
    """The results z and w are made again from y, each after the backward operation before its first reader."""
    graph = StepGraph(CHAIN)
    assert graph.kept_bytes() == 31 * MIB
    assert graph.least_bytes() == 11 * MIB
    plan = graph.plan(0)
    assert plan.kept_bytes == 11 * MIB
    assert plan.copies == ((2, 5), (3, 5))
    assert sorted(plan.readers) == [(6, 1), (7, 1)]


def test_no_more_runs_again_than_the_limit_asks_for() -> None:
    """With room for one of them the cheaper way is taken: nothing runs again where all may stay."""
    graph = StepGraph(CHAIN)
    assert graph.plan(31 * MIB).copies == ()
    one = graph.plan(21 * MIB)
    assert one.kept_bytes == 21 * MIB
    assert len(one.copies) == 1


def test_a_search_without_time_runs_everything_again() -> None:
    """It still fits, and the step does not wait for the search."""
    graph = StepGraph(CHAIN)
    assert graph.plan(31 * MIB, deadline_s=0).copies == graph.plan(0).copies


def test_an_early_backward_operation_waits_for_its_place_unless_it_shrinks() -> None:
    """What needs only forward results would be made in the forward pass, and kept."""
    early = [*CHAIN[:6], backward(3, mib=10), backward(5, 6), backward(2, mib=0.01), backward(7, 8)]
    plan = StepGraph(early).plan(1 << 40)
    assert dict(plan.delays) == {6: 5}


def test_an_early_operation_that_another_early_one_reads_does_not_wait() -> None:
    """The other one is wanted before: they would wait for each other in a circle."""
    shrinking = backward(6, mib=0.01)
    early = [*CHAIN[:6], backward(3, mib=10), shrinking, backward(5, 7), backward(8, 6)]
    assert StepGraph(early).plan(1 << 40).delays == ()


def test_results_that_share_memory_count_once() -> None:
    """A view of what is kept costs nothing more, and a view of what is dropped is made again with it."""
    view = dataclasses.replace(forward(2, mib=10, passes=0.0), is_view=True)
    graph = StepGraph([*CHAIN[:3], view, forward(3, passes=None), *CHAIN[5:]])
    assert graph.kept_bytes() == 21 * MIB


def test_small_results_stay() -> None:
    """Many copies would save little."""
    small = [source(), forward(0, passes=None), forward(1, mib=LEAST_BYTES / MIB / 2), forward(2, passes=None)]
    graph = StepGraph([*small, backward(3), backward(4, 2, 1)])
    assert graph.plan(0).copies == ()


def test_what_graph_optimizers_share_may_come_before_the_pivot() -> None:
    """A forward operation that reads one named as backward is a forward one all the same."""
    shared = dataclasses.replace(forward(1), is_gradient=True)
    tail = [backward(4 + i) for i in range(20)]
    graph = StepGraph([source(), forward(0, passes=None), shared, forward(2, mib=10), forward(3, passes=None), *tail])
    assert graph.kept_bytes() == MIB  # the pivot's result alone


def test_what_comes_after_many_backward_operations_is_no_forward_one() -> None:
    """Sums of gradients have no name that tells."""
    summed = forward(25)
    operations = [*CHAIN[:5], backward(4, 2), *(backward(5 + i) for i in range(20)), summed, backward(26, 3)]
    assert StepGraph(operations).kept_bytes() == 21 * MIB


@pytest.mark.parametrize(
    "operations",
    [
        [source(), forward(0)],
        [source(), forward(0, mib=PIVOT_BYTES / MIB / 2), backward(1)],
        [source(), Operation(((2, 0),)), Operation(((1, 0),))],
    ],
)
def test_a_graph_without_a_backward_pass_or_with_a_circle_is_refused(operations: list[Operation]) -> None:
    """The step is then left as it is."""
    with pytest.raises(ValueError, match=r"backward|circle"):
        StepGraph(operations)


@st.composite
def steps(draw: st.DrawFn) -> list[Operation]:
    """Return a forward chain with branches, and backward operations that read from it in reverse."""
    n_forward = draw(st.integers(3, 12))
    operations = [source()]
    for i in range(1, n_forward):
        inputs = draw(st.lists(st.integers(0, i - 1), min_size=0, max_size=2))
        kind = draw(st.sampled_from(["cheap", "dear", "view", "small"]))
        operation = forward(i - 1, *inputs, mib=draw(st.integers(1, 8)), passes=None if kind == "dear" else 1.0)
        if kind == "view":
            parent = operations[i - 1].output_bytes
            operation = dataclasses.replace(operation, is_view=True, passes=0.0, output_bytes=parent)
        elif kind == "small":
            operation = dataclasses.replace(operation, output_bytes=(16,))
        operations.append(operation)
    operations.append(forward(n_forward - 1, passes=None))
    last = n_forward
    for _ in range(draw(st.integers(1, 12))):
        read = draw(st.lists(st.integers(1, n_forward), min_size=1, max_size=2))
        follows = draw(st.booleans()) or last == n_forward
        operations.append(backward(*([last] if follows else []), *read, mib=draw(st.integers(1, 8))))
        if follows:
            last = len(operations) - 1
    early = [i for i in range(n_forward + 1, len(operations)) if i != last]
    operations.append(backward(last, *early))
    return operations


def changed(operations: list[Operation], plan: Rebuilding) -> list[Operation]:
    """Return the graph that a plan asks for, copies at its end."""
    made = {original: len(operations) + k for k, (original, _) in enumerate(plan.copies)}
    after = dict(plan.delays)
    readers = set(plan.readers)
    result = []
    for i, operation in enumerate(operations):
        inputs = tuple(
            (made[before], which) if (i, at) in readers else (before, which)
            for at, (before, which) in enumerate(operation.inputs)
        )
        waits = (*operation.waits_for, *([after[i]] if i in after else []))
        result.append(dataclasses.replace(operation, inputs=inputs, waits_for=waits))
    for original, before in plan.copies:
        inputs = tuple((made.get(i, i), which) for i, which in operations[original].inputs)
        result.append(dataclasses.replace(operations[original], inputs=inputs, waits_for=(before,)))
    return result


def values(operations: list[Operation], originals: list[int]) -> list[int]:
    """Return what each operation computes: a number for it and for all that it was made of; fails on a cycle."""
    waiting = deque(range(len(operations)))
    found: dict[int, int] = {}
    idle = 0
    while waiting:
        i = waiting.popleft()
        needed = [*(before for before, _ in operations[i].inputs), *operations[i].waits_for]
        if all(before in found for before in needed):
            found[i] = hash((originals[i], tuple((found[before], which) for before, which in operations[i].inputs)))
            idle = 0
        else:
            waiting.append(i)
            idle += 1
            assert idle <= len(waiting), "a cycle"
    return [found[i] for i in range(len(operations))]


@settings(max_examples=300)
@given(steps(), st.floats(0, 1.2))
def test_invariant_6_a_changed_graph_computes_the_same_and_keeps_no_more_than_asked(
    operations: list[Operation], share: float
) -> None:
    """Invariant 6: whatever the graph and the limit are."""
    graph = StepGraph(operations)
    limit = int(share * graph.kept_bytes())
    plan = graph.plan(limit)
    assert plan.kept_bytes <= max(limit, graph.least_bytes())
    after = changed(operations, plan)
    originals = [*range(len(operations)), *(original for original, _ in plan.copies)]
    assert values(after, originals)[: len(operations)] == values(operations, list(range(len(operations))))
    late = StepGraph(after)
    assert late.kept_bytes() <= plan.kept_bytes
