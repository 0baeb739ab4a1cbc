"""A second opinion on swap plans: nanosecond by nanosecond, byte by byte."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zico.planning.saving.problem import SwapPlan, SwapProblem

Byte = tuple[str, int, int]


@dataclasses.dataclass
class Transfer:
    """A transfer that was asked for."""

    swap: int
    access_op: int
    """The operation before the gap, counted on through the iterations."""
    from_ns: int
    end_ns: int = -1


class Ticks:
    """Runs operations and transfers; memory is a set of bytes."""

    def __init__(self, problem: SwapProblem, plan: SwapPlan) -> None:
        """Begin with what persists, and what an iteration leaves to the next one, but for what is away then."""
        self.problem, self.plan, self.n = problem, plan, problem.n_ops
        self.memory: set[Byte] = set()
        self.blocked: set[int] = set()
        self.queues: dict[str, list[Transfer]] = {"out": [], "back": []}
        self.op_begin_ns: list[int] = []
        self.n_done, self.op_end_ns, self.done_ns, self.now_ns = 0, -1, 0, 0
        self.peak_bytes = 0
        for tensor in range(len(problem)):
            if problem.persistent[tensor] or problem.free_op[tensor] >= self.n:
                self.memory |= self._bytes(tensor)
        for swap in range(len(plan)):
            if self._is_away_at_the_boundary(swap):
                self.memory -= self._moved(swap)
                self.blocked.add(swap)

    def run(self, operations: int, patience_ns: int) -> bool:
        """Go on until so many operations have begun; tell whether they did, each within some time."""
        while len(self.op_begin_ns) < operations:
            if self.now_ns > (self.op_begin_ns[-1] if self.op_begin_ns else 0) + patience_ns:
                return False
            self._ends()
            # What ends in the very instant in which it began ends after all that begins then, as for the judge.
            while len(self.op_begin_ns) < operations and (self._begins() or self._ends()):
                self.peak_bytes = max(self.peak_bytes, len(self.memory))
            self.now_ns += 1
        return True

    def _is_away_at_the_boundary(self, swap: int) -> bool:
        asked = dict(zip(self.plan.out.swap.tolist(), self.plan.out.op.tolist(), strict=True))
        access, until = self._gap(swap)
        back = dict(zip(self.plan.back.swap.tolist(), self.plan.back.op.tolist(), strict=True)).get(swap)
        away = [op for op in range(access, until) if op % self.n == asked[swap]][:1]
        returns = [op for op in range(away[0], until) if op % self.n == back][:1] if back is not None else [until - 1]
        return away[0] < self.n <= returns[0]

    def _gap(self, swap: int) -> tuple[int, int]:
        """Return the operation before a swap's gap, and the one behind it."""
        tensor, gap = int(self.plan.tensor[swap]), int(self.plan.gap[swap])
        needed = self.problem.next_access(tensor, gap)
        until = int(self.problem.free_op[tensor]) + 1 if needed is None else needed
        return int(self.problem.accesses(tensor)[gap]), until

    def _bytes(self, tensor: int) -> set[Byte]:
        return {("tensor", tensor, i) for i in range(int(self.problem.size_bytes[tensor]))}

    def _moved(self, swap: int) -> set[Byte]:
        first, size = int(self.plan.first_byte[swap]), int(self.plan.size_bytes[swap])
        return {("tensor", int(self.plan.tensor[swap]), i) for i in range(first, first + size)}

    def _fits(self, more: int) -> bool:
        return self.problem.limit_bytes is None or len(self.memory) + more <= self.problem.limit_bytes

    def _ends(self) -> bool:
        out, back = (queue[0] if queue and queue[0].end_ns == self.now_ns else None for queue in self.queues.values())
        op_ends = self.op_end_ns == self.now_ns
        if out:
            self.queues["out"].pop(0)
            self.memory -= {("ghost", out.swap, 0)} | {("ghost", *byte[1:]) for byte in self._moved(out.swap)}
            if self._lives(out):
                self.memory -= self._moved(out.swap)
        if back:
            self.queues["back"].pop(0)
            self.blocked.discard(back.swap)
        if op_ends:
            self._op_ends()
        return bool(out or back or op_ends)

    def _op_ends(self) -> None:
        leaving = self.queues["out"][0] if self.queues["out"] and self.queues["out"][0].end_ns >= 0 else None
        for tensor in range(len(self.problem)):
            if not self.problem.persistent[tensor] and (self.problem.free_op[tensor] - self.n_done) % self.n == 0:
                if leaving and self.plan.tensor[leaving.swap] == tensor and self._lives(leaving):
                    self.memory |= {("ghost", *byte[1:]) for byte in self._moved(leaving.swap)}
                self.memory -= self._bytes(tensor)
                self.blocked -= {swap for swap in range(len(self.plan)) if self.plan.tensor[swap] == tensor}
        self.n_done, self.op_end_ns, self.done_ns = self.n_done + 1, -1, self.now_ns

    def _lives(self, transfer: Transfer) -> bool:
        """Tell whether the tensor that a transfer was asked for has not ended."""
        tensor = int(self.plan.tensor[transfer.swap])
        access, _ = self._gap(transfer.swap)
        last = transfer.access_op - access + int(self.problem.free_op[tensor])
        return bool(self.problem.persistent[tensor]) or self.n_done <= last

    def _begins(self) -> bool:
        return self._out_begins() or self._op_begins() or self._back_begins()

    def _out_begins(self) -> bool:
        queue = self.queues["out"]
        if not queue or queue[0].end_ns >= 0:
            return False
        if not self._lives(queue[0]):
            queue.pop(0)
            return True
        return self._goes(queue[0], self.n_done > queue[0].access_op, self.problem.out.transfer_ns)

    def _back_begins(self) -> bool:
        queue = self.queues["back"]
        if not queue or queue[0].end_ns >= 0:
            return False
        moved = self._moved(queue[0].swap)
        is_out = queue[0].swap in self.blocked and not moved & self.memory
        began = self._goes(queue[0], is_out and self._fits(len(moved)), self.problem.back.transfer_ns)
        if began:
            self.memory |= moved
        return began

    def _goes(self, transfer: Transfer, may: bool, takes: object) -> bool:  # noqa: FBT001
        if not may or self.now_ns < transfer.from_ns or not callable(takes):
            return False
        transfer.end_ns = self.now_ns + takes(int(self.plan.size_bytes[transfer.swap]))
        return True

    def _op_begins(self) -> bool:
        at, problem = self.n_done % self.n, self.problem
        ends = problem.op_start_ns + problem.op_duration_ns
        pause_ns = problem.op_start_ns[at] - (ends[at - 1] if at else ends[-1] - problem.period_ns)
        if self.op_end_ns >= 0 or self.now_ns < self.done_ns + pause_ns:
            return False
        for swap in self.blocked:
            if any((op - at) % self.n == 0 for op in problem.accesses(int(self.plan.tensor[swap]))):
                return False
        new = [tensor for tensor in range(len(problem)) if problem.alloc_op[tensor] == at]
        if new and not self._fits(sum(int(problem.size_bytes[tensor]) for tensor in new)):
            return False
        for tensor in new:
            self.memory |= self._bytes(tensor)
        self.op_begin_ns.append(self.now_ns)
        self.op_end_ns = self.now_ns + int(problem.op_duration_ns[at])
        self._ask(at)
        return True

    def _ask(self, at: int) -> None:
        for name, transfers in (("out", self.plan.out), ("back", self.plan.back)):
            for swap, op, delay_ns in zip(transfers.swap, transfers.op, transfers.delay_ns, strict=True):
                if op == at:
                    access, _ = self._gap(int(swap))
                    behind = (self.n_done - access) % self.n
                    self.queues[name].append(Transfer(int(swap), self.n_done - behind, self.now_ns + int(delay_ns)))
                    if name == "out":
                        self.blocked.add(int(swap))
