"""PyTorch jobs whose saved tensors leave encoded: who reads what, and trainings, bit by bit."""

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

CHECKS = FRAMEWORK / "torch_encoding_checks.py"
MODELS = FRAMEWORK / "torch_saving_models.py"
KINDS = ("Resnet", "Pooled", "Checkpointed")


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pool]:
    """Give a pool with small regions, in which a job is held back by its own limit only."""
    with pool(regions=1024, region_bytes=MIB // 4) as made:
        yield made


def encoding(planner: str, made: Pool, *arguments: object, fresh: bool = False) -> Script:
    """Start a Python job whose saved tensors leave for a compressed tier."""
    wish = Wish("swap", tier="compressed:1GiB", planner=planner)
    environment = job_environment(clean_environment(), made.socket, planner, wish=wish)
    return Script([str(argument) for argument in arguments], environment, fresh=fresh)


@functools.cache
def checked(made: Pool) -> dict[str, Any]:
    """Run the checks, once."""
    return run_checks(CHECKS, functools.partial(encoding, "gist", made, fresh=True))


@pytest.fixture(scope="module")
def trained(roomy: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train all kinds alone, encoded, and in fewer bits, once; returns what they found."""
    directory: Path = tmp_path_factory.mktemp("models")
    paths = {name: directory / name for name in ("alone", "gist", "gist-fp8")}
    with (
        alone(MODELS, paths["alone"], *KINDS) as first,
        encoding("gist", roomy, MODELS, paths["gist"], *KINDS) as second,
        encoding("gist-fp8", roomy, MODELS, paths["gist-fp8"], KINDS[0]) as third,
    ):
        for process in (first, second, third):
            done = process.finish(2 * PATIENCE_S)
            assert (done.returncode, done.stderr) == (0, "")
    return {name: json.loads(path.read_text()) for name, path in paths.items()}


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("name", checks_in(CHECKS))
def test_in_a_job_that_encodes(roomy: Pool, name: str) -> None:
    """What the check's docstring says is true of tensors that leave encoded."""
    found = checked(roomy)[name]
    assert found == "ok", found


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("kind", KINDS)
def test_less_memory_gives_the_same_bits(trained: dict[str, dict[str, Any]], kind: str) -> None:
    """Invariant 6: losses and weights in a share of the job's own peak are those of a process without Zico."""
    job, expected = trained["gist"][kind], trained["alone"][kind]
    found = job["runs"]["planned"]
    assert {name: found[name] for name in expected} == expected
    assert found["peak"] <= job["limit"], "it holds what it may"
    assert found["out_bytes"] > 0


@pytest.mark.timeout(3 * PATIENCE_S)
def test_fewer_bits_are_other_bits_and_still_train(trained: dict[str, dict[str, Any]]) -> None:
    """With 8 bits the first loss is the same, and later ones are close and not the same."""
    expected, found = trained["alone"][KINDS[0]], trained["gist-fp8"][KINDS[0]]["runs"]["planned"]
    assert found["weights"] != expected["weights"]
