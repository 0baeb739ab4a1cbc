"""What a planner of swaps is given: one iteration's operations, its tensors, and who uses which when.

Operations run one after another on one stream. The iteration repeats, so its operations lie on a
circle: operation ``n`` is operation 0 of the next iteration. A tensor lives from the beginning of
``alloc_op`` to the end of ``free_op``, or always. Between two of its *accesses* it is idle; that
*gap* is when it can be elsewhere::

    operation      0 1 2 3 4 5 6 7 | 8 9     n = 8
    feature map    W R - - - R               alloc_op 0, free_op 5, accesses 0, 1, 5: gap 0 is empty, gap 1 is 2 to 4
    gradient             W - - - - | - R     alloc_op 3, free_op 9, accesses 3, 9: gap 0 passes the boundary
    weight         R - - - - - R W | R       persistent, accesses 0, 6, 7: gap 2, the last one, is empty
    output               W - - -             alloc_op 3, free_op 6, access 3: gap 0 ends with the tensor

Gap ``g`` of a tensor follows its access ``g``. After the last access comes, on the circle, the
first one of what is persistent, and the end of every other tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from zico.base.errors import ProblemError
from zico.base.units import GIB, KIB

if TYPE_CHECKING:
    from zico.planning.packing.problem import NoPlan

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

READ = 1
WRITE = 2
PERSISTENT = -1
"""Stands for ``alloc_op`` and ``free_op`` of a tensor that outlives iterations."""
LARGEST = 1 << 60
"""Bytes or nanoseconds: sums of a problem's numbers must stay below 2**63."""
LEAST_BYTES = 64 * KIB
"""Smaller tensors stay: they are not in the pool (docs/design/README.md: granule)."""
PCIE_BANDWIDTH = 12.0 * GIB
"""Bytes per second each way: what pinned memory reaches on PCIe 3.0 x16 (Capuchin, ASPLOS 2020, measures 12 GB/s)."""


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction between the device's memory and where tensors wait."""

    bandwidth: float = PCIE_BANDWIDTH
    """Bytes per second."""
    latency_ns: int = 0
    """What every transfer takes besides."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ProblemError(f"a bandwidth of {self.bandwidth} bytes per second: give more than 0")
        if self.latency_ns < 0:
            raise ProblemError(f"a latency of {self.latency_ns} ns: give 0 or more")

    def transfer_ns(self, size_bytes: int) -> int:
        """Return how long so many bytes take, rounded up."""
        return self.latency_ns + math.ceil(size_bytes * 1e9 / self.bandwidth)


@dataclasses.dataclass(frozen=True, eq=False)
class SwapProblem:
    """An iteration as parallel arrays, the links, and the limit; checked when made.

    Raises:
        ProblemError: Something is out of range or out of order; the message names the first tensor
            or operation.
    """

    op_start_ns: Int64s
    """When each operation begins, with all tensors at hand, from the beginning of the iteration."""
    op_duration_ns: Int64s
    """How long it takes; 0 for one that only allocates."""
    period_ns: int
    """How long an iteration takes, with all tensors at hand."""
    size_bytes: Int64s
    alloc_op: Int64s
    """The operation of the iteration that needs the tensor first, or ``PERSISTENT``."""
    free_op: Int64s
    """The last operation in which it lives, from ``alloc_op`` to less than ``alloc_op + n``; or ``PERSISTENT``."""
    access_begin: Int64s
    """Tensor ``i``'s accesses are entries ``access_begin[i]`` to ``access_begin[i + 1]`` of the two arrays below."""
    access_op: Int64s
    """Ascending for each tensor, within its life, so from 0 to less than ``2 n``."""
    access_kind: Int64s
    """``READ``, ``WRITE``, or both added."""
    out: Link = Link()
    back: Link = Link()
    limit_bytes: int | None = None
    """Never more than this in memory; ``None``: no limit."""
    op_names: tuple[str, ...] | None = None
    made_by: tuple[str, ...] | None = None
    """What made each tensor, where operations are parts of an iteration without names; ``None``: see ``op_names``."""
    read_by: tuple[str, ...] | None = None
    """What keeps each tensor for the backward pass, likewise."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "Int64s":
                object.__setattr__(self, field.name, np.ascontiguousarray(getattr(self, field.name), np.int64))
        _check_operations(self)
        _check_tensors(self)
        for names in (self.made_by, self.read_by):
            if names is not None and len(names) != len(self):
                raise ProblemError(f"{len(names)} names of {len(self)} tensors: give one each")
        _check_accesses(self)

    def __len__(self) -> int:
        return len(self.size_bytes)

    @property
    def n_ops(self) -> int:
        """Return the number of operations of an iteration."""
        return len(self.op_start_ns)

    @property
    def persistent(self) -> Bools:
        """Return which tensors outlive iterations."""
        return np.asarray(self.alloc_op == PERSISTENT)

    def accesses(self, tensor: int) -> Int64s:
        """Return the operations that use a tensor, ascending."""
        return self.access_op[self.access_begin[tensor] : self.access_begin[tensor + 1]]

    def next_access(self, tensor: int, gap: int) -> int | None:
        """Return the operation that ends a gap, ``n`` more in the next iteration; ``None``: the tensor's end does."""
        ops = self.accesses(tensor)
        if gap + 1 < len(ops):
            return int(ops[gap + 1])
        return int(ops[0]) + self.n_ops if self.alloc_op[tensor] == PERSISTENT else None

    def op_name(self, op: int) -> str:
        """Return what an operation is called in messages."""
        index = op % self.n_ops
        return f"{index}" if self.op_names is None else f"{index} ({self.op_names[index]})"

    @functools.cached_property
    def load_bytes(self) -> Int64s:
        """Return the bytes alive during each operation, with all tensors at hand."""
        return self._alive_during(np.where(self.persistent, 0, self.alloc_op), self._last_op, self.size_bytes)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes alive at once, with all tensors at hand."""
        return int(self.load_bytes.max(initial=0))

    @functools.cached_property
    def least_bytes(self) -> int:
        """Return the lowest limit that any plan can keep: what some operation needs at once.

        That is what it uses, and what lives but holds nothing yet, or is never used.
        """
        first, last, size = self.gap_ops
        ends = first <= last
        idle = self._alive_during(first[ends], last[ends], size[ends])
        return int((self.load_bytes - idle).max(initial=0))

    @functools.cached_property
    def gap_ops(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return for each access the first and last operation of the gap behind it, and the bytes of its tensor.

        The last one comes before the first one where the gap is empty; it reaches to less than
        ``3 n``.
        """
        owner = np.repeat(np.arange(len(self)), np.diff(self.access_begin))
        until = np.append(self.access_op[1:], 0)
        ends = self.access_begin[1:][np.diff(self.access_begin) > 0] - 1
        tensors = owner[ends]
        again = self.access_op[self.access_begin[tensors]] + self.n_ops
        until[ends] = np.where(self.persistent[tensors], again, self._last_op[tensors] + 1)
        return self.access_op + 1, until - 1, self.size_bytes[owner]

    @functools.cached_property
    def turning_op(self) -> int:
        """Return the operation during which most is idle that ends with the iteration: there the forward pass ends."""
        first, last, size = self.gap_ops
        owner = np.repeat(np.arange(len(self)), np.diff(self.access_begin))
        ends = (first <= last) & ~self.persistent[owner]
        return int(np.argmax(self._alive_during(first[ends], last[ends], size[ends])))

    @property
    def _last_op(self) -> Int64s:
        return np.where(self.persistent, self.n_ops - 1, self.free_op)

    def _alive_during(self, first: Int64s, last: Int64s, size: Int64s) -> Int64s:
        """Return the bytes of intervals of operations, both ends included, at each operation of the circle."""
        change = np.zeros(3 * self.n_ops + 1, np.int64)
        np.add.at(change, first, size)
        np.add.at(change, last + 1, -size)
        alive: Int64s = np.cumsum(change)[: 3 * self.n_ops].reshape(3, self.n_ops).sum(axis=0)
        return alive


