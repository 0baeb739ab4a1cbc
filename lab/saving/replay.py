"""The judge of swap plans: replay an iteration until it repeats, event by event. Obvious, slow, trusted.

Operations run one after another on one stream, transfers on one stream for each direction, all in
continuous time:

* An operation begins once the one before it has ended and the time between them has passed. All its
  tensors must be in memory by then, and what it allocates fits below the limit. What it frees, it
  frees when it ends.
* A transfer out begins when its stream reaches it, its delay has passed and the access before its
  gap has ended. It holds its memory until it ends.
* A transfer back begins when its stream reaches it, its delay has passed, its bytes are out and
  their memory fits below the limit. It holds that memory from its beginning.
* At one instant operations go first: the memory is theirs before a transfer back takes it.

The first iteration begins with all persistent tensors in memory, but those that the plan has out at
the boundary. The others begin where the one before them ended. Besides the rules of
``broken_rule``:

* ``start``: what is in memory when an iteration begins lies below the limit.
* ``deadlock``: something can always go on.

``fast.py`` does the same for planners, compiled; a test compares the two.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from zico.planning.saving.problem import SwapPlan, SwapProblem, Transfers


# --------------------------------------------------------------------------------------------------
# What makes a swap plan one, before time is looked at. Obvious; shares no code with any planner.
#
# Rules, each with a name that a verdict quotes:
#
# * ``swap``: each swap names a gap that exists, and bytes of the tensor.
# * ``overlap``: no two swaps of a gap share a byte.
# * ``once``: each swap leaves once, and returns once unless its tensor ends with the gap; then it
#   does not return.
# * ``order``: transfers are asked for at operations of the iteration, in ascending order, after no
#   negative delay.
# * ``late``: leaving is asked for within the gap, and returning before the operation begins that
#   ends it.

Broken = tuple[str, str]
"""A rule and what breaks it."""


def broken_rule(problem: SwapProblem, plan: SwapPlan) -> Broken | None:
    """Return the first rule that the plan breaks, with the swap concerned; ``None``: it keeps them all."""
    return _swaps(problem, plan) or _overlaps(plan) or _orders(problem, plan) or _late(problem, plan)


def asked_at(problem: SwapProblem, plan: SwapPlan) -> tuple[list[int], list[int | None]]:
    """Return the operations at which each swap's transfers are asked for, counted on from the gap's own iteration.

    The first ones at or behind the gap's access, on the circle: from the access to less than two
    rounds later.
    """
    n = problem.n_ops
    out_op = dict(zip(plan.out.swap.tolist(), plan.out.op.tolist(), strict=True))
    back_op = dict(zip(plan.back.swap.tolist(), plan.back.op.tolist(), strict=True))
    leaves: list[int] = []
    returns: list[int | None] = []
    for swap in range(len(plan)):
        access = int(problem.accesses(int(plan.tensor[swap]))[plan.gap[swap]])
        leaves.append(access + (out_op[swap] - access) % n)
        returns.append(leaves[-1] + (back_op[swap] - leaves[-1]) % n if swap in back_op else None)
    return leaves, returns


def _swaps(problem: SwapProblem, plan: SwapPlan) -> Broken | None:
    if not len(plan) == len(plan.gap) == len(plan.first_byte) == len(plan.size_bytes):
        return "swap", "tensors, gaps, first bytes and sizes differ in number"
    for swap in range(len(plan)):
        tensor, gap = int(plan.tensor[swap]), int(plan.gap[swap])
        if not 0 <= tensor < len(problem) or not 0 <= gap < len(problem.accesses(tensor)):
            return "swap", f"swap {swap} is of gap {gap} of tensor {tensor}, which does not exist"
        first, size = int(plan.first_byte[swap]), int(plan.size_bytes[swap])
        if first < 0 or size < 1 or first + size > problem.size_bytes[tensor]:
            has = f"tensor {tensor} has {problem.size_bytes[tensor]}"
            return "swap", f"swap {swap} moves bytes {first} to {first + size}; {has}"
    return None


def _overlaps(plan: SwapPlan) -> Broken | None:
    for swap in range(len(plan)):
        earlier = slice(0, swap)
        same = (plan.tensor[earlier] == plan.tensor[swap]) & (plan.gap[earlier] == plan.gap[swap])
        ends = plan.first_byte + plan.size_bytes
        shared = same & (plan.first_byte[earlier] < ends[swap]) & (plan.first_byte[swap] < ends[earlier])
        if shared.any():
            return "overlap", f"swaps {int(np.argmax(shared))} and {swap} move the same bytes"
    return None


def _orders(problem: SwapProblem, plan: SwapPlan) -> Broken | None:
    for name, transfers in (("out", plan.out), ("back", plan.back)):
        broken = _order(problem, plan, name, transfers)
        if broken is not None:
            return broken
    moved = {"out": sorted(plan.out.swap.tolist()), "back": sorted(plan.back.swap.tolist())}
    due = [s for s in range(len(plan)) if problem.next_access(int(plan.tensor[s]), int(plan.gap[s])) is not None]
    for name, swaps in (("out", list(range(len(plan)))), ("back", due)):
        if moved[name] != swaps:
            wrong = sorted(set(moved[name]) ^ set(swaps)) or "one"
            return "once", f"transfers {name} do not move each of {len(swaps)} swaps once: look at {wrong}"
    return None


def _order(problem: SwapProblem, plan: SwapPlan, name: str, transfers: Transfers) -> Broken | None:
    if not len(transfers) == len(transfers.op) == len(transfers.delay_ns):
        return "order", f"swaps, operations and delays of transfers {name} differ in number"
    for i in range(len(transfers)):
        swap, op = int(transfers.swap[i]), int(transfers.op[i])
        if not 0 <= swap < len(plan):
            return "once", f"transfer {name} {i} is of swap {swap}, which does not exist"
        if not 0 <= op < problem.n_ops or transfers.delay_ns[i] < 0:
            return "order", f"swap {swap} is asked {name} at operation {op}, {transfers.delay_ns[i]} ns behind it"
        if i and op < transfers.op[i - 1]:
            return "order", f"swap {swap} is asked {name} at operation {op}, behind one of {transfers.op[i - 1]}"
    return None


def _late(problem: SwapProblem, plan: SwapPlan) -> Broken | None:
    leaves, returns = asked_at(problem, plan)
    for swap in range(len(plan)):
        tensor, gap = int(plan.tensor[swap]), int(plan.gap[swap])
        needed, back = problem.next_access(tensor, gap), returns[swap]
        if leaves[swap] >= (int(problem.free_op[tensor]) + 1 if needed is None else needed):
            what = "ends" if needed is None else f"is used by operation {problem.op_name(needed)}"
            return "late", f"tensor {tensor} is asked out at operation {problem.op_name(leaves[swap])}, when it {what}"
        if needed is not None and back is not None and back >= needed:
            op, asked = problem.op_name(needed), problem.op_name(back)
            return "late", f"tensor {tensor}, used by operation {op}, is out: asked back at operation {asked}"
    return None


# --------------------------------------------------------------------------------------------------

MOST_ITERATIONS = 64
"""If no iteration repeats until then, the mean of the later half counts."""

_HERE, _ASKED, _LEAVING, _AWAY, _RETURNING = range(5)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What became of a plan: figures of the iterations that repeat."""

    rule: str | None
    """The rule that is broken; ``None``: the plan is good. Then the figures are of the whole replay so far."""
    detail: str
    duration_ns: float
    """Of an iteration."""
    overhead: float
    """How much longer than with all tensors at hand, as a share."""
    peak_bytes: int
    """Most bytes in memory at once, in any iteration."""
    tensor_wait_ns: float
    """What operations waited for their tensors, in an iteration."""
    memory_wait_ns: float
    """What they waited for memory, their tensors being there."""
    moved_bytes: int
    """Bytes moved in an iteration, both directions together."""
    repeats: bool
    """Whether an iteration began as an earlier one did; otherwise the figures are means."""

    @property
    def is_good(self) -> bool:
        """Tell whether no rule is broken."""
        return self.rule is None


