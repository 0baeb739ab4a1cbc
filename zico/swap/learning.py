"""From what iterations do to a plan: watch, plan when two in a row were alike, correct by what came late."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from zico.base.background import work_lock
from zico.base.comparison import Comparison
from zico.base.errors import ConfigError, ZicoError
from zico.base.saying import inform
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.registry import LONGEST
from zico.swap.observed import NS, Observed, Rebuild
from zico.swap.schedule import EARLIER, choose, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zico.swap.job import Job
    from zico.swap.observed import Int64s
    from zico.swap.schedule import Chosen, Plan
    from zico.tiers.layout import Rates


# -- learning --------------------------------------------------------------------------------------


MARGIN_SHARE = 0.04
"""Of what the job may hold, that a plan leaves for what lies between tensors in their regions."""
_TENSE_SHARE = 0.01
"""Of an iteration's time: who waits longer for memory in a planned one gets a plan with a greater margin."""
_TENSE_ITERATIONS = 3
"""For which a margin is followed before it is judged, besides the first one."""
_STEADY_SHARE = 0.1
"""Of an iteration's time, by which some differ at most that tell of a margin."""
_SLOWER = 1.02
"""Times the best iteration: a margin with which they take longer is taken back."""
_MARGIN_STEP = 0.02
"""By which the margin of a plan for a device grows, before it is judged again."""
_MARGIN_GROWTH = 1.5
"""Times which the margin on the host grows with each iteration that waits."""
MOST_MARGIN = 0.2
"""A heap holds up to 1.24 times what lives in it (benchmarks/results/held.md): so much of that lies between tensors."""
CALM_ITERATIONS = 2 * (1 + _TENSE_ITERATIONS)
"""For which the margin stays, before others hear how the job could go on with less: what it can do by itself comes
first. Two margins could have been judged by then. The greatest margin stays anyway."""
TRIAL_ITERATIONS = 7
"""For which each of several planners is followed, before the fastest is kept."""
WORTH_SHARE = _SLOWER - 1
"""Of an iteration's time: where the first planner loses less, no other is tried. It could not clearly be faster."""
_FASTER_SHARE = 0.9
"""An iteration that takes less than this share of the time of the one that was planned for is a better model."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The memory of the iteration that ended last."""

    first_tick: int
    load_bytes: Int64s
    """What was alive at this tick and the ones behind it, to the end."""
    end_ns: int
    """By the processor's clock."""


class Clock(Protocol):
    """Tells when events were, on a clock that stands still while the job waits: the processor's, or a device's."""

    is_ahead: bool
    """The processor is ahead of what this clock tells of, so that its waits may only mean that it has caught up."""

    def stamp(self) -> Any:  # noqa: ANN401 - what ``read`` takes
        """Return a stamp of this moment. Waits for nothing."""

    def end(self, ended: Ended) -> Any:  # noqa: ANN401 - as above
        """Return a stamp of the moment at which the last iteration ended, as the next one begins."""

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """Return the nanoseconds of stamps in order, from any moment on. May wait until the device has come by.

        Raises:
            DriverError: The device does not tell.
        """

    def lost_ns(self, took_ns: int, waited_ns: int, seen: Observed) -> int:
        """Return what an iteration lost since the job may hold less: of its time by the processor's clock."""


class ProcessorClock:
    """The processor's."""

    is_ahead = False

    def __init__(self, waited_ns: Callable[[], int]) -> None:
        """Take what says for how long the job has waited until now."""
        self._waited_ns = waited_ns

    def stamp(self) -> int:
        """Return the time."""
        return time.monotonic_ns() - self._waited_ns()

    def end(self, ended: Ended) -> int:
        """Return the time of the last boundary."""
        return ended.end_ns - self._waited_ns()

    def read(self, stamps: Sequence[int]) -> list[int]:
        """Return them."""
        return list(stamps)

    def lost_ns(self, _took_ns: int, waited_ns: int, _seen: Observed) -> int:
        """Return what the job waited."""
        return waited_ns


@dataclasses.dataclass
class _ForCap:
    """What is known of iterations within what the job may hold."""

    cap_bytes: int
    margin: float = MARGIN_SHARE
    plan: Plan | None = None
    choice: tuple[Observed, int, str, Chosen | NoPlan | None] | None = None
    """What a planner chose for an iteration and a limit."""
    told: Observed | None = None
    """The iteration that others were told of."""
    observed_ns: int = 0
    """What the iteration took that the plan is made for, less waiting; by the processor's clock."""
    earlier_ns: dict[int, float] = dataclasses.field(default_factory=dict)
    """How much earlier than planned a tensor comes back that was late, by its number."""


