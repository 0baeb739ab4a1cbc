"""AutoTM: an integer program chooses which tensors leave, and at which operations they move.

A copy is *synchronous*, and costs all of its time, or it overlaps with operations. An operation
takes as long as itself, and as long as the copies in each direction that overlap with it. The
program minimises the sum of these times, with what is in memory at each operation below the limit::

    operation        0   1   2   3   4   5   6          gap 1 to 5
    leaves           .   [ copy )                       from operation 3 on it is away
    returns                          [ copy )           until operation 3 it is away
    synchronous        |                       |        away from 1 to 5, copied before 1 and before 6

Each gap has a few choices of where its copies begin, by their durations. Where the rounded solution
exceeds the limit, or its replay breaks a rule, the limit is lowered at the fullest operations. Then
the program is solved again, as the paper does for fragmentation. Source: M. Hildebrand et al.,
"AutoTM: Automatic Tensor Movement in Heterogeneous Memory Systems using Integer Linear Programming"
(ASPLOS 2020), section 4.

Known limitations
    * As published, a copy overlaps with one operation. Operations of our traces are shorter than
      copies, so here a copy may overlap with several in a row.
    * Operations have one place for their inputs and outputs: none runs on tensors that are away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zico.base.errors import ConfigError
from zico.base.units import format_bytes
from zico.lab.saving.autoswap import LEAST_BYTES, Limited, begin_ns, gaps_between_accesses, in_order
from zico.lab.saving.replayer import Replayer
from zico.planning.saving.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zico.lab.saving.autoswap import Floats, Gaps
    from zico.planning.saving.problem import Bools, Int64s, SwapPlan, SwapProblem

MOST_ENTRIES = 400_000
"""Of the program's matrix: above, it is not tried."""
MOVE_COST = 1e-4
"""Of a copy's time, added to the sum: what need not move stays."""
GAP = 1e-4
"""A solution is taken that is no further from the best one, as a share of the iteration."""
_ALL_STARTS = 8
"""A gap of so many operations or fewer has all of them as choices."""
_STARTS = (0, 1, 2, 3, 5, 8)
"""Else copies begin so many of their own durations from the gap's end."""
_FIRST = 1 / 8
"""Of the time, for the first solution: if nothing waits in its replay, it is the best."""
_TRIES = 5
_PROVED = (0, 2)
"""What ``scipy.optimize.milp`` says where the answer is optimal, and where there is none."""
_LOWERED = 64
"""The limit is lowered by a part of so many at least."""


class Copy(NamedTuple):
    """One choice of how a gap's tensor leaves or returns; operations are counted on as in ``Gaps``."""

    gap: int
    begin: int
    """The first operation it overlaps with; a synchronous one: the first behind it."""
    end: int
    """The last one; a synchronous one: the one ahead of it."""
    overlaps: tuple[tuple[int, int], ...]
    """Operations of the iteration, and the nanoseconds of the copy in each."""
    alone_ns: int
    """What a synchronous one takes."""


Chosen = tuple[list[Copy], list[Copy]]
"""Copies out and back, gap by gap."""


# -- what a gap's copies can choose from -----------------------------------------------------------


