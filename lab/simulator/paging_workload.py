"""What one iteration of a trace touches, block by block, and when: what the simulator of paging repeats.

A tensor covers the blocks between its first and its last byte at the address that the caller gives
it; small ones share a block. An operation touches each of its tensors from the beginning to the
end, all of them at the same pace::

    reads a (blocks 0 1 2 3), writes b (blocks 7 8)      touches 0 7 1 2 8 3

A block is *active* while a tensor in it lives.

Known limitations
    * A trace says which tensors an operation touches, not which parts: a lookup in an embedding
      touches all of it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import TraceError
from zico.paging.layout import BLOCK_BYTES
from zico.trace.events import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from zico.trace.events import Trace
    from zico.trace.iterations import Iteration, Iterations
    from zico.trace.lifetimes import Lifetimes

    Int64s = NDArray[np.int64]


class Naming(enum.Enum):
    """What makes two operations the same execution."""

    SHAPES = "shapes"
    """The operation and the sizes of its operands."""
    ARGUMENTS = "arguments"
    """Their addresses, too: DeepUM's hash of a kernel's name and arguments."""
    OCCURRENCE = "occurrence"
    """Operation, sizes, and how many of these came before in the iteration."""


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """One iteration as parallel arrays; ``first_*`` have one more entry than there are executions."""

    n_blocks: int
    name: Int64s
    """Of each execution."""
    duration_ns: Int64s
    first_touch: Int64s
    touched: NDArray[np.int32]
    """Blocks, each once an execution, in the order in which it reaches them."""
    writes: NDArray[np.bool_]
    first_change: Int64s
    changed: NDArray[np.int32]
    """Blocks that become active, or inactive, before the execution; the last ones at the iteration's end."""
    becomes_active: NDArray[np.bool_]
    active: NDArray[np.bool_]
    """Which blocks are when the iteration begins."""

    def __len__(self) -> int:
        return len(self.name)

    @property
    def compute_ns(self) -> int:
        """Nanoseconds of an iteration that never waits."""
        return int(self.duration_ns.sum())


@dataclasses.dataclass(frozen=True, eq=False)
class _Placed:
    """Where the tensors of an iteration lie, by the trace's number."""

    row: dict[int, int]
    first: list[int]
    last: list[int]
    size_bytes: list[int]


