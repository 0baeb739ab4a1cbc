"""What changes if a constant that nobody derives is half as large, or twice?

Each constant is changed alone, in a copy of the sources, and one of these replays is done again.
None measures time. But a heap's plan knows the times of its job's profile, so what is held differs
a little from run to run. One change to the same value shows by how much:

* plans: the planner of jobs, for iterations of the zoo at 60, 50 and 40 % of their peaks.
* heap: the zoo's allocations through a job's heap, some of them disturbed, with evaluations between
  training steps: what is held and claimed, and which phase the heap takes a step for.
* short: the same of training loops of one to eight layers, with temporaries now and then.
* boundaries: training loops without marks: which beginnings of iterations are told.
* swaps: idle tensors of the zoo by a plan whose copies are slower than it thinks, and without one.
* trials: two planners in turn, whose iterations vary.

Compiled code reads the constants of a copy from memory, so that it is compiled once for all values.
Constants of the same replay are compared with one run of it that changes nothing::

    python benchmarks/constants.py -o benchmarks/results [--only REPLAY[.CONSTANT]]
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import common

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


# -- a copy whose compiled code reads constants from memory ----------------------------------------

_KNOBS = '''"""Constants that are being tuned, at an address that each process of this copy has."""

import ctypes
import json
import os

import numpy as np

from zico.base.compiled import array_at, inlined

ADDRESS = 1 << 44
MOST = 32
"""Numbers, and as many lists of so many numbers."""
_I64, _F64 = np.dtype("i8"), np.dtype("f8")


@inlined
def whole_constant(k):
    return array_at(ADDRESS, MOST, _I64)[k]


@inlined
def listed_constant(k):
    return array_at(ADDRESS + 8 * MOST * (k + 1), array_at(ADDRESS, MOST, _I64)[k], _F64)


_mmap = ctypes.CDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
assert _mmap(ADDRESS, 1 << 14, 3, 0x100022, -1, 0) == ADDRESS  # private, anonymous, there and nowhere else
_words = (ctypes.c_int64 * MOST).from_address(ADDRESS)
for _k, _value in enumerate(json.loads(os.environ["BENCHMARK_CONSTANTS"])):
    if isinstance(_value, list):
        _words[_k] = len(_value)
        _listed = (ctypes.c_double * MOST).from_address(ADDRESS + 8 * MOST * (_k + 1))
        _listed[: len(_value)] = _value
    else:
        _words[_k] = int(_value)
'''
_COMPILED = {"compiled", "inlined", "entry", "callback"}
_PYTHON = "zico.swap"
"""Constants that Python reads in these replays are set where they stand."""
_GUARD_BINS = ("zico.trace.profile", "GUARD_BINS")
"""A constant made of one that is changed."""


def knobs() -> list[tuple[str, str]]:
    """Return modules and names of the constants that compiled code reads, each once."""
    read = [one for one in CONSTANTS if not one.module.startswith(_PYTHON)]
    return [*dict.fromkeys((one.module, one.name) for one in read), _GUARD_BINS]


class _Reads(ast.NodeTransformer):
    """Replaces constants in compiled functions by reads of memory."""

    def __init__(self, own: dict[str, str], of_modules: dict[str, dict[str, str]]) -> None:
        self._own, self._of_modules = own, of_modules
        self._is_inside = False
        self.replaced = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        names = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
        if names & _COMPILED:
            self._is_inside = True
            node.body = [self.visit(one) for one in node.body]
            self._is_inside = False
        return node

    def _read(self, node: ast.expr, found: str | None) -> ast.AST:
        if found is None or not self._is_inside:
            return self.generic_visit(node)
        self.replaced += 1
        return ast.parse(found, mode="eval").body

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._read(node, self._own.get(node.id) if isinstance(node.ctx, ast.Load) else None)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        of = self._of_modules.get(node.value.id, {}) if isinstance(node.value, ast.Name) else {}
        return self._read(node, of.get(node.attr))


def _with_knobs(source: str, module: str) -> str:
    """Return a module's source whose compiled functions read constants from memory."""
    values = {(one.module, one.name): one.value for one in CONSTANTS}
    reads = {
        knob: f"{'listed' if isinstance(values.get(knob), tuple) else 'whole'}_constant({k})"
        for k, knob in enumerate(knobs())
    }
    tree = ast.parse(source)
    own = {name: read for (owner, name), read in reads.items() if owner == module}
    of_modules: dict[str, dict[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                if (read := reads.get((str(node.module), alias.name))) is not None:
                    own[alias.asname or alias.name] = read
                for (owner, name), read in reads.items():
                    if owner == f"{node.module}.{alias.name}":
                        of_modules.setdefault(alias.asname or alias.name, {})[name] = read
    change = _Reads(own, of_modules)
    tree = change.visit(tree)
    if not change.replaced:
        return source
    at = next(i for i, node in enumerate(tree.body) if isinstance(node, ast.ImportFrom)) + 1
    tree.body.insert(at, ast.parse("from zico.base.knobs import listed_constant, whole_constant").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def copied_to(directory: Path) -> None:
    """Copy the package, as it is when it is installed, with constants in memory."""
    package = directory / "zico"
    for folder in ("zico", "adapters", "kernels", "lab"):
        target = package if folder == "zico" else package / folder
        shutil.copytree(common.ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "base" / "knobs.py").write_text(_KNOBS)
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(directory).with_suffix("").parts)
        if path.name != "knobs.py":
            source = path.read_text()
            changed = _with_knobs(source, module)
            if changed is not source:
                path.write_text(changed)


# -- the replays, each in a process of its own -----------------------------------------------------


def asked(tree: Path, replay: str, module: str = "", name: str = "", value: Value | None = None) -> Figures:
    """Return a replay's figures in a process in which one constant has another value."""
    known: dict[tuple[str, str], Any] = {(one.module, one.name): one.value for one in CONSTANTS}
    if module:
        known[module, name] = value
    known[_GUARD_BINS] = 128 >> int(known["zico.trace.profile", "_GUARD_SHIFT"])
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "BENCHMARK_CONSTANTS": json.dumps([known[knob] for knob in knobs()]),
        "OMP_NUM_THREADS": "1",
    }
    words = [json.dumps([module, name, value])] if module else []
    done = subprocess.run(
        [sys.executable, __file__, "--ask", replay, *words],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=REPLAY_S,
    )
    answer: Figures = json.loads(done.stdout.splitlines()[-1])
    return answer


def answer(replay: str, changed: str = "") -> None:
    """Do a replay and print its figures; Python reads a changed constant where it stands."""
    sys.path.insert(0, str(common.ROOT / "tests"))  # for their training loops
    if changed:
        module, name, value = json.loads(changed)
        setattr(importlib.import_module(module), name, value)
    print(json.dumps(getattr(importlib.import_module(REPLAYS), replay)()))


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
    with tempfile.TemporaryDirectory(prefix="zico-") as name:
        tree = Path(name)
        copied_to(tree)
        if options.smoke:
            one = CONSTANTS[-1]
            found = asked(tree, one.replay), asked(tree, one.replay, one.module, one.name, one.others[0])
            print(compared(*found))
            return
        _measure(result, tree, options, directory)


def _measure(result: dict[str, Any], tree: Path, options: Any, directory: Path | None) -> None:  # noqa: ANN401 - argparse
    """Add what is missing of the changes that are asked for, one after the other; of each the commit is kept."""
    import time

    began_s = time.monotonic()
    done = {(one["replay"], one["constant"], _shown(one["to"])) for one in result["changes"]}
    for constant in _wanted(options.only):
        if constant.replay not in result["unchanged"]:
            figures = asked(tree, constant.replay)
            result["unchanged"][constant.replay] = {"commit": result["commit"], "figures": figures}
        for value in constant.others:
            if (constant.replay, constant.name, _shown(value)) in done or time.monotonic() - began_s > options.for_s:
                continue
            common.note(f"{constant.key} {_shown(constant.value)} -> {_shown(value)}")
            change = {"replay": constant.replay, "constant": constant.name, "from": constant.value, "to": value}
            figures = asked(tree, constant.replay, constant.module, constant.name, value)
            result["changes"].append(change | {"commit": result["commit"], "figures": figures})
            common.write(result, text_of(result), directory)


if __name__ == "__main__":
    main()
