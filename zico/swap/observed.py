"""An observed iteration: its events, what was alive, and the same as a problem for planners."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.planning.saving.problem import READ, WRITE, Link, SwapProblem
from zico.planning.saving.recomputation import Graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from zico.tiers.layout import Rates

    Int64s = NDArray[np.int64]

NEVER = -1
NS = 1e9
SAVED = 0
USED = 1


class Rebuild(NamedTuple):
    """How a tensor can be made again."""

    cost_ns: int
    sources: tuple[int, ...]
    """The numbers of the tensors that it is made of."""


@dataclasses.dataclass(frozen=True)
class Observed:
    """One iteration. Ticks count from its beginning."""

    sequence: tuple[int, ...]
    """What the events are: twice the tensor's number, plus ``SAVED`` or ``USED``; below 0 of an earlier iteration."""
    size_bytes: tuple[int, ...]
    """Of the tensors, by number."""
    event_tick: tuple[int, ...]
    load_bytes: Int64s
    """By tick: what was alive, plus what was away."""
    t_ns: Int64s
    """When each tick began, on a clock that stands still while the job waits."""
    ways: Mapping[int, Rebuild] = dataclasses.field(default_factory=dict)
    """How tensors can be made again, by number."""
    names: tuple[str, ...] = ()
    """By event: the framework's name of what made the tensor that is saved, or needs the one used; nothing: unknown."""


class Idleness:
    """The gaps of an iteration: from being saved to the first use."""

    def __init__(self, seen: Observed) -> None:
        n = len(seen.size_bytes)
        self.saved = [0] * n
        self.saved_event = [0] * n
        self.used = [NEVER] * n
        self.used_event = [0] * n
        for event, (code, tick) in enumerate(zip(seen.sequence, seen.event_tick, strict=True)):
            number, kind = divmod(code, 2)
            if number < 0:  # of an earlier iteration
                continue
            if kind == SAVED:
                self.saved[number] = tick
                self.saved_event[number] = event
            elif self.used[number] == NEVER:
                self.used[number] = tick
                self.used_event[number] = event

    def use_for(self, seen: Observed, dropped: Iterable[int]) -> None:
        """Let what is dropped use its sources when it is used itself, those with the latest uses first."""
        for number in sorted(dropped, key=lambda i: -self.used_event[i]):
            for source in seen.ways[number].sources:
                if self.used_event[number] < self.used_event[source]:
                    self.used[source], self.used_event[source] = self.used[number], self.used_event[number]


# -- an iteration as planners see it ---------------------------------------------------------------
#
# Operation 0 is what runs ahead of the first event, the others what runs from each event to the
# next one. A tensor that can be made again has an operation more, ahead of its becoming idle. That
# makes it of its sources, and only such operations may run again. What is no idle tensor is alive
# at each operation as one that cannot move::
#
#     events                saved 0      saved 1                  used 1        used 0
#     operations     0        1     make 1  2                       3             4
#     tensor 0     W ...... R ..... R ...................... (R) .............. R
#     tensor 1                      W ..... R ...................... R


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """An observed iteration as a problem, and what its first tensors are."""

    problem: SwapProblem
    graph: Graph
    numbers: list[int]


def problem_of(seen: Observed, rates: Rates, limit_bytes: int | None = None) -> Seen:
    """Return an observed iteration as planners see it."""
    idle, end = Idleness(seen), len(seen.t_ns) - 1
    numbers = [i for i in range(len(seen.size_bytes)) if idle.used_event[i] > idle.saved_event[i] + 1]
    place_of = {number: place for place, number in enumerate(numbers)}
    made_at = {idle.saved_event[i]: place_of[i] for i in numbers if _can_be_made(seen, idle, place_of, i)}
    ticks = np.array([0, *seen.event_tick, end + 1])
    starts = seen.t_ns[np.minimum(ticks, end)] - seen.t_ns[0]
    at, ops = [0], [_Op(int(starts[1] - starts[0]), int(seen.load_bytes[: max(ticks[1], 1)].max()))]
    for event in range(len(seen.sequence)):
        begin, until = min(int(ticks[event + 1]), end), int(ticks[event + 2])
        most = int(seen.load_bytes[begin : max(until, begin + 1)].max())
        if event in made_at:
            ops.append(_Op(seen.ways[numbers[made_at[event]]].cost_ns, ops[-1].load_bytes, made_at[event]))
        at.append(len(ops))
        ops.append(_Op(int(starts[event + 2] - starts[event + 1]), most))
    return _Seeing(seen, idle, numbers, at, ops).done(rates, limit_bytes)


