"""The replays of ``constants.py``: each returns what it measures, by case."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import swap
import zoo
from marks import STREAM, heaps_in_pool

from zico.base.units import GIB, KIB, MIB
from zico.heap import allocator
from zico.heap.cuda import on_stream
from zico.heap.plan_thread import Planning
from zico.lab.saving.files import swap_iteration
from zico.lab.saving.graphs import graph_of
from zico.lab.simulator.held import again, parts_of
from zico.planning.saving.planner import WORK, searched
from zico.planning.saving.pruning import NEVER
from zico.pool.regions import claim_of
from zico.swap import learning, schedule, swapper
from zico.swap.mover import Figures as Moved
from zico.swap.mover import Place
from zico.swap.observed import SAVED, USED, Observed
from zico.tiers.layout import Rates
from zico.trace import online
from zico.trace.events import Kind
from zico.trace.phases import MARKED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zico.lab.simulator.held import Event
    from zico.planning.saving.problem import SwapProblem

Figures = dict[str, dict[str, float | None]]

SHARES = (0.6, 0.5, 0.4)
NETS = ("DCGAN", "U-Net", "ResNet-50", "MobileNetV2", "GPT-2", "DenseNet-121", "GNMT, 4 layers", "RHN")
SMALL = NETS[:3]
"""Whose replays take seconds."""
REGION_BYTES = 16 * MIB
BUDGET_BYTES = 72 * GIB
SEED = 5


def _problem(name: str) -> SwapProblem:
    return swap_iteration(zoo.zoo_trace(zoo.ZOO[name]), out=swap.PCIE, back=swap.PCIE).problem


# -- plans -----------------------------------------------------------------------------------------


def plans() -> Figures:
    """Plan iterations of the zoo, a margin below each limit."""
    found: dict[str, float | None] = {}
    for name in NETS:
        problem = _problem(name)
        graph = graph_of(problem)
        for share in SHARES:
            limit_bytes = int(share * problem.peak_bytes * (1 - learning.MARGIN_SHARE))
            best = searched(dataclasses.replace(problem, limit_bytes=limit_bytes), graph, WORK)
            took_ns = int(best.ns[0])
            found[f"{name}, {share:.0%}"] = None if took_ns == NEVER else took_ns / problem.period_ns
    return {"time": found}


# -- the heap --------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A step of a job: its calls, and whether a mark ends it."""

    events: list[Event]
    is_marked: bool


def _evaluation(events: list[Event], turn: int) -> list[Event]:
    """Return the forward pass of a training step, in which each tensor is freed when the next one is there."""
    live = peak = last = 0
    sizes: dict[Any, int] = {}
    for i, (kind, tensor, size_bytes) in enumerate(events):
        if kind == Kind.ALLOC:
            sizes[tensor] = size_bytes
            live += size_bytes
        else:
            live -= sizes.get(tensor, 0)
        if live > peak:
            peak, last = live, i
    made: list[Event] = []
    before = None
    for kind, tensor, size_bytes in events[: last + 1]:
        if kind == Kind.ALLOC:
            made.append((Kind.ALLOC, ("evaluation", turn, tensor), size_bytes))
            if before is not None:
                made.append((Kind.FREE, before, 0))
            before = ("evaluation", turn, tensor)
    made.append((Kind.FREE, before, 0))
    return made


def _disturbed(events: Iterable[Event], rng: random.Random) -> list[Event]:
    """Return the same with neighbours swapped, and temporaries inserted, one in a hundred of each."""
    found = list(events)
    for i in range(len(found) - 1):
        if rng.random() < 0.01 and found[i][1] != found[i + 1][1]:
            found[i], found[i + 1] = found[i + 1], found[i]
    made: list[Event] = []
    for event in found:
        made.append(event)
        if rng.random() < 0.01:
            extra = ("extra", rng.random())
            made += [(Kind.ALLOC, extra, rng.randrange(1, 64) * MIB), (Kind.FREE, extra, 0)]
    return made


