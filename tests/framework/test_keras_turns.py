"""Two Keras jobs that take turns in a pool which has no room for one of them beside what the other keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.harness import FRAMEWORK, MIB, PATIENCE_S, clean_environment, pool
from support.scripts import Script, alone

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

if TYPE_CHECKING:
    from zico.broker.protocol.messages import SaveMode

SCRIPT = str(FRAMEWORK / "keras_turns.py")
STEPS = 12
"""Of each job, from when both have made two: by then both are known."""
REGIONS = 48
"""A step needs 42, and 25 stay between two steps: weights, and twice as much of the optimizer."""
OVERFLOW_BYTES = 2 * (42 + 25 - REGIONS) * MIB
"""Two of two dozen turns: a job whose neighbour gets no processor for a fifth of a second may take what it lacks."""


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(("policy", "save"), [("serial", "swap"), ("zico", "none")])
def test_what_keras_keeps_between_steps_is_the_others_in_its_turn(policy: str, save: SaveMode) -> None:
    """Invariants 4 and 6: weights and optimizer state leave and come back between steps, and losses are those alone.

    Nobody is starved by the other, which fits while the first one's memory is out, and nothing
    overflows. So it is for jobs that save nothing, too: no step has room beside what the other
    keeps. How many steps a job makes before the other has begun, or in a row, is a matter of time:
    each goes on until both have made enough.
    """
    with pool(regions=REGIONS, region_bytes=MIB, policy=policy) as made:
        environments = [
            job_environment(clean_environment(), made.socket, name, wish=Wish(save)) for name in ("one", "two")
        ]
        with Script([SCRIPT], environments[0]) as one, Script([SCRIPT], environments[1]) as two:
            one.until(made.exceeds("iteration", [0, 1], 1), "both are known")
            first = made.look().jobs[:2]
            one.until(made.exceeds("iteration", [0, 1], first["iteration"] + STEPS), "both get on")
            for process in (one, two):
                process.tell("stop")
            found = [process.finish().stdout.split() for process in (one, two)]
        assert (made.jobs["evictions"][:2] > first["evictions"]).all()
        assert made.jobs["spilled_bytes"][:2].sum() <= first["spilled_bytes"].sum() + OVERFLOW_BYTES
    with alone(SCRIPT, *(steps for steps, _ in found)) as process:
        expected = dict(line.split() for line in process.finish().stdout.splitlines())
    assert dict(found) == expected