class Learner:
    """Watches iterations; has the plan for the next one.

    What was learned within one limit is kept while another one is in force: the broker tries limits
    by turns.
    """

    def __init__(
        self,
        job: Job,
        planners: Sequence[str] = (LONGEST,),
        *,
        choose: Callable[[Observed, int, Rates, str], Chosen | NoPlan | None] = choose,
    ) -> None:
        """Begin with nothing known.

        Args:
            job: Whose iterations they are. It is told of an iteration that plans are made for, in a
                thread, once the margin has stayed for ``CALM_ITERATIONS``. Where nothing leaves it
                is told at once. It prepares for each planner but the first.
            planners: One, or some of which the fastest is kept; as ``swap_schedule.choose`` takes
                them.
            choose: Asks a planner, in the thread.
        """
        self._job, self._choose = job, choose
        self._trial = Trial(planners)
        self._is_turn = False
        """Another planner is to follow, and an iteration is to be observed for it."""
        self._turned_ns = 0
        self.clock: Clock = ProcessorClock(lambda: 0)
        """Whose stamps events have."""
        self._now = self._other = _ForCap(0)
        self._tense = Tense(MARGIN_SHARE)
        self._calm = 0
        """Planned iterations since the margin was last changed."""
        self._planned: Observed | None = None
        """The iteration that plans are made for."""
        self._before: tuple[object, ...] = ()
        self.planning: threading.Thread | None = None
        """What makes a plan at the moment, or has made the last one."""
        self._work = work_lock()
        self.plans = 0
        self._start()

    def _start(self) -> None:
        self._codes: list[int] = []
        self._ticks: list[int] = []
        self._names: list[str] = []
        self._stamps: list[Any] = []
        self._sizes: list[int] = []
        self._moved: list[tuple[int, int]] = []
        self._late: list[int] = []
        self._ways: dict[int, Rebuild] = {}

    # -- watching ----------------------------------------------------------------------------------

    def note_size(self, size_bytes: int) -> None:
        """Note the size of the iteration's next tensor that becomes idle."""
        self._sizes.append(size_bytes)

    def note_way(self, number: int, cost_ns: int, sources: Sequence[int]) -> None:
        """Note that a tensor can be made again: what that takes, and of which others, by number."""
        self._ways[number] = Rebuild(cost_ns, tuple(dict.fromkeys(sources)))

    def note_event(self, code: int, tick: int, name: str = "") -> None:
        """Note an event of this moment, and the operation that made or needs the tensor."""
        self._codes.append(code)
        self._ticks.append(tick)
        self._names.append(name)
        self._stamps.append(self.clock.stamp())

    def note_moved(self, tick: int, size_bytes: int) -> None:
        """Note what has left, or, below zero, come back."""
        self._moved.append((tick, size_bytes))

    def note_late(self, number: int) -> None:
        """Note a tensor that was not back when it was needed."""
        self._late.append(number)

    @property
    def fits(self) -> bool:
        """Tell whether the iteration that plans were made for fits what the job may hold; false: there is none yet."""
        seen = self._planned
        return seen is not None and not self._is_planning and int(seen.load_bytes.max(initial=0)) <= self._limit_bytes()

    def plan_again(self) -> None:
        """Make a plan for the same iteration, in a thread: what the job may hold has changed."""
        self._follow_cap()
        planned = self._planned
        if planned is not None and not self._is_planning:
            self._make(lambda: planned)

    def forget(self) -> None:
        """Know no iteration any more: they have changed."""
        self._planned = self._now.plan = self._other.plan = None

    @property
    def _is_planning(self) -> bool:
        return self.planning is not None and self.planning.is_alive()

    def _limit_bytes(self) -> int:
        return int(self._job.cap_bytes() * (1 - self._now.margin))

    def _follow_cap(self) -> None:
        """Go on with what was learned within what the job may hold now, if that was so before."""
        cap_bytes = self._job.cap_bytes()
        if cap_bytes != self._now.cap_bytes:
            kept = self._other if self._other.cap_bytes == cap_bytes else _ForCap(cap_bytes)
            self._other, self._now = self._now, kept
            self._tense = Tense(kept.margin)
            self._calm = 0
            self._trial.turn(self._trial.way)

    # -- planning ----------------------------------------------------------------------------------

    def skip(self) -> Plan | None:
        """Begin anew: what was noted is no iteration; returns the plan for the next one."""
        self._before = ()
        self._start()
        return self._now.plan

    def turn(self, waited_ns: int, late_ns: int = 0) -> Plan | None:
        """End an iteration; returns the plan for the next one, ``None`` as long as there is none.

        Args:
            waited_ns: For how long the job waited for memory in it.
            late_ns: For how long it waited until something was back.
        """
        signature = (tuple(self._codes), tuple(self._sizes))
        now_ns = time.monotonic_ns()
        took_ns, self._turned_ns = now_ns - self._turned_ns, now_ns
        lost_ns = waited_ns + late_ns
        moving_ns = max(took_ns - lost_ns, 0)
        self._follow_cap()
        is_known = bool(self._codes) and signature == self._before
        self._before = signature
        if is_known and not self._is_planning:
            plan = self._now.plan
            if self._is_turn:
                self._is_turn = False
                self._observe(moving_ns)
            elif plan is not None and self._is_of(plan) and self._is_next_planners_turn(plan, took_ns, lost_ns):
                self._job.prepare(self._trial.way)
                self._is_turn = True
            else:
                self._reconsider(took_ns, waited_ns, moving_ns)
        self._start()
        return self._now.plan

    def _is_next_planners_turn(self, plan: Plan, took_ns: int, waited_ns: int) -> bool:
        return self._trial.turns(took_ns, self.clock.lost_ns(took_ns, waited_ns, plan.observed))

    def _is_of(self, plan: Plan) -> bool:
        return plan.observed.sequence == tuple(self._codes)

    def _reconsider(self, took_ns: int, waited_ns: int, moving_ns: int) -> None:
        """Plan anew if what has happened is not what was planned for, or can be better."""
        now = self._now
        plan, margin = now.plan, now.margin
        if plan is None or not self._is_of(plan):
            now.earlier_ns = {}
            self._observe(moving_ns)
            return
        if self.clock.is_ahead and (plan.leaves or plan.drops):
            now.margin = self._tense.margin(took_ns, waited_ns)
        elif plan.leaves and waited_ns > _TENSE_SHARE * moving_ns:
            now.margin = min(_MARGIN_GROWTH * margin, MOST_MARGIN)
        if now.margin == margin:
            self._calm += 1
        else:
            self._calm = 0
            self._trial.turn(self._trial.way)  # a planner is judged with the margin that its plans keep
        rates = self._job.rates()
        late = [number for number in self._late if now.earlier_ns.get(number, 0.0) < now.observed_ns]
        for number in late:  # what would be a whole iteration earlier lacks room, not time
            step_ns = EARLIER * rates.in_s(plan.observed.size_bytes[number]) * NS
            now.earlier_ns[number] = now.earlier_ns.get(number, 0.0) + step_ns
        if moving_ns < _FASTER_SHARE * now.observed_ns:
            self._observe(moving_ns)
        elif late or now.margin != margin or self._is_to_tell(plan):
            self._make(lambda: plan.observed)

    def _is_to_tell(self, plan: Plan) -> bool:
        """Tell whether others are to hear of a plan's iteration: its margin stays, as it does where nothing leaves."""
        is_calm = self._calm >= CALM_ITERATIONS or self._now.margin >= MOST_MARGIN
        stays = is_calm or not (plan.leaves or plan.drops)
        return stays and plan.observed is not self._now.told

    def _observe(self, took_ns: int) -> None:
        """Plan by the iteration that has ended, which took so long."""
        ended = self._job.ended()
        if ended is None:
            return
        self._now.observed_ns = took_ns
        self._tense = Tense(self._now.margin)
        codes, sizes, event_ticks, moved, ways = self._codes, self._sizes, self._ticks, self._moved, self._ways
        stamps, clock, names = [*self._stamps, self.clock.end(ended)], self.clock, tuple(self._names)

        def see() -> Observed:
            n = len(ended.load_bytes)
            away = np.zeros(n, np.int64)
            for tick, size_bytes in moved:
                if tick - ended.first_tick < n:
                    away[max(tick - ended.first_tick, 0) :] += size_bytes
            ticks = np.clip(np.array(event_ticks) - ended.first_tick, 0, n - 1)
            times = np.maximum.accumulate(np.array(clock.read(stamps)))
            t_ns = np.interp(np.arange(n), [*ticks, n], times - times[0]).astype(np.int64)
            load = ended.load_bytes + np.maximum(away, 0)
            return Observed(tuple(codes), tuple(sizes), tuple(ticks.tolist()), load, t_ns, ways, names)

        self._make(see)

    def _make(self, see: Callable[[], Observed]) -> None:
        """Make a plan in a thread, for the iteration that this returns; the one after it is ready follows it."""
        now, limit_bytes = self._now, self._limit_bytes()
        earlier_ns = dict(now.earlier_ns)
        planner = self._trial.way

        def work() -> None:
            with self._work:
                try:
                    seen = see()
                except ZicoError as error:
                    inform(f"the last plan is kept, as the device does not tell its time: {error}")
                    return
                if now.plan is None or now.plan.observed.sequence != seen.sequence:
                    # A planner may take seconds: until it answers, what is idle longest leaves.
                    now.plan = plan(seen, limit_bytes, self._job.rates(), earlier_ns)
                chosen = self._followed(planner, self._chosen(now, seen, limit_bytes, planner))
                now.plan = planned = plan(seen, limit_bytes, self._job.rates(), earlier_ns, chosen)
                if seen is not self._planned:
                    self._trial.turn(self._trial.way)  # else the plan is the last one, corrected
                self._planned = seen
                self.plans += 1
                if self._is_to_tell(planned):
                    now.told = seen
                    self._job.tell(seen)

        self.planning = threading.Thread(target=work, name="zico-swap-plan", daemon=True)
        self.planning.start()

    def _followed(self, planner: str, answer: Chosen | NoPlan | None) -> Chosen | None:
        """Tell whose choice is followed; returns it, ``None``: what is idle longest leaves."""
        if isinstance(answer, NoPlan):
            self._job.follow(LONGEST, f"{planner} {answer.detail}; {LONGEST} is used instead")
            return None
        self._job.follow(planner, f"{planner} {answer.note}" if answer is not None and answer.note else "")
        return answer

    def _chosen(self, now: _ForCap, seen: Observed, limit_bytes: int, planner: str) -> Chosen | NoPlan | None:
        """Return what a planner answers; asks it once for an iteration and a limit."""
        known = now.choice
        if known is None or known[0] is not seen or known[1:3] != (limit_bytes, planner):
            try:
                answer = self._choose(seen, limit_bytes, self._job.rates(), planner)
            except ConfigError as error:
                answer = NoPlan(Reason.NOT_FOUND, planner, 0.0, f"cannot plan ({error})")
            except Exception as error:  # noqa: BLE001 - whatever fails, the job goes on without this plan
                why = f"cannot plan (it failed with {type(error).__name__}: {error})"
                answer = NoPlan(Reason.NOT_FOUND, planner, 0.0, why)
            known = now.choice = (seen, limit_bytes, planner, answer)
        return known[3]


