"""PyTorch jobs that swap: the same bits of losses and weights in 60 % of their own peaks, and what a script sees."""

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

CHECKS = FRAMEWORK / "torch_saving_checks.py"
MODELS = FRAMEWORK / "torch_saving_models.py"
KINDS = ("Resnet", "Transformer", "Views", "Accumulated", "Pair", "Checkpointed", "Penalised", "Retained")


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pool]:
    """Give a pool with small regions, in which a job is held back by its own limit only."""
    with pool(regions=1024, region_bytes=MIB // 4) as made:
        yield made


def swapping(made: Pool, *arguments: object, fresh: bool = False) -> Script:
    """Start a Python job that swaps."""
    environment = job_environment(clean_environment(), made.socket, "swaps", wish=Wish("swap", tier="memory:1GiB"))
    return Script([str(argument) for argument in arguments], environment, fresh=fresh)


@functools.cache
def checked(made: Pool) -> dict[str, Any]:
    """Run the checks, once."""
    return run_checks(CHECKS, functools.partial(swapping, made, fresh=True))


@pytest.fixture(scope="module")
def trained(roomy: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train all kinds in a job that swaps and alone, once; returns what the two found."""
    directory: Path = tmp_path_factory.mktemp("models")
    paths = {"alone": directory / "alone", "swapping": directory / "swapping"}
    with (
        alone(MODELS, paths["alone"], *KINDS) as first,
        swapping(roomy, MODELS, paths["swapping"], *KINDS) as second,
    ):
        for process in (first, second):
            done = process.finish(2 * PATIENCE_S)
            assert (done.returncode, done.stderr) == (0, "")
    return {name: json.loads(path.read_text()) for name, path in paths.items()}


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("name", checks_in(CHECKS))
def test_in_a_job_that_swaps(roomy: Pool, name: str) -> None:
    """What the check's docstring says is true of saved tensors."""
    found = checked(roomy)[name]
    assert found == "ok", found


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("way", ["needed", "planned"])
@pytest.mark.parametrize("kind", KINDS)
def test_less_memory_gives_the_same_bits(trained: dict[str, dict[str, Any]], kind: str, way: str) -> None:
    """Invariant 6: losses and weights in a share of the job's own peak are those of a process without Zico.

    By need alone and by plans; and nothing goes to the next tier instead, however slow the machine
    is: an allocation that waits goes there only where relief has answered that nothing can leave,
    and asks again whenever a tensor has arrived (``test_relief.py``) or pool or heap have changed.
    What lands or leaves is waited for.
    """
    job, expected = trained["swapping"][kind], trained["alone"][kind]
    found = job["runs"][way]
    for bits in (job, found):
        assert {name: bits[name] for name in expected} == expected
    assert found["peak"] <= job["limit"], "it holds what it may"
    assert min(found["out_bytes"], found["in_bytes"]) > 0
    assert found["spilled_bytes"] == found["evictions"] == 0
    assert (found["planned"] > 0) == (way == "planned")
