"""How long does it take to plan the swaps of an iteration of thousands of tensors?

The models of the zoo with the most tensors, at four limits each: ``flow``, ours; ``swdoa``, one of
the published scores; ``bayes``, their mix, which plans 35 times. All is compiled before. Traces are
read before.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import pytest
import zoo
from swap import PCIE, stand_in

from zico.lab.saving.files import swap_iteration
from zico.lab.saving.replay import replay
from zico.planning.packing.problem import NoPlan
from zico.planning.saving.registry import swap_planner

if TYPE_CHECKING:
    from micro.conftest import Measure

    from zico.planning.saving.problem import SwapProblem

MODELS = ("NASNet-A mobile", "GNMT, 4 layers", "RHN")
"""Those with 5,000 tensors or more."""
SHARES = (80, 70, 60, 50)
GOALS_NS = {"flow": 5e9, "swdoa": 5e9, "bayes": 60e9}
DEADLINE_S = 600.0
"""Of a plan: none of them is to be cut short."""


@functools.cache
def problem_of(model: str) -> SwapProblem:
    """Return the problem of a model's iteration on its device."""
    return swap_iteration(zoo.zoo_trace(zoo.ZOO[model]), out=PCIE, back=PCIE).problem


@pytest.mark.parametrize("planner", GOALS_NS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("model", [pytest.param(name, marks=pytest.mark.long) for name in MODELS] + ["no model"])
def test_swap_plan(measure: Measure, model: str, share: int, planner: str) -> None:
    """A plan of an iteration's swaps at a share of its peak."""
    problem = stand_in() if model == "no model" else problem_of(model)
    limited = dataclasses.replace(problem, limit_bytes=share * problem.peak_bytes // 100)
    swap_planner(planner).plan(stand_in(), DEADLINE_S)  # compiles
    group = f"{model}, {len(problem)} tensors, at {share} %"
    plan = measure(group, swap_planner(planner).plan, limited, DEADLINE_S, goal_ns=GOALS_NS[planner])
    overhead = "no plan" if isinstance(plan, NoPlan) else replay(limited, plan).overhead
    measure.figures |= {"name": planner, "overhead": overhead}
