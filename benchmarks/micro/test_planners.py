"""How near to the live peak do planners get, and how long do they take?

Two parts: the public hard instances of minimalloc, placed into their capacity, and the zoo's
training iterations, whose peak is to be as low as can be. All plans are judged outside of what is
timed; code is compiled before.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import pytest
import zoo

from zico.lab.packing.caching import reserved_by_caching
from zico.lab.packing.compare import PLANNERS
from zico.lab.packing.files import read_csv
from zico.lab.simulator.roofline import device_model
from zico.planning.packing.from_trace import iteration_problem
from zico.planning.packing.judge import judge
from zico.planning.packing.problem import Plan, Problem

if TYPE_CHECKING:
    from micro.conftest import Measure

    from zico.planning.packing.problem import Planner

INSTANCES = Path(os.environ.get("MINIMALLOC", common.ROOT.parent / "shared" / "data" / "minimalloc"))
CAPACITY_BYTES = 1 << 20
PEER_S = {"A": 3.38, "B": 2.41, "C": 0.48, "D": 1.72, "E": 2.46, "F": 3.83}
"""minimalloc, one thread, median of three. Source: README.md beside the instances, another machine than this one."""
HARD_S = 60.0
ZOO_S = 1.0
LARGE_S = 10.0
LARGE_TENSORS = 5000
"""Problems with more tensors have ``LARGE_S``."""
LARGE_LENGTH = 84
"""Tokens; the published length gives 6,400 tensors."""
LARGE = f"GNMT, {LARGE_LENGTH} tokens"
REPEAT = 3
BRIEF = ("ResNet-50", "U-Net", "DCGAN")
"""Models of ``make bench``; `make bench-planners` takes all."""
CACHING = "PyTorch's caching"
ZOO_PLANNERS = (CACHING, *(name for name in PLANNERS if name not in ("exact", "regions")))


@functools.cache
def planner_named(name: str) -> Planner:
    """Return a planner whose code is compiled, which would take its seconds."""
    random = np.random.default_rng(0)
    lower = random.integers(0, 40, 30)
    problem = Problem(lower, lower + random.integers(1, 40, 30), random.integers(1, 1000, 30))
    planner = PLANNERS[name]()
    planner.plan(problem, 0.2)
    planner.plan(dataclasses.replace(problem, capacity_bytes=problem.peak_live_bytes), 0.2)
    return planner


@functools.cache
def problem_of(model: str) -> Problem:
    """Return an iteration of a model at its published batch, or of the translator on longer sentences."""
    if model != LARGE:
        return next(iter(zoo.zoo_problems((model,))))[1]
    trace = zoo.fake_trace(zoo.ZOO["GNMT, 4 layers"].build(length=LARGE_LENGTH), device_model(zoo.DEVICE))
    return iteration_problem(trace).problem


@pytest.mark.parametrize("instance", PEER_S)
def test_hard_instance(measure: Measure, instance: str) -> None:
    """The exact planner places minimalloc's instance into its capacity."""
    found = sorted(INSTANCES.glob(f"{instance}*.csv"))
    if not found:
        pytest.skip(f"minimalloc's instances are not in {INSTANCES}")
    problem = dataclasses.replace(read_csv(found[0]).problem, capacity_bytes=CAPACITY_BYTES)
    how: dict[str, Any] = {"rounds": REPEAT, "warmup_rounds": 1}
    plan = measure("minimalloc's instance into 2^20", planner_named("exact").plan, problem, HARD_S, **how)
    measure.figures["minimalloc, published, s"] = PEER_S[instance]
    assert isinstance(plan, Plan)
    assert judge(problem, plan).is_good


@pytest.mark.parametrize("planner", ZOO_PLANNERS)
@pytest.mark.parametrize(
    "model", [*BRIEF, *(pytest.param(name, marks=pytest.mark.long) for name in (*zoo.ZOO, LARGE) if name not in BRIEF)]
)
def test_iteration(measure: Measure, model: str, planner: str) -> None:
    """A plan of a training iteration; an improving search ends at the live peak or after its seconds."""
    problem = problem_of(model)
    group = f"{model}, {len(problem)} tensors, live peak {problem.peak_live_bytes / 2**20:.0f} MiB"
    deadline_s = LARGE_S if len(problem) > LARGE_TENSORS else ZOO_S
    measure.figures["name"] = planner
    if planner == CACHING:
        peak_bytes = measure(group, reserved_by_caching, problem, rounds=REPEAT, warmup_rounds=1).reserved_bytes
    else:
        plan = measure(group, planner_named(planner).plan, problem, deadline_s, rounds=REPEAT, warmup_rounds=1)
        verdict = judge(problem, plan)
        assert verdict.is_good
        peak_bytes = verdict.peak_bytes
    measure.figures["peak / live peak"] = peak_bytes / problem.peak_live_bytes
