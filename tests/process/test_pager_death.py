"""Pagers killed at any instruction of what they do with a block: the next one has everything (invariants 4 and 5)."""

from __future__ import annotations

from typing import Any

import pytest
from process.support.pager_victims import OPERATIONS

VICTIMS = "process.support.pager_victims"
TRIALS = 12
DEATHS_S = 550.0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_invariant_5_whoever_takes_over_has_every_block(deaths: dict[str, dict[str, Any]], operation: str) -> None:
    """Invariant 5: killed at instructions spread over the operation, a pager leaves what another one goes on from."""
    found = deaths[operation]
    assert found["fault"] is None, found["fault"]
    assert found["instructions"] > TRIALS
