"""JAX on the host, in a pool; on a GPU: ``test_xla_cuda.py``."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
from support.harness import FRAMEWORK, MIB, pool
from support.scripts import checks_in, job, run_checks

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKS = FRAMEWORK / "jax_checks.py"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """Give what the script of checks found as a job in a pool in which nobody has to wait."""
    with pool(regions=128, region_bytes=MIB) as made:
        yield run_checks(CHECKS, functools.partial(job, made, "checks"))


@pytest.mark.parametrize("name", checks_in(CHECKS))
def test_in_a_job(found: dict[str, Any], name: str) -> None:
    """What the check's docstring says is true of JAX in a job."""
    assert found[name] == "ok", found[name]


def test_the_end_is_clean(found: dict[str, Any]) -> None:
    """A process that ends with live arrays ends with 0."""
    assert found["exit"]["code"] == 0, found["exit"]["stderr"]