class Moved(NamedTuple):
    """A transfer of the replay."""

    direction: str
    """``out`` or ``back``."""
    swap: int
    iteration: int
    """In which it was asked for."""
    begin_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class History:
    """All that happened in a replay, in order, times from the beginning of the first iteration."""

    op_begin_ns: list[int]
    """Of operations 0, 1, 2..., counted on through the iterations."""
    transfers: list[Moved]
    iteration_ns: list[int]
    """When iterations began, the one that was not run included."""
    load_bytes: list[tuple[int, int]]
    """Time, and the bytes in memory from then on."""


def replay(problem: SwapProblem, plan: SwapPlan) -> Replay:
    """Return what an iteration costs under a plan, or which rule the plan breaks."""
    return replay_with_history(problem, plan)[0]


def replay_with_history(problem: SwapProblem, plan: SwapPlan) -> tuple[Replay, History]:
    """Return the same, and all that happened."""
    broken = broken_rule(problem, plan)
    if broken is not None:
        return Replay(*broken, 0.0, 0.0, 0, 0.0, 0.0, 0, repeats=False), History([], [], [0], [])
    run = _Run(problem, plan)
    repeated = run.run()
    return run.result(repeated), run.history


@dataclasses.dataclass
class _Request:
    """A transfer that was asked for."""

    swap: int
    asked_op: int
    """Counted on through the iterations."""
    from_ns: int
    """Not before."""
    end_ns: int | None = None
    """Set when it begins."""
    ghost: bool = False
    """The tensor ended while its bytes were leaving."""


