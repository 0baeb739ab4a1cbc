"""Forked children of a job see its tensors as without Zico and never touch the pool (invariant 10)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from support.harness import FRAMEWORK, MIB, PATIENCE_S, clean_environment, pool
from support.light_job import can_page
from support.scripts import Script, alone, checks_in, job, run_checks

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.harness import Nursery

SCRIPT = FRAMEWORK / "fork_checks.py"
STRESS = FRAMEWORK / "fork_stress_checks.py"
STRESS_S = 3 * PATIENCE_S
"""For a hundred forks in the middle of planning, and more, on a machine that is busy."""
LOSSES = "check_losses_with_workers"
CANNOT_PAGE = pytest.mark.skipif(not can_page(), reason="this user may not serve page faults")


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """Give what the script found as a job, and see that the pool is empty after it."""
    with pool(regions=32, region_bytes=MIB) as made:
        results = run_checks(SCRIPT, functools.partial(job, made, "forks", fresh=True))
        made.settled(lambda look: look.granted == 0, "everything is free")
        (report,) = made.client.report().jobs  # no child has joined
        assert report.name == "forks"
        yield results


@pytest.mark.parametrize("name", [name for name in checks_in(SCRIPT) if name != LOSSES])
def test_invariant_10(found: dict[str, Any], name: str) -> None:
    """Invariant 10: what the check's docstring says is true of a job's children."""
    assert found[name] == "ok", found[name]


def test_a_data_loader_with_workers_behaves_as_without_zico(found: dict[str, Any]) -> None:
    """The losses are those of the same script without Zico, to the last bit, although the workers spoil their data."""
    assert found[LOSSES] == run_checks(SCRIPT, alone)[LOSSES]
    assert len(found[LOSSES]) == 8


def test_the_end_is_clean(found: dict[str, Any]) -> None:
    """The parent ends with 0 and says nothing."""
    assert found["exit"] == {"code": 0, "stderr": ""}


def test_invariant_10_nobody_is_in_the_heap_over_a_fork(nursery: Nursery) -> None:
    """Invariant 10: a fork waits for who is inside, and nobody gets in before the child has copied."""
    with pool(regions=4) as made, nursery.job(made, "forks") as one:
        assert one.ask("fork_beside_threads") == "0 0"
        assert one.ask("hold 1") == "1"


@functools.cache
def stressed(save: str) -> dict[str, Any]:
    """Run the checks that fork at every moment in a job that saves memory so, once, and see that the pool is empty.

    One of the jobs imports PyTorch itself; its spawned workers do so anyway.
    """
    with pool(regions=256, region_bytes=MIB) as made:
        wish = Wish(save, tier="memory:1GiB")
        environment = job_environment(clean_environment(), made.socket, "forks", wish=wish)
        results = run_checks(
            STRESS,
            lambda *arguments: Script([str(argument) for argument in arguments], environment, fresh=save == "none"),
            within_s=STRESS_S,
        )
        made.settled(lambda look: look.granted == 0, "everything is free")
        assert len(made.client.report().jobs) == 1  # no child has joined
    return results


@pytest.mark.timeout(STRESS_S + PATIENCE_S)
@pytest.mark.parametrize("save", ["none", "swap", pytest.param("page", marks=CANNOT_PAGE)])
@pytest.mark.parametrize("name", checks_in(STRESS))
def test_invariant_10_at_every_moment(save: str, name: str) -> None:
    """Invariant 10: what the check's docstring says is true of a job that saves memory in this way."""
    found = stressed(save)
    assert found[name] == "ok", found
