"""What changes if a constant that nobody derives is half as large, or twice?

Each constant is changed alone, in a process of its own, and one of these replays is done again.
None measures time. But a heap's plan knows the times of its job's profile, so what is held differs
a little from run to run. One change to the same value shows by how much:

* plans: the planner of jobs, for iterations of the zoo at 60, 50 and 40 % of their peaks.
* heap: the zoo's allocations through a job's heap, some of them disturbed, with evaluations between
  training steps: what is held and claimed, and which phase the heap takes a step for.
* short: the same of training loops of one to eight layers, with temporaries now and then.
* boundaries: training loops without marks: which beginnings of iterations are told.
* swaps: idle tensors of the zoo by a plan whose copies are slower than it thinks, and without one.
* trials: two planners in turn, whose iterations vary.

Compiled code reads the constants from memory (``changeable.py``).
Constants of the same replay are compared with one run of it that changes nothing::

    python benchmarks/constants.py -o benchmarks/results [--only REPLAY[.CONSTANT]]
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import changeable
import common

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

QUESTION = "What changes if a constant that nobody derives is half as large, or twice?"
REPLAYS = "constants_replays"
REPLAY_S = 900.0

Value = float | tuple[float, ...]
Figures = dict[str, dict[str, float | None]]
"""What a replay measures, and each case's figure of it; ``None``: there was no answer."""


class Constant(NamedTuple):
    """A constant, its replay, and the values that it is changed to."""

    replay: str
    module: str
    name: str
    value: Value
    others: tuple[Value, ...]

    @property
    def key(self) -> str:
        """Return how it is named on a command line."""
        return f"{self.replay}.{self.name}"


CONSTANTS = (
    Constant(
        *("plans", "zico.planning.saving.planner", "_SHARES", (0.0, 0.15, 0.3, 0.5, 0.75)),
        ((0.0, 0.5), (0.0, 0.3, 0.75), (0.0, 0.08, 0.15, 0.23, 0.3, 0.4, 0.5, 0.62, 0.75, 0.88)),
    ),
    Constant("plans", "zico.planning.saving.planner", "_BEST_SEGMENTS", 3, (1, 6)),
    Constant("plans", "zico.planning.saving.planner", "_TRIES", 3, (1, 6, 1000)),
    Constant("plans", "zico.planning.saving.planner", "_AT_ONCE", 6, (3, 12, 32)),
    Constant("plans", "zico.planning.saving.pruning", "_MOST_LENGTH", 3, (2, 6)),
    Constant("plans", "zico.swap.learning", "MARGIN_SHARE", 0.04, (0.02, 0.08)),
    Constant("heap", "zico.heap.history", "SHORT_EVENTS", 8, (8, 0, 4, 16)),
    Constant("heap", "zico.heap.history", "_SHORT_SHIFT", 6, (5, 7)),
    Constant("heap", "zico.trace.profile", "_GUARD_SHIFT", 5, (4, 6)),
    Constant("heap", "zico.trace.profile", "_TYPICAL_SLACK_EVENTS", 8, (0, 4, 16)),
    Constant("heap", "zico.trace.profile", "SLACK_SHIFT", 4, (3, 5)),
    Constant("heap", "zico.trace.profile", "_DECAY_SHIFT", 3, (2, 4)),
    Constant("heap", "zico.trace.phases", "WIDEST", 8, (4, 16)),
    Constant("short", "zico.heap.history", "SHORT_EVENTS", 8, (8, 0, 4, 16)),
    Constant("short", "zico.heap.history", "_SHORT_SHIFT", 6, (5, 7)),
    Constant("short", "zico.trace.profile", "_GUARD_SHIFT", 5, (4, 6)),
    Constant("short", "zico.trace.profile", "_TYPICAL_SLACK_EVENTS", 8, (0, 4, 16)),
    Constant("short", "zico.trace.profile", "SLACK_SHIFT", 4, (3, 5)),
    Constant("short", "zico.trace.profile", "_DECAY_SHIFT", 3, (2, 4)),
    Constant("boundaries", "zico.trace.online", "_PATIENCE", 16, (8, 32)),
    Constant("boundaries", "zico.trace.profile", "SLACK_SHIFT", 4, (3, 5)),
    Constant("swaps", "zico.swap.schedule", "LEAD_SHARE", 4.0, (0.0, 2.0, 8.0)),
    Constant("swaps", "zico.swap.swapper", "FULL_SHARE", 0.85, (0.425, 0.7, 0.925, 1.0)),
    Constant("swaps", "zico.swap.swapper", "ROOM_SHARE", 0.9, (0.45, 0.8, 0.95, 1.0)),
    Constant("trials", "zico.swap.learning", "TRIAL_ITERATIONS", 7, (3, 5, 14)),
)


GUARD = ("zico.trace.profile", "GUARD_BINS")
"""A constant made of one that is changed, in whole bins of half a curve."""


# -- the replays, each in a process of its own -----------------------------------------------------


