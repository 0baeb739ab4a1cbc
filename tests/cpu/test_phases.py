"""Phases of a job that marks its iterations: found by how they begin and repeat, each with a profile of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from cpu.support.members import Tenant, tenants
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.heap.layout import GRANULE_BYTES
from zico.pool.layout import iterations_of
from zico.pool.regions import claim_of
from zico.trace import online, profile
from zico.trace.online import MEMORY_BYTES, TRACKER
from zico.trace.phases import MARKED, PHASES, WIDEST, is_level
from zico.trace.repeats import LOOSE, mark_at

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIT = GRANULE_BYTES  # a region, so that every tensor shows in what is held
ROOM = 1024


class Net(NamedTuple):
    """Layers by their sizes, in units; what a pass over them allocates and frees is what autograd would."""

    layers: tuple[int, ...] = (3, 5, 2, 7, 4, 6, 1, 8, 2, 5, 3, 4)

    def train(self, tenant: Tenant) -> None:
        """Keep each layer's output until the way back, where each has a gradient for a moment."""
        outputs = [tenant.allocate(n * UNIT) for n in self.layers]
        for n, output in zip(reversed(self.layers), reversed(outputs), strict=True):
            gradient = tenant.allocate(n * UNIT)
            tenant.free(output)
            tenant.free(gradient)

    def evaluate(self, tenant: Tenant) -> None:
        """Keep each layer's output until the next one has been made."""
        before = tenant.allocate(self.layers[0] * UNIT)
        for n in self.layers[1:]:
            output = tenant.allocate(n * UNIT)
            tenant.free(before)
            before = output
        tenant.free(before)

    @property
    def train_peak(self) -> int:
        """Return the regions that a training step comes to hold."""
        return sum(self.layers) + self.layers[-1]

    @property
    def evaluation_peak(self) -> int:
        """Return the regions that an evaluation step comes to hold."""
        return max(a + b for a, b in zip(self.layers, self.layers[1:], strict=False))


NET = Net()


def _epoch(tenant: Tenant, net: Net = NET, steps: int = 6, evaluations: int = 6) -> tuple[list[int], list[int]]:
    """Train and evaluate; returns the phase in use at the end of each training and each evaluation step."""
    trained, evaluated = [], []
    for _ in range(steps):
        net.train(tenant)
        trained.append(int(tenant.job["phase"]))
        tenant.mark()
    for _ in range(evaluations):
        net.evaluate(tenant)
        evaluated.append(int(tenant.job["phase"]))
    return trained, evaluated


@pytest.fixture
def tenant() -> Iterator[Tenant]:
    """Return a job that is alone in a pool."""
    with tenants(ROOM) as (alone,):
        yield alone


def _counts(tenant: Tenant) -> Any:  # noqa: ANN401 - an int64 array
    """Return how many iterations, evaluations and parts have ended."""
    return np.array([iterations_of(tenant.job), tenant.job["evaluations"], tenant.job["parts"]])


def _claim(tenant: Tenant) -> int:
    return int(claim_of(tenant.job))


def test_an_evaluation_that_has_been_seen_is_a_phase_from_its_first_step_on(tenant: Tenant) -> None:
    """It has its own profile, and each of its steps is an iteration; training after it is known at once, too."""
    _epoch(tenant)
    before = _counts(tenant)
    trained, evaluated = _epoch(tenant)
    assert set(trained) == {MARKED}
    assert MARKED not in evaluated
    assert len(set(evaluated)) == 1
    # Six marks; the last evaluation step of before, and five, after what lies between a mark and the first one.
    assert (_counts(tenant) - before).tolist() == [6, 6, 1]
    assert int(tenant.job["claim_peak"]) <= NET.evaluation_peak + 1
    for _ in range(WIDEST):  # training begins without a mark
        tenant.allocate(UNIT)
    _epoch(tenant)