def _steps(name: str, way: str) -> Iterator[Step]:
    """Yield what a job does: its beginning, then steps that are alike, disturbed, or with evaluations between."""
    rng = random.Random(SEED)  # noqa: S311 - a benchmark's own luck
    parts = parts_of(zoo.zoo_trace(zoo.ZOO[name]))
    last = parts[-1]
    for part in parts:
        yield Step(part, is_marked=True)
    for turn in range(18):
        events = list(again(last, turn))
        yield Step(_disturbed(events, rng) if way == "disturbed" else events, is_marked=True)
        if way == "evaluations" and turn % 6 == 5:  # an epoch has six steps
            for each in range(5):
                yield Step(_evaluation(last, 100 * turn + each), is_marked=False)


@dataclasses.dataclass
class _Seen:
    """What a job's steps have come to."""

    held: int = 0
    live: int = 0
    claimed: int = 0
    peak: int = 0
    live_peak: int = 0
    wrong_claims: int = 0


def _do(record: Any, job: Any, step: Step, addresses: dict[Any, int], seen: _Seen) -> None:  # noqa: ANN401 - records
    for kind, tensor, size_bytes in step.events:
        before = int(claim_of(job))
        if kind == Kind.ALLOC:
            addresses[tensor] = int(on_stream.allocate_on(record, size_bytes, STREAM))
            if addresses[tensor] <= 0:
                raise MemoryError("the pool is too small")
        elif tensor in addresses:
            on_stream.free_on(record, addresses.pop(tensor), STREAM)
        held = int(job["held"])
        seen.wrong_claims += held > before
        seen.held += held
        seen.claimed += max(int(claim_of(job)), held)
        seen.live += int(job["live_bytes"])
        seen.peak, seen.live_peak = max(seen.peak, held), max(seen.live_peak, int(job["live_bytes"]))


def heap() -> Figures:
    """Replay allocations of the zoo through a job's heap."""
    ways = itertools.product(SMALL, ("alike", "disturbed", "evaluations"))
    return _replayed((f"{name}, {way}", _steps(name, way)) for name, way in ways)