def workload(
    trace: Trace, life: Lifetimes, iterations: Iterations, iteration: Iteration, offset_bytes: Int64s, naming: Naming
) -> Workload:
    """Return what an iteration touches.

    Args:
        trace: A trace that says who reads and writes what.
        life: Its lifetimes.
        iterations: Its iterations.
        iteration: The one to repeat, laid out.
        offset_bytes: The address of each tensor of ``iteration``.
        naming: Which operations are the same execution.

    Raises:
        TraceError: The trace has no operations that read or write.
    """
    begin, end = iterations.events_of(iteration.number)
    placed = _Placed(
        rows_of(life, iteration, life.step_of_event(begin), life.step_of_event(end)),
        (offset_bytes // BLOCK_BYTES).tolist(),
        ((offset_bytes + iteration.size_bytes - 1) // BLOCK_BYTES).tolist(),
        iteration.size_bytes.tolist(),
    )
    builder = _Builder(placed, naming, 1 + max(placed.last))
    for tensor in placed.row:
        row = int(np.searchsorted(life.tensor, tensor))
        if life.step_event[life.begin[row]] < begin:
            builder.begin_with(tensor)
    for event in trace.events[begin:end].tolist():
        builder.add(event)
    if not builder.names:
        raise TraceError(trace.path or "trace", 0, "does not say what operations touch: make it by zico trace --fake")
    return builder.finish()


def rows_of(life: Lifetimes, iteration: Iteration, first: int, after: int) -> dict[int, int]:
    """Return which tensor of an iteration each of the trace's is that it touches, by the trace's number.

    Those of before the iteration that die in it are the ones that come in their stead at its end.

    Args:
        life: The trace's lifetimes.
        iteration: The iteration.
        first: Its first step.
        after: The step after its last one.
    """
    row = {int(life.tensor[r]): i for i, r in enumerate(iteration.row)}
    again = {int(life.begin[r]) - (after - first): i for i, r in enumerate(iteration.row)}
    old = np.flatnonzero((life.begin < first) & (life.end > first))
    for r in old.tolist():
        if int(life.begin[r]) in again:
            row.setdefault(int(life.tensor[r]), again[int(life.begin[r])])
    return row


class _Builder:
    """Turns events into the arrays of a workload."""

    def __init__(self, placed: _Placed, naming: Naming, n_blocks: int) -> None:
        self._placed = placed
        self._naming = naming
        self._alive = np.zeros(n_blocks, np.int64)
        self._active = self._alive > 0
        self._numbers: dict[Any, int] = {}
        self._seen: Counter[Any] = Counter()
        self._operands: dict[int, bool] = {}
        self.names: list[int] = []
        self._durations: list[int] = []
        self._touches: list[list[tuple[int, bool]]] = []
        self._changes: list[list[tuple[int, bool]]] = [[]]

    def begin_with(self, tensor: int) -> None:
        """Note that a tensor lives when the iteration begins."""
        self._count(tensor, 1)
        self._active = self._alive > 0
        self._changes = [[]]

    def add(self, event: tuple[int, ...]) -> None:
        """Note an event of the iteration."""
        _, tensor, size, name, _, kind, _ = event
        match kind:
            case Kind.ALLOC:
                self._count(tensor, 1)
            case Kind.FREE:
                self._count(tensor, -1)
            case Kind.READ | Kind.WRITE if tensor in self._placed.row:
                row = self._placed.row[tensor]
                self._operands[row] = self._operands.get(row, False) or kind == Kind.WRITE
            case Kind.OP:
                self._execute(name, size)
            case _:
                pass

    def finish(self) -> Workload:
        """Return the workload."""
        touches, changes = [t for some in self._touches for t in some], [c for some in self._changes for c in some]
        return Workload(
            n_blocks=len(self._alive),
            name=np.array(self.names, np.int64),
            duration_ns=np.array(self._durations, np.int64),
            first_touch=np.cumsum([0, *map(len, self._touches)]),
            touched=np.array([block for block, _ in touches], np.int32),
            writes=np.array([is_written for _, is_written in touches], np.bool_),
            first_change=np.cumsum([0, *map(len, self._changes)]),
            changed=np.array([block for block, _ in changes], np.int32),
            becomes_active=np.array([active for _, active in changes], np.bool_),
            active=self._active,
        )

    def _count(self, tensor: int, change: int) -> None:
        if tensor not in self._placed.row:
            return
        row = self._placed.row[tensor]
        for block in range(self._placed.first[row], self._placed.last[row] + 1):
            self._alive[block] += change
            if self._alive[block] == (1 if change > 0 else 0):
                self._changes[-1].append((block, change > 0))

    def _execute(self, name: int, duration_ns: int) -> None:
        """Note an operation on the operands seen since the last one."""
        if self._operands:
            self._touches.append(list(_in_order(self._placed, self._operands)))
            self.names.append(self._number(name))
            self._durations.append(duration_ns)
            self._changes.append([])
        elif self._durations:
            self._durations[-1] += duration_ns
        self._operands = {}

    def _number(self, name: int) -> int:
        """Return the number of an execution's name."""
        placed = self._placed
        key: Any = (name, *(placed.size_bytes[row] for row in self._operands))
        if self._naming is Naming.ARGUMENTS:
            key = (*key, *(placed.first[row] for row in self._operands))
        elif self._naming is Naming.OCCURRENCE:
            self._seen[key] += 1
            key = (*key, self._seen[key])
        return self._numbers.setdefault(key, len(self._numbers) + 1)


def _in_order(placed: _Placed, operands: dict[int, bool]) -> Iterator[tuple[int, bool]]:
    """Yield the blocks that an operation touches, each once, and whether it writes there."""
    reached: list[tuple[float, int, bool]] = []
    for row, is_written in operands.items():
        first, last = placed.first[row], placed.last[row]
        reached += [((b - first) / (last - first + 1), b, is_written) for b in range(first, last + 1)]
    reached.sort(key=lambda touch: touch[0])
    written = {block for _, block, is_written in reached if is_written}
    for block in dict.fromkeys(block for _, block, _ in reached):
        yield block, block in written