def _check_operations(problem: SwapProblem) -> None:
    start, duration = problem.op_start_ns, problem.op_duration_ns
    if not len(start) or len(start) != len(duration):
        raise ProblemError(f"{len(start)} starts and {len(duration)} durations of operations: give one of each or more")
    if problem.op_names is not None and len(problem.op_names) != len(start):
        raise ProblemError(f"{len(problem.op_names)} names of {len(start)} operations: give one each")
    end = np.concatenate([[0], start + duration])
    _refuse("operation", (duration < 0) | (duration > LARGEST), "takes {} ns: give 0 to 2**60", duration)
    _refuse("operation", start < end[:-1], "begins at {} ns, before the one ahead of it ends: put them in order", start)
    if not end[-1] <= problem.period_ns <= LARGEST:
        raise ProblemError(f"an iteration of {problem.period_ns} ns whose last operation ends at {end[-1]} ns")
    if problem.limit_bytes is not None and problem.limit_bytes < 1:
        raise ProblemError(f"a limit of {problem.limit_bytes} bytes: give 1 or more")


def _check_tensors(problem: SwapProblem) -> None:
    n, n_ops = len(problem), problem.n_ops
    size, alloc, free = problem.size_bytes, problem.alloc_op, problem.free_op
    if len(alloc) != n or len(free) != n or len(problem.access_begin) != n + 1:
        what = f"{n} sizes, {len(alloc)} allocations, {len(free)} frees, {len(problem.access_begin)} access_begin"
        raise ProblemError(f"{what}: give one of each, and one more access_begin")
    _refuse("tensor", (size <= 0) | (size > LARGEST // max(n, 1)), "has {} bytes: give 1 to 2**60 in all", size)
    persists = alloc == PERSISTENT
    _refuse("tensor", persists != (free == PERSISTENT), "ends at {}: give PERSISTENT for both or none", free)
    _refuse("tensor", (alloc < PERSISTENT) | (alloc >= n_ops), "begins at {}: give an operation", alloc)
    outside = ~persists & ((free < alloc) | (free >= alloc + n_ops))
    _refuse("tensor", outside, "ends at {}: give an operation from its first to one round later", free)


def _check_accesses(problem: SwapProblem) -> None:
    begin, op, kind = problem.access_begin, problem.access_op, problem.access_kind
    if begin[0] != 0 or begin[-1] != len(op) or len(op) != len(kind) or (np.diff(begin) < 0).any():
        raise ProblemError(
            f"access_begin does not divide {len(op)} operations and {len(kind)} kinds: see its docstring"
        )
    owner = np.repeat(np.arange(len(problem)), np.diff(begin))
    persists = problem.persistent[owner]
    low = np.where(persists, 0, problem.alloc_op[owner])
    high = np.where(persists, problem.n_ops - 1, problem.free_op[owner])
    _refuse("tensor", (op < low) | (op > high), "is used by operation {}, at which it does not live", op, owner)
    later = np.append(False, (owner[1:] == owner[:-1]) & (op[1:] <= op[:-1]))
    _refuse("tensor", later, "is used by operation {} after a later one: give each once, in order", op, owner)
    _refuse("tensor", (kind < READ) | (kind > READ + WRITE), "has an access of kind {}: give READ, WRITE", kind, owner)


def _refuse(noun: str, wrong: Bools, text: str, value: Int64s, owner: Int64s | None = None) -> None:
    """Raise an error for the first of those that are wrong."""
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ProblemError(f"{noun} {i if owner is None else owner[i]} {text.format(value[i])}")


# --------------------------------------------------------------------------------------------------
# What a planner of swaps answers: which bytes leave and return, and when each transfer is asked
# for.
#
# Each direction has one stream, which works in the order in which transfers are asked for. A
# transfer is asked for when an operation *begins*, by which time that operation has its memory. So
# what the stream then brings back can only make later operations wait. A transfer out starts no
# earlier than the end of the access before its gap. One back starts no earlier than the end of the
# transfer out.


@dataclasses.dataclass(frozen=True, eq=False)
class Transfers:
    """What is asked of one direction's stream in an iteration, in this order."""

    swap: Int64s
    """Which swap of the plan."""
    op: Int64s
    """The operation, from 0 to ``n - 1``, at whose beginning it is asked for; ascending."""
    delay_ns: Int64s
    """It starts no earlier than so long after that; what stands behind it in the stream waits, too."""

    def __post_init__(self) -> None:
        _to_int64s(self, "swap", "op", "delay_ns")

    def __len__(self) -> int:
        return len(self.swap)


@dataclasses.dataclass(frozen=True, eq=False)
class SwapPlan:
    """Swaps as parallel arrays, and the two streams' orders. Believe it once the judge has.

    A swap happens once in every iteration: bytes of a tensor leave in one of its gaps and return in
    the same one. Two swaps may share a gap if they share no bytes. Where the tensor ends with the
    gap, its bytes need not return.
    """

    tensor: Int64s
    gap: Int64s
    """The index of the access, among the tensor's, after which the bytes leave."""
    first_byte: Int64s
    size_bytes: Int64s
    out: Transfers
    """Every swap once."""
    back: Transfers
    """Every swap once; those of a gap that ends with its tensor may be left out."""
    planner: str
    elapsed_s: float
    optimal: bool = False
    """The planner has proved that no plan has less overhead."""

    def __post_init__(self) -> None:
        _to_int64s(self, "tensor", "gap", "first_byte", "size_bytes")

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes moved in an iteration, both directions together."""
        return int(self.size_bytes.sum() + self.size_bytes[self.back.swap].sum())


def no_swaps(planner: str, elapsed_s: float = 0.0) -> SwapPlan:
    """Return the plan that moves nothing."""
    none = np.zeros(0, np.int64)
    nothing = Transfers(none, none, none)
    return SwapPlan(none, none, none, none, nothing, nothing, planner, elapsed_s)


class SwapPlanner(Protocol):
    """Something that plans swaps for a problem with a limit."""

    name: str

    def plan(self, problem: SwapProblem, deadline_s: float) -> SwapPlan | NoPlan:
        """Return a plan whose replay ends and keeps the limit, or why there is none."""
        ...


def _to_int64s(plan: object, *names: str) -> None:
    for name in names:
        object.__setattr__(plan, name, np.ascontiguousarray(getattr(plan, name), np.int64))
