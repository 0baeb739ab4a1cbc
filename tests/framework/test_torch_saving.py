"""PyTorch jobs with less memory than they need, in each way: the same bits, and what a script sees of it.

One process without Zico trains every kind once, for all ways. A way has a script of checks, which
one job runs, and kinds, which another job trains.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
from support.harness import FRAMEWORK, MIB, PATIENCE_S, Pool, clean_environment, pool
from support.scripts import Script, alone, checks_in, run_checks

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.job.session import Session

MODELS = FRAMEWORK / "torch_saving_models.py"
COMMON = ("Resnet", "Accumulated", "Pair", "Checkpointed", "Penalised", "Retained")


class Saver(NamedTuple):
    """A way to need less memory."""

    wish: Wish
    kinds: tuple[str, ...]
    """Of trainings in ``MODELS``."""
    must_drop: tuple[str, ...] = ()
    """Those in which something is certainly made again."""
    checks: Path | None = None
    runs: tuple[str, ...] = ("planned",)


def swapping(planner: str | None = None, tier: str = "memory:1GiB") -> Wish:
    """Return what a job that follows a planner asks for."""
    return Wish("swap", tier=tier, planner=planner)


WAYS = {
    "swap": Saver(
        swapping(),
        (*COMMON, "Transformer", "Views"),
        checks=FRAMEWORK / "torch_saving_checks.py",
        runs=("needed", "planned"),
    ),
    "drop": Saver(
        swapping("echo"),
        (*COMMON, "Transformer"),
        must_drop=("Resnet", "Accumulated", "Pair"),
        checks=FRAMEWORK / "torch_rebuilding_checks.py",
    ),
    "gist": Saver(
        swapping("gist", "compressed:1GiB"),
        ("Resnet", "Pooled", "Checkpointed"),
        checks=FRAMEWORK / "torch_encoding_checks.py",
    ),
    "gist-fp8": Saver(swapping("gist-fp8", "compressed:1GiB"), ("Resnet",)),
}
CHECKS = [(name, check) for name, way in WAYS.items() if way.checks for check in checks_in(way.checks)]
SAME = [
    (name, kind, run)
    for name, way in WAYS.items()
    if name != "gist-fp8"  # fewer bits are other bits
    for kind in way.kinds
    for run in way.runs
]

Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pool]:
    """Give a pool with small regions, in which a job is held back by its own limit only."""
    with pool(regions=1024, region_bytes=MIB // 4) as made:
        yield made


def in_way(made: Pool, name: str, *arguments: object) -> Script:
    """Start a Python job that needs less memory in a way."""
    environment = job_environment(clean_environment(), made.socket, name, wish=WAYS[name].wish)
    return Script([str(argument) for argument in arguments], environment)


@functools.cache
def checked(made: Pool, name: str) -> dict[str, Any]:
    """Run the checks of a way, once."""
    checks = WAYS[name].checks
    assert checks is not None
    return run_checks(checks, functools.partial(in_way, made, name))


def ran(start: Callable[..., Script], *arguments: str) -> Runs:
    """Run trainings to their end; returns what they found by kind."""
    with tempfile.TemporaryDirectory(prefix="zm-") as directory:
        results = Path(directory) / "results.json"
        with start(MODELS, results, *arguments) as process:
            done = process.finish(2 * PATIENCE_S)
        assert done.returncode == 0, done.stderr
        found: Runs = json.loads(results.read_text())
    return found | {"stderr": {"text": done.stderr}}


@functools.cache
def trained_alone() -> Runs:
    """Train all kinds without Zico, once."""
    return ran(alone, "", *sorted({kind for way in WAYS.values() for kind in way.kinds}))


@functools.cache
def trained(made: Pool, name: str) -> Runs:
    """Train the kinds of a way in a job, once."""
    return ran(functools.partial(in_way, made, name), ",".join(WAYS[name].runs), *WAYS[name].kinds)


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(("name", "check"), CHECKS)
def test_in_a_job(roomy: Pool, name: str, check: str) -> None:
    """What the check's docstring says is true in a job that swaps, drops or encodes."""
    found = checked(roomy, name)[check]
    assert found == "ok", found


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(("name", "kind", "run"), SAME)
def test_less_memory_gives_the_same_bits(roomy: Pool, name: str, kind: str, run: str) -> None:
    """Invariant 6: losses and weights in a share of the job's own peak are those of a process without Zico."""
    job, expected = trained(roomy, name)[kind], trained_alone()[kind]
    found = job["runs"][run]
    for bits in (job, found):
        assert {field: bits[field] for field in expected} == expected
    assert found["peak"] <= job["limit"], "it holds what it may"
    if kind in WAYS[name].must_drop:
        assert found["dropped_bytes"] > 0


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("run", WAYS["swap"].runs)
@pytest.mark.parametrize("kind", WAYS["swap"].kinds)
def test_what_a_job_swaps_goes_where_it_is_to_go(roomy: Pool, kind: str, run: str) -> None:
    """By need alone and by plans, tensors leave and come back, and nothing goes to the next tier instead.

    However slow the machine is: an allocation that waits goes there only where the swapper has answered
    that nothing can leave, and asks again whenever a tensor has arrived (``test_making_room.py``) or pool
    or heap have changed. What lands or leaves is waited for.
    """
    found = trained(roomy, "swap")[kind]["runs"][run]
    assert min(found["out_bytes"], found["in_bytes"]) > 0
    assert found["spilled_bytes"] == found["evictions"] == 0
    assert (found["planned"] > 0) == (run == "planned")


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("kind", WAYS["gist"].kinds)
def test_what_is_encoded_leaves(roomy: Pool, kind: str) -> None:
    """With encodings tensors leave, too."""
    assert trained(roomy, "gist")[kind]["runs"]["planned"]["out_bytes"] > 0


@pytest.mark.timeout(3 * PATIENCE_S)
def test_fewer_bits_are_other_bits_and_still_train(roomy: Pool) -> None:
    """With 8 bits the first loss is the same, and later ones are close and not the same."""
    expected, found = trained_alone()["Resnet"], trained(roomy, "gist-fp8")["Resnet"]["runs"]["planned"]
    losses, exact = ([float.fromhex(loss) for loss in each["losses"]] for each in (found, expected))
    assert losses[0] == exact[0]
    assert losses[1:] == pytest.approx(exact[1:], rel=0.05)
    assert found["weights"] != expected["weights"]


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("name", WAYS)
def test_a_training_says_nothing(roomy: Pool, name: str) -> None:
    """Neither do jobs that need less memory write to stderr, but for who stands in for a planner without a plan."""
    lines = trained(roomy, name)["stderr"]["text"].splitlines()
    assert [line for line in lines if not line.endswith("; longest is used instead")] == []
    assert trained_alone()["stderr"]["text"] == ""


def test_a_pytorch_that_hides_its_hooks_does_not_swap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those before 2.8 do not say whose hooks save a tensor: the job goes on without, and is told what it needs."""
    from torch._C import _autograd
    from zico.adapters import torch as adapter

    monkeypatch.delattr(_autograd, "_top_saved_tensors_default_hooks", raising=False)
    adapter._swap(cast("Session", None))
    assert capsys.readouterr().err.startswith("zico: this process does not swap: PyTorch 2.8 or later is needed")
