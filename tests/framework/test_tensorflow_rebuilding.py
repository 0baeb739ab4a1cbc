"""A step of TensorFlow that lacks memory computes again what is cheap, with the bits that it has alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from support.harness import FRAMEWORK, MIB, PATIENCE_S, clean_environment, pool
from support.light_job import can_page
from support.scripts import Script, alone

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

if TYPE_CHECKING:
    from zico.broker.protocol.messages import SaveMode

SCRIPT = str(FRAMEWORK / "rebuilding_job.py")
STEPS = 20


@functools.cache
def expected() -> str:
    """Return the bits without Zico."""
    with alone(SCRIPT, STEPS) as process:
        return process.finish().stdout.strip()


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(
    ("save", "budget_mib", "limit_mib"), [("auto", 160, 0), ("auto", 160, 50), (None, 50, 0)], ids=str
)
def test_invariant_6_a_step_that_lacks_memory_keeps_less_and_computes_the_same(
    save: SaveMode | None, budget_mib: int, limit_mib: int
) -> None:
    """Invariant 6: in three quarters of the peak, which a limit or the budget leaves; what fits is left as it is."""
    if save and not can_page():
        pytest.skip("this user may not serve page faults")
    with pool(regions=budget_mib, region_bytes=MIB) as made:
        wish = Wish(save, limit_mib * MIB)
        environment = job_environment(clean_environment(), made.socket, "step", wish=wish)
        with Script([SCRIPT, str(STEPS)], environment) as process:
            done = process.finish(PATIENCE_S)
        assert (done.returncode, done.stdout.strip()) == (0, expected()), done.stderr
        (report,) = made.client.report().jobs
    assert report.iterations == STEPS
    lacks = limit_mib > 0 or budget_mib == 50
    assert ("a training step computes" in done.stderr) == (report.saving.dropped_bytes > 0) == lacks
