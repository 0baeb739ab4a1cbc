"""Plans that save memory as JSON: for who carries them out, with names of the trace instead of the problem's indexes.

Operations are counted as the problem counts them. ``event`` is where in the trace each of those is
that a transfer is asked for at, ``op`` its name.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from zico.base.errors import TraceError
from zico.planning.saving.problem import PERSISTENT, READ, WRITE, Link, SwapProblem
from zico.trace.events import NO_NAME, Kind
from zico.trace.iterations import choose, find_iterations, with_operations
from zico.trace.lifetimes import NEVER, lifetimes

if TYPE_CHECKING:
    from zico.lab.saving.rewriting import Rewritten
    from zico.planning.saving.mixed import SavePlan
    from zico.planning.saving.problem import Int64s, Transfers
    from zico.trace.events import Trace
    from zico.trace.iterations import Iterations
    from zico.trace.lifetimes import Lifetimes

SCHEMA = "zico.swap_plan.v1"


class Asked(msgspec.Struct, frozen=True):
    """A transfer."""

    swap: int
    """Its place among the plan's swaps."""
    at: int
    """The operation at whose beginning it is asked for."""
    event: int
    op: str
    delay_ns: int


class Swap(msgspec.Struct, frozen=True):
    """Bytes of a tensor that leave in one of its gaps."""

    tensor: int
    """The problem's."""
    trace_tensor: int
    gap: int
    after: int
    """The operation whose access is before the gap."""
    before: int | None
    """The one whose access ends it, counted on from the iteration of the first; none: the tensor ends."""
    first_byte: int
    size_bytes: int


class PlanFile(msgspec.Struct, frozen=True):
    """What a file says."""

    planner: str
    iteration: int
    """Of the trace."""
    operations: int
    period_ns: int
    limit_bytes: int | None
    swaps: list[Swap]
    out: list[Asked]
    back: list[Asked]
    again: list[int] = []
    """The operations that run again, counted in the iteration with these repeats; all else here counts so, too."""
    schema_version: str = SCHEMA


def plan_json(found: SwapIteration, made: Rewritten, plan: SavePlan, limit_bytes: int | None) -> bytes:
    """Return the file's bytes, for the iteration that the plan's order makes of the one that was found."""
    problem, op_event, swapping = made.problem, found.op_event[made.op], plan.swaps
    swaps = [
        Swap(
            tensor=tensor,
            trace_tensor=int(found.tensor[made.tensor[tensor]]),
            gap=gap,
            after=int(problem.accesses(tensor)[gap]),
            before=problem.next_access(tensor, gap),
            first_byte=int(swapping.first_byte[i]),
            size_bytes=int(swapping.size_bytes[i]),
        )
        for i, (tensor, gap) in enumerate(zip(swapping.tensor.tolist(), swapping.gap.tolist(), strict=True))
    ]

    def asked(transfers: Transfers) -> list[Asked]:
        names = problem.op_names or ("",) * problem.n_ops
        rows = zip(transfers.swap.tolist(), transfers.op.tolist(), transfers.delay_ns.tolist(), strict=True)
        return [Asked(swap, op, int(op_event[op]), names[op], delay_ns) for swap, op, delay_ns in rows]

    content = PlanFile(
        planner=plan.planner,
        iteration=found.number,
        operations=problem.n_ops,
        period_ns=problem.period_ns,
        limit_bytes=limit_bytes,
        swaps=swaps,
        out=asked(swapping.out),
        back=asked(swapping.back),
        again=np.flatnonzero(made.again).tolist(),
    )
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


# -- the swap problem of one iteration of a trace that says which operation uses which tensor ------
#
# A tensor may end between two allocations that no operation separates. An operation without
# duration is put in there, so that the load is the trace's own at every instant::
#
#     trace       ALLOC a  FREE b  ALLOC c  READ a  WRITE c  OP add
#     operations  (empty: a)       add: c, uses a and c
#
# What lives longer than one iteration and shorter than two is there twice for a while. It is there
# once all around the circle, and once, as a tensor that is never idle, for as long as there are
# two.


