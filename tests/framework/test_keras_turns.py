"""Two Keras jobs that take turns in a pool which has no room for one of them beside what the other keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness import FRAMEWORK, MIB, PATIENCE_S, clean_environment, pool, until
from scripts import Script, alone

from zico.broker.saving import Wish
from zico.launch.environment import job_environment

if TYPE_CHECKING:
    from zico.broker.messages import SaveMode

SCRIPT = str(FRAMEWORK / "keras_turns.py")
STEPS = 40
REGIONS = 48
"""A step needs 42, and 25 stay between two steps: weights, and twice as much of the optimizer."""
TURNS = 2
"""By how many iterations one's lead may vary: its turn has come, and the other's iteration ends."""
SETTLED = STEPS // 4
"""When both have ended so many steps. Before that who has waited for the other's tracing is below its floor, and has
turns in a row until it is not; then so has the other. From its second step on a lead does not grow by more than a turn.
"""
HEAD_START = STEPS // 2
"""The most that comes of that."""


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(
    ("policy", "save"), [("serial", "swap"), ("zico", "swap"), ("serial", "none"), ("zico", "none")]
)
def test_what_keras_keeps_between_steps_is_the_others_in_its_turn(policy: str, save: SaveMode) -> None:
    """Invariants 4 and 6: weights and optimizer state leave and come back between steps, and losses are those alone.

    Nobody is starved by the other, which fits while the first one's memory is out, and nothing overflows. So it is for
    jobs that save nothing, too: no step has room beside what the other keeps.
    """
    with alone(SCRIPT, STEPS) as process:
        assert process.line() == "ready"
        process.tell("go")
        expected = process.finish().stdout
    ahead: list[int] = []
    settled: list[int] = []
    overflowed = []
    with pool(regions=REGIONS, region_bytes=MIB, policy=policy) as made:
        environments = [
            job_environment(clean_environment(), made.socket, name, wish=Wish(save)) for name in ("one", "two")
        ]
        with Script([SCRIPT, str(STEPS)], environments[0]) as one, Script([SCRIPT, str(STEPS)], environments[1]) as two:
            for process in (one, two):
                assert process.line() == "ready"
            for process in (one, two):
                process.tell("go")

            def have_ended() -> bool:
                first, second = made.jobs["iteration"][:2].tolist()
                if min(first, second) >= 2 and max(first, second) < STEPS:
                    ahead.append(first - second)
                    if min(first, second) >= SETTLED:
                        settled.append(first - second)
                    overflowed.append(made.jobs["spilled_bytes"][:2].tolist())
                return one.process.poll() is not None and two.process.poll() is not None

            until(have_ended, 2 * PATIENCE_S, "both have trained")
            assert [one.finish().stdout, two.finish().stdout] == [expected] * 2
        assert (made.jobs["evictions"][:2] > 0).all()
        assert made.jobs["spilled_bytes"][:2].tolist() == overflowed[0], "nothing overflows once both are known"
    if policy == "serial":
        assert max(settled) - min(settled) <= TURNS, set(settled)
        assert max(map(abs, ahead)) <= min(abs(ahead[0]) + TURNS, HEAD_START), (ahead[0], set(ahead))
