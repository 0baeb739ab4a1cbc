"""What the microbenchmarks share: the time of one operation, a baseline, the file of results.

``--benchmark-json=DIR/NAME.json`` writes pytest-benchmark's figures in the form of all results, and
``NAME.md`` beside, and prints what is in that.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import common
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

RESULT = pytest.StashKey[dict[str, Any]]()
UNITS_NS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
DEADLINE_S = 1800
NOT_COLUMNS = {"group", "name", "ns", "per", "goal_ns", "is_baseline", "over_baseline", "added_ns"}


class Benchmark(Protocol):
    """What is used of pytest-benchmark's fixture."""

    group: str | None
    enabled: bool
    extra_info: dict[str, Any]

    def pedantic(self, target: Callable[..., Any], args: tuple[Any, ...], **how: Any) -> Any:
        """Call ``target`` and keep the time of each round."""


class Measure:
    """Times a function by pytest-benchmark and notes what its times mean."""

    def __init__(self, benchmark: Benchmark) -> None:
        """Use this fixture of pytest-benchmark."""
        self._benchmark = benchmark
        self.enabled = benchmark.enabled
        """False with ``--benchmark-disable``: the function is called once, so it may do less."""
        self.figures: dict[str, Any] = benchmark.extra_info
        """Further figures, each a column of the table."""

    def __call__(
        self, group: str, function: Any, *args: Any, per: int = 1, goal_ns: float | None = None, **how: Any
    ) -> Any:
        """Time ``function``, which does ``per`` operations a call; ``how`` goes to ``pedantic``."""
        self._benchmark.group = group
        self.figures["per"] = per
        if goal_ns is not None:
            self.figures["goal_ns"] = goal_ns
        return self._benchmark.pedantic(function, args, **how)

    def is_baseline(self, name: str) -> None:
        """Put every time of the group over this one, which has this name."""
        self.figures |= {"name": name, "is_baseline": True}


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "long: takes minutes, and is no part of `make bench`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give benchmarks more time than tests: some compile, or follow a model first."""
    for item in items:
        item.add_marker(pytest.mark.timeout(DEADLINE_S))


@pytest.fixture
def measure(benchmark: Benchmark, request: pytest.FixtureRequest) -> Measure:
    """Return what times a function; the module's first line is the question of the result."""
    if RESULT not in request.config.stash:
        name = Path(request.config.getoption("benchmark_json") or "").stem
        question = (request.module.__doc__ or "").partition("\n")[0].replace("``", "`")
        request.config.stash[RESULT] = common.document(name, question, {"unit": "ns", "by": "pytest-benchmark"})
    return Measure(benchmark)


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Reduce what pytest-benchmark writes to the form of all results, and write the tables beside it."""
    rows = [_reduced(one) for one in output_json["benchmarks"]]
    for row in rows:
        baseline = [one for one in rows if one["group"] == row["group"] and one.get("is_baseline")]
        if baseline and baseline[0] is not row:
            row["over_baseline"] = row["ns"]["median"] / baseline[0]["ns"]["median"]
            row["added_ns"] = row["ns"]["median"] - baseline[0]["ns"]["median"]
    output_json.clear()
    output_json.update(config.stash[RESULT] | {"benchmarks": rows})
    text, path = text_of(rows), Path(config.getoption("benchmark_json"))
    common.save(output_json, text, path.parent)
    config.get_terminal_writer().write(f"\n{text}\nwritten: {path} and .md\n")


def _reduced(one: dict[str, Any]) -> dict[str, Any]:
    """Return a benchmark's name, figures, and nanoseconds of an operation."""
    figures = dict(one["extra_info"])
    times_ns = [time_s * 1e9 / figures["per"] for time_s in one["stats"]["data"]]
    spread = common.spread(times_ns) | {"p99": common.percentile(times_ns, 99)}
    name = one["param"] or one["name"].removeprefix("test_").replace("_", " ")
    return {"group": one["group"], "name": name, "ns": spread, **figures}


def text_of(rows: list[dict[str, Any]]) -> str:
    """Return a table for each group."""
    groups = dict.fromkeys(row["group"] for row in rows)
    return "\n".join(_table(group, [row for row in rows if row["group"] == group]) for group in groups)


def _table(group: str, rows: list[dict[str, Any]]) -> str:
    baseline = next((row["name"] for row in rows if row.get("is_baseline")), None)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        group: lambda row: str(row["name"]),
        "median": lambda row: text_of_ns(row["ns"]["median"]),
        "least": lambda row: text_of_ns(row["ns"]["min"]),
        "p99": lambda row: text_of_ns(row["ns"]["p99"]) if row["ns"]["n"] >= 100 else "-",
        "most": lambda row: text_of_ns(row["ns"]["max"]),
        "rounds": lambda row: str(row["ns"]["n"]),
    }
    if baseline:
        columns[f"over {baseline}"] = lambda row: f"{row['over_baseline']:.3f}" if "over_baseline" in row else "-"
        columns["added"] = lambda row: text_of_ns(row["added_ns"]) if "added_ns" in row else "-"
    if any("goal_ns" in row for row in rows):
        columns["goal"] = _goal
    for key in dict.fromkeys(key for row in rows for key in row if key not in NOT_COLUMNS):
        columns[key] = functools.partial(_cell, key)
    return common.table(list(columns), ([cell(row) for cell in columns.values()] for row in rows))


def _goal(row: dict[str, Any]) -> str:
    if "goal_ns" not in row:
        return "-"
    word = "reached" if row["ns"]["median"] <= row["goal_ns"] else "missed"
    return f"{text_of_ns(row['goal_ns'])}: {word}"


def _cell(key: str, row: dict[str, Any]) -> str:
    value = row.get(key, "-")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def text_of_ns(time_ns: float) -> str:
    """Return a time in the largest unit that leaves a digit before the point."""
    unit, scale = next((one for one in UNITS_NS.items() if abs(time_ns) >= one[1]), ("ns", 1.0))
    return f"{time_ns / scale:.3g} {unit}" if abs(time_ns) < 1000 * scale else f"{time_ns / scale:.0f} {unit}"
