"""The simulator of paging on jobs small enough to count by hand, and the baselines beside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError, TraceError
from zico.lab.simulator.lms_vdnn import Step, Tensors, lms, tensors_of, vdnn
from zico.lab.simulator.paging_simulation import Device, Paging
from zico.lab.simulator.paging_workload import Naming, Workload, workload
from zico.paging.layout import ALL, BLOCK_BYTES, DEEPUM, INVALIDATE, PREEVICT, PREFETCH
from zico.trace.events import EVENT, NO_NAME, Kind, Origin, Trace
from zico.trace.iterations import choose, find_iterations, lay_out
from zico.trace.lifetimes import lifetimes

GB_S = BLOCK_BYTES / 1e-3  # a block a millisecond
MS = 1_000_000


def job(touches: list[list[int]], *, writes: bool = True, duration_ns: int = MS, temporary: int = 0) -> Workload:
    """Return a workload whose executions touch these blocks; the last ones are temporary: active while touched."""
    n_blocks = 1 + max(max(some) for some in touches)
    kept = n_blocks - temporary
    changes: list[list[tuple[int, bool]]] = [[] for _ in range(len(touches) + 1)]
    for i, some in enumerate(touches):
        changes[i] += [(block, True) for block in some if block >= kept]
        changes[i + 1] += [(block, False) for block in some if block >= kept]
    touched, changed = [b for some in touches for b in some], [c for some in changes for c in some]
    return Workload(
        n_blocks=n_blocks,
        name=np.arange(1, len(touches) + 1),
        duration_ns=np.full(len(touches), duration_ns),
        first_touch=np.cumsum([0, *map(len, touches)]),
        touched=np.array(touched, np.int32),
        writes=np.full(len(touched), writes),
        first_change=np.cumsum([0, *map(len, changes)]),
        changed=np.array([block for block, _ in changed], np.int32),
        becomes_active=np.array([active for _, active in changed], np.bool_),
        active=np.arange(n_blocks) < kept,
    )


def device(blocks: int, **told: int) -> Device:
    """Return a device of so many blocks, each of which takes a millisecond to copy."""
    return Device(blocks * BLOCK_BYTES, GB_S, fault_ns=MS // 10, **told)


# -- the simulator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [0, DEEPUM, ALL])
def test_a_job_that_fits_waits_once(flags: int) -> None:
    """With one block to spare, the first iteration brings blocks in, and later ones take what computing takes."""
    paging = Paging(job([[0, 1], [2, 3]]), device(5), flags)
    assert paging.iterate().moved_in == 4
    later = paging.iterate()
    assert (later.faults, later.late, later.time_ns) == (0, 0, 2 * MS)


def test_paging_on_demand_takes_what_can_be_counted() -> None:
    """A loop over six written blocks in three misses each time: a fault, a copy out and a copy in for every block."""
    paging = Paging(job([[block] for block in range(6)]), device(3), 0)
    paging.iterate()
    later = paging.iterate()
    assert (later.faults, later.moved_in, later.moved_out) == (6, 6, 6)
    assert later.time_ns == 6 * (MS + MS // 10 + 2 * MS)
    assert later.lost_ns == later.time_ns - 6 * MS


def test_a_batch_is_handled_once() -> None:
    """Blocks touched together share the handling of their faults; smaller units of migration take one each."""
    for told, handled in (({"batch_blocks": 2}, 1), ({}, 2), ({"batch_blocks": 2, "fault_bytes": BLOCK_BYTES // 4}, 7)):
        paging = Paging(job([[0, 1], [2, 3], [4, 5]]), device(4, **told), 0)
        paging.iterate()
        assert paging.iterate().time_ns == 3 * (MS + handled * MS // 10 + 4 * MS), told


def test_prefetching_hides_what_fits_beside_computing() -> None:
    """Where computing takes as long as copying each way, a learned loop loses little of what it lost on demand."""
    work = job([[block] for block in range(12)], duration_ns=2 * MS)
    lost = {}
    for flags in (0, PREFETCH, PREFETCH | PREEVICT, ALL):
        paging = Paging(work, device(8), flags, degree=3)
        lost[flags] = [paging.iterate() for _ in range(6)][-1].lost_ns
    assert lost[0] == 12 * (2 * MS + MS // 10)
    assert lost[PREFETCH] < lost[0]
    assert lost[PREFETCH | PREEVICT] == lost[ALL] == 0


def test_what_is_kept_leaves_in_no_iteration() -> None:
    """A loop over six blocks in five misses all of them on demand, and none of two that are kept."""
    work = job([[block] for block in range(6)])
    for kept, faults in ((range(0), 6), (range(2, 4), 4), (range(2, 6), 4)):
        paging = Paging(work, device(5), 0, kept=kept)
        paging.iterate()
        assert paging.iterate().faults == faults
        assert paging.resident()[kept[:2]].all()


def test_what_nothing_lives_in_is_dropped() -> None:
    """Temporary blocks cost no copy where inactive ones are dropped, and one each way where they are not."""
    work = job([[0, 4], [1, 5], [2, 6], [3, 7]], temporary=4)
    moved = {}
    for flags in (0, DEEPUM & ~INVALIDATE, DEEPUM):
        paging = Paging(work, device(5), flags, degree=1)
        later = [paging.iterate() for _ in range(6)][-1]
        moved[flags] = later.moved_out
    assert moved[0] == 8
    assert moved[DEEPUM] <= 4 < moved[DEEPUM & ~INVALIDATE]


def test_clean_blocks_need_no_copy_where_the_tier_keeps_theirs() -> None:
    """A loop that only reads copies nothing out where the next tier keeps its copies, and all where it does not."""
    for keeps, moved in ((0, 6), (1, 0)):
        paging = Paging(job([[block] for block in range(6)], writes=False), device(3, keeps_copies=keeps), 0)
        paging.iterate()
        assert paging.iterate().moved_out == moved


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=5, unique=True), min_size=1, max_size=15),
    st.sampled_from([0, PREFETCH, PREFETCH | PREEVICT, DEEPUM, ALL]),
    st.integers(4, 20),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1]),
)
def test_memory_suffices_and_time_adds_up(
    touches: list[list[int]], flags: int, blocks: int, batch: int, keeps: int
) -> None:
    """Whatever a job touches: no more blocks are there than fit, and an iteration takes what it computes and loses."""
    work = job(touches, temporary=min(3, max(max(some) for some in touches)))
    paging = Paging(work, device(blocks, batch_blocks=batch, keeps_copies=keeps), flags, degree=4)
    for _ in range(4):
        result = paging.iterate()
        machine = paging.machine
        leaving = int(machine["leaving_tail"] - machine["leaving_head"])
        assert paging.resident().sum() + leaving + machine["free"] == blocks
        assert result.time_ns == work.compute_ns + result.lost_ns


def test_too_little_memory_is_refused() -> None:
    """A device that cannot hold what is touched at once, and one block more, says so."""
    with pytest.raises(ConfigError, match="less than 3 blocks"):
        device(2, batch_blocks=2)


# -- what a trace touches --------------------------------------------------------------------------


def two_iterations() -> Trace:
    """Return a trace whose iterations read a, four blocks that persist, and write b, two that die."""
    rows = [(0, 4 * BLOCK_BYTES, Kind.ALLOC)]
    for number in range(3):
        b = number + 1
        rows += [(number, 0, Kind.BEGIN), (b, 2 * BLOCK_BYTES, Kind.ALLOC), (0, 0, Kind.READ), (b, 0, Kind.WRITE)]
        rows += [(NO_NAME, 5000, Kind.OP), (b, 0, Kind.READ), (NO_NAME, 3000, Kind.OP), (b, 0, Kind.FREE)]
    events = [(i, tensor, size, 0, 0, kind, 0) for i, (tensor, size, kind) in enumerate(rows)]
    return Trace(Origin(), np.array(events, EVENT), ("add",))


def test_a_workload_is_what_the_trace_says() -> None:
    """Operands are passed at the same pace, blocks become active as tensors live, and what differs has another name."""
    trace = two_iterations()
    life = lifetimes(trace)
    iterations = find_iterations(trace, life)
    iteration = lay_out(trace, life, iterations, choose(trace, iterations))
    offsets = np.where(iteration.size_bytes == 4 * BLOCK_BYTES, 0, 7 * BLOCK_BYTES)
    work = workload(trace, life, iterations, iteration, offsets, Naming.SHAPES)
    assert work.n_blocks == 9
    assert work.touched.tolist() == [0, 7, 1, 2, 8, 3, 7, 8]
    assert work.writes.tolist() == [False, True, False, False, True, False, False, False]
    assert (work.first_touch.tolist(), work.duration_ns.tolist()) == ([0, 6, 8], [5000, 3000])
    assert work.name.tolist() == [1, 2]
    assert np.flatnonzero(work.active).tolist() == [0, 1, 2, 3]
    changes = [(block, bool(is_active)) for block, is_active in zip(work.changed, work.becomes_active, strict=True)]
    assert changes == [(7, True), (8, True), (7, False), (8, False)]
    assert work.first_change.tolist() == [0, 2, 2, 4]


def test_a_trace_without_accesses_is_refused() -> None:
    """A trace that does not say what operations touch names what would."""
    trace = two_iterations()
    kept = ~np.isin(trace.events["kind"], (Kind.READ, Kind.WRITE, Kind.OP))
    trace = Trace(Origin(), trace.events[kept], trace.names)
    life = lifetimes(trace)
    iterations = find_iterations(trace, life)
    iteration = lay_out(trace, life, iterations, choose(trace, iterations))
    with pytest.raises(TraceError, match="what operations touch"):
        workload(trace, life, iterations, iteration, np.zeros(len(iteration.row), np.int64), Naming.SHAPES)


# -- baselines -------------------------------------------------------------------------------------


def test_tensors_are_what_the_trace_says() -> None:
    """What lives, is allocated, used and freed comes in the order of the trace."""
    trace = two_iterations()
    life = lifetimes(trace)
    iterations = find_iterations(trace, life)
    iteration = lay_out(trace, life, iterations, choose(trace, iterations))
    work = tensors_of(trace, life, iterations, iteration)
    a, b = (int(np.flatnonzero(iteration.size_bytes == n * BLOCK_BYTES)[0]) for n in (4, 2))
    assert work.alive == [a]
    steps = [(step.kind, step.tensors) for step in work.steps]
    assert steps == [(Kind.ALLOC, (b,)), (Kind.OP, (a, b)), (Kind.OP, (b,)), (Kind.FREE, (b,))]


def chain(n: int) -> Tensors:
    """Return a forward pass that makes n tensors of a kilobyte, each from the one before, and a backward pass."""
    steps = []
    for i in range(n):
        steps += [Step(Kind.ALLOC, (i,)), Step(Kind.OP, (i - 1, i) if i else (i,), 1000, "convolution")]
    for i in reversed(range(n)):
        steps += [Step(Kind.OP, (i,), 1000, "convolution_backward"), Step(Kind.FREE, (i,))]
    return Tensors([1000] * n, [], steps)


def test_lms_moves_what_does_not_fit() -> None:
    """Of six tensors three leave a memory of three and come back, one after the other; one alone cannot run two."""
    found = lms(chain(6), 3000, 1e9)
    assert found is not None
    assert (found.moved_bytes, found.peak_bytes, found.time_ns) == (6000, 3000, 12_000 + 6000)
    assert lms(chain(6), 1000, 1e9) is None


def test_vdnn_moves_feature_maps_whether_they_fit_or_not() -> None:
    """All tensors but those of the middle leave and come back; operations wait for copies that take longer."""
    fast, slow = vdnn(chain(6), 1e9), vdnn(chain(6), 0.5e9)
    assert fast.time_ns == 12_000
    assert fast.moved_bytes == slow.moved_bytes == 2 * 5 * 1000
    assert slow.time_ns == 12_000 + 10 * 1000
    assert fast.peak_bytes < 6000
    assert vdnn(chain(6), 1e9, layers="matmul").moved_bytes == 0
