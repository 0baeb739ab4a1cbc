"""Pagers killed at any instruction of what they do with a block: the next one has everything (invariants 4 and 5)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pager_victims import OPERATIONS
from single_steps import NO_PTRACE

TRIALS = 12
DEADLINE_S = 300


@pytest.mark.parametrize("operation", OPERATIONS)
def test_invariant_5_whoever_takes_over_has_every_block(operation: str) -> None:
    """Invariant 5: killed at instructions spread over the operation, a pager leaves what another one goes on from."""
    script = Path(__file__).with_name("pager_victims.py")
    done = subprocess.run(
        [sys.executable, str(script), str(TRIALS), operation],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if NO_PTRACE in done.stderr:
        pytest.skip("this system does not let a process trace its children")
    found = json.loads(done.stdout)
    assert found["fault"] is None, found["fault"]
    assert found["instructions"] > TRIALS