class Tense(Comparison[float]):
    """The margin of plans for a device: it grows while the job waits for memory, unless that costs time.

    Iterations that vary by much tell nothing of a margin: then it grows unjudged.
    """

    def __init__(self, margin: float) -> None:
        super().__init__(margin, settle=1, window=_TENSE_ITERATIONS, clear=_SLOWER, steady=_STEADY_SHARE)
        self._is_settled = False

    def margin(self, took_ns: int, waited_ns: int) -> float:
        """Return the margin of the next plan, after an iteration that took and waited so long."""
        waits = waited_ns > _TENSE_SHARE * took_ns
        if not self._is_settled and (waits or self.took) and self.note(took_ns) is not None:
            if self.has_lost:
                self.way, self._is_settled = self.best, True
            elif self.way + _MARGIN_STEP > MOST_MARGIN + _MARGIN_STEP / 2:
                self._is_settled = True
            elif waits:
                self.turn(self.way + _MARGIN_STEP)
        return self.way


class Trial(Comparison[str]):
    """Several planners in turn, until each has been followed for some iterations; then the fastest one.

    Where the first one costs hardly anything, it is kept. Where one of them chose what an earlier
    one did, noise decides, and nothing is lost.
    """

    def __init__(self, planners: Sequence[str]) -> None:
        super().__init__(planners[0], settle=1, window=TRIAL_ITERATIONS)
        self._waiting = list(planners[1:])
        self._is_over = not self._waiting

    def turns(self, took_ns: int, lost_ns: int) -> bool:
        """Note what an iteration took, and what of that was waiting; tells whether another planner is to follow."""
        window = None if self._is_over else self.note(took_ns, lost_ns)
        if window is None:
            return False
        before, (median_ns, lost) = self.way, window
        costs_nothing = len(self.took) == 1 and lost <= WORTH_SHARE * median_ns
        self._is_over = costs_nothing or not self._waiting
        self.turn(self.best if self._is_over else self._waiting.pop(0))
        return self.way != before