class Choices:
    """The gaps that pass an operation above the limit, and the copies that each can choose from."""

    def __init__(self, problem: SwapProblem, limit_bytes: int, least_bytes: int = LEAST_BYTES) -> None:
        self._n = problem.n_ops
        self.took_ns = np.diff(begin_ns(problem, np.arange(self._n + 1)))
        above = np.concatenate([[0], np.cumsum(np.tile(problem.load_bytes > limit_bytes, 3))])
        gaps = gaps_between_accesses(problem, least_bytes)
        self.gaps = gaps.take(above[gaps.last + 1] > above[gaps.first])
        self._starts_ns = begin_ns(problem, np.arange(3 * self._n + 1))
        self.out: list[Copy] = []
        self.back: list[Copy] = []
        for gap in range(len(self.gaps)):
            first, last = int(self.gaps.first[gap]), int(self.gaps.last[gap])
            out, back = self._copies(gap, first, last)
            self.out += [copy for copy in out if above[last + 1] > above[copy.end + 1]]
            self.back += [copy for copy in back if above[copy.begin] > above[first]]

    def _copies(self, gap: int, first: int, last: int) -> tuple[list[Copy], list[Copy]]:
        out_ns, back_ns = int(self.gaps.out_ns[gap]), int(self.gaps.back_ns[gap])
        out = [Copy(gap, first, first - 1, (), out_ns), self._overlapping(gap, first, first, out_ns)]
        out += [self._overlapping(gap, op, last, out_ns) for op in self._starts(first, last, out_ns, ahead=True)]
        back = [Copy(gap, last + 1, last, (), back_ns)]
        back += [self._overlapping(gap, op, last, back_ns) for op in self._starts(first, last, back_ns, ahead=False)]
        return list(dict.fromkeys(out)), back

    def _starts(self, first: int, last: int, copy_ns: int, *, ahead: bool) -> list[int]:
        """Return where copies may begin: from the beginning of the gap on, or from its end backwards."""
        if last - first < _ALL_STARTS:
            return list(range(first, last + 1))
        away_ns = np.array(_STARTS) * copy_ns
        if ahead:
            ops = np.searchsorted(self._starts_ns, self._starts_ns[first] + away_ns)
        else:
            ops = np.searchsorted(self._starts_ns, self._starts_ns[last + 1] - away_ns, side="right") - 1
        return sorted({min(op, last) for op in ops.tolist() if first <= min(op, last)})

    def _overlapping(self, gap: int, begin: int, last: int, copy_ns: int) -> Copy:
        """Return the copy that begins with an operation; what is left of it at the last one makes that longer."""
        end = int(np.searchsorted(self._starts_ns, self._starts_ns[begin] + copy_ns)) - 1
        end = min(max(end, begin), last)
        parts = self.took_ns[np.arange(begin, end + 1) % self._n]
        parts[-1] = copy_ns - parts[:-1].sum()
        ops = [op % self._n for op in range(begin, end + 1)]
        return Copy(gap, begin, end, tuple(zip(ops, parts.tolist(), strict=True)), 0)


# -- the program -----------------------------------------------------------------------------------
#
# Its columns and its rows::
#
#     out[c], back[c]   copy c is chosen                  of each gap as many out as back, one or none
#     wait[k]           operation k takes longer          overlaps of each direction <= took[k] + wait[k]
#     used[k]           bytes in memory at operation k    used[k] - used[k - 1] as loads say, and as copies do
#     one               stands for the operations         so that the solver's gap is a share of the iteration
#
# No gap's copy back is chosen that begins before the one out has ended.


