"""``zico plan --swap``: what leaves memory around the peak of an iteration and comes back in time."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from zico.cli.plan_swap_show import PLANNED, SwapReport, SwapRow, picture, show
from zico.errors import ConfigError
from zico.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zico.planners.plan import NoPlan
    from zico.planners.swap.from_trace import SwapIteration
    from zico.planners.swap.plan import SwapPlan, SwapPlanner
    from zico.planners.swap.problem import Link, SwapProblem
    from zico.planners.swap.replay import History, Replay

_DEFAULT = "swdoa"
_DEADLINE_S = 60.0
_LARGEST = 1 << 60
_PERCENT = 100.0
_NS_PER_MS = 1e6


def swap_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``--swap`` to a command."""
    options = (
        click.option(
            "--swap",
            is_flag=True,
            help="Plan which tensors leave memory around the peak and return before they are used.",
        ),
        click.option("--limit", metavar="SIZE", help="With --swap: the most memory in use: 8GiB, or 70% of the peak."),
        click.option("--score", metavar="NAME", help=f"With --swap: the planner (default: {_DEFAULT})."),
        click.option(
            "--bandwidth",
            metavar="SIZE",
            help="With --swap: bytes per second in each direction, or OUT,BACK (default: 12GiB).",
        ),
        click.option(
            "--overhead",
            metavar="SHARE",
            help="With --swap: find the lowest limit that makes the iteration at most this much longer (default: 0%).",
        ),
        click.option("--bound", is_flag=True, help="With --swap: also print a bound that no plan can beat."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclasses.dataclass(frozen=True)
class SwapAsked:
    """The options of ``--swap``."""

    swap: bool
    limit: str | None
    score: str | None
    bandwidth: str | None
    overhead: str | None
    bound: bool

    def refuse_without_swap(self) -> None:
        """Refuse options that say nothing without ``--swap``.

        Raises:
            ConfigError: One was given.
        """
        for name in ("limit", "score", "bandwidth", "overhead", "bound"):
            if not self.swap and getattr(self, name):
                raise ConfigError(f"--{name} needs --swap: give --swap, too")


@dataclasses.dataclass(frozen=True)
class Work:
    """What else was asked for."""

    file: Path
    planner: str | None
    compare: bool
    deadline_s: float | None
    iteration: int | None
    json_path: Path | None
    plan_path: Path | None
    picture: Path | None


@dataclasses.dataclass(frozen=True)
class _Judged:
    row: SwapRow
    plan: SwapPlan | None = None
    history: History | None = None


def plan_swaps(asked: SwapAsked, work: Work, write: Callable[[Path, bytes], None]) -> int:
    """Plan, judge, pack, print and write; returns the exit code of ``zico plan``.

    Raises:
        ConfigError: An option has no meaning.
        TraceError: The file is no trace that says which operation uses which tensor.
    """
    from zico.planners.swap.from_trace import swap_iteration
    from zico.trace.files import read_trace

    if asked.limit is not None and asked.overhead is not None:
        raise ConfigError("--overhead finds the lowest limit: give --overhead or --limit, not both")
    out, back = _links(asked.bandwidth)
    planners = _planners(asked.score, compare=work.compare)
    found = swap_iteration(read_trace(work.file), work.iteration, out=out, back=back)
    limit_bytes = _limit(asked.limit, found.problem.peak_bytes)
    overhead = None if limit_bytes is not None else _share(asked.overhead or "0%")
    problem = dataclasses.replace(found.problem, limit_bytes=limit_bytes)
    packer = _packer(work.planner)
    rows = [_without(problem, packer)]
    best: _Judged | None = None
    for planner in planners:
        judged = _ask(planner, problem, overhead, work.deadline_s or _DEADLINE_S, packer)
        rows.append(judged.row)
        if judged.plan is not None and (best is None or _cost(judged.row, overhead) < _cost(best.row, overhead)):
            best = judged
    report = SwapReport(
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
        packed_by=packer.name,
        rows=rows,
    )
    show(report, work.json_path, write)
    if best is not None:
        _write(found, best, work, write)
    answers = [row.answer for row in rows[1:]]
    return 0 if best is not None else 1 if "does not fit" in answers else 2


# -- options ----------------------------------------------------------------------------------------------------------


def _links(bandwidth: str | None) -> tuple[Link, Link]:
    from zico.planners.swap.problem import Link

    if bandwidth is None:
        return Link(), Link()
    try:
        rates = [parse_size(part.strip().removesuffix("/s"), whole_bytes=_LARGEST) for part in bandwidth.split(",")]
        out, back = rates * 2 if len(rates) == 1 else rates
    except (ConfigError, ValueError):
        raise ConfigError(f"--bandwidth {bandwidth!r}: give bytes per second such as 12GiB, or OUT,BACK") from None
    return Link(float(out)), Link(float(back))


def _limit(text: str | None, peak_bytes: int) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text, whole_bytes=peak_bytes if text.strip().endswith("%") else _LARGEST)
    except ConfigError:
        raise ConfigError(f"--limit {text!r}: give a size such as 8GiB, or a share of the peak such as 70%") from None


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (_PERCENT if text.endswith("%") else 1.0)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"--overhead {text!r}: give a share such as 10% or 0.1")
    return value


