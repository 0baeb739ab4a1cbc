"""The exact planner's search: depth first over "what lies next on this floor?", on a stack of its own.

One step of depth is one decision: a tensor put on a valley's floor, or "nothing lies on this floor in this section",
which raises it. The answers to one question cover all plans in which every tensor is held up, and exclude each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.compiled import compiled
from zico.libc import monotonic_ns
from zico.planners.exact_infer import Rules, bound, choose, connect, gather, hash_of, next_level, part_of
from zico.planners.exact_state import UNPLACED, State, UInt64s

if TYPE_CHECKING:
    from zico.planners.problem import Int64s

FOUND, INFEASIBLE, STOPPED, TOO_DEEP = range(4)
"""What a search comes back with: a plan, a proof, at its limit of steps or its deadline, or with its stack full."""

RAISE = -1
"""The answer "nothing lies here", among tensors."""
OPEN, DEAD, DONE, FULL = range(4)
STEPS_PER_LOOK = 64
"""Steps between two looks at the clock: well under 10 ms for a thousand tensors."""


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

    In any plan, what lies above such a tensor may come down by its size, and it may go to the very top instead.
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

    The part is as it was right after that decision, but for tensors that hang over all of it: they must lie somewhere
    in it anyway, and the top is as good as any.
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
    stack.n_hung[0] = stack.n_saved[0] = 0
    while True:
        steps += 1
        if steps > limits[0] or (steps % STEPS_PER_LOOK == 0 and monotonic_ns() > limits[1]):
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
