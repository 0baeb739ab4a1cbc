"""What leaves and comes back follows the plan while events do, and need where they do not."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.swapping_parts import DEADLINE_S, Array, Gauge, Shelf, make_mover

from zico.base.errors import ConfigError
from zico.planning.packing.problem import NoPlan, Reason
from zico.swap import swapper
from zico.swap.learning import (
    CALM_ITERATIONS,
    MARGIN_SHARE,
    MOST_MARGIN,
    TRIAL_ITERATIONS,
    Ended,
    Learner,
    ProcessorClock,
    Tense,
    Trial,
)
from zico.swap.mover import Place
from zico.swap.observed import SAVED, USED, Observed
from zico.swap.schedule import Chosen, Plan
from zico.swap.swapper import Swapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.swap.mover import Mover
    from zico.tiers.layout import Rates

SIZE = 1000
MS = 1_000_000


class Job:
    """A job that saves and uses arrays in stack order; its memory is what it has saved and is here."""

    def __init__(self, cap: int) -> None:
        """May hold so many bytes."""
        self.shelf = Shelf()
        self.mover: Mover = make_mover(self.shelf)[0]
        self.gauge = Gauge(cap)
        self.loads: list[int] = []
        self.learner = Learner(self.gauge)
        self.swapper = Swapper(self.mover, self.gauge, self.learner)
        self.saved: list[Array] = []
        self.away: list[int] = []

    def tick(self, work: Callable[[], object]) -> None:
        """Let work be an event of the heap, that changes what is alive."""
        self.gauge.ticks += 1
        work()
        assert self.swapper.settle(DEADLINE_S)
        self.gauge.live = sum(array.size_bytes for array in self.saved if array.here is not None)
        self.loads.append(self.gauge.live)

    def save(self, contents: bytes) -> None:
        """Save an array."""
        array = Array(self.mover, contents)
        self.tick(lambda: self.saved.append(array))
        self.tick(lambda: self.swapper.saved(array))

    def use(self) -> bytes:
        """Use what was saved last, and free it."""
        contents: list[bytes] = []
        array = self.saved[-1]
        self.tick(lambda: contents.append(self.swapper.used(array, array.take)))
        self.tick(self.saved.pop)
        return contents[0]

    def iterate(self, n: int, *, size: int = SIZE) -> None:
        """Save and use so many."""
        self.loads = []
        for i in range(n):
            self.save(bytes([i]) * size)
        self.away = [i for i, array in enumerate(self.saved) if array.place is not Place.HERE]
        for i in reversed(range(n)):
            assert self.use() == bytes([i]) * size
        self.gauge.iterations += 1
        self.gauge.last = Ended(self.gauge.ticks - len(self.loads) + 1, np.array(self.loads), time.monotonic_ns())


def test_without_a_plan_what_was_saved_first_leaves_when_memory_is_nearly_full() -> None:
    """The first iteration moves what exceeds the greater part of the limit, and no more."""
    job = Job(8 * SIZE)
    job.iterate(10)
    assert job.away == [0, 1, 2, 3]
    assert job.gauge.live <= 8 * SIZE


def test_without_a_plan_a_use_brings_back_all_that_was_saved_before_it_and_has_room() -> None:
    """However many tensors that are."""
    job = Job(100 * SIZE)
    for i in range(6):
        job.save(bytes([i]) * SIZE)
    job.swapper.make_room(5 * SIZE)
    assert job.swapper.settle(DEADLINE_S)
    assert [array.place is Place.AWAY for array in job.saved] == [True] * 5 + [False]
    assert job.use() == bytes([5]) * SIZE
    assert [array.place is Place.AWAY for array in job.saved] == [False] * 5


def test_a_plan_is_made_of_two_iterations_that_are_alike_and_followed() -> None:
    """From then on planned ones leave as they are saved, and the same come back before they are used."""
    job = Job(6 * SIZE)
    for _ in range(6):
        job.iterate(10)
        if job.learner.planning is not None:
            job.learner.planning.join(DEADLINE_S)
    assert job.swapper.passive_iterations <= 3, "two alike, and the one in which the plan is made"
    assert job.swapper.planned_iterations >= 2
    assert job.learner.plans >= 1
    assert job.away == [0, 1, 2, 3, 4], "a little more than what exceeds the limit"


def test_an_iteration_that_is_not_the_planned_one_is_served_by_need() -> None:
    """Other sizes or more tensors end the plan for this iteration; contents are right all the same."""
    job = Job(6 * SIZE)
    for _ in range(5):
        job.iterate(10)
        if job.learner.planning is not None:
            job.learner.planning.join(DEADLINE_S)
    planned = job.swapper.planned_iterations
    job.iterate(10, size=SIZE + 1)
    job.iterate(12)
    job.iterate(10)
    assert job.swapper.planned_iterations == planned + 1, "the last of the planned ones"
    job.save(b"another")
    assert job.swapper.planned_iterations == planned + 2


def test_memory_that_is_not_logged_counts_as_away_until_its_tensor_dies() -> None:
    """An iteration is told of its first departure and of its end, and of no return."""
    job = Job(100 * SIZE)
    job.swapper = Swapper(job.mover, job.gauge, job.learner, logs_returns=False)
    job.save(b"a" * SIZE)
    for _ in range(2):
        assert job.mover.send(job.saved[0])
        assert job.swapper.settle(DEADLINE_S)
        job.mover.need(job.saved[0], job.saved[0].take)
        job.saved[0].held = False
    assert [size_bytes for _, size_bytes in job.learner._moved] == [SIZE]
    job.swapper.forget(job.saved[0])
    assert [size_bytes for _, size_bytes in job.learner._moved] == [SIZE, -SIZE]


def planned(job: Job, iterations: int = 1) -> None:
    """Let iterations pass, and the plan that they bring be made."""
    for _ in range(iterations):
        job.iterate(10)
        if job.learner.planning is not None:
            job.learner.planning.join(DEADLINE_S)


def test_a_job_that_fits_stands_by_until_its_limit_or_its_peak_changes() -> None:
    """Nothing has to be told while iterations fit; a lower limit has its plan before the next one begins."""
    job = Job(100 * SIZE)
    assert not job.swapper.stands_by(), "no iteration is known"
    planned(job, 4)
    assert job.swapper.stands_by()
    plans, job.gauge.cap = job.learner.plans, 6 * SIZE
    assert not job.swapper.stands_by()
    job.learner.planning.join(DEADLINE_S)
    assert job.learner.plans == plans + 1
    assert not job.swapper.stands_by()
    job.gauge.iterations += 1  # some have passed of which nobody told
    planned(job, 3)
    assert job.swapper.planned_iterations >= 2, "from the first one on"
    job.gauge.cap = 100 * SIZE
    planned(job, 2)
    assert job.swapper.stands_by()
    job.gauge.peak += 1
    assert not job.swapper.stands_by(), "they have grown"
    planned(job, 2)
    assert job.swapper.stands_by()


def test_room_is_made_of_what_is_needed_last_and_no_more() -> None:
    """Somebody who waits gets what was saved first."""
    job = Job(100 * SIZE)
    for i in range(5):
        job.save(bytes([i]) * SIZE)
    job.swapper.make_room(2 * SIZE)
    assert job.swapper.settle(DEADLINE_S)
    assert [array.place is Place.AWAY for array in job.saved] == [True, True, False, False, False]
    for i in reversed(range(5)):
        assert job.use() == bytes([i]) * SIZE


def test_what_outlives_its_iteration_can_still_leave_and_be_used() -> None:
    """A graph that is kept over a boundary is first to go, and its tensors come back."""
    job = Job(100 * SIZE)
    job.save(b"old" * SIZE)
    kept = job.saved.pop()
    job.gauge.iterations += 1
    job.save(b"new" * SIZE)
    job.swapper.make_room(1)
    assert job.swapper.settle(DEADLINE_S)
    assert (kept.place, job.saved[0].place) == (Place.AWAY, Place.HERE)
    assert job.swapper.used(kept, kept.take) == b"old" * SIZE


def test_events_without_boundaries_are_not_kept_for_ever() -> None:
    """A loop that nothing marks begins anew now and then."""
    job = Job(100 * SIZE)
    job.swapper.most_events = 10
    for _ in range(40):
        job.save(b"x")
        job.use()
    assert job.swapper.passive_iterations >= 7


def test_making_room_waits_for_what_is_being_copied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back cannot leave until it is here; then it goes again at once, and the wait is over."""
    job = Job(100 * SIZE)
    job.save(b"a" * SIZE)
    job.swapper.make_room(SIZE)
    assert job.swapper.settle(DEADLINE_S)
    array = job.saved[0]
    job.shelf.held_up_in = threading.Event()
    assert job.mover.fetch(array)
    assert job.shelf.begun_in.wait(DEADLINE_S)
    waits, await_landing = threading.Event(), job.mover.await_landing

    def noted(within_s: float) -> bool:
        waits.set()
        return await_landing(within_s)

    monkeypatch.setattr(swapper, "LANDING_S", DEADLINE_S)
    monkeypatch.setattr(job.mover, "await_landing", noted)
    making = threading.Thread(target=job.swapper.make_room, args=(SIZE,), daemon=True)
    making.start()
    assert waits.wait(DEADLINE_S), "it does not wait, though it cannot leave yet"
    assert making.is_alive()
    job.shelf.held_up_in.set()
    making.join(DEADLINE_S)
    assert (making.is_alive(), array.place) == (False, Place.AWAY)
    assert job.use() == b"a" * SIZE