@dataclasses.dataclass(frozen=True, eq=False)
class SwapIteration:
    """A trace's iteration as a swap problem, and what its tensors and operations are in the trace."""

    problem: SwapProblem
    number: int
    """The iteration's, as the trace counts."""
    tensor: Int64s
    """The number in the trace of each of the problem's tensors."""
    op_event: Int64s
    """The event that each of the problem's operations is; an allocation for those that were put in."""


def swap_iteration(
    trace: Trace,
    iteration: int | None = None,
    *,
    out: Link | None = None,
    back: Link | None = None,
    limit_bytes: int | None = None,
) -> SwapIteration:
    """Return what a planner of swaps needs to know of one iteration.

    Args:
        trace: The trace; it has READ, WRITE and OP events.
        iteration: The number of the iteration; by default a typical one of median duration, not the
            first.
        out: The link that tensors leave by; by default PCIe 3.0.
        back: The link that they return by.
        limit_bytes: What the plan is to keep below.

    Raises:
        TraceError: The trace does not say which operation uses which tensor, is inconsistent, empty
            or never repeats, or has no such iteration.
    """
    kind = trace.events["kind"]
    if not (np.isin(kind, (Kind.READ, Kind.WRITE)).any() and (kind == Kind.OP).any()):
        what = "does not say which operation uses which tensor: trace with --fake, or record with --ops"
        raise TraceError(trace.path or "trace", 0, what)
    life = lifetimes(trace)
    found = find_iterations(trace, life)
    index = choose(trace, found, iteration)
    seen = with_operations(trace, found)
    if not seen[index]:
        others = ", ".join(map(str, found.number[seen])) or "none"
        what = f"has no operations of iteration {found.number[index]} (of these it has: {others}): choose another"
        raise TraceError(trace.path or "trace", 0, what)
    walk = _Walk(trace, int(found.begin[index]), int(found.end[index]))
    repeats = bool(found.typical[index]) and index + 1 < len(found) and bool(seen[index + 1])
    if repeats:
        walk.go_on(int(found.end[index + 1]))
    tensors = _Tensors(walk, life, repeats=repeats)
    names = tuple(trace.names[name] if name != NO_NAME else "" for name in trace.events["name"][walk.op_event])
    problem = SwapProblem(
        op_start_ns=np.array(walk.start_ns),
        op_duration_ns=np.array(walk.duration_ns),
        period_ns=max(_period_ns(trace, found, index), walk.end_ns),
        size_bytes=np.array(tensors.size_bytes),
        alloc_op=np.array(tensors.alloc_op),
        free_op=np.array(tensors.free_op),
        access_begin=np.cumsum([0, *map(len, tensors.accesses)]),
        access_op=np.array([op for accesses in tensors.accesses for op in accesses], np.int64),
        access_kind=np.array([kind for accesses in tensors.accesses for kind in accesses.values()], np.int64),
        out=out or Link(),
        back=back or Link(),
        limit_bytes=limit_bytes,
        op_names=names,
    )
    return SwapIteration(problem, int(found.number[index]), np.array(tensors.tensor), np.array(walk.op_event))


def _period_ns(trace: Trace, found: Iterations, index: int) -> int:
    t_ns, end = trace.events["t_ns"], int(found.end[index])
    return int(t_ns[min(end, len(t_ns) - 1)] - t_ns[found.begin[index]])