class _Run:
    """The state of a replay."""

    def __init__(self, problem: SwapProblem, plan: SwapPlan) -> None:
        self.problem, self.plan, n = problem, plan, problem.n_ops
        self.leaves, self.returns = asked_at(problem, plan)
        self.t_ns = 0
        self.op = 0  # the next one to begin, or the one that runs, counted on through the iterations
        self.op_end_ns: int | None = None
        self.free_ns = 0  # when the operation before ended
        self.alive = problem.persistent | (problem.free_op >= n)
        self.state = np.full(len(plan), _HERE)
        for swap, back in enumerate(self.returns):
            end = int(problem.free_op[plan.tensor[swap]]) if back is None else back
            if self.leaves[swap] < n <= end:
                self.state[swap] = _AWAY
        self.out: collections.deque[_Request] = collections.deque()
        self.back: collections.deque[_Request] = collections.deque()
        self.users: list[list[int]] = [[] for _ in range(n)]  # the swaps of each operation's tensors
        for swap, tensor in enumerate(plan.tensor.tolist()):
            for op in set((problem.accesses(tensor) % n).tolist()):
                self.users[op].append(swap)
        self.waits = {"tensor": 0, "memory": 0}
        self.waited: list[dict[str, int]] = []
        self.history = History([], [], [], [])
        self.broken = ("", "")
        self.peak_bytes = 0
        self._note_load()

    def run(self) -> int | None:
        """Replay; return the first iteration of those that repeat, ``None`` if a rule broke or none does."""
        seen: dict[object, int] = {}
        while True:
            if self.op == len(seen) * self.problem.n_ops and self.op_end_ns is None:
                self.history.iteration_ns.append(self.t_ns)
                self.waited.append(dict(self.waits))
                key = self._signature()
                if key in seen:
                    return seen[key]
                seen[key] = len(seen)
                if self._fits(0) and len(seen) <= MOST_ITERATIONS:
                    continue
                if not self._fits(0):
                    limit = self.problem.limit_bytes
                    what = f"{self._used()} bytes are in memory when an iteration begins, the limit is {limit}"
                    self.broken = ("start", what)
                return None
            if not self._something_begins() and not self._time_passes():
                self.broken = ("deadlock", self._why())
                return None

    def result(self, repeated: int | None) -> Replay:
        """Return the figures of the iterations from ``repeated`` on."""
        at, n = self.history.iteration_ns, len(self.history.iteration_ns) - 1
        first = n // 2 if repeated is None else repeated
        rounds = max(n - first, 1)
        duration_ns = (at[-1] - at[first]) / rounds
        waits = {name: (self.waited[-1][name] - self.waited[first][name]) / rounds for name in self.waits}
        rule, detail = self.broken
        return Replay(
            rule=rule or None,
            detail=detail,
            duration_ns=duration_ns,
            overhead=duration_ns / self.problem.period_ns - 1 if self.problem.period_ns else 0.0,
            peak_bytes=self.peak_bytes,
            tensor_wait_ns=waits["tensor"],
            memory_wait_ns=waits["memory"],
            moved_bytes=self.plan.moved_bytes,
            repeats=repeated is not None,
        )

    def _signature(self) -> object:
        """Return all that decides how things go on, relative to now."""
        queues = [
            (
                request.swap,
                request.asked_op - self.op,
                max(request.from_ns - self.t_ns, 0),
                None if request.end_ns is None else request.end_ns - self.t_ns,
                request.ghost,
            )
            for queue in (self.out, self.back)
            for request in queue
        ]
        return len(self.out), tuple(queues), self.state.tobytes(), self.alive.tobytes()

    def _used(self) -> int:
        """Return the bytes in memory, counted anew."""
        used = int(self.problem.size_bytes[self.alive].sum())
        used -= int(self.plan.size_bytes[self.state == _AWAY].sum())
        if self.out and self.out[0].ghost:
            used += int(self.plan.size_bytes[self.out[0].swap])
        return used

    def _fits(self, more_bytes: int) -> bool:
        limit = self.problem.limit_bytes
        return limit is None or self._used() + more_bytes <= limit

    def _note_load(self) -> None:
        used = self._used()
        self.peak_bytes = max(self.peak_bytes, used)
        self.history.load_bytes.append((self.t_ns, used))

    # -- what begins -------------------------------------------------------------------------------

    def _something_begins(self) -> bool:
        """Let one thing begin that can; tell whether there was one."""
        return self._out_begins() or self._op_begins() or self._back_begins()

    def _op_begins(self) -> bool:
        if self.op_end_ns is not None or self.t_ns < self._earliest_ns() or self._missing() or self._short_bytes() > 0:
            return False
        at = self.op % self.problem.n_ops
        self.alive |= self.problem.alloc_op == at
        self.op_end_ns = self.t_ns + int(self.problem.op_duration_ns[at])
        self.history.op_begin_ns.append(self.t_ns)
        self._note_load()
        for transfers, queue in ((self.plan.out, self.out), (self.plan.back, self.back)):
            for i in np.flatnonzero(transfers.op == at):
                swap = int(transfers.swap[i])
                if queue is self.out:
                    self.state[swap] = _ASKED
                queue.append(_Request(swap, self.op, self.t_ns + int(transfers.delay_ns[i])))
        return True

    def _out_begins(self) -> bool:
        if not self.out or self.out[0].end_ns is not None:
            return False
        request = self.out[0]
        tensor, ahead = int(self.plan.tensor[request.swap]), self.leaves[request.swap] - request.asked_op
        access = int(self.problem.accesses(tensor)[self.plan.gap[request.swap]]) - ahead
        if not self.problem.persistent[tensor] and self.op > int(self.problem.free_op[tensor]) - ahead:
            self.out.popleft()  # the tensor has ended, there is nothing left to move
            return True
        if self.t_ns < request.from_ns or self.op <= access:
            return False
        self.state[request.swap] = _LEAVING
        self._begin(request, "out")
        return True

    def _back_begins(self) -> bool:
        if not self.back or self.back[0].end_ns is not None:
            return False
        request = self.back[0]
        size_bytes = int(self.plan.size_bytes[request.swap])
        if self.t_ns < request.from_ns or self.state[request.swap] != _AWAY or not self._fits(size_bytes):
            return False
        self.state[request.swap] = _RETURNING
        self._begin(request, "back")
        self._note_load()
        return True

    def _begin(self, request: _Request, direction: str) -> None:
        link = self.problem.out if direction == "out" else self.problem.back
        request.end_ns = self.t_ns + link.transfer_ns(int(self.plan.size_bytes[request.swap]))
        iteration = request.asked_op // self.problem.n_ops
        self.history.transfers.append(Moved(direction, request.swap, iteration, self.t_ns, request.end_ns))

    # -- what ends ---------------------------------------------------------------------------------

    def _time_passes(self) -> bool:
        """Go to the next instant at which something ends or may begin; tell whether there is one."""
        instants = [request.end_ns for queue in (self.out, self.back) for request in list(queue)[:1] if request.end_ns]
        instants += [queue[0].from_ns for queue in (self.out, self.back) if queue and queue[0].from_ns > self.t_ns]
        waits_since_ns = self._earliest_ns()
        if self.op_end_ns is not None:
            instants.append(self.op_end_ns)
        elif waits_since_ns > self.t_ns:
            instants.append(waits_since_ns)
        if not instants:
            return False
        until_ns = min(instants)
        if self.op_end_ns is None and waits_since_ns <= self.t_ns:
            self.waits["tensor" if self._missing() else "memory"] += until_ns - self.t_ns
        self.t_ns = until_ns
        self._end_what_ends()
        return True

    def _end_what_ends(self) -> None:
        if self.out and self.out[0].end_ns == self.t_ns:
            request = self.out.popleft()
            if not request.ghost:
                self.state[request.swap] = _AWAY
        if self.back and self.back[0].end_ns == self.t_ns:
            self.state[self.back.popleft().swap] = _HERE
        if self.op_end_ns == self.t_ns:
            ended = ~self.problem.persistent & (
                self.problem.free_op % self.problem.n_ops == self.op % self.problem.n_ops
            )
            self.alive &= ~ended
            for swap in np.flatnonzero(ended[self.plan.tensor]):
                if self.state[swap] == _LEAVING:
                    self.out[0].ghost = True
                self.state[swap] = _HERE
            self.op, self.op_end_ns, self.free_ns = self.op + 1, None, self.t_ns
        self._note_load()

    # -- what is waited for ------------------------------------------------------------------------

    def _earliest_ns(self) -> int:
        """Return when the next operation would begin with all tensors at hand."""
        at, start, duration = self.op % self.problem.n_ops, self.problem.op_start_ns, self.problem.op_duration_ns
        before = start[at - 1] + duration[at - 1] - (0 if at else self.problem.period_ns)
        return self.free_ns + int(start[at] - before)

    def _missing(self) -> list[int]:
        """Return the swaps, of tensors that the next operation uses, that are not back."""
        return [swap for swap in self.users[self.op % self.problem.n_ops] if self.state[swap] != _HERE]

    def _short_bytes(self) -> int:
        """Return the bytes that the next operation allocates beyond the limit; not positive: it fits."""
        if self.problem.limit_bytes is None:
            return 0
        needs = int(self.problem.size_bytes[self.problem.alloc_op == self.op % self.problem.n_ops].sum())
        return needs and self._used() + needs - self.problem.limit_bytes

    def _why(self) -> str:
        """Return what the next operation waits for in vain."""
        op, limit = self.problem.op_name(self.op), self.problem.limit_bytes
        missing = self._missing()
        if not missing:
            return f"operation {op} is short of {self._short_bytes()} bytes, {self._used()} of {limit} are in use"
        swap = missing[0]
        what = f"tensor {self.plan.tensor[swap]} used by operation {op} is out"
        if self.back and limit is not None:
            head = self.back[0].swap
            more = int(self.plan.size_bytes[head])
            of = "" if head == swap else f" of tensor {self.plan.tensor[head]}"
            what += f": {more} bytes{of} are to come back first, {self._used()} of {limit} are in use"
        return what