def _replayed(cases: Iterable[tuple[str, Iterable[Step]]]) -> Figures:
    found: Figures = {measure: {} for measure in ("held", "claimed", "wrong claims", "wrong phases")}
    for case, those in cases:
        steps = list(those)
        wrong_phases = wrong_claims = held = claimed = 0
        with heaps_in_pool(BUDGET_BYTES // REGION_BYTES, None, beside=False, region_bytes=REGION_BYTES) as (one,):
            record, job = one.record[0], one.pool.jobs[int(one.pool.member[0]["job"])]
            planning = Planning(one)
            addresses: dict[Any, int] = {}
            for number, step in enumerate(steps):
                seen = _Seen()
                _do(record, job, step, addresses, seen)
                if number > len(steps) // 2:
                    wrong_phases += (int(job["phase"]) == MARKED) != step.is_marked
                    wrong_claims += seen.wrong_claims
                    held, claimed = held + seen.held, claimed + seen.claimed
                if step.is_marked:
                    last = seen
                    allocator.mark(record)
                    if record["planning"]["asked"] and not record["planning"]["next_address"]:
                        planning.plan_handed()
            planning.close()
        found["held"][f"{case}, mean"] = last.held * REGION_BYTES / last.live
        found["held"][f"{case}, peak"] = last.peak * REGION_BYTES / last.live_peak
        found["claimed"][case] = claimed / held
        found["wrong claims"][case] = wrong_claims
        found["wrong phases"][case] = wrong_phases
    return found


def short() -> Figures:
    """Replay iterations of a few layers, with temporaries now and then, through a job's heap."""
    from cpu.support.training_loops import Network, trained

    def steps(layers: int, extras: float) -> Iterator[Step]:
        job = trained(Network(layers, temporaries=1), 40)
        rng = random.Random(SEED)  # noqa: S311 - a benchmark's own luck
        events: list[Event] = []
        made = 0
        for tensor, size in job.ops:
            if size and made in job.starts:
                yield Step(events, is_marked=True)
                events = []
            made += size > 0
            events.append((Kind.ALLOC if size else Kind.FREE, tensor, size * KIB))
            if size and rng.random() < extras:
                events += [(Kind.ALLOC, ("extra", made), MIB), (Kind.FREE, ("extra", made), 0)]
        yield Step(events, is_marked=True)

    ways = itertools.product((1, 2, 4, 8), (0.0, 0.02, 0.1))
    return _replayed((f"{layers} layers, {extras:.0%} extras", steps(layers, extras)) for layers, extras in ways)


# -- boundaries ------------------------------------------------------------------------------------


def _told(job: Any) -> set[int]:  # noqa: ANN401 - a Recording
    """Return the allocations with which, as they came, an iteration seemed to begin."""
    memory = np.zeros(online.MEMORY_BYTES, np.uint8)
    tracker = np.zeros(1, online.TRACKER)[0]
    tracker["memory_address"] = memory.ctypes.data
    return {i for i, (size, live) in enumerate(zip(*job.arrays(), strict=True)) if online.begins(tracker, size, live)}


def _loops() -> Iterator[tuple[str, Any, int]]:
    """Yield training loops, and the allocation from which on beginnings are to be told."""
    from cpu.support.training_loops import Network, Recording, trained

    for layers, keeps, micro in itertools.product((2, 12, 40), (False, True), (1, 4)):
        network = Network(layers, micro_batches=micro, keeps_gradients=keeps)
        job = trained(network, 50)
        case = f"{layers} layers, {micro} micro-batches, {'kept' if keeps else 'freed'}"
        yield case, job, job.starts[30 if micro > 1 else 9]
        if micro == 1:
            noisy = job.disturbed(0.01, 0.01)
            yield f"{case}, disturbed", noisy, noisy.starts[10]
    tiny = Network(1, temporaries=1)
    job = trained(tiny, 50)
    yield "1 layer", job, job.starts[9]
    for steps, validations in ((10, 8), (10, 20), (10, 40), (20, 100)):
        job, network = Recording(), Network()
        network.set_up(job)
        for _ in range(6):
            for _ in range(steps):
                network.step(job)
            for _ in range(validations):
                network.validate(job)
        yield f"{validations} validations after {steps} steps", job, job.starts[2 * steps]
    for batches in ((32, 64), (64, 32), (8, 16, 32, 64)):
        job = Recording()
        Network().set_up(job)
        for batch in batches:
            for _ in range(20):
                Network(batch=batch).step(job)
        yield f"batches {batches}", job, job.starts[9]


def boundaries() -> Figures:
    """Look for iterations in training loops that nothing marks."""
    found: dict[str, float | None] = {}
    for case, job, first in _loops():
        told, true = ({each for each in those if each >= first} for those in (_told(job), job.starts))
        found[case] = len(told ^ true)
    return {"wrong boundaries": found}


# -- swaps -----------------------------------------------------------------------------------------

SLOWER = (1.0, 1.5, 3.0)
"""Times as long as planned, that copies take."""


def observed_of(problem: SwapProblem) -> Observed:
    """Return an iteration as a job sees it whose tensors are idle in their longest gap, of those that end in it."""
    n = problem.n_ops
    gaps: list[tuple[int, int, int]] = []
    load = np.zeros(n + 1, np.int64)
    for i in range(len(problem)):
        uses = problem.access_op[problem.access_begin[i] : problem.access_begin[i + 1]].tolist()
        begin, end = int(problem.alloc_op[i]), int(problem.free_op[i])
        if begin < 0 or end >= n:
            load[0] += problem.size_bytes[i]
            continue
        load[begin] += problem.size_bytes[i]
        load[end + 1] -= problem.size_bytes[i]
        away = max(itertools.pairwise(uses), key=lambda pair: pair[1] - pair[0], default=(0, 0))
        if away[1] > away[0] + 1 and problem.size_bytes[i] >= swapper.LEAST_BYTES:
            gaps.append((away[0] + 1, away[1], i))
    gaps.sort()
    events = [(begin, 1, 2 * number + SAVED) for number, (begin, _, _) in enumerate(gaps)]
    events += [(end, 0, 2 * number + USED) for number, (_, end, _) in enumerate(gaps)]
    events.sort()
    sizes = tuple(int(problem.size_bytes[i]) for _, _, i in gaps)
    return Observed(
        tuple(code for _, _, code in events),
        sizes,
        tuple(tick for tick, _, _ in events),
        np.cumsum(load[:n]),
        problem.op_start_ns.copy(),
    )


def _planned_ns(plan: schedule.Plan, seen: Observed, rates: Rates, slower: float, period_ns: int) -> float:
    """Return what an iteration takes by a plan whose copies in take longer than it thinks."""
    late_ns = free_ns = 0.0
    ends_ns: dict[int, float] = {}
    for event, (code, tick) in enumerate(zip(seen.sequence, seen.event_tick, strict=True)):
        now_ns = float(seen.t_ns[tick]) + late_ns
        number, kind = divmod(code, 2)
        for i in plan.returns.get(event, ()):
            free_ns = ends_ns[i] = max(now_ns, free_ns) + rates.in_s(seen.size_bytes[i]) * 1e9 * slower
        if kind == USED and number in plan.leaves:
            late_ns += max(0.0, ends_ns[number] - now_ns)
    return period_ns + late_ns


class _Job:
    """A job whose memory is what an iteration says, less what is away."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap, self.needed, self.away = cap_bytes, 0, 0

    def cap_bytes(self) -> int:
        return self.cap

    def live_bytes(self) -> int:
        return self.needed - self.away

    def iteration(self) -> int:
        return 0

    def waited_ns(self) -> int:
        return 0

    def tick(self) -> int:
        return 0


class _Learner:
    """Learns nothing."""

    def note_size(self, size_bytes: int) -> None:
        pass

    def note_event(self, code: int, tick: int, name: str) -> None:
        pass

    def note_moved(self, tick: int, size_bytes: int) -> None:
        pass


class _Idle:
    """A tensor, and when its copy ends that is on the way."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes, self.place, self.end_ns = size_bytes, Place.HERE, 0.0
        self.ordinal = -1
        self.is_used = False


class _Mover:
    """Moves tensors in simulated time, one at a time each way."""

    def __init__(self, job: _Job, rates: Rates) -> None:
        self._job, self._rates = job, rates
        self.now_ns = 0.0
        self._free_ns = [0.0, 0.0]
        self._moving: list[_Idle] = []
        self.figures = Moved()
        self.on_moved: Any = None

    def go_on(self, until_ns: float) -> None:
        """Let time pass; what has been copied by then is away, or here."""
        self.now_ns = max(self.now_ns, until_ns)
        for idle in [one for one in self._moving if one.end_ns <= self.now_ns]:
            self._moving.remove(idle)
            if idle.place is Place.LEAVING:
                idle.place = Place.AWAY
                self._job.away += idle.size_bytes
                self.figures.leaving_bytes -= idle.size_bytes
            elif idle.place is Place.COMING:
                idle.place = Place.HERE

    def next_ns(self) -> float:
        """Return when the next copy ends; never: infinity."""
        return min((one.end_ns for one in self._moving), default=float("inf"))

    def await_landing(self, _within_s: float) -> bool:
        """Leave that to who lets time pass."""
        return False

    def send(self, idle: _Idle) -> bool:
        """Begin a copy out of what is idle."""
        if idle.place is not Place.HERE or idle.is_used:
            return False
        idle.place = Place.LEAVING
        self._free_ns[0] = idle.end_ns = max(self.now_ns, self._free_ns[0]) + self._rates.out_s(idle.size_bytes) * 1e9
        self._moving.append(idle)
        self.figures.leaving_bytes += idle.size_bytes
        return True

    def fetch(self, idle: _Idle) -> bool:
        """Begin a copy in, if there is room now."""
        if idle.place is Place.COMING:
            return True
        if self._job.live_bytes() + idle.size_bytes > self._job.cap:
            return False
        self._come(idle)
        return True

    def _come(self, idle: _Idle) -> None:
        idle.place = Place.COMING
        self._job.away -= idle.size_bytes
        self._free_ns[1] = idle.end_ns = max(self.now_ns, self._free_ns[1]) + self._rates.in_s(idle.size_bytes) * 1e9
        self._moving.append(idle)

    def need(self, idle: _Idle, take: Any) -> tuple[bool, Any]:  # noqa: ANN401 - a callable
        """Have it here; what is leaving stays."""
        idle.is_used = True
        if idle.place is Place.LEAVING:
            self.figures.leaving_bytes -= idle.size_bytes
        elif idle.place is not Place.HERE:
            if idle.place is Place.AWAY:
                self._come(idle)
            self.go_on(idle.end_ns)
        idle.place = Place.HERE
        return False, take()


def _passive_ns(seen: Observed, problem: SwapProblem, rates: Rates, limit_bytes: int) -> float | None:
    """Return what an iteration takes without a plan; ``None`` if what is idle does not make enough room."""
    job = _Job(limit_bytes)
    mover = _Mover(job, rates)
    moving = swapper.Swapper(*cast("tuple[Any, Any, Any]", (mover, job, _Learner())))  # what it calls is there
    idles = [_Idle(size_bytes) for size_bytes in seen.size_bytes]
    event = 0
    for op in range(problem.n_ops):
        job.needed = int(seen.load_bytes[op])
        while event < len(seen.event_tick) and seen.event_tick[event] <= op:
            number, kind = divmod(seen.sequence[event], 2)
            if kind == SAVED:
                moving.saved(cast("Any", idles[number]))
            else:
                moving.used(cast("Any", idles[number]), lambda: None)
            event += 1
        while (missing := job.live_bytes() - limit_bytes) > 0:
            moving.make_room(missing)
            if mover.next_ns() == float("inf"):
                return None
            mover.go_on(mover.next_ns())
        mover.go_on(mover.now_ns + float(problem.op_duration_ns[op]))
    return mover.now_ns


def swaps() -> Figures:
    """Swap in simulated time, by a plan of what is idle longest, and without one."""
    found: Figures = {"planned": {}, "passive": {}}
    for name in NETS[:6]:
        problem = _problem(name)
        seen = observed_of(problem)
        peak_bytes = int(seen.load_bytes.max())
        for share, ratio in itertools.product((0.8, 0.7, 0.6), (1.0, 4.0)):
            rate = 2 * peak_bytes * ratio / (problem.period_ns / 1e9)
            rates = Rates(rate, rate, 1e-5, 1e-5)
            case = f"{name}, {share:.0%}, links {2 * ratio:g}"
            plan = schedule.plan(seen, int(share * peak_bytes), rates)
            for slower in SLOWER:
                took_ns = _planned_ns(plan, seen, rates, slower, problem.period_ns)
                found["planned"][f"{case}, copies {slower:g}"] = took_ns / problem.period_ns
            passive_ns = _passive_ns(seen, problem, rates, int(share * peak_bytes))
            found["passive"][case] = None if passive_ns is None else passive_ns / problem.period_ns
    return found


# -- trials ----------------------------------------------------------------------------------------

JOBS, ITERATIONS, TRIED = 400, 500, 40
"""Iterations of each job, and those by which every trial is over."""


def trials() -> Figures:
    """Let a job try two planners whose iterations vary, and go on with the one that it keeps."""
    found: dict[str, float | None] = {}
    for better, noise, first in itertools.product((0.0, 0.02, 0.05, 0.1), (0.02, 0.1, 0.3), (True, False)):
        rng = random.Random(SEED)  # noqa: S311 - a benchmark's own luck
        mean = {"one": 1.0 - better * first, "two": 1.0 - better * (not first)}
        total = 0.0
        for _ in range(JOBS):
            trial = learning.Trial(["one", "two"])
            for _ in range(TRIED):
                took = mean[trial.way] * (1 + abs(rng.gauss(0, noise)) + (rng.random() if rng.random() < noise else 0))
                total += mean[trial.way]
                trial.turns(int(1e6 * took), int(1e6 * (took - 0.9)))
            total += mean[trial.way] * (ITERATIONS - TRIED)
        found[f"better by {better:.0%}, noise {noise:.0%}, {'first' if first else 'second'} one"] = total / (
            JOBS * ITERATIONS * min(mean.values())
        )
    return {"trial": found}