def _can_be_made(seen: Observed, idle: Idleness, place_of: Mapping[int, int], number: int) -> bool:
    """Tell whether a tensor can be made of others that are idle when it is used, or can be made then."""
    way = seen.ways.get(number)
    return way is not None and all(
        source in place_of and idle.saved_event[source] < idle.saved_event[number] for source in way.sources
    )


class _Op(NamedTuple):
    """An operation."""

    duration_ns: int
    load_bytes: int
    makes: int = NEVER
    """The tensor that it makes again."""


class _Seeing:
    """Makes the problem, and the graph of what may run again."""

    def __init__(self, seen: Observed, idle: Idleness, numbers: list[int], at: list[int], ops: list[_Op]) -> None:
        self._seen, self._numbers, self._ops = seen, numbers, ops
        self._made = {op.makes: i for i, op in enumerate(ops) if op.makes != NEVER}
        self._accesses: list[dict[int, int]] = []
        for place, number in enumerate(numbers):
            saved, used = at[idle.saved_event[number] + 1], at[idle.used_event[number] + 1]
            self._accesses.append({self._made.get(place, saved - 1): WRITE, saved: READ, used: READ})
        place_of = {number: place for place, number in enumerate(numbers)}
        for place, op in self._made.items():
            for source in seen.ways[numbers[place]].sources:
                self._accesses[place_of[source]].setdefault(op, READ)

    def done(self, rates: Rates, limit_bytes: int | None) -> Seen:
        accesses = [dict(sorted(each.items())) for each in self._accesses]
        lives = [(min(each), max(each)) for each in accesses]
        size = np.array([self._seen.size_bytes[i] for i in self._numbers], np.int64)
        rest = np.array([op.load_bytes for op in self._ops], np.int64)
        for i, (begin, last) in enumerate(lives):
            rest[begin : last + 1] -= size[i]
        filled = np.flatnonzero(rest > 0)
        duration_ns = np.array([op.duration_ns for op in self._ops], np.int64)
        for op in self._made.values():  # ahead of the event, in what ran until then
            duration_ns[op - 1] = max(0, duration_ns[op - 1] - duration_ns[op])
        start_ns = np.cumsum(duration_ns) - duration_ns
        problem = SwapProblem(
            op_start_ns=start_ns,
            op_duration_ns=duration_ns,
            period_ns=int(duration_ns.sum()),
            size_bytes=np.concatenate([size, rest[filled]]),
            alloc_op=np.concatenate([np.array([begin for begin, _ in lives], np.int64), filled]),
            free_op=np.concatenate([np.array([last for _, last in lives], np.int64), filled]),
            access_begin=np.cumsum([0, *map(len, accesses), *[0] * len(filled)]),
            access_op=np.array([op for each in accesses for op in each], np.int64),
            access_kind=np.array([kind for each in accesses for kind in each.values()], np.int64),
            out=Link(rates.out_bytes_per_s, round(rates.out_latency_s * NS)),
            back=Link(rates.in_bytes_per_s, round(rates.in_latency_s * NS)),
            limit_bytes=limit_bytes,
            **self._names(len(filled)),
        )
        return Seen(problem, self._graph(problem, np.maximum(rest, 0)), self._numbers)

    def _names(self, n_others: int) -> dict[str, tuple[str, ...]]:
        """Return what made each tensor, and what has saved it; of others nothing is known."""
        seen, others = self._seen, ("",) * n_others
        if not any(seen.names):
            return {}
        made: dict[int, str] = {}
        read: dict[int, dict[str, None]] = {}
        for code, name in zip(seen.sequence, seen.names, strict=True):
            number, kind = divmod(code, 2)
            if kind == SAVED:
                made[number] = name
            else:
                read.setdefault(number, {})[name] = None
        return {
            "made_by": (*(made[i] for i in self._numbers), *others),
            "read_by": (*(" ".join(read[i]) for i in self._numbers), *others),
        }

    def _graph(self, problem: SwapProblem, rest: Int64s) -> Graph:
        n = len(self._ops)
        inputs: list[list[int]] = [[] for _ in self._ops]
        for place, uses in enumerate(self._accesses):
            for op, kind in uses.items():
                if kind == READ:
                    inputs[op].append(place)
        return Graph(
            cost_ns=tuple(problem.op_duration_ns.tolist()),
            size_bytes=tuple(self._seen.size_bytes[i] for i in self._numbers),
            inputs=tuple(map(tuple, inputs)),
            n_forward=problem.turning_op + 1,
            until=tuple(n if op.makes != NEVER else i for i, op in enumerate(self._ops)),
            rest_bytes=tuple(rest.tolist()),
            maker=tuple(min(uses) for uses in self._accesses),
            op_of=tuple(range(n)),
            tensor=tuple(range(len(self._numbers))),
        )
