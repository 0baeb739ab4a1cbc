"""Forked children of a job see its tensors as without Zico and never touch the pool (invariant 10)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from harness import FRAMEWORK, MIB, pool
from scripts import alone, checks_in, job, run_checks

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = FRAMEWORK / "fork_checks.py"
LOSSES = "check_losses_with_workers"


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """Give what the script found as a job, and see that the pool is empty after it."""
    with pool(regions=32, region_bytes=MIB) as made:
        results = run_checks(SCRIPT, functools.partial(job, made, "forks"))
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
