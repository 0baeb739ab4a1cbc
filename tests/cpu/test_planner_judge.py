"""The judge: a plan broken in each way, and the figures that it gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu.support.planner_cases import problems
from hypothesis import given
from hypothesis import strategies as st

from zico.planning.packing.judge import held_regions, judge, live_bytes, mean_over_time
from zico.planning.packing.problem import Plan, Problem

PROBLEM = Problem(
    np.array([0, 2, 4]), np.array([4, 6, 8]), np.array([8, 4, 8]), ("a", "b", "c"), capacity_bytes=12, alignment_bytes=4
)


def plan(*offsets: int) -> Plan:
    """Make a plan of these offsets."""
    return Plan(np.array(offsets, np.int64), "by hand", 0.0)


def test_a_good_plan() -> None:
    """Tensors may touch in space and in time; the peak is the highest byte used."""
    backwards = Problem(PROBLEM.lower[::-1], PROBLEM.upper[::-1], PROBLEM.size_bytes[::-1])
    for problem in (PROBLEM, backwards):
        verdict = judge(problem, plan(0, 8, 0))
        assert (verdict.is_good, verdict.peak_bytes) == (True, 12)


@pytest.mark.parametrize(
    ("rule", "offsets", "detail"),
    [
        ("count", (0, 8), "2 offsets for 3 tensors"),
        ("place", (0, 8, -4), "tensor c lies at -4, alignment 4"),
        ("place", (0, 10, 0), "tensor b lies at 10, alignment 4"),
        ("overlap", (0, 4, 8), "tensors a and b share byte 4"),
        ("overlap", (0, 8, 4), "tensors b and c share byte 8"),
        ("capacity", (0, 12, 0), "the plan needs 16 bytes, the capacity is 12"),
    ],
)
def test_each_rule(rule: str, offsets: tuple[int, ...], detail: str) -> None:
    """A plan that breaks one rule is refused by its name and with what is wrong."""
    verdict = judge(PROBLEM, plan(*offsets))
    assert (verdict.rule, verdict.detail, verdict.is_good) == (rule, detail, False)


@given(problems(most=6), st.lists(st.integers(-1, 30), min_size=6, max_size=6))
def test_the_judge_agrees_with_bytes_and_ticks(problem: Problem, offsets: list[int]) -> None:
    """It finds a plan good just where a look at each byte at each tick does."""
    offsets = offsets[: len(problem)]
    misplaced = any(offset < 0 or offset % problem.alignment_bytes for offset in offsets)
    taken = [
        (tick, byte)
        for i, offset in enumerate(offsets)
        for tick in range(problem.lower[i], problem.upper[i])
        for byte in range(offset, offset + problem.size_bytes[i])
    ]
    assert judge(problem, plan(*offsets)).is_good == (not misplaced and len(set(taken)) == len(taken))


@given(problems(most=6), st.lists(st.integers(0, 40), min_size=6, max_size=6), st.integers(1, 9))
def test_regions_held_agree_with_bytes_and_ticks(problem: Problem, offsets: list[int], region_bytes: int) -> None:
    """A region is held at a tick just where a byte of it is taken, and the bytes alive are those taken."""
    taken: list[list[int]] = [[] for _ in range(problem.n_ticks)]
    for i in range(len(problem)):
        for tick in range(problem.lower[i], problem.upper[i]):
            taken[tick] += range(offsets[i], offsets[i] + int(problem.size_bytes[i]))
    held = held_regions(problem, plan(*offsets[: len(problem)]), region_bytes)
    assert held.tolist() == [len({byte // region_bytes for byte in now}) for now in taken]
    assert live_bytes(problem).tolist() == [len(now) for now in taken]
    assert problem.peak_live_bytes == max((len(now) for now in taken), default=0)


def test_means_are_weighted_by_time() -> None:
    """A tick that takes three times as long counts three times; without times all ticks count once."""
    problem = Problem(np.array([0, 1]), np.array([1, 2]), np.array([4, 8]))
    assert mean_over_time(problem, live_bytes(problem)) == 6
    timed = dataclasses.replace(problem, tick_ns=np.array([10, 40, 50]))
    assert mean_over_time(timed, live_bytes(timed)) == 5
    assert mean_over_time(problem, np.zeros(0, np.int64)) == 0
