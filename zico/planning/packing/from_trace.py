"""The planning problem of one iteration of a trace."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zico.base.errors import TraceError
from zico.planning.packing.problem import LARGEST, Problem
from zico.trace.classes import classify
from zico.trace.iterations import choose, find_iterations, lay_out
from zico.trace.lifetimes import lifetimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zico.trace.events import Trace
    from zico.trace.iterations import Iteration, Iterations
    from zico.trace.lifetimes import Lifetimes


@dataclasses.dataclass(frozen=True, eq=False)
class IterationProblem:
    """A trace's iteration as a problem, and what it was made of."""

    problem: Problem
    classes: NDArray[np.int8]
    """Each tensor's ``zico.trace.classes.TensorClass``."""
    iteration: Iteration
    iterations: Iterations
    life: Lifetimes


def iteration_problem(trace: Trace, iteration: int | None = None) -> IterationProblem:
    """Return what a planner needs to know of one iteration: its tensors on a line of ticks, with times.

    A tick follows each allocation or free. The iteration lies on a circle, which is cut where the
    fewest bytes pass. What passes there, and what lives longer than an iteration, is persistent and
    lives all ticks. The drawing is in ``zico/trace/lifetimes.py``.

    Args:
        trace: The trace.
        iteration: The number of the iteration; by default a typical one of median duration, not the
            first.

    Raises:
        TraceError: The trace is inconsistent, empty or never repeats, or has no such iteration.
    """
    life = lifetimes(trace)
    found = find_iterations(trace, life)
    chosen = lay_out(trace, life, found, choose(trace, found, iteration))
    if int(chosen.size_bytes.max()) > LARGEST // len(chosen.row):
        raise TraceError(trace.path or "trace", 0, "has tensors of more than 2**60 bytes together: record it again")
    problem = Problem(chosen.lower, chosen.upper, chosen.size_bytes, tick_ns=chosen.tick_ns)
    classes = classify(chosen.lower, chosen.upper, chosen.size_bytes, chosen.n_ticks)
    return IterationProblem(problem, classes, chosen, found, life)
