"""A step of TensorFlow that lacks memory computes again what is cheap, with the bits that it has alone."""

from __future__ import annotations

import functools

import pytest
from harness import FRAMEWORK, MIB, PATIENCE_S, clean_environment, pool
from light_job import can_page
from scripts import Script, alone

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

SCRIPT = str(FRAMEWORK / "rebuilding_job.py")
STEPS = 20


@functools.cache
def expected() -> str:
    """Return the bits without Zico."""
    with alone(SCRIPT, STEPS) as process:
        return process.finish().stdout.strip()


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("limit_mib", [0, 50])
def test_invariant_6_a_step_that_lacks_memory_keeps_less_and_computes_the_same(limit_mib: int) -> None:
    """Invariant 6: some two thirds of the peak are too little; a job that fits is left as it is."""
    if limit_mib and not can_page():
        pytest.skip("this user may not serve page faults")
    with pool(regions=160, region_bytes=MIB) as made:
        wish = Wish("auto", limit_mib * MIB)
        environment = job_environment(clean_environment(), made.socket, "step", wish=wish)
        with Script([SCRIPT, str(STEPS)], environment) as process:
            done = process.finish(PATIENCE_S)
        assert (done.returncode, done.stdout.strip()) == (0, expected()), done.stderr
        (report,) = made.client.report().jobs
    assert report.iterations == STEPS
    assert ("computes" in done.stderr) == (report.saving.dropped_bytes > 0) == bool(limit_mib)
