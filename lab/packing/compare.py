"""Ask planners, judge what they answer, and put it into figures that can be compared."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.base.units import MIB
from zico.planning.packing.judge import held_regions, judge, live_bytes, mean_over_time
from zico.planning.packing.problem import NoPlan, Plan, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zico.planning.packing.problem import Planner

PLACED = "placed"
_WARM_S = 0.05
_MOST_CALLS = 8


@dataclasses.dataclass(frozen=True)
class Held:
    """Regions that a plan holds, in multiples of the live bytes. 1.0 cannot be reached: bytes come in regions."""

    region_bytes: int
    peak_regions: int
    peak_ratio: float
    """Most bytes of regions held at once over most live bytes."""
    mean_ratio: float
    """Bytes of regions held, integrated over the iteration, over live bytes integrated."""
    least_peak_regions: int
    """Live bytes at the peak, rounded up."""
    least_mean_ratio: float
    """What live bytes rounded up to regions at every tick would come to."""
    slots: int
    """Different slots ever held: those beyond the peak have to be mapped anew in every iteration."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One planner's answer to one problem."""

    planner: str
    answer: str
    """``PLACED`` if the judge agrees, the rule it found broken, or the planner's own reason."""
    detail: str
    peak_bytes: int
    ratio: float
    """Peak over the most bytes alive at once; 0 without a plan."""
    elapsed_s: float
    optimal: bool
    held: Held | None = None


def warm(planner: Planner) -> None:
    """Ask a planner something small until it answers in time, so that its code is there before a deadline counts.

    Waits for what has to be compiled: up to half a minute, once per machine.
    """
    lower, upper = np.array([0, 1, 3, 4, 2, 0, 1, 0, 5]), np.array([4, 5, 6, 6, 4, 1, 2, 1, 6])
    # Never more than 8 bytes alive, yet no plan within 8: whoever searches has to.
    problem = Problem(lower, upper, np.array([2, 1, 3, 3, 2, 4, 4, 2, 2]))
    for _ in range(_MOST_CALLS):
        began_s = time.monotonic()
        planner.plan(problem, _WARM_S)
        if time.monotonic() - began_s < 2 * _WARM_S:
            break


def ask(planner: Planner, problem: Problem, deadline_s: float, region_bytes: int = 0) -> tuple[Row, Plan | None]:
    """Return the figures of a planner's judged answer, and its plan if that is good; its code is loaded before.

    Args:
        planner: Whom to ask.
        problem: With its ticks compact if regions are to be counted.
        deadline_s: Seconds that the planner may take.
        region_bytes: Count regions of this size; 0: do not.
    """
    warm(planner)
    answer = planner.plan(problem, deadline_s)
    if isinstance(answer, NoPlan):
        return Row(answer.planner, answer.reason.value, answer.detail, 0, 0.0, answer.elapsed_s, optimal=False), None
    verdict = judge(problem, answer)
    row = Row(
        planner=answer.planner,
        answer=PLACED if verdict.is_good else f"breaks the rule {verdict.rule!r}",
        detail=verdict.detail,
        peak_bytes=verdict.peak_bytes,
        ratio=verdict.peak_bytes / max(problem.peak_live_bytes, 1),
        elapsed_s=answer.elapsed_s,
        optimal=answer.optimal,
        held=held(problem, answer, region_bytes) if region_bytes and verdict.is_good else None,
    )
    return row, answer if verdict.is_good else None


def held(problem: Problem, plan: Plan, region_bytes: int) -> Held:
    """Return what a plan holds in regions of a size."""
    regions = held_regions(problem, plan, region_bytes)
    live = live_bytes(problem)
    least = -(-live // region_bytes)
    mean_live = max(mean_over_time(problem, live), 1e-9)
    first = plan.offset_bytes // region_bytes
    last = (plan.offset_bytes + problem.size_bytes - 1) // region_bytes
    used = np.zeros(int(last.max(initial=-1)) + 2, np.int64)
    np.add.at(used, first, 1)
    np.add.at(used, last + 1, -1)
    return Held(
        region_bytes=region_bytes,
        peak_regions=int(regions.max(initial=0)),
        peak_ratio=float(regions.max(initial=0)) * region_bytes / max(problem.peak_live_bytes, 1),
        mean_ratio=mean_over_time(problem, regions) * region_bytes / mean_live,
        least_peak_regions=int(least.max(initial=0)),
        least_mean_ratio=mean_over_time(problem, least) * region_bytes / mean_live,
        slots=int((np.cumsum(used) > 0).sum()),
    )


# --------------------------------------------------------------------------------------------------
# The planners by the names that users type. A planner's code is imported when it is asked for.

_ORDERS = ("size", "duration", "area", "start")
_FITS = ("best", "first")
_REGION_BYTES = 64 * MIB


def _classic(order: str, fit: str) -> Planner:
    from zico.lab.packing.classic import Classic, Fit, Order

    return Classic(Order(order), Fit(fit))


def _made(module: str, name: str, *arguments: int) -> Planner:
    planner: Planner = getattr(importlib.import_module(module), name)(*arguments)
    return planner


PLANNERS: Mapping[str, Callable[[], Planner]] = {
    **{f"{order}-{fit}": functools.partial(_classic, order, fit) for order in _ORDERS for fit in _FITS},
    "smartpool": functools.partial(_made, "zico.lab.packing.classic", "smartpool"),
    "improve": functools.partial(_made, "zico.lab.packing.improve", "Improve"),
    "exact": functools.partial(_made, "zico.lab.packing.exact", "Exact"),
    "regions": functools.partial(_made, "zico.planning.packing.regions", "Regions", _REGION_BYTES),
}
"""``start-best`` is dynamic best fit: what an allocator does that does not know the future; ``regions`` plans for
64 MiB."""
