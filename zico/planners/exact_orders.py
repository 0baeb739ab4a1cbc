"""The orders in which the exact planner tries things, one for each turn, and how long each turn may take."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.exact_infer import FEWEST_FAILED, FEWEST_LOWEST, FEWEST_TIGHTEST, LOWEST_FEWEST

if TYPE_CHECKING:
    from zico.planners.exact_state import State

FIRST_STEPS = 3
"""Steps per tensor in the first round; a plan that a lucky order finds takes little more than one."""
GROWTH = 1.1
"""From round to round. Slowly: where no turn comes near an answer, many short ones find more than a few long ones."""
LARGEST_GROWTH = 1e9
CROWD_POWER = 30
"""In the order by crowd, an area where a tenth less is alive is worth a 24th."""
NOISE = 0.5
"""Standard deviation of the logarithm of values, after the first round."""


class Orders:
    """An endless series of orders; the same for the same seed."""

    def __init__(self, state: State, seed: int) -> None:
        """Begin with the plain orders: by area, time, size, crowd, each with every way to branch. Nothing is placed."""
        self.state = state
        self.random = np.random.default_rng(seed)
        length = (state.right - state.left).astype(float)
        size = state.size.astype(float)
        area = length * size
        crowd = np.array([state.unplaced[a:b].max() for a, b in zip(state.left, state.right, strict=True)])
        by_crowd = area * (crowd / crowd.max()) ** CROWD_POWER
        values = (area, length * size.max() + size, size * length.max() + length, by_crowd)
        hows = (FEWEST_FAILED, FEWEST_LOWEST, FEWEST_TIGHTEST, LOWEST_FEWEST)
        self.plain = tuple(itertools.product(hows, values))
        self.turn = 0

    def next_turn(self) -> tuple[int, int]:
        """Set the state's values; returns how to branch and the most steps to take."""
        round_, which = divmod(self.turn, len(self.plain))
        how, values = self.plain[which]
        self.turn += 1
        noise = NOISE * self.random.standard_normal(len(values)) if round_ > 0 else 0.0
        self.state.value[:] = values * np.exp(noise)
        return how, int(FIRST_STEPS * len(values) * min(GROWTH**round_, LARGEST_GROWTH))
