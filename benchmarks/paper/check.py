"""Rows of the committed results, simulated anew: results that are older than the scheduler are told by them.

The rows need the trace of one model, NASNet, and some seconds. They cover every policy of the
evaluation, both assumptions, two and four jobs, and a budget that changes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paper import budget, identical, many

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "NN"
_N, _SHARE = 4, 0.6
"""Of the rows of many jobs, the one that is simulated."""


def rows(directory: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield a name of each row, what the results in a directory say, and what today's code does."""
    kept = json.loads((directory / f"{budget.NAME}.json").read_text())
    yield from _by_policy("figure 10", kept, budget.run())
    kept = json.loads((directory / f"{identical.NAME}.json").read_text())
    yield from _by_policy("figure 5", kept["models"][KEY][identical.PRESSURE][-1], identical.largest_row(KEY))
    kept = json.loads((directory / f"{many.NAME}.json").read_text())
    row = next(row for row in kept["sets"]["identical"] if (row["n"], row["share"]) == (_N, _SHARE))
    yield from _by_policy(f"{_N} jobs", row, many.row_of((KEY,), _N, _SHARE))


def _by_policy(title: str, kept: dict[str, Any], fresh: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for assumption in budget.ASSUMPTIONS:
        for policy, found in fresh[assumption].items():
            yield f"{title}, {policy}, {assumption}", kept[assumption].get(policy), json.loads(json.dumps(found))
