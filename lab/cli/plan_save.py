"""``zico plan --save``: how an iteration keeps a limit: what leaves memory and returns, and what is made again."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from zico.base.errors import ConfigError
from zico.base.units import format_bytes, parse_size
from zico.cli.options import told_as_json, write_file
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.table import Table

    from zico.lab.saving.files import SwapIteration
    from zico.lab.saving.replay import History, Replay
    from zico.lab.saving.rewriting import Rewritten
    from zico.planning.packing.problem import NoPlan
    from zico.planning.saving.mixed import SavePlan, SavePlanner
    from zico.planning.saving.problem import Link, SwapPlan, SwapProblem
    from zico.planning.saving.recomputation import Graph


# -- what ``zico plan --save`` prints, and its picture ---------------------------------------------

SCHEMA = "zico.save.v1"
PLANNED = "planned"


@dataclasses.dataclass(frozen=True)
class SaveRow:
    """One planner's judged answer; the first row is the iteration as it is."""

    planner: str
    answer: str
    """``PLANNED``, the rule that the judge found broken, or the planner's own reason."""
    detail: str = ""
    limit_bytes: int | None = None
    """What was asked for, or the lowest limit found."""
    peak_bytes: int = 0
    packed_bytes: int | None = None
    """The highest byte that the packing planner needs for the iteration as it comes to be."""
    iteration_ms: float = 0.0
    overhead: float = 0.0
    tensor_wait_ms: float = 0.0
    memory_wait_ms: float = 0.0
    moved_bytes: int = 0
    swaps: int = 0
    runs_again: int = 0
    """Operations that run again, for results that were dropped."""
    elapsed_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """What ``--json`` writes."""

    file: str
    tensors: int
    operations: int
    peak_bytes: int
    least_bytes: int
    """No plan keeps a lower limit."""
    limit_bytes: int | None
    allowed_overhead: float | None
    """With it, the lowest limit was looked for."""
    out_bandwidth: float
    back_bandwidth: float
    bound: float | None
    """What no plan is below: bytes of a limit, or with a limit the share of overhead; if ``--bound`` was given."""
    packed_by: str
    rows: list[SaveRow]
    schema_version: str = SCHEMA


def show(report: SaveReport, json_path: Path | None) -> None:
    """Print the table, or write the figures as JSON; ``-`` is stdout."""
    if told_as_json(report, json_path):
        return
    console = TextConsole()
    limit = "" if report.limit_bytes is None else f", limit {format_bytes(report.limit_bytes)}"
    console.say(
        f"{report.file}: {report.tensors} tensors, {report.operations} operations, "
        f"at most {format_bytes(report.peak_bytes)} alive at once, at least {format_bytes(report.least_bytes)} "
        f"needed at once{limit}; "
        f"{format_bytes(report.out_bandwidth)}/s out, {format_bytes(report.back_bandwidth)}/s back"
    )
    console.print(_table(report, console))
    for row in report.rows:
        if row.detail:
            console.say(f"{row.planner}: {row.answer}: {row.detail}")
    if report.bound is not None:
        what = f"an overhead below {report.bound:.1%}"
        if report.allowed_overhead is not None:
            what = f"a limit below {format_bytes(report.bound)} at that overhead"
        console.say(f"no plan of swaps has {what}")


def _table(report: SaveReport, console: TextConsole) -> Table:
    packed = f"packed by {report.packed_by}"
    before = ("peak", "of before", packed, "iteration", "overhead", "waits")
    table = console.table(("planner",), (*before, "moved", "swaps", "run again", "seconds"))
    for row in report.rows:
        if not row.peak_bytes:
            table.add_row(row.planner, row.answer, *["-"] * 8, f"{row.elapsed_s:.2f}")
            continue
        waits = f"{row.tensor_wait_ms:.1f} + {row.memory_wait_ms:.1f} ms"
        table.add_row(
            *(row.planner, format_bytes(row.peak_bytes), f"{row.peak_bytes / report.peak_bytes:.1%}"),
            "-" if row.packed_bytes is None else format_bytes(row.packed_bytes),
            *(f"{row.iteration_ms:.1f} ms", f"{row.overhead:.1%}", waits if row.answer else ""),
            *(format_bytes(row.moved_bytes), str(row.swaps), str(row.runs_again), f"{row.elapsed_s:.2f}"),
        )
    if report.rows[1:]:
        table.caption = "waits: of operations for their tensors, and for memory"
    return table