def asked(replay: str, module: str = "", name: str = "", value: Value | None = None) -> Figures:
    """Return a replay's figures in a process in which one constant has another value."""
    words = [json.dumps([module, name, value])] if module else []
    done = subprocess.run(
        [sys.executable, __file__, "--ask", replay, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=REPLAY_S,
    )
    answer: Figures = json.loads(done.stdout.splitlines()[-1])
    return answer


def answer(replay: str, changed: str = "") -> None:
    """Do a replay and print its figures."""
    sys.path.insert(0, str(common.ROOT / "tests"))  # for their training loops
    replays = importlib.import_module(REPLAYS)
    module, name, given = json.loads(changed) if changed else ("", "", 0)
    value: Value = tuple(given) if isinstance(given, list) else given
    read = dict.fromkeys((one.module, one.name) for one in CONSTANTS) | {GUARD: None}
    length = f"-{len(value)}" if isinstance(value, tuple) else ""
    changeable.read_from_memory(
        [(importlib.import_module(of), called) for of, called in read], cache=f"replays{length}"
    )
    if module:
        changeable.change(importlib.import_module(module), name, value)
    if name == "_GUARD_SHIFT":
        changeable.change(importlib.import_module(GUARD[0]), GUARD[1], 128 >> int(given))
    print(json.dumps(getattr(replays, replay)()))


# -- what is shown ---------------------------------------------------------------------------------


def compared(before: Figures, after: Figures) -> dict[str, Any]:
    """Return for each measure what its cases come to: ratios, or sums of what is counted."""
    found: dict[str, Any] = {}
    for measure, cases in before.items():
        pairs = [(old, after[measure][case]) for case, old in cases.items()]
        both = [(old, new) for old, new in pairs if old is not None and new is not None]
        row: dict[str, Any] = {"cases": len(pairs), "other": sum(old != new for old, new in pairs)}
        row["without"] = [sum(one is None for one in side) for side in zip(*pairs, strict=True)]
        if measure.startswith("wrong"):
            row["sums"] = [sum(side) for side in zip(*both, strict=True)]
        else:
            ratios = [new / old for old, new in both if old > 0]
            row |= {"mean": statistics.geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
        found[measure] = row
    return found


def _shown(value: Value) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple | list) else f"{value:g}"


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for change in result["changes"]:
        base = result["unchanged"][change["replay"]]["figures"]
        for measure, row in compared(base, change["figures"]).items():
            figures = [f"{row[name]:.4f}" for name in ("mean", "least", "most")] if "mean" in row else ["-"] * 3
            sums = " to ".join(f"{one:g}" for one in row["sums"]) if "sums" in row else "-"
            rows.append(
                (
                    f"{change['replay']}: {change['constant']} {_shown(change['from'])} -> {_shown(change['to'])}",
                    *(measure, f"{row['other']} of {row['cases']}", *figures, sums),
                    " to ".join(map(str, row["without"])) if any(row["without"]) else "-",
                )
            )
    header = ("constant", "of", "other", "ratio, mean", "least", "most", "sum", "no plan")
    return f"{_TEXT}\n{common.table(header, rows)}"


_TEXT = """Ratios are changed over unchanged, lower is better; the mean is geometric. *Other*: cases that differ.
What begins with *wrong* is counted, so its sums are shown, unchanged to changed. A change to the same value shows
what differs from run to run.

* time: of an iteration, by the planner's own replay.
* held: regions over live bytes in the last iteration; its mean over events, and its peak.
* claimed: regions claimed over regions held, mean over events.
* wrong claims: events at which more was held than had been claimed.
* wrong phases: steps that the heap took for another phase than it was.
* wrong boundaries: beginnings of iterations that were not told, and others that were.
* planned, passive: an iteration with swaps, by a plan and without one.
* trial: iterations of a job that tries two planners, over those of the better one.
"""


# -- the command -----------------------------------------------------------------------------------


def _known(path: Path | None, result: dict[str, Any]) -> None:
    """Take over what another run has found."""
    if path is not None and path.exists():
        known = json.loads(path.read_text())
        result["unchanged"], result["changes"] = known["unchanged"], known["changes"]


def _wanted(only: Sequence[str]) -> Iterable[Constant]:
    return [one for one in CONSTANTS if not only or one.replay in only or one.key in only]


def main() -> None:
    """Replay, print, write."""
    if sys.argv[1:2] == ["--ask"]:
        answer(*sys.argv[2:])
        return
    parser = common.parser(__doc__)
    parser.add_argument("--only", action="append", default=[], help="a replay, or REPLAY.CONSTANT; others stay")
    parser.add_argument("--for-s", type=float, default=float("inf"), help="begin no change after so many seconds")
    options = parser.parse_args()
    directory = common.output_directory(options)
    result = common.document(
        "constants", QUESTION, {"replays": list(dict.fromkeys(each.replay for each in CONSTANTS))}
    ) | {"unchanged": {}, "changes": []}
    path = directory / "constants.json" if directory is not None else None
    _known(path, result)
    if options.smoke:
        one = CONSTANTS[-1]
        print(compared(asked(one.replay), asked(one.replay, one.module, one.name, one.others[0])))
        return
    _measure(result, options, directory)


def _measure(result: dict[str, Any], options: Any, directory: Path | None) -> None:  # noqa: ANN401 - argparse
    """Add what is missing of the changes that are asked for, one after the other; of each the commit is kept."""
    import time

    began_s = time.monotonic()
    done = {(one["replay"], one["constant"], _shown(one["to"])) for one in result["changes"]}
    for constant in _wanted(options.only):
        if constant.replay not in result["unchanged"]:
            figures = asked(constant.replay)
            result["unchanged"][constant.replay] = {"commit": result["commit"], "figures": figures}
        for value in constant.others:
            if (constant.replay, constant.name, _shown(value)) in done or time.monotonic() - began_s > options.for_s:
                continue
            common.note(f"{constant.key} {_shown(constant.value)} -> {_shown(value)}")
            change = {"replay": constant.replay, "constant": constant.name, "from": constant.value, "to": value}
            figures = asked(constant.replay, constant.module, constant.name, value)
            result["changes"].append(change | {"commit": result["commit"], "figures": figures})
            common.write(result, text_of(result), directory)


if __name__ == "__main__":
    main()