def test_claims_are_those_of_the_phase_that_runs(tenant: Tenant) -> None:
    """While it evaluates, a job claims what evaluation comes to hold; as soon as it trains, what training does."""
    for _ in range(2):
        _epoch(tenant)
    assert _claim(tenant) <= NET.evaluation_peak + 1
    held = [tenant.allocate(n * UNIT) for n in NET.layers]
    assert int(tenant.job["phase"]) == MARKED
    assert NET.train_peak <= _claim(tenant) <= NET.train_peak + 1
    for address in held:
        tenant.free(address)


def test_claims_cover_iterations_that_take_turns(tenant: Tenant) -> None:
    """The higher of two that take turns is claimed behind the lower one, and forgotten when it stays away."""

    def train(height: int) -> int:
        for address in [tenant.allocate(UNIT) for _ in range(4)]:
            tenant.free(address)
        tenant.free(tenant.allocate(height * UNIT))
        tenant.mark()
        return int(tenant.job["claim_peak"])

    assert [train(height) for height in (8, 8, 8, 16, 8, 16, 8)][-4:] == [16] * 4
    assert [train(8) for _ in range(20)][-1] == 8


def test_a_mark_ends_any_other_phase(tenant: Tenant) -> None:
    """What runs after a mark is what marks begin, until something else is seen to begin."""
    for _ in range(2):
        _epoch(tenant)
    assert tenant.job["phase"] != MARKED
    tenant.mark()
    assert tenant.job["phase"] == MARKED
    assert int(tenant.job["claim_peak"]) >= NET.train_peak