def picture(found: SwapIteration, made: Rewritten, row: SaveRow, history: History) -> bytes:
    """Return the picture of a plan, of the last iteration that the judge replayed.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from zico.lab.report.plan_picture import saving_png

    problem = found.problem
    begin, end = history.iteration_ns[-2:]
    starts = np.append(problem.op_start_ns, problem.period_ns)
    before = starts, np.append(problem.load_bytes, problem.load_bytes[-1])
    at = np.array([t_ns for t_ns, _ in history.load_bytes])
    loads = np.array([load for _, load in history.load_bytes])
    inside = (at >= begin) & (at <= end)
    after = at[inside] - begin, loads[inside]
    lanes = {
        direction: [
            (max(one.begin_ns, begin) - begin, min(one.end_ns, end) - begin)
            for one in history.transfers
            if one.direction == direction and one.begin_ns < end and one.end_ns > begin
        ]
        for direction in ("out", "back")
    }
    n, begun = made.problem.n_ops, history.op_begin_ns
    last = np.array(begun[len(begun) // n * n - n : len(begun) // n * n]) - begin
    ends = last + made.problem.op_duration_ns
    lanes["again"] = list(zip(last[made.again].tolist(), ends[made.again].tolist(), strict=True))
    title = f"{row.planner}: {row.swaps} swaps, {row.runs_again} operations again, {row.overhead:.1%} longer"
    return saving_png(title, before, after, row.limit_bytes, lanes)


# --------------------------------------------------------------------------------------------------

_WORK_S = 60.0
"""Processor time that a planner gets where no deadline is given."""
_LARGEST = 1 << 60
_PERCENT = 100.0
_NS_PER_MS = 1e6


def save_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``--save`` to a command."""
    options = (
        click.option(
            "--save",
            metavar="NAME",
            help="Plan how the iteration keeps a limit, by this planner: zico, capuchin, swdoa, checkmate...",
        ),
        click.option("--limit", metavar="SIZE", help="With --save: the most memory in use: 8GiB, or 70% of the peak."),
        click.option(
            "--bandwidth",
            metavar="SIZE",
            help="With --save: bytes per second in each direction, or OUT,BACK (default: 12GiB).",
        ),
        click.option(
            "--overhead",
            metavar="SHARE",
            help="With --save: find the lowest limit that makes the iteration at most this much longer (default: 0%).",
        ),
        click.option("--bound", is_flag=True, help="With --save: also print a bound that no plan of swaps can beat."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclasses.dataclass(frozen=True)
class SaveAsked:
    """The options of ``--save``."""

    save: str | None
    limit: str | None
    bandwidth: str | None
    overhead: str | None
    bound: bool

    def refuse_alone(self) -> None:
        """Refuse options that say nothing without ``--save``.

        Raises:
            ConfigError: One was given.
        """
        for name in ("limit", "bandwidth", "overhead", "bound"):
            if self.save is None and getattr(self, name):
                raise ConfigError(f"--{name} needs --save: give --save NAME, too")


@dataclasses.dataclass(frozen=True)
class Work:
    """What else was asked for."""

    file: Path
    planner: str | None
    compare: bool
    deadline_s: float | None
    iteration: int | None
    whole: bool
    json_path: Path | None
    plan_path: Path | None
    picture: Path | None


@dataclasses.dataclass(frozen=True)
class _Judged:
    row: SaveRow
    plan: SavePlan | None = None
    history: History | None = None


def plan_saving(asked: SaveAsked, work: Work) -> int:
    """Plan, judge, pack, print and write; returns the exit code of ``zico plan``.

    Raises:
        ConfigError: An option has no meaning.
        TraceError: The file is no trace that says which operation uses which tensor.
    """
    from zico.lab.saving.files import swap_iteration
    from zico.lab.saving.graphs import graph_of
    from zico.trace.files import read_trace

    if asked.limit is not None and asked.overhead is not None:
        raise ConfigError("--overhead finds the lowest limit: give --overhead or --limit, not both")
    out, back = _links(asked.bandwidth)
    planners = _planners(asked.save or "", compare=work.compare, limited=asked.limit is not None)
    found = swap_iteration(read_trace(work.file, whole=work.whole), work.iteration, out=out, back=back)
    limit_bytes = limit_of(asked.limit, found.problem.peak_bytes, "the peak")
    overhead = None if limit_bytes is not None else _share(asked.overhead or "0%")
    found = dataclasses.replace(found, problem=dataclasses.replace(found.problem, limit_bytes=limit_bytes))
    problem = found.problem
    asking = _Asking(problem, graph_of(problem), overhead, work.deadline_s, _packer(work.planner))
    rows = [asking.without()]
    best: _Judged | None = None
    if limit_bytes is not None and limit_bytes < problem.least_bytes:
        rows.append(asking.refused(planners))
        planners = []
    for planner in planners:
        judged = asking.ask(planner)
        rows.append(judged.row)
        if judged.plan is not None and (best is None or _cost(judged.row, overhead) < _cost(best.row, overhead)):
            best = judged
    report = SaveReport(
        file=str(work.file),
        tensors=len(problem),
        operations=problem.n_ops,
        peak_bytes=problem.peak_bytes,
        least_bytes=problem.least_bytes,
        limit_bytes=limit_bytes,
        allowed_overhead=overhead,
        out_bandwidth=problem.out.bandwidth,
        back_bandwidth=problem.back.bandwidth,
        bound=_bound(problem, overhead) if asked.bound else None,
        packed_by=asking.packer.name,
        rows=rows,
    )
    show(report, work.json_path)
    if best is not None:
        _write(found, asking.graph, best, work)
    answers = [row.answer for row in rows[1:]]
    return 0 if PLANNED in answers else 1 if "does not fit" in answers else 2


# -- options ---------------------------------------------------------------------------------------


def _links(bandwidth: str | None) -> tuple[Link, Link]:
    from zico.planning.saving.problem import Link

    if bandwidth is None:
        return Link(), Link()
    try:
        rates = [parse_size(part.strip().removesuffix("/s"), whole_bytes=_LARGEST) for part in bandwidth.split(",")]
        out, back = rates * 2 if len(rates) == 1 else rates
    except (ConfigError, ValueError):
        raise ConfigError(f"--bandwidth {bandwidth!r}: give bytes per second such as 12GiB, or OUT,BACK") from None
    return Link(float(out)), Link(float(back))


def limit_of(text: str | None, whole_bytes: int, whole: str) -> int | None:
    """Return the bytes of ``--limit``, which may be a share of a whole; ``None``: there is no limit.

    Raises:
        ConfigError: It is neither a size nor a share.
    """
    if text is None:
        return None
    try:
        return parse_size(text, whole_bytes=whole_bytes if text.strip().endswith("%") else _LARGEST)
    except ConfigError:
        raise ConfigError(f"--limit {text!r}: give a size such as 8GiB, or a share of {whole} such as 70%") from None


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (_PERCENT if text.endswith("%") else 1.0)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"--overhead {text!r}: give a share such as 10% or 0.1")
    return value


def _planners(name: str, *, compare: bool, limited: bool) -> list[SavePlanner]:
    """Return the planner of that name, or all: without a limit those that can look for the lowest one."""
    from zico.planning.saving.registry import SAVE_PLANNERS, SWAP_PLANNERS, save_planner

    try:
        asked = save_planner(name)
    except ConfigError as error:
        raise ConfigError(f"--save: {error}") from None
    if compare:
        return [save_planner(each) for each in (*SWAP_PLANNERS, *(SAVE_PLANNERS if limited else ()))]
    if name in SAVE_PLANNERS and not limited:
        raise ConfigError(f"--save {name} needs a limit: give --limit SIZE, too")
    return [asked]


def _packer(name: str | None) -> Any:  # noqa: ANN401 - a Planner, whose module is imported if asked for
    from zico.lab.packing.compare import PLANNERS

    if name is not None and name not in PLANNERS:
        raise ConfigError(f"--planner {name!r} is unknown: give one of {', '.join(PLANNERS)}")
    return PLANNERS[name or "smartpool"]()


# -- answers ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Asking:
    """What planners are asked for."""

    problem: SwapProblem
    graph: Graph
    overhead: float | None
    """With it, the lowest limit is looked for."""
    deadline_s: float | None
    packer: Any  # a Planner, whose module is imported if asked for

    def without(self) -> SaveRow:
        """Return the row of the iteration as it is."""
        from zico.planning.saving.problem import no_swaps

        free = dataclasses.replace(self.problem, limit_bytes=None)
        return SaveRow(
            planner="(none)",
            answer="",
            peak_bytes=self.problem.peak_bytes,
            packed_bytes=_packed(free, no_swaps(""), self.packer),
            iteration_ms=self.problem.period_ns / _NS_PER_MS,
        )

    def refused(self, planners: Sequence[SavePlanner]) -> SaveRow:
        """Return the one row for all planners where the limit is below what an operation needs."""
        from zico.planning.packing.problem import Reason

        name = planners[0].name if len(planners) == 1 else "(any)"
        detail = f"an operation needs {self.problem.least_bytes} bytes at once: give that limit or a higher one"
        return SaveRow(name, Reason.INFEASIBLE.value, detail, self.problem.limit_bytes)

    def ask(self, planner: SavePlanner) -> _Judged:
        """Return a planner's judged answer."""
        from zico.lab.saving.judge import judge
        from zico.lab.saving.rewriting import rewritten
        from zico.planning.packing.problem import NoPlan

        _warm(planner)
        problem, answer = self._answer(planner)
        if isinstance(answer, NoPlan):
            reason = SaveRow(planner.name, answer.reason.value, answer.detail, problem.limit_bytes)
            return _Judged(dataclasses.replace(reason, elapsed_s=answer.elapsed_s))
        result, history = judge(problem, self.graph, answer)
        row = _row(planner.name, result, problem)
        if not result.is_good:
            return _Judged(dataclasses.replace(row, elapsed_s=answer.elapsed_s))
        made = rewritten(problem, self.graph, answer.order).problem if answer.order else problem
        row = dataclasses.replace(
            row,
            packed_bytes=_packed(made, answer.swaps, self.packer),
            swaps=len(answer.swaps),
            runs_again=answer.runs_again(self.graph),
            elapsed_s=answer.elapsed_s,
        )
        return _Judged(row, answer, history)

    def _answer(self, planner: SavePlanner) -> tuple[SwapProblem, SavePlan | NoPlan]:
        from zico.lab.saving.packing import lowest_limit
        from zico.planning.saving.clock import by_processor_time
        from zico.planning.saving.mixed import Swapping, straight

        problem = self.problem
        seconds = _WORK_S if self.deadline_s is None else self.deadline_s
        with by_processor_time() if self.deadline_s is None else contextlib.nullcontext():
            if self.overhead is not None and isinstance(planner, Swapping):
                lowest = lowest_limit(problem, planner.planner, self.overhead, seconds)
                return dataclasses.replace(problem, limit_bytes=lowest.limit_bytes), straight(lowest.plan)
            return problem, planner.plan(problem, self.graph, seconds)


def _row(name: str, result: Replay, problem: SwapProblem) -> SaveRow:
    return SaveRow(
        planner=name,
        answer=PLANNED if result.is_good else f"breaks the rule {result.rule!r}",
        detail=result.detail,
        limit_bytes=problem.limit_bytes,
        peak_bytes=result.peak_bytes,
        iteration_ms=result.duration_ns / _NS_PER_MS,
        overhead=result.overhead,
        tensor_wait_ms=result.tensor_wait_ns / _NS_PER_MS,
        memory_wait_ms=result.memory_wait_ns / _NS_PER_MS,
        moved_bytes=result.moved_bytes,
    )


def _warm(planner: SavePlanner) -> None:
    """Let a planner's code be loaded or compiled before its time counts: up to half a minute, once per machine."""
    from zico.lab.saving.graphs import graph_of
    from zico.planning.saving.problem import SwapProblem

    two, rest = np.array([0, 1]), np.array([2, 1])
    tiny = SwapProblem(
        *(two * 10**6, np.full(2, 10**6), 2 * 10**6, rest * 2**21, rest - 2, rest - 2),
        *(np.array([0, 1, 2]), np.array([0, 1]), np.array([2, 1])),
        limit_bytes=5 * 2**20,
    )
    planner.plan(tiny, graph_of(tiny), 0.05)


def _packed(problem: SwapProblem, plan: SwapPlan, packer: Any) -> int | None:  # noqa: ANN401 - as above
    """Return how many bytes of addresses an iteration needs, ``None`` if nobody knows."""
    from zico.lab.saving.packing import packing_problem
    from zico.planning.packing.problem import NoPlan

    places = packing_problem(problem, plan)
    answer = None if places is None else packer.plan(places, 10.0)
    if answer is None or places is None or isinstance(answer, NoPlan):
        return None
    return int((answer.offset_bytes + places.size_bytes).max(initial=0))


def _bound(problem: SwapProblem, overhead: float | None) -> float:
    """Return what no plan is below: bytes of a limit, or the share of overhead within the problem's.

    Raises:
        ConfigError: SciPy is not installed.
    """
    from zico.lab.saving.bound import least_overhead, least_peak

    if problem.limit_bytes is None:
        return least_peak(problem, overhead or 0.0).value
    return least_overhead(problem, problem.limit_bytes).value / max(problem.period_ns, 1)


def _cost(row: SaveRow, overhead: float | None) -> float:
    return row.overhead if overhead is None else float(row.limit_bytes or 0)


def _write(found: SwapIteration, graph: Graph, best: _Judged, work: Work) -> None:
    """Write the best plan and its picture if they were asked for."""
    from zico.lab.saving.rewriting import rewritten

    if best.plan is None or best.history is None:
        return
    made = rewritten(found.problem, graph, best.plan.order)
    if work.plan_path is not None:
        from zico.lab.saving.files import plan_json

        write_file(work.plan_path, plan_json(found, made, best.plan, best.row.limit_bytes))
    if work.picture is not None:
        write_file(work.picture, picture(found, made, best.row, best.history))
