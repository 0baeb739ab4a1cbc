"""The exact planner: for hard problems of up to about a thousand tensors. It finds a plan or proves that there is none.

Theory of operation:
    * What never lives together is planned apart; each such group has a ``Group`` here.
    * ``exact_search`` searches a group depth first. Whether that takes a millisecond or a century
      depends on the order in which it tries things, and no order is good for all problems. So many
      orders take turns with a limit on their steps, and the limits grow. A lucky order answers at
      once, and in the end one goes through all there is. Source: C. Gomes, B. Selman, H. Kautz,
      "Boosting combinatorial search through randomization", AAAI 1998.
    * What was learned stays from turn to turn: states that failed, and the sections where searches
      failed.
    * Without a capacity the peak is made as low as can be, by bisection between what is proved and
      what is found.

Guarantees:
    * "Does not fit" is a proof, but for two different states with one 64-bit hash.
    * The same problem, options and steps give the same plan; only the deadline depends on the
      clock.

Known limitations:
    * A step takes time in proportion to the sections in which the unplaced tensors live: about 5 us
      for 200 tensors, 30 us for 1,000.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.compiled import compiled
from zico.base.libc import monotonic_ns
from zico.lab.packing.exact_state import (
    FEWEST_FAILED,
    FEWEST_LOWEST,
    FEWEST_TIGHTEST,
    LOWEST_FEWEST,
    UNPLACED,
    Rules,
    State,
    UInt64s,
    bound,
    choose,
    connect,
    gather,
    hash_of,
    make_state,
    next_level,
    part_of,
    reset,
    sections,
    unit_bytes,
)
from zico.planning.packing.problem import NoPlan, Plan, Problem, Reason, limits_of, refusal

if TYPE_CHECKING:
    from zico.planning.packing.problem import Int64s


# --------------------------------------------------------------------------------------------------
# The exact planner's search: depth first over "what lies next on this floor?", on a stack of its
# own.
#
# One step of depth is one decision. A tensor is put on a valley's floor, or "nothing lies on this
# floor in this section" raises it. The answers to one question cover all plans in which every
# tensor is held up, and exclude each other.

FOUND, INFEASIBLE, STOPPED, TOO_DEEP = range(4)
"""What a search comes back with: a plan, a proof, at its limit of steps or its deadline, or with its stack full."""

RAISE = -1
"""The answer "nothing lies here", among tensors."""
OPEN, DEAD, DONE, FULL = range(4)
LOOK_AFTER = 1 << 16
"""Tensors, one for each tensor of a step, between two looks at the clock: under 10 ms for a thousand tensors."""


class Stack(NamedTuple):
    """The decisions that led to the present state and the answers still to try; by depth, but for the last three."""

    left: Int64s
    """The part of the problem in which the question was asked: its sections..."""
    right: Int64s
    section: Int64s
    """...and the section asked about."""
    floor: Int64s
    """Where an answer is put."""
    raised: Int64s
    """Where the floor goes if nothing is put there."""
    next: Int64s
    """The next answer in ``answers``."""
    end: Int64s
    choice: Int64s
    """The answer being tried."""
    n_hung: Int64s
    """How many tensors hung from the ceiling before this depth."""
    n_saved: Int64s
    """How many entries ``saved`` had before this depth's decision."""
    state: UInt64s
    """The hash under which failure is remembered."""
    answers: Int64s
    hung: Int64s
    """Tensors placed under the ceiling, in order."""
    saved: Int64s
    """Pairs of floor and top as they were before decisions."""


def make_stack(state: State, depth: int) -> Stack:
    """Return an empty stack for so many decisions."""
    left, right, section, floor, raised, first, end, choice, n_hung, n_saved = np.zeros((10, depth + 1), np.int64)
    decisions = (left, right, section, floor, raised, first, end, choice, n_hung, n_saved)
    answers, hung = np.zeros(16 * depth, np.int64), np.zeros(len(state.size), np.int64)
    saved = np.zeros((int((state.right - state.left).sum()) + depth, 2), np.int64)
    return Stack(*decisions, np.zeros(depth + 1, np.uint64), answers, hung, saved)


