"""PyTorch jobs whose optimizers' state is out of the pool between steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from support.harness import FRAMEWORK, MIB, PATIENCE_S, Pool, clean_environment, pool
from support.scripts import Script, checks_in, place_of, run_checks

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKS = FRAMEWORK / "torch_state_checks.py"
VICTIM = FRAMEWORK / "torch_state_victim.py"


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pool]:
    """Give a pool with small regions, in which a job is held back by its own limit only."""
    with pool(regions=1024, region_bytes=MIB // 4) as made:
        yield made


def swapping(made: Pool, *arguments: object) -> Script:
    """Start a Python job that swaps to memory."""
    wish = Wish("swap", tier="memory:1GiB")
    environment = job_environment(clean_environment(), made.socket, "stateful", wish=wish)
    return Script([str(argument) for argument in arguments], environment)


@functools.cache
def checked(made: Pool) -> dict[str, Any]:
    """Run the checks, once."""
    return run_checks(CHECKS, functools.partial(swapping, made))


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("name", checks_in(CHECKS))
def test_in_a_job_that_swaps(roomy: Pool, name: str) -> None:
    """What the check's docstring says is true of what optimizers keep."""
    found = checked(roomy)[name]
    assert found == "ok", found


@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_job_killed_while_its_state_rests_leaves_nothing(roomy: Pool) -> None:
    """Invariant 5: what is away dies with its process, and the pool has all its regions."""
    with swapping(roomy, VICTIM) as process:
        assert process.line() == "away"
        place = place_of(roomy, "stateful", process)
        assert roomy.jobs["held"][place] > 0
        process.process.kill()
        roomy.settled(lambda look: look.held(place) == 0, "the dead job's memory is the pool's").check()
