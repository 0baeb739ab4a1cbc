"""What does it cost to acquire a region of the pool and to release it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import loops
import numpy as np

if TYPE_CHECKING:
    from micro.conftest import Measure

PAIRS = 1024
ROUNDS = 2000


def test_region(measure: Measure) -> None:
    """One region, mapped where it is wanted; nobody else asks."""
    with loops.joined_pool() as heap:
        wanted = np.zeros(1, np.int32)
        record = heap.pool.member[0]
        how: dict[str, Any] = {"per": PAIRS, "rounds": ROUNDS, "warmup_rounds": 2}
        measure("acquire and release a region", loops.region_pairs, record, wanted, PAIRS, **how)