def _planners(score: str | None, *, compare: bool) -> list[SwapPlanner]:
    from zico.planners.swap.registry import SWAP_PLANNERS, swap_planner

    try:
        return [swap_planner(name) for name in (SWAP_PLANNERS if compare else [score or _DEFAULT])]
    except ConfigError as error:
        raise ConfigError(f"--score {error}") from None


def _packer(name: str | None) -> Any:  # noqa: ANN401 - a Planner, whose module is imported if asked for
    from zico.planners.registry import PLANNERS

    if name is not None and name not in PLANNERS:
        raise ConfigError(f"--planner {name!r} is unknown: give one of {', '.join(PLANNERS)}")
    return PLANNERS[name or "smartpool"]()


# -- answers ----------------------------------------------------------------------------------------------------------


def _ask(
    planner: SwapPlanner,
    problem: SwapProblem,
    overhead: float | None,
    deadline_s: float,
    packer: Any,  # noqa: ANN401 - as above
) -> _Judged:
    from zico.planners.plan import NoPlan
    from zico.planners.swap.lowest import lowest_limit
    from zico.planners.swap.replay import replay_with_history

    _warm(planner)
    answer: SwapPlan | NoPlan
    if overhead is None:
        answer = planner.plan(problem, deadline_s)
    else:
        lowest = lowest_limit(problem, planner, overhead, deadline_s)
        problem, answer = dataclasses.replace(problem, limit_bytes=lowest.limit_bytes), lowest.plan
    if isinstance(answer, NoPlan):
        reason = SwapRow(planner.name, answer.reason.value, answer.detail, problem.limit_bytes)
        return _Judged(dataclasses.replace(reason, elapsed_s=answer.elapsed_s))
    result, history = replay_with_history(problem, answer)
    row = dataclasses.replace(
        _row(planner.name, result, problem),
        packed_bytes=_packed(problem, answer, packer) if result.is_good else None,
        swaps=len(answer),
        elapsed_s=answer.elapsed_s,
    )
    return _Judged(row, answer, history) if result.is_good else _Judged(row)


def _row(name: str, result: Replay, problem: SwapProblem) -> SwapRow:
    return SwapRow(
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


def _without(problem: SwapProblem, packer: Any) -> SwapRow:  # noqa: ANN401 - as above
    from zico.planners.swap.plan import no_swaps

    free = dataclasses.replace(problem, limit_bytes=None)
    return SwapRow(
        planner="(none)",
        answer="",
        peak_bytes=problem.peak_bytes,
        packed_bytes=_packed(free, no_swaps(""), packer),
        iteration_ms=problem.period_ns / _NS_PER_MS,
    )


def _warm(planner: SwapPlanner) -> None:
    """Let a planner's code be loaded or compiled before its time counts: up to half a minute, once per machine."""
    from zico.planners.swap.problem import SwapProblem

    two, rest = np.array([0, 1]), np.array([2, 1])
    tiny = SwapProblem(
        *(two * 10**6, np.full(2, 10**6), 2 * 10**6, rest * 2**21, rest - 2, rest - 2),
        *(np.array([0, 1, 2]), np.array([0, 1]), np.array([2, 1])),
        limit_bytes=5 * 2**20,
    )
    planner.plan(tiny, 0.05)


def _packed(problem: SwapProblem, plan: SwapPlan, packer: Any) -> int | None:  # noqa: ANN401 - as above
    """Return how many bytes of addresses an iteration needs, ``None`` if nobody knows."""
    from zico.planners.plan import NoPlan
    from zico.planners.swap.packing import packing_problem

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
    from zico.planners.swap.bound import least_overhead, least_peak

    if problem.limit_bytes is None:
        return least_peak(problem, overhead or 0.0).value
    return least_overhead(problem, problem.limit_bytes).value / max(problem.period_ns, 1)


def _cost(row: SwapRow, overhead: float | None) -> float:
    return row.overhead if overhead is None else float(row.limit_bytes or 0)


def _write(found: SwapIteration, best: _Judged, work: Work, write: Callable[[Path, bytes], None]) -> None:
    """Write the best plan and its picture if they were asked for."""
    if best.plan is None or best.history is None:
        return
    if work.plan_path is not None:
        from zico.planners.swap.files import plan_json

        write(work.plan_path, plan_json(found, best.plan, best.row.limit_bytes))
    if work.picture is not None:
        write(work.picture, picture(found.problem, best.row, best.history))