class _Walk:
    """Goes through the events of an iteration, and of the next one, and gives each an operation."""

    def __init__(self, trace: Trace, begin: int, end: int) -> None:
        self._events = trace.events
        self._ops = np.flatnonzero(trace.events["kind"] == Kind.OP)
        self._begin_ns = int(trace.events["t_ns"][begin])
        self._allocates = False
        self._accesses = False
        self._at = 0  # the operation that comes next
        self.begin, self.end = begin, end
        self.start_ns: list[int] = []
        self.duration_ns: list[int] = []
        self.end_ns = 0
        self.op_event: list[int] = []
        self.alloc_op: dict[int, int] = {}
        self.free_op: dict[int, int] = {}
        self.accesses: dict[int, dict[int, int]] = {}
        self._walk(begin, end, adds=True)

    @property
    def n_ops(self) -> int:
        """Return the number of operations of the iteration."""
        return len(self.op_event)

    def go_on(self, end: int) -> None:
        """Walk through the next iteration, too, whose operations are numbered on."""
        self._at = self.n_ops
        self._walk(self.end, end, adds=False)

    def _walk(self, begin: int, end: int, *, adds: bool) -> None:
        events = self._events[begin:end]
        following = np.append(self._ops, len(self._events) - 1)[np.searchsorted(self._ops, np.arange(begin, end))]
        runs = (events["t_ns"] > self._events["t_ns"][following]) & (self._events["kind"][following] == Kind.OP)
        rows = zip(events["kind"].tolist(), events["tensor"].tolist(), runs.tolist(), strict=True)
        last_alloc = begin
        for i, (kind, tensor, inside) in enumerate(rows, begin):
            if kind == Kind.ALLOC:
                self.alloc_op[tensor] = self._at
                self._allocates, last_alloc = True, i
            elif kind == Kind.FREE:
                if self._allocates and not inside and not self._accesses:
                    self._close(last_alloc, 0, adds=adds)
                self.free_op[tensor] = self._at if inside or self._accesses else self._at - 1
            elif kind in (Kind.READ, Kind.WRITE):
                self._accesses = True
                uses = self.accesses.setdefault(tensor, {})
                uses[self._at] = uses.get(self._at, 0) | (READ if kind == Kind.READ else WRITE)
            elif kind == Kind.OP:
                self._close(i, int(self._events["size_bytes"][i]), adds=adds)
        if self._allocates:
            self._close(last_alloc, 0, adds=adds)

    def _close(self, event: int, duration_ns: int, *, adds: bool) -> None:
        self._at += 1
        self._allocates = self._accesses = False
        if adds:
            since_ns = int(self._events["t_ns"][event]) - self._begin_ns
            self.start_ns.append(max(since_ns, self.end_ns))
            self.end_ns = max(since_ns + duration_ns, self.start_ns[-1])
            self.duration_ns.append(self.end_ns - self.start_ns[-1])
            self.op_event.append(event)


class _Tensors:
    """Lists the tensors of an iteration, each generation once."""

    def __init__(self, walk: _Walk, life: Lifetimes, *, repeats: bool) -> None:
        self.tensor: list[int] = []
        self.size_bytes: list[int] = []
        self.alloc_op: list[int] = []
        self.free_op: list[int] = []
        self.accesses: list[dict[int, int]] = []
        self._n = walk.n_ops
        born = life.step_event[life.begin]
        dies = np.where(
            life.end < NEVER, np.append(life.step_event, 0)[np.minimum(life.end, len(life.step_event))], NEVER
        )
        for row in np.flatnonzero((born < walk.end) & (dies > walk.begin)):
            tensor, uses = int(life.tensor[row]), walk.accesses.get(int(life.tensor[row]), {})
            self._size, self._tensor = int(life.size_bytes[row]), tensor
            is_old, stays = born[row] < walk.begin, dies[row] >= walk.end
            if is_old and stays:
                self._add(PERSISTENT, PERSISTENT, {op: kind for op, kind in uses.items() if op < self._n})
            elif not repeats:
                alloc, free = walk.alloc_op.get(tensor, 0), walk.free_op.get(tensor, self._n - 1)
                self._add(alloc, max(alloc, min(free, self._n - 1)), uses)
            elif not is_old and stays and tensor not in walk.free_op:
                self._add(PERSISTENT, PERSISTENT, {op % self._n: kind for op, kind in uses.items()})
            elif not is_old:
                self._once_or_twice(walk.alloc_op[tensor], walk.free_op[tensor], uses)

    def _once_or_twice(self, alloc: int, free: int, uses: dict[int, int]) -> None:
        last = alloc + self._n - 1
        if free > last:
            self._add(alloc, min(free - self._n, last), {})
            uses = {min(op, last): kind for op, kind in uses.items()} | {last: READ}
        self._add(alloc, max(alloc, min(free, last)), uses)

    def _add(self, alloc: int, free: int, uses: dict[int, int]) -> None:
        self.tensor.append(self._tensor)
        self.size_bytes.append(self._size)
        self.alloc_op.append(alloc)
        self.free_op.append(free)
        end = self._n - 1 if free == PERSISTENT else free
        kept: dict[int, int] = {}
        for op, kind in sorted(uses.items()):
            at = min(max(op, alloc), end)
            kept[at] = kept.get(at, 0) | kind
        self.accesses.append(kept)