class Late(Array):
    """An array of which a device tells, later, whether it can be made again."""

    told = False
    asked = 0

    def keep_sources(self) -> bool:
        """It can, once that is told."""
        return self.told

    def await_check(self, within_s: float) -> bool:
        """Let the device tell."""
        assert within_s > 0
        self.asked += 1
        before, self.told = self.told, True
        return not before


def wish_to_drop(job: Job, array: Array) -> None:
    """Let the job's plan be to drop an array, which is still here."""
    seen = Observed((), (), (), np.zeros(1, np.int64), np.zeros(1, np.int64))
    job.swapper._wishes = [weakref.ref(array)]
    job.swapper._plan = Plan(seen, frozenset(), {}, SIZE, frozenset({array.ordinal}))


def test_making_room_lets_the_device_tell_before_anything_is_copied() -> None:
    """What the plan drops goes when the device has told that it may; nothing else leaves for it."""
    job = Job(100 * SIZE)
    job.save(b"a" * SIZE)
    late = Late(job.mover, b"b" * SIZE)
    wish_to_drop(job, late)
    job.swapper.make_room(SIZE)
    assert (late.place, late.is_dropped, late.asked) == (Place.AWAY, True, 1)
    assert job.saved[0].place is Place.HERE
    job.swapper.make_room(SIZE)
    assert job.swapper.settle(DEADLINE_S)
    assert job.saved[0].place is Place.AWAY, "there is nothing else to drop"


