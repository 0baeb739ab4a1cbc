"""PyTorch jobs whose modules run again in the backward pass: each condition, and trainings of every kind."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import pytest
from harness import FRAMEWORK, MIB, PATIENCE_S, Pool, clean_environment, pool
from scripts import Script, alone, checks_in, run_checks

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHECKS = FRAMEWORK / "torch_segments_checks.py"
MODELS = FRAMEWORK / "torch_saving_models.py"
KINDS = ("Resnet", "Deep", "Accumulated", "Pair", "Checkpointed", "Penalised", "Retained")
MUST_RUN_AGAIN = ("Deep",)


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pool]:
    """Give a pool with small regions, in which a job is held back by its own limit only."""
    with pool(regions=1024, region_bytes=MIB // 4) as made:
        yield made


def segmented(made: Pool, *arguments: object, fresh: bool = False) -> Script:
    """Start a Python job that runs modules again."""
    wish = Wish("swap", tier="memory:1GiB", planner="segments")
    environment = job_environment(clean_environment(), made.socket, "segments", wish=wish)
    return Script([str(argument) for argument in arguments], environment, fresh=fresh)


@functools.cache
def checked(made: Pool) -> dict[str, Any]:
    """Run the checks, once."""
    return run_checks(CHECKS, functools.partial(segmented, made, fresh=True))


@pytest.fixture(scope="module")
def trained(roomy: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train all kinds with segments and alone, once; returns what the two found."""
    directory: Path = tmp_path_factory.mktemp("models")
    paths = {"alone": directory / "alone", "segmented": directory / "segmented"}
    with (
        alone(MODELS, paths["alone"], *KINDS) as first,
        segmented(roomy, MODELS, paths["segmented"], *KINDS) as second,
    ):
        for process in (first, second):
            done = process.finish(2 * PATIENCE_S)
            assert done.returncode == 0, done.stderr
    return {name: json.loads(path.read_text()) for name, path in paths.items()}


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("name", checks_in(CHECKS))
def test_in_a_job_with_segments(roomy: Pool, name: str) -> None:
    """What the check's docstring says is true of modules that run again."""
    found = checked(roomy)[name]
    assert found == "ok", found


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("kind", KINDS)
def test_less_memory_gives_the_same_bits(trained: dict[str, dict[str, Any]], kind: str) -> None:
    """Invariant 6: losses and weights in a share of the job's own peak are those of a process without Zico."""
    job, expected = trained["segmented"][kind], trained["alone"][kind]
    found = job["runs"]["planned"]
    assert {name: found[name] for name in expected} == expected
    assert found["peak"] <= job["limit"], "it holds what it may"
    if kind in MUST_RUN_AGAIN:
        assert found["dropped_bytes"] > 0