def test_closures_are_iterations_while_the_optimizer_remembers_more_of_each(tenant: Tenant) -> None:
    """Memory is a little higher after each pass, so no allocation finds it twice as it was: the passes are alike."""
    net = Net((4,) * 12)
    iterations = []
    for _ in range(3):
        before = int(tenant.job["iteration"])
        for _ in range(15):
            net.train(tenant)
            tenant.allocate(UNIT // 8)
        tenant.mark()
        iterations.append(int(tenant.job["iteration"]) - before)
    assert min(iterations) >= 10
    assert iterations[-1] == 15


def test_training_alone_looks_for_nothing(tenant: Tenant) -> None:
    """In a plain loop every boundary is a mark, and inside an iteration no allocation is noted."""
    for _ in range(40):
        NET.train(tenant)
        tenant.mark()
    assert _counts(tenant).tolist() == [40, 0, 0]
    noted = int(tenant.record[0]["tracker"]["events"])
    NET.train(tenant)
    assert int(tenant.record[0]["tracker"]["events"]) - noted <= WIDEST + len(NET.layers) // 4


def test_micro_batches_are_iterations(tenant: Tenant) -> None:
    """An iteration of several equal passes, of which each but the first adds to gradients, is cut at each of them."""

    def accumulate() -> None:
        gradients = 0
        for _ in range(4):
            NET.train(tenant)
            gradients = gradients or tenant.allocate(9 * UNIT)
        tenant.free(gradients)
        tenant.mark()

    for _ in range(6):
        accumulate()
    before = _counts(tenant)
    for _ in range(20):  # more than after which passes that do not come any more are forgotten
        accumulate()
    assert (_counts(tenant) - before).tolist() == [20, 0, 20 * 3]


def test_the_first_mark_makes_parts_of_what_repetition_has_shown(tenant: Tenant) -> None:
    """Once a job has marks, these are its iterations: passes before the first one are none."""
    for _ in range(20):
        NET.train(tenant)
    found = int(tenant.job["iteration"])
    assert found >= 10
    assert _counts(tenant).tolist() == [found, 0, 0]
    tenant.mark()
    assert _counts(tenant).tolist() == [1, 0, found]


def test_layers_that_begin_like_the_iteration_are_no_micro_batches(tenant: Tenant) -> None:
    """Equal layers come again and again in one pass, but memory is not down again at their beginnings."""
    net = Net(NET.layers * 4)
    for _ in range(20):
        net.train(tenant)
        tenant.mark()
    assert int(tenant.job["iteration"]) == 20


def test_what_follows_the_usual_end_is_claimed_as_it_was_seen(tenant: Tenant) -> None:
    """A step that logs goes on for longer: at first the whole peak may come again, later what came then."""

    def log() -> None:
        for n in range(40):
            tenant.free(tenant.allocate((n % 2 + 1) * UNIT))

    for _ in range(4):
        NET.train(tenant)
        tenant.mark()
    NET.train(tenant)
    log()
    assert _claim(tenant) >= NET.train_peak
    tenant.mark()
    NET.train(tenant)
    tenant.mark()
    NET.train(tenant)
    log()
    assert _claim(tenant) <= 3


def test_what_begins_unlike_anything_known_may_hold_as_much_as_ever(tenant: Tenant) -> None:
    """Until it is known what runs, the claim does not fall, however far training would be by then."""
    for _ in range(6):
        NET.train(tenant)
        tenant.mark()
    for n in range(2 * len(NET.layers)):
        tenant.free(tenant.allocate((n % 5 + 1) * UNIT))
    assert _claim(tenant) >= NET.train_peak


@pytest.mark.parametrize(
    ("starts", "peaks", "expected"),
    [
        ([0, 0, 0, 0], [9, 9, 9, 9], True),
        ([0, 0, 0, 0], [9, 8, 9, 8], True),
        ([0, 3, 6, 9], [9, 12, 15, 18], False),
        ([0, 0, 0, 0], [9, 9, 3, 9], False),
    ],
    ids=["equal passes", "nearly equal ones", "each begins higher", "one rises less"],
)
def test_a_loop_is_a_phase_only_if_its_passes_are_level_and_rise_alike(
    starts: list[int], peaks: list[int], *, expected: bool
) -> None:
    """A loop may be known by one size alone. Memory tells whether its passes are equal."""
    sizes: list[int] = []
    live: list[int] = []
    for start, peak in zip(starts, peaks, strict=True):
        sizes += [7, 1, 1, 1, 1, 1]
        live += [start, start + 1, peak, start + 1, start, start]
    sizes.append(7)
    live.append(starts[-1])
    memory = np.zeros(MEMORY_BYTES, "u1")
    tracker = np.zeros(1, TRACKER)[0]
    tracker["memory_address"] = memory.ctypes.data
    for size, before in zip(sizes, live, strict=True):
        online.note(tracker, size, before)
    tracker["gap"], tracker["width"] = 6, LOOSE
    tracker["mark"] = mark_at(np.array(sizes), np.array(live), len(sizes) - 1, LOOSE)
    assert is_level(tracker) == expected


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.lists(st.integers(1, 9), min_size=10, max_size=24), min_size=2, max_size=PHASES - 2),
    order=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=20),
)
def test_any_mixture_of_phases_keeps_the_table_right(kinds: list[list[int]], order: list[tuple[int, int]]) -> None:
    """Whatever follows whatever: phases stay within bounds, claims cover what is held, marks are never lost."""
    with tenants(ROOM) as (tenant,):
        marks = 0
        for kind, times in order:
            net = Net(tuple(kinds[kind % len(kinds)]))
            for n in range(times):
                if kind % 2:
                    net.evaluate(tenant)
                else:
                    net.train(tenant)
                    if n % 2:
                        tenant.mark()
                        marks += 1
                assert 0 <= tenant.job["phase"] < PHASES
                assert _claim(tenant) >= int(tenant.job["held"])
                assert not tenant.job["profiled"] or int(tenant.job["claim_peak"]) >= 0
        assert int(tenant.record[0]["phases"]["marks"]) == marks
        assert int(tenant.job["iteration"]) >= marks
        assert profile.peak(tenant.job["current"]) <= ROOM
        tenant.check_structure()