class Silent(Late):
    """An array of which the device tells nothing, since it is busy."""

    def await_check(self, within_s: float) -> bool:
        """Wait in vain."""
        return not threading.Event().wait(min(within_s, 0.01))


def test_making_room_copies_where_the_device_is_busy_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only has to be copied leaves, though the device never tells whether something else may be dropped."""
    monkeypatch.setattr("zico.swap.swapper.LANDING_S", 0.05)
    job = Job(100 * SIZE)
    job.save(b"a" * SIZE)
    silent = Silent(job.mover, b"b" * SIZE)
    wish_to_drop(job, silent)
    making = threading.Thread(target=job.swapper.make_room, args=(SIZE,), daemon=True)
    making.start()
    making.join(5.0)
    assert not making.is_alive()
    assert job.swapper.settle(DEADLINE_S)
    assert (job.saved[0].place, silent.place) == (Place.AWAY, Place.HERE)


class Unmakeable(Array):
    """An array that is dropped for good."""

    def keep_sources(self) -> bool:
        """It says that it can be made."""
        return True

    def make(self, _bring: Any) -> None:  # noqa: ANN401 - it is not called
        """Fail."""
        raise MemoryError


def test_a_fork_waits_for_nothing_that_cannot_be_made() -> None:
    """What is dropped is made before a fork; where that fails, nothing moves over the fork nevertheless."""
    job = Job(100 * SIZE)
    dropped = Unmakeable(job.mover, b"a" * SIZE)
    job.swapper.saved(dropped)
    assert job.mover.drop(dropped)
    job.swapper.hold()
    assert dropped.is_dropped
    assert job.swapper._held is not None
    assert len(job.swapper._held) == len(job.swapper._locks)
    job.swapper._release()


def test_of_several_planners_the_fastest_one_is_kept() -> None:
    """Each is followed for some iterations, the first of which does not count; a slow outlier changes nothing."""
    for times, kept in (((10, 20), "one"), ((20, 10), "two")):
        trial = Trial(["one", "two"])
        followed = []
        for took_ns in times:
            trial.turn(trial.way)
            changes = [trial.turns(1000 if i in (0, 3) else took_ns, 9) for i in range(TRIAL_ITERATIONS + 1)]
            followed.append(sum(changes))
        assert trial.way == kept
        assert followed == [1, kept == "one"]
        assert not any(trial.turns(5, 9) for _ in range(50)), "and for good"


def test_one_planner_is_not_tried() -> None:
    """Nothing is measured."""
    trial = Trial(["one"])
    assert not any(trial.turns(took_ns, 1) for took_ns in range(50))
    assert trial.way == "one"


def test_a_planner_that_costs_nothing_is_kept() -> None:
    """Where hardly anything is lost, hardly anything can be won."""
    trial = Trial(["one", "two"])
    assert not any(trial.turns(100, 2) for _ in range(50))
    assert trial.way == "one"


def seen_by(gauge: Gauge) -> Gauge:
    """Let a job's last iteration be one of two tensors, of which both are alive half of the time; returns the job."""
    gauge.last = Ended(0, SIZE * np.array([1, 2, 2, 1]), 8 * MS)
    return gauge


