"""Planning round tensors that lie somewhere already."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ProblemError
from zico.planning.packing.judge import held_regions, judge
from zico.planning.packing.problem import Plan, Problem
from zico.planning.packing.regions import Options, place

REGION = 16
FEW_MOVES = Options(most_moves=50)


@settings(deadline=None, max_examples=150)
@given(
    lying=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=6),
    tensors=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 8), st.integers(1, 40)), min_size=1, max_size=16),
    pile=st.booleans(),
)
def test_what_lies_stays_and_the_rest_is_placed_round_it(
    lying: list[tuple[int, int]], tensors: list[tuple[int, int, int]], *, pile: bool
) -> None:
    """Tensors that lie keep their offsets, no two tensors overlap, and the planner counts regions as the judge does."""
    n_ticks = 20
    gaps = np.array([gap for gap, _ in lying], np.int64)
    sizes = np.array([size for _, size in lying], np.int64)
    at = np.cumsum(gaps + sizes) - sizes
    lower = np.concatenate([np.zeros(len(lying), np.int64), [begin for begin, _, _ in tensors]])
    upper = np.concatenate([np.full(len(lying), n_ticks), [begin + length for begin, length, _ in tensors]])
    size = np.concatenate([sizes, [size for _, _, size in tensors]])
    problem = Problem(lower, upper, size)
    fixed = np.concatenate([at, np.full(len(tensors), -1)])
    placed = place(problem, REGION, 60.0, dataclasses.replace(FEW_MOVES, pile=pile), fixed)
    assert placed.reason is None
    assert placed.offset_bytes[: len(lying)].tolist() == at.tolist()
    plan = Plan(placed.offset_bytes, "regions", 0.0)
    assert judge(problem, plan).is_good
    assert int(held_regions(problem, plan, REGION).max()) == placed.peak


def test_holes_between_what_lies_are_used_first() -> None:
    """What fits into regions that are held anyway costs no further region."""
    problem = Problem(np.array([0, 0, 1, 2]), np.array([9, 9, 8, 7]), np.array([2, 2, 12, 10]))
    placed = place(problem, REGION, 60.0, FEW_MOVES, np.array([0, 16, -1, -1]))
    assert placed.peak == 2


def test_what_lies_off_the_alignment_is_refused() -> None:
    """A tensor that lies at no multiple of the alignment cannot be planned round."""
    problem = Problem(np.array([0]), np.array([2]), np.array([8]), alignment_bytes=8)
    with pytest.raises(ProblemError, match="alignment"):
        place(problem, REGION, 1.0, FEW_MOVES, np.array([4]))
