"""Tests of PyTorch's real build for CUDA, which `make test-cuda-wheel` installs; without it none is collected.

At the end of a run stands what was called and what came of it.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

WAYS = ("plain", "pool")
seen = pytest.StashKey[dict[str, Any]]()


def has_wheel() -> bool:
    """Tell whether PyTorch is a build for CUDA, with the libraries that it requires."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and (Path(str(spec.origin)).parent / "lib" / "libtorch_cuda.so").exists()


collect_ignore_glob = [] if has_wheel() else ["test_*.py"]


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Give what is printed when all tests have run: way to what its job saw."""
    found: dict[str, Any] = request.config.stash.setdefault(seen, {})
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was called and what came of it."""
    found = config.stash.get(seen, {})
    if not found:
        return
    terminalreporter.section("PyTorch's build for CUDA over a driver of software: what was called")
    for line in lines(found):
        terminalreporter.write_line(line)


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return a table of the checks, and one of the driver's functions by the calls of both jobs."""
    names = dict.fromkeys(name for way in WAYS for name in found.get(way, {}) if name != "calls")
    rows = [(name, *(json.dumps(found.get(way, {}).get(name, "not asked")) for way in WAYS)) for name in names]
    text = [f"{name}\n  plain    {plain}\n  in pool  {pool}" for name, plain, pool in rows]
    calls = [found.get(way, {}).get("calls", {}) for way in WAYS]
    text.append(f"{'the driver by function':44}{'plain':>10}{'in pool':>10}")
    by_name = sorted(set().union(*calls))
    return text + [f"{name:44}" + "".join(f"{one.get(name, 0):>10}" for one in calls) for name in by_name]