class Losing(ProcessorClock):
    """A device's clock that says what is lost: it has stood still as long as it has gone."""

    def lost_ns(self, took_ns: int, _waited_ns: int, _seen: Observed) -> int:
        """Return half of what an iteration took."""
        return took_ns // 2


@pytest.mark.parametrize(
    ("clock", "waited_ns", "late"), [(ProcessorClock, 1 << 40, False), (Losing, 0, False), (Losing, 0, True)]
)
def test_an_iteration_is_observed_for_each_planner(
    clock: type[ProcessorClock],
    waited_ns: int,
    late: bool,  # noqa: FBT001 - by parameters
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who prepares is told of a planner ahead of the iteration that is observed for it, where any time is lost.

    A plan that is corrected in each iteration, since something comes late, is tried as long as others.
    """
    ticks = itertools.count(step=MS)
    monkeypatch.setattr("zico.swap.learning.time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    gauge = Gauge(4 * SIZE)
    gauge.last = Ended(0, np.full(8, SIZE), 8)
    learner = Learner(gauge, ["longest", "zico"])
    learner.clock = clock(lambda: 0)
    for _ in range(3 * TRIAL_ITERATIONS):
        for tick in range(4):
            learner.note_event(2 * (tick if tick < 2 else 3 - tick) + (tick > 1), tick)
        learner.note_size(SIZE)
        learner.note_size(SIZE)
        if late:
            learner.note_late(0)
        learner.turn(waited_ns)
        if learner.planning is not None:
            learner.planning.join(DEADLINE_S)
    assert gauge.prepared[0] == "zico"


def test_what_stays_late_is_not_corrected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is to come back a whole iteration earlier, and is late all the same, lacks room."""
    ticks = itertools.count(step=MS)
    monkeypatch.setattr("zico.swap.learning.time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    learner = Learner(seen_by(Gauge(2 * SIZE, SIZE * 100.0)))
    plans = []
    for _ in range(40):
        for tick, code in enumerate((0, 2, 3, 1)):
            learner.note_event(code, tick)
        learner.note_size(SIZE)
        learner.note_size(SIZE)
        learner.note_late(0)
        learner.turn(0)
        if learner.planning is not None:
            learner.planning.join(DEADLINE_S)
        plans.append(learner.plans)
    assert 2 < plans[-1] < 30
    assert plans[-10:] == plans[-1:] * 10


def test_others_hear_once_the_margin_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits first leaves more room by itself; what is told is of the margin that it came to."""
    ticks = itertools.count(step=MS)
    monkeypatch.setattr("zico.swap.learning.time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    gauge = seen_by(Gauge(2 * SIZE, SIZE * 1e6))
    learner, waits, heard, margins = Learner(gauge), 2, 0, list[float]()
    for turn in range(40):
        for tick, code in enumerate((0, 2, 3, 1)):
            learner.note_event(code, tick)
        learner.note_size(SIZE)
        learner.note_size(SIZE)
        learner.turn(MS if 1 < turn <= 1 + waits else 0)
        if learner.planning is not None:
            learner.planning.join(DEADLINE_S)
        heard = heard or turn * bool(gauge.told)
        margins += [learner._now.margin] * (len(gauge.told) - len(margins))
    assert heard == 1 + waits + CALM_ITERATIONS
    assert margins == [pytest.approx(MARGIN_SHARE * 1.5**waits)]


def test_limits_that_take_turns_have_a_plan_and_a_margin_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker tries one: what was learned within the other is in force again at once, and nothing of it here."""
    ticks = itertools.count(step=MS)
    monkeypatch.setattr("zico.swap.learning.time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    gauge = seen_by(Gauge(2 * SIZE, SIZE * 1e6))
    learner = Learner(gauge)
    margins: list[float] = []

    def run(cap_bytes: int, turns: int, waits: int = 0) -> list[Plan | None]:
        gauge.cap = cap_bytes
        found = []
        for turn in range(turns):
            for tick, code in enumerate((0, 2, 3, 1)):
                learner.note_event(code, tick)
            learner.note_size(SIZE)
            learner.note_size(SIZE)
            found.append(learner.turn(MS if turn < waits else 0))
            if learner.planning is not None:
                learner.planning.join(DEADLINE_S)
            margins.extend([learner._now.margin] * (len(gauge.told) - len(margins)))
        return found

    shared = run(2 * SIZE, 20, waits=7)[-1]
    assert shared is not None
    assert margins == [MOST_MARGIN], "at once, as it grows no more"
    less = run(SIZE, 20)[-1]
    assert less is not None
    assert margins[1:] == [MARGIN_SHARE]
    plans = learner.plans
    assert run(2 * SIZE, 1)[0] is shared
    assert run(SIZE, 1)[0] is less
    assert learner.plans == plans


def test_an_iteration_ends_when_it_ended_however_long_the_job_has_waited() -> None:
    """The clock stands still while the job waits, at the iteration's end, too. What fits is told of at once."""
    waited_ns = 10**12
    gauge = Gauge(4 * SIZE)
    learner = Learner(gauge)
    learner.clock = ProcessorClock(lambda: waited_ns)
    began_ns = time.monotonic_ns()
    for _ in range(2):
        for tick, code in enumerate((SAVED, USED)):
            learner.note_event(code, tick)
        learner.note_size(SIZE)
        gauge.last = Ended(0, np.full(8, SIZE), time.monotonic_ns())
        learner.turn(0)
    assert learner.planning is not None
    learner.planning.join(DEADLINE_S)
    seen = gauge.told[0]
    assert 0 <= seen.t_ns[-1] <= time.monotonic_ns() - began_ns


@pytest.mark.parametrize(
    ("took", "waits", "last"),
    [
        pytest.param([100] * 60, [0] * 60, 0.04, id="who does not wait gets no greater margin"),
        pytest.param([100] * 4 + [110] * 56, [9] * 60, 0.04, id="one by which iterations become slower is taken back"),
        pytest.param([100] * 4 + [99] * 4 + [110] * 52, [9] * 60, 0.06, id="to the best one"),
        pytest.param([100] * 60, [9] * 60, 0.2, id="up to the most"),
        pytest.param([100, 150, 70, 130] * 15, [9] * 60, 0.2, id="also where iterations tell nothing"),
        pytest.param([100] * 60, [9] * 4 + [0] * 56, 0.06, id="until it does not wait any more"),
    ],
)
def test_a_margin_grows_while_that_costs_nothing(took: list[int], waits: list[int], last: float) -> None:
    """It is judged by the median of some iterations."""
    tense = Tense(0.04)
    found = [tense.margin(took_ns, waited_ns) for took_ns, waited_ns in zip(took, waits, strict=True)]
    assert found[-1] == pytest.approx(last)


def planned_in_three_turns(learner: Learner) -> Plan | None:
    """Let a learner see the same iteration of two tensors three times, and planners answer; returns its last plan."""
    planned = None
    for _ in range(3):
        for tick, code in enumerate((0, 2, 3, 1)):
            learner.note_event(code, tick)
        learner.note_size(SIZE)
        learner.note_size(SIZE)
        planned = learner.turn(0)
        if learner.planning is not None:
            learner.planning.join(DEADLINE_S)
    return planned


def test_what_is_idle_longest_leaves_until_a_planner_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner may take longer than iterations do; what it answered stays in force while it is asked again."""
    ticks = itertools.count(step=MS)
    monkeypatch.setattr("zico.swap.learning.time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    asked = [threading.Event(), threading.Event()]
    answers = [threading.Event(), threading.Event()]
    gauge = Gauge(2 * SIZE, 1e12)
    gauge.last = Ended(0, SIZE * np.array([1, 1, 2, 2, 2, 2, 1, 1]), 8 * MS)

    def choose(_seen: Observed, limit_bytes: int, _rates: Rates, _planner: str) -> Chosen:
        number = int(limit_bytes < int(2 * SIZE * (1 - MARGIN_SHARE)))
        asked[number].set()
        assert answers[number].wait(DEADLINE_S)
        return Chosen(frozenset({1 - number}), frozenset())

    learner = Learner(gauge, ["zico"], choose=choose)

    def turn(waited_ns: int = 0) -> frozenset[int]:
        for tick, code in zip((0, 2, 5, 7), (0, 2, 3, 1), strict=True):
            learner.note_event(code, tick)
        learner.note_size(SIZE)
        learner.note_size(SIZE)
        planned = learner.turn(waited_ns)
        return frozenset() if planned is None else planned.leaves

    def join() -> None:
        assert learner.planning is not None
        learner.planning.join(DEADLINE_S)

    turn()
    turn()
    assert asked[0].wait(DEADLINE_S)
    assert turn() == {0}
    answers[0].set()
    join()
    assert turn(waited_ns=MS) == {1}  # which waited, so that the margin grows and the planner is asked again
    assert asked[1].wait(DEADLINE_S)
    assert turn() == {1}
    answers[1].set()
    join()
    assert turn() == {0}


def test_the_learner_goes_on_where_nothing_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who chooses is asked once for an iteration; its error is the reason why what is idle longest leaves."""
    ticks = itertools.count(step=MS)
    monkeypatch.setattr("zico.swap.learning.time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    asked: list[tuple[int, str]] = []
    gauge = seen_by(Gauge(2 * SIZE, 1e12))

    def choose(seen: Observed, limit_bytes: int, _rates: Rates, planner: str) -> None:
        asked.append((limit_bytes, planner))
        raise ConfigError(f"no process for {len(seen.size_bytes)} tensors")

    planned = planned_in_three_turns(Learner(gauge, ["zico"], choose=choose))
    assert asked == [(int(2 * SIZE * (1 - MARGIN_SHARE)), "zico")]
    assert gauge.followed == [("longest", "zico cannot plan (no process for 2 tensors); longest is used instead")]
    assert planned is not None
    assert planned.leaves == {0}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, ("chen", "")),
        (Chosen(frozenset({0}), frozenset()), ("chen", "")),
        (
            Chosen(frozenset({0}), frozenset(), "found none; its plan for 2 B is used"),
            ("chen", "chen found none; its plan for 2 B is used"),
        ),
        (NoPlan(Reason.NOT_FOUND, "chen", 0.0, "found none"), ("longest", "chen found none; longest is used instead")),
    ],
)
def test_the_learner_tells_whose_choice_is_followed(answer: Chosen | NoPlan | None, told: tuple[str, str]) -> None:
    """The planner asked for, or the one that stands in for it, and why."""
    gauge = seen_by(Gauge(2 * SIZE, 1e12))
    planned = planned_in_three_turns(Learner(gauge, ["chen"], choose=lambda *_: answer))
    assert set(gauge.followed) == {told}
    assert planned is not None
    assert planned.leaves == {0}