class _Program:
    """The program as sparse rows: ``low <= sum of terms <= high``."""

    def __init__(self, problem: SwapProblem, choices: Choices) -> None:
        self.choices, n = choices, problem.n_ops
        self.copies = [*choices.out, *choices.back]
        self._sign = np.repeat([-1, 1], [len(choices.out), len(choices.back)])
        self.load = problem.load_bytes
        self.n_columns = len(self.copies) + 2 * n + 1
        self._wait, self._used = len(self.copies), len(self.copies) + n
        self._bytes = float(max(choices.gaps.size_bytes.max(initial=1), 1))
        self._ns = float(max(choices.gaps.out_ns.max(initial=1), choices.gaps.back_ns.max(initial=1)))
        self._entries: list[tuple[int, int, float]] = []
        self._bounds: list[tuple[float, float]] = []
        self._times()
        self._pairs()
        self._memory()

    @property
    def n_entries(self) -> int:
        """Return the size of the matrix."""
        return len(self._entries)

    def _row(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        self._entries += [(len(self._bounds), column, value) for column, value in terms]
        self._bounds.append((low, high))

    def _times(self) -> None:
        for sign in (-1, 1):
            overlaps: dict[int, list[tuple[int, float]]] = {}
            for column in np.flatnonzero(self._sign == sign).tolist():
                for op, part_ns in self.copies[column].overlaps:
                    overlaps.setdefault(op, []).append((column, part_ns / self._ns))
            for op, terms in overlaps.items():
                self._row([*terms, (self._wait + op, -1.0)], -np.inf, self.choices.took_ns[op] / self._ns)

    def _pairs(self) -> None:
        columns: list[tuple[list[int], list[int]]] = [([], []) for _ in range(len(self.choices.gaps))]
        for column, copy in enumerate(self.copies):
            columns[copy.gap][int(self._sign[column] > 0)].append(column)
        for out, back in columns:
            self._row([(column, 1.0) for column in out], 0.0, 1.0)
            self._row([*((column, 1.0) for column in out), *((column, -1.0) for column in back)], 0.0, 0.0)
            for begin in sorted({self.copies[column].begin for column in back}):
                gone = [(column, 1.0) for column in out if self.copies[column].end < begin]
                if len(gone) < len(out):
                    early = [(column, -1.0) for column in back if self.copies[column].begin <= begin]
                    self._row([*gone, *early], 0.0, np.inf)

    def _memory(self) -> None:
        n = len(self.load)
        changes: list[list[tuple[int, float]]] = [[] for _ in range(n)]
        at_start = []
        for column, copy in enumerate(self.copies):
            size = float(self._sign[column] * self.choices.gaps.size_bytes[copy.gap] / self._bytes)
            since = copy.end + 1 if self._sign[column] < 0 else copy.begin
            changes[since % n].append((column, -size))
            at_start.append((column, (since - 1) // n * size))
        self._row([(self._used, 1.0), *at_start], *[self.load[0] / self._bytes] * 2)
        for op in range(1, n):
            grows = float((self.load[op] - self.load[op - 1]) / self._bytes)
            self._row([(self._used + op, 1.0), (self._used + op - 1, -1.0), *changes[op]], grows, grows)

    def solve(self, capacity: Int64s, deadline_s: float) -> tuple[Chosen | None, bool]:
        """Return the copies chosen with so many bytes at each operation, and whether these, or none, are proved."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise ConfigError("the program of AutoTM needs SciPy: pip install 'zico-memory[swap]'") from None
        chosen, n = len(self.copies), len(self.load)
        rows, columns, values = zip(*self._entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._bounds), self.n_columns))
        high = np.concatenate([np.ones(chosen), np.full(n, np.inf), capacity / self._bytes, [1.0]])
        low = np.concatenate([np.zeros(chosen + n), np.full(n, -np.inf), [1.0]])
        answer: Any = milp(
            self.cost(),
            constraints=LinearConstraint(matrix, *np.array(self._bounds).T),
            bounds=Bounds(low, high),
            integrality=np.arange(self.n_columns) < chosen,
            options={"time_limit": max(deadline_s, 0.0), "mip_rel_gap": GAP},
        )
        is_proved = answer.status in _PROVED
        if answer.x is None:
            return None, is_proved
        taken = answer.x[:chosen] > 1 / 2
        out, back = ([self.copies[c] for c in np.flatnonzero(taken & (self._sign == sign))] for sign in (-1, 1))
        return (out, back), is_proved

    def cost(self) -> Floats:
        """Return what columns cost: synchronous copies and a little of every copy, waits, and the operations."""
        cost = np.zeros(self.n_columns)
        for column, copy in enumerate(self.copies):
            whole_ns = copy.alone_ns + sum(part_ns for _, part_ns in copy.overlaps)
            cost[column] = (copy.alone_ns + MOVE_COST * whole_ns) / self._ns
        cost[self._wait : self._used] = 1.0
        cost[-1] = self.choices.took_ns.sum() / self._ns
        return cost


# -- the planner -----------------------------------------------------------------------------------


class AutoTM(Limited):
    """The program's solution, as transfers."""

    name = "autotm"

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        """Leave tensors below ``least_bytes`` where they are."""
        self._least_bytes = least_bytes

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:
        """Return a plan whose replay keeps the limit, or what is in the way.

        Raises:
            ConfigError: SciPy is not installed.
        """
        choices = Choices(problem, limit_bytes, self._least_bytes)
        left = int(used_bytes(problem, choices, _all_alone(choices)).max())
        if left > limit_bytes:
            return f"with all {len(choices.gaps)} candidates away {format_bytes(left)} are left, {left} bytes"
        program = _Program(problem, choices)
        if program.n_entries > MOST_ENTRIES:
            what = f"a program of {program.n_entries} entries is too large, {MOST_ENTRIES} are the most"
            return f"{what}: ask flow"
        return self._tried(problem, limit_bytes, program, end_s)

    @staticmethod
    def _tried(problem: SwapProblem, limit: int, program: _Program, end_s: float) -> SwapPlan | str:
        """Solve until a plan holds; once more, for longer, if the first one waits and is not proved best."""
        capacity, replayer = np.full(problem.n_ops, limit), Replayer(problem)
        best_ns, best, share = np.inf, None, _FIRST
        for _ in range(_TRIES):
            chosen, is_proved = program.solve(capacity, share * (end_s - now_s()))
            is_last, share = is_proved or share == 1.0, 1.0
            if chosen is not None:
                used = used_bytes(problem, program.choices, chosen)
                made = plan_of(problem, program.choices, chosen)
                replayed = replayer.replay(made)
                if used.max() > limit or not replayed.is_good:
                    tight = used > limit if used.max() > limit else used == used.max()
                    capacity[tight] -= np.maximum(used[tight] - limit, limit // _LOWERED)
                    continue
                if replayed.duration_ns < best_ns:
                    best_ns, best = replayed.duration_ns, made
            if is_last or best_ns <= problem.period_ns:
                break
        if best is None:
            return f"no plan was found that holds {format_bytes(limit)}, {limit} bytes, or less"
        return best


def _all_alone(choices: Choices) -> Chosen:
    """Return the synchronous copies of all gaps: nothing can be away for longer."""
    return [copy for copy in choices.out if not copy.overlaps], [copy for copy in choices.back if not copy.overlaps]


def used_bytes(problem: SwapProblem, choices: Choices, chosen: Chosen) -> Int64s:
    """Return the bytes in memory at each operation."""
    used = problem.load_bytes.copy()
    for out, back in zip(*chosen, strict=True):
        used[np.arange(out.end + 1, back.begin) % problem.n_ops] -= choices.gaps.size_bytes[out.gap]
    return used


def plan_of(problem: SwapProblem, choices: Choices, chosen: Chosen) -> SwapPlan:
    """Return the plan that asks for each copy where it begins; a synchronous one back when the gap's end has run."""
    gaps: Gaps = choices.gaps.take(np.array([out.gap for out in chosen[0]], np.int64))
    alone_out, alone_back = (np.array([not copy.overlaps for copy in copies], np.bool_) for copies in chosen)
    begin_out, begin_back = (np.array([copy.begin for copy in copies], np.int64) for copies in chosen)
    # What leaves at the beginning of its gap may do so once the access has ended.
    asked = np.where(begin_out == gaps.first, gaps.first - 1, begin_out)
    returns = np.where(alone_back, gaps.last, begin_back)
    none = np.zeros(len(gaps), np.int64)
    ran_ns = np.where(alone_back, problem.op_duration_ns[gaps.last % problem.n_ops], none)
    return gaps.moved(
        in_order(asked, none, _first(alone_out, gaps.first, problem), problem.n_ops),
        in_order(returns, ran_ns, _first(~alone_back, gaps.last, problem), problem.n_ops),
        AutoTM.name,
    )


def _first(which: Bools, order: Int64s, problem: SwapProblem) -> Int64s:
    """Return an order in which some come ahead of all others."""
    return np.where(which, order, order + 4 * problem.n_ops)