@compiled
def _hang(state: State, stack: Stack, depth: int, found: int, left: int, right: int) -> int:
    """Put under the ceiling what lives in all of a part, until nothing does; returns how many tensors remain.

    In any plan, what lies above such a tensor may come down by its size, and it may go to the very
    top instead.
    """
    again = True
    while again:
        again = False
        connect(state, found, left, right)
        for i in range(found):
            b = state.active[i]
            first, end = state.left[b], state.right[b]
            alone = (first == left or state.tally[first] == 0) and (end == right or state.tally[end] == 0)
            offset = state.ceiling[first] - state.size[b]
            if alone and offset >= state.earliest[b]:  # otherwise there is no room, which the bound will notice
                state.offset[b] = offset
                for s in range(first, end):
                    state.ceiling[s] -= state.size[b]
                    state.unplaced[s] -= state.size[b]
                stack.hung[stack.n_hung[depth + 1]] = b
                stack.n_hung[depth + 1] += 1
                again = True
        if again:
            found = gather(state, left, right)
    return found


@compiled
def _take_down(state: State, stack: Stack, depth: int) -> None:
    """Undo ``_hang`` of a depth."""
    for i in range(stack.n_hung[depth], stack.n_hung[depth + 1]):
        b = stack.hung[i]
        state.offset[b] = UNPLACED
        for s in range(state.left[b], state.right[b]):
            state.ceiling[s] += state.size[b]
            state.unplaced[s] += state.size[b]


@compiled
def _list_answers(state: State, rules: Rules, stack: Stack, depth: int, found: int) -> bool:
    """List the answers of a depth's question, the most valued first, "nothing" last; tells whether there was room."""
    section, floor, begin = stack.section[depth], stack.floor[depth], stack.next[depth]
    if begin + found + 1 > len(stack.answers):
        return False
    answers, end = stack.answers, begin
    for i in range(found):
        b = state.active[i]
        if not state.left[b] <= section < state.right[b] or state.earliest[b] != floor:
            continue
        twin = state.twin[b]
        if rules.twins and twin >= 0 and state.offset[twin] == UNPLACED:
            continue
        is_held = not rules.held_up
        for s in range(state.left[b], state.right[b]):
            is_held |= state.top[s] == floor
        if not is_held:
            continue
        j = end
        while j > begin and state.value[answers[j - 1]] < state.value[b]:
            answers[j] = answers[j - 1]
            j -= 1
        answers[j] = b
        end += 1
    if state.slack[section] > 0:
        stack.raised[depth] = next_level(state, found, section)
        if stack.raised[depth] - floor <= state.slack[section]:
            answers[end] = RAISE
            end += 1
    stack.end[depth] = end
    return True


@compiled
def _next_part(state: State, rules: Rules, stack: Stack, depth: int) -> tuple[int, int, int]:
    """Return the range of sections to look at and how many tensors are unplaced there; none: all is placed."""
    left, right = 0, len(state.failures)
    if depth > 0 and rules.parts:
        left, right = stack.left[depth - 1], stack.right[depth - 1]
    while True:
        found = gather(state, left, right)
        if rules.ceiling:
            found = _hang(state, stack, depth, found, left, right)
        if found > 0 or right - left == len(state.failures):
            return left, right, found
        left, right = 0, len(state.failures)


@compiled
def _open(state: State, rules: Rules, how: int, stack: Stack, depth: int) -> int:
    """Look at the present state, and ask the next question."""
    stack.next[depth] = stack.end[depth] = stack.end[depth - 1] if depth > 0 else 0
    stack.n_hung[depth + 1] = stack.n_hung[depth]
    stack.left[depth], stack.right[depth], stack.state[depth] = 0, len(state.failures), 0
    left, right, found = _next_part(state, rules, stack, depth)
    if found == 0:
        return DONE
    if not bound(state, rules.heads, found, left, right):
        return DEAD
    connect(state, found, left, right)
    left, right = part_of(state, left, right)
    if rules.memory:
        number = hash_of(state, found, left, right)
        if state.failed[number % np.uint64(len(state.failed))] == number:
            return DEAD
        stack.state[depth] = number
    section = choose(state, how, found, left, right)
    stack.section[depth], stack.floor[depth] = section, state.level[section]
    if rules.parts:
        stack.left[depth], stack.right[depth] = left, right
    return OPEN if _list_answers(state, rules, stack, depth, found) else FULL


@compiled
def _range_of(state: State, stack: Stack, depth: int) -> tuple[int, int]:
    """Return the sections that a depth's decision changes."""
    b = stack.choice[depth]
    return (stack.section[depth], stack.section[depth] + 1) if b == RAISE else (state.left[b], state.right[b])


@compiled
def _decide(state: State, stack: Stack, depth: int) -> None:
    """Take the next answer of a depth."""
    b = stack.choice[depth] = stack.answers[stack.next[depth]]
    stack.next[depth] += 1
    left, right = _range_of(state, stack, depth)
    n_saved, floor = stack.n_saved[depth], stack.floor[depth]
    stack.n_saved[depth + 1] = n_saved + right - left
    for s in range(left, right):
        stack.saved[n_saved + s - left, 0] = state.floor[s]
        stack.saved[n_saved + s - left, 1] = state.top[s]
        if b == RAISE:
            state.floor[s] = stack.raised[depth]
        else:
            state.floor[s] = state.top[s] = floor + state.size[b]
            state.unplaced[s] -= state.size[b]
    if b != RAISE:
        state.offset[b] = floor


@compiled
def _take_back(state: State, stack: Stack, depth: int) -> None:
    """Undo ``_decide``."""
    b, n_saved = stack.choice[depth], stack.n_saved[depth]
    left, right = _range_of(state, stack, depth)
    for s in range(left, right):
        state.floor[s] = stack.saved[n_saved + s - left, 0]
        state.top[s] = stack.saved[n_saved + s - left, 1]
        if b != RAISE:
            state.unplaced[s] += state.size[b]
    if b != RAISE:
        state.offset[b] = UNPLACED


@compiled
def _go_back(state: State, stack: Stack, depth: int) -> int:
    """Give up on a depth: go back to the last decision that touched its part; returns that depth, or -1.

    The part is as it was right after that decision, but for tensors that hang over all of it. They
    must lie somewhere in it anyway, and the top is as good as any.
    """
    left, right = stack.left[depth], stack.right[depth]
    if stack.state[depth] != 0:
        state.failed[stack.state[depth] % np.uint64(len(state.failed))] = stack.state[depth]
    while True:
        _take_down(state, stack, depth)
        depth -= 1
        if depth < 0:
            return depth
        first, end = _range_of(state, stack, depth)
        _take_back(state, stack, depth)
        if first < right and left < end:
            return depth


@compiled
def search(state: State, rules: Rules, how: int, stack: Stack, limits: tuple[int, int]) -> tuple[int, int]:
    """Search from the state in which nothing is placed; returns how it ended, and the steps it took.

    Args:
        state: As ``reset`` leaves it, with ``value`` set. A plan is found in ``offset``.
        rules: The inferences to use.
        how: Where to branch, see ``choose``.
        stack: Working memory; what it holds does not matter.
        limits: The number of steps, and the time of ``time.monotonic_ns``, after which to stop.
    """
    depth, steps = 0, 0
    per_look = max(1, LOOK_AFTER // len(state.size))
    stack.n_hung[0] = stack.n_saved[0] = 0
    while True:
        steps += 1
        if steps > limits[0] or (steps % per_look == 0 and monotonic_ns() > limits[1]):
            return STOPPED, steps
        status = _open(state, rules, how, stack, depth)
        if status == DONE:
            return FOUND, steps
        if status == FULL or depth + 2 >= len(stack.left):
            return TOO_DEEP, steps
        while stack.next[depth] == stack.end[depth]:
            depth = _go_back(state, stack, depth)
            if depth < 0:
                return INFEASIBLE, steps
        _decide(state, stack, depth)
        depth += 1


# --------------------------------------------------------------------------------------------------
# The orders in which the exact planner tries things, one for each turn, and how long each turn may
# take.

FIRST_STEPS = 3
"""Steps per tensor in the first round; a plan that a lucky order finds takes little more than one."""
GROWTH = 1.1
"""From round to round. Slowly: where no turn comes near an answer, many short ones find more than a few long ones."""
LARGEST_GROWTH = 1e9
CROWD_POWER = 30
"""In the order by crowd, an area where a tenth less is alive is worth a 24th."""
NOISE = 0.5
"""Standard deviation of the logarithm of values, after the first round."""


class Orders:
    """An endless series of orders; the same for the same seed."""

    def __init__(self, state: State, seed: int) -> None:
        """Begin with the plain orders: by area, time, size, crowd, each with every way to branch. Nothing is placed."""
        self.state = state
        self.random = np.random.default_rng(seed)
        length = (state.right - state.left).astype(float)
        size = state.size.astype(float)
        area = length * size
        crowd = np.array([state.unplaced[a:b].max() for a, b in zip(state.left, state.right, strict=True)])
        by_crowd = area * (crowd / crowd.max()) ** CROWD_POWER
        values = (area, length * size.max() + size, size * length.max() + length, by_crowd)
        hows = (FEWEST_FAILED, FEWEST_LOWEST, FEWEST_TIGHTEST, LOWEST_FEWEST)
        self.plain = tuple(itertools.product(hows, values))
        self.turn = 0

    def next_turn(self) -> tuple[int, int]:
        """Set the state's values; returns how to branch and the most steps to take."""
        round_, which = divmod(self.turn, len(self.plain))
        how, values = self.plain[which]
        self.turn += 1
        noise = NOISE * self.random.standard_normal(len(values)) if round_ > 0 else 0.0
        self.state.value[:] = values * np.exp(noise)
        return how, int(FIRST_STEPS * len(values) * min(GROWTH**round_, LARGEST_GROWTH))


# --------------------------------------------------------------------------------------------------

NO_LIMIT = 1 << 62
TURNS_PER_BISECTION = 24
MOST_TENSORS = 10_000
"""Of a group: a question looks at pairs of tensors."""
MOST_LIVES = 1 << 22
"""Sections in which the tensors of a group live, all together: a step looks at each, and clocks are read between."""


@dataclasses.dataclass(frozen=True)
class ExactOptions:
    """What the exact planner uses. A switch only changes how long an answer takes; see ``Rules`` for the first six."""

    heads: bool = True
    held_up: bool = True
    twins: bool = True
    ceiling: bool = True
    parts: bool = True
    memory: bool = True
    restarts: bool = True
    """Let many orders take turns; otherwise search once, with the first."""
    seed: int = 0
    work: int = 200_000_000
    """Steps, each times the tensors of its group, where no deadline was given: about ten seconds."""

    def rules(self, *, whole: bool) -> Rules:
        """Return the inferences to use; nothing hangs from a capacity that is not a ``whole`` number of alignments."""
        return Rules(self.heads, self.held_up, self.twins, self.ceiling and whole, self.parts, self.memory)


class Group:
    """Tensors that are planned together, and what is known about them."""

    def __init__(self, problem: Problem, options: ExactOptions) -> None:
        self.problem = problem
        self.options = options
        self.state = make_state(problem)
        self.stack = make_stack(self.state, 4 * len(problem) + 64)
        self.capacity_bytes: int | None = None
        self.orders: Orders

    def fit(self, capacity_bytes: int, turns: int, effort: Effort) -> int:
        """Search for a plan within a capacity; returns what the last search did. A plan lies in ``offset_bytes``."""
        if capacity_bytes != self.capacity_bytes:
            self.capacity_bytes = capacity_bytes
            self.state.failed[:] = 0
            reset(self.state, self.problem, capacity_bytes)
            self.orders = Orders(self.state, self.options.seed)
        rules = self.options.rules(whole=capacity_bytes % self.problem.alignment_bytes == 0)
        ended = STOPPED
        n = len(self.problem)
        while turns > 0 and ended == STOPPED and effort.is_left:
            how, limit = self.orders.next_turn()
            reset(self.state, self.problem, capacity_bytes)
            most = min(limit if self.options.restarts else NO_LIMIT, -(-effort.work // n))
            ended, steps = search(self.state, rules, how, self.stack, (most, effort.deadline_ns))
            effort.work -= steps * n
            turns -= 1
            if ended == TOO_DEEP:
                self.stack = make_stack(self.state, 2 * len(self.stack.left))
                ended = STOPPED
        return int(ended)

    @property
    def offset_bytes(self) -> Int64s:
        """The offsets of the group's tensors, after a plan was found."""
        return self.state.offset * unit_bytes(self.problem)


def split(problem: Problem) -> list[Int64s]:
    """Return the indexes of tensors in groups that are never alive together."""
    order = np.argsort(problem.lower, kind="stable")
    latest = np.maximum.accumulate(problem.upper[order])
    return np.split(order, 1 + np.flatnonzero(problem.lower[order][1:] >= latest[:-1])) if len(order) else []


def is_too_large(problem: Problem, members: Int64s) -> bool:
    """Tell whether a step of the search of a group would take so long that no deadline could be kept."""
    if len(members) ** 2 <= MOST_LIVES or len(members) > MOST_TENSORS:
        return len(members) > MOST_TENSORS
    left, right, _ = sections(_part(problem, members))
    return int((right - left).sum()) > MOST_LIVES


@dataclasses.dataclass
class Effort:
    """What a search may still take."""

    deadline_ns: int
    """By ``time.monotonic_ns``."""
    work: int
    """Steps, each times the tensors of its group."""

    @property
    def is_left(self) -> bool:
        """Whether there is any."""
        return self.work > 0 and time.monotonic_ns() < self.deadline_ns


class Exact:
    """A planner for hard problems, with proofs. For training traces of thousands of tensors, use ``improve``."""

    name = "exact"

    def __init__(self, options: ExactOptions | None = None) -> None:
        self.options = options or ExactOptions()

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Return a plan within the capacity, or of the lowest peak found; or why there is none.

        Args:
            problem: What to place. With a capacity, any plan within it will do.
            deadline_s: Seconds to take at most. Without a capacity, all of them unless the peak is
                proved the lowest. ``math.inf``: the options' work ends the search.
        """
        began_ns = time.monotonic_ns()
        effort = Effort(*limits_of(began_ns, deadline_s, self.options.work))
        members = split(problem)
        large = next((each for each in members if is_too_large(problem, each)), None)
        if large is not None:
            detail = f"{len(large)} tensors whose lives overlap are too many for an exact search: ask improve"
            return NoPlan(Reason.NOT_FOUND, self.name, 0.0, detail)
        found = Joint(problem, members, self.options)
        if problem.capacity_bytes is None:
            reason = found.minimise(effort)
        else:
            reason = found.fit(problem.capacity_bytes, NO_LIMIT, effort)
        elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
        if found.offset_bytes is None:
            return refusal(problem, reason or Reason.OUT_OF_TIME, self.name, elapsed_s)
        is_optimal = found.peak_bytes <= found.proved_bytes
        return Plan(found.offset_bytes, self.name, elapsed_s, optimal=is_optimal)


class Joint:
    """All groups of a problem, and the best plan found for all of them together."""

    def __init__(self, problem: Problem, members: list[Int64s], options: ExactOptions) -> None:
        """Begin without a plan; ``members`` are the groups' tensors, as ``split`` tells them apart."""
        self.problem = problem
        self.members = members
        self.options = options
        self.groups: list[Group] = []
        self.offset_bytes: Int64s | None = None
        self.peak_bytes = NO_LIMIT
        self.proved_bytes = problem.peak_live_bytes
        """No plan's peak is lower."""

    def fit(self, capacity_bytes: int, turns: int, effort: Effort) -> Reason | None:
        """Search for a plan within a capacity; ``None``: it is in ``offset_bytes``."""
        if capacity_bytes < self.proved_bytes:
            return Reason.INFEASIBLE
        offset_bytes = np.zeros(len(self.problem), np.int64)
        for number, members in enumerate(self.members):
            if not effort.is_left:
                return Reason.OUT_OF_TIME
            if number == len(self.groups):
                self.groups.append(Group(_part(self.problem, members), self.options))
            group = self.groups[number]
            ended = group.fit(capacity_bytes, turns, effort)
            if ended == INFEASIBLE:
                self.proved_bytes = max(self.proved_bytes, capacity_bytes + 1)
                return Reason.INFEASIBLE
            if ended != FOUND:
                return Reason.OUT_OF_TIME
            offset_bytes[members] = group.offset_bytes
        self.offset_bytes = offset_bytes
        self.peak_bytes = int((offset_bytes + self.problem.size_bytes).max(initial=0))
        return None

    def minimise(self, effort: Effort) -> Reason | None:
        """Search for lower and lower peaks, until the lowest is proved or the effort is used up."""
        room_bytes = int(self.problem.size_bytes.sum()) + len(self.problem) * self.problem.alignment_bytes
        reason = self.fit(room_bytes, NO_LIMIT, effort)
        for turns in (TURNS_PER_BISECTION << doubling for doubling in itertools.count()):
            lower, target = self.proved_bytes, self.proved_bytes
            while lower < self.peak_bytes and effort.is_left:
                if self.fit(target, turns, effort) is not None:
                    lower = target + 1
                target = (lower + self.peak_bytes) // 2
            if self.proved_bytes >= self.peak_bytes or not effort.is_left:
                break
        return reason


def _part(problem: Problem, members: Int64s) -> Problem:
    lower, upper, size_bytes = (a[members] for a in (problem.lower, problem.upper, problem.size_bytes))
    return Problem(lower, upper, size_bytes, alignment_bytes=problem.alignment_bytes)
