"""How near to the live peak do planners get, and how long do they take?

Two parts: the public hard instances of minimalloc, placed into their capacity, and the zoo's training iterations, whose
peak is to be as low as can be. All plans are judged outside of what is timed; code is compiled before.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np

from zico.planners.caching import reserved_by_caching
from zico.planners.from_trace import iteration_problem
from zico.planners.judge import judge
from zico.planners.minimalloc import read_csv
from zico.planners.plan import NoPlan, Plan
from zico.planners.problem import Problem
from zico.planners.registry import PLANNERS
from zico.trace.roofline import device_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

QUESTION = "How near to the live peak do planners get, and how long do they take?"
INSTANCES = common.ROOT.parent / "shared" / "data" / "minimalloc"
CAPACITY_BYTES = 1 << 20
PEER_S = {"A": 3.38, "B": 2.41, "C": 0.48, "D": 1.72, "E": 2.46, "F": 3.83}
"""minimalloc, one thread, median of three. Source: README.md beside the instances, another machine than this one."""
HARD_S = 60.0
ZOO_S = 1.0
LARGE_S = 10.0
LARGE_TENSORS = 5000
"""Problems with more tensors have ``LARGE_S``."""
LARGE_LENGTH = 84
"""Tokens; the published length gives 6,400 tensors."""
ZOO_PLANNERS = tuple(name for name in PLANNERS if name not in ("exact", "regions"))


def warm() -> None:
    """Compile, or load from the cache, what is timed."""
    random = np.random.default_rng(0)
    lower = random.integers(0, 40, 30)
    problem = Problem(lower, lower + random.integers(1, 40, 30), random.integers(1, 1000, 30))
    for name in (*ZOO_PLANNERS, "exact"):
        PLANNERS[name]().plan(problem, 0.2)
        PLANNERS[name]().plan(dataclasses.replace(problem, capacity_bytes=problem.peak_live_bytes), 0.2)
    reserved_by_caching(problem)


def timed(planner: str, problem: Problem, deadline_s: float) -> dict[str, Any]:
    """Plan once; return peak over live peak, seconds by the clock and of the processor, and what the judge says."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    answer = PLANNERS[planner]().plan(problem, deadline_s)
    cpu_s, wall_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
    figures: dict[str, Any] = {"wall_s": wall_s, "cpu_s": cpu_s}
    match answer:
        case Plan():
            verdict = judge(problem, answer)
            ratio = verdict.peak_bytes / problem.peak_live_bytes
            return figures | {"ratio": ratio, "judged": verdict.rule or "good", "optimal": answer.optimal}
        case NoPlan():
            return figures | {"no_plan": answer.reason.value}


# -- the parts --------------------------------------------------------------------------------------------------------


def hard_instances(directory: Path) -> Iterator[tuple[str, Problem]]:
    """Yield minimalloc's instances with their capacity."""
    for path in sorted(directory.glob("*.csv")):
        yield path.name[0], dataclasses.replace(read_csv(path).problem, capacity_bytes=CAPACITY_BYTES)


def measure_hard(directory: Path, deadline_s: float, repeat: int) -> dict[str, list[dict[str, Any]]]:
    """Place the hard instances by the exact planner."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, problem in hard_instances(directory):
        common.note(f"instance {name}")
        runs[name] = [timed("exact", problem, deadline_s) for _ in range(repeat)]
    return runs


def measure_zoo(problems: Iterator[tuple[str, Problem]], repeat: int) -> dict[str, dict[str, Any]]:
    """Plan each problem by each planner, and replay it by the caching allocator."""
    rows: dict[str, dict[str, Any]] = {}
    for name, problem in problems:
        common.note(f"zoo: {name}, {len(problem)} tensors")
        deadline_s = LARGE_S if len(problem) > LARGE_TENSORS else ZOO_S
        caching = reserved_by_caching(problem).reserved_bytes
        rows[name] = {
            "tensors": len(problem),
            "live_peak_bytes": problem.peak_live_bytes,
            "deadline_s": deadline_s,
            "caching_ratio": caching / problem.peak_live_bytes,
            "planners": {one: [timed(one, problem, deadline_s) for _ in range(repeat)] for one in ZOO_PLANNERS},
        }
    return rows


def large_problem() -> Iterator[tuple[str, Problem]]:
    """Yield an iteration of more than 20,000 tensors: the zoo's translator on longer sentences."""
    import zoo

    trace = zoo.fake_trace(zoo.ZOO["GNMT, 4 layers"].build(length=LARGE_LENGTH), device_model(zoo.DEVICE))
    yield f"GNMT, {LARGE_LENGTH} tokens", iteration_problem(trace).problem


def stand_in() -> Iterator[tuple[str, Problem]]:
    """Yield a small problem that is no model, for smoke runs."""
    random = np.random.default_rng(1)
    lower = random.integers(0, 100, 60)
    yield "no model", Problem(lower, lower + random.integers(1, 60, 60), random.integers(1, 1 << 20, 60))


# -- what is shown ----------------------------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    parts = [_hard_text(result["hard"])] if result["hard"] else []
    if not result["zoo"]:
        return "\n".join(parts)
    header = ("peak / live peak", "tensors", "live peak, MiB", "PyTorch's caching", *ZOO_PLANNERS, "improve, s")
    rows = [
        (
            name,
            str(row["tensors"]),
            f"{row['live_peak_bytes'] / 2**20:.0f}",
            f"{row['caching_ratio']:.4f}",
            *(_ratio(runs[0]) for runs in row["planners"].values()),
            _seconds(row["planners"]["improve"]),
        )
        for name, row in result["zoo"].items()
    ]
    parts.append(common.table(header, rows))
    parts.append(
        f"`improve` had {ZOO_S:g} s, {LARGE_S:g} s for more than {LARGE_TENSORS} tensors, and ends once it is at the "
        f"live peak. Slowest of the others: {_slowest(result['zoo']):.2f} s. Seconds are the median by the clock; all "
        f"plans judged {', '.join(sorted(_verdicts(result)))}.\n"
    )
    return "\n".join(parts)


def _hard_text(hard: dict[str, list[dict[str, Any]]]) -> str:
    rows = [(name, _answer(runs), _seconds(runs), f"{PEER_S[name]:.2f}") for name, runs in hard.items()]
    total = sum(common.spread(run["wall_s"] for run in runs)["median"] for runs in hard.values())
    rows.append(("all", "", f"{total:.2f}", f"{sum(PEER_S[name] for name in hard):.2f}"))
    return common.table(("minimalloc's instance into 2^20", "exact", "s", "minimalloc, s, published"), rows)


def _answer(runs: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({run.get("judged") or run["no_plan"] for run in runs}))


def _ratio(run: dict[str, Any]) -> str:
    return f"{run['ratio']:.4f}" if "ratio" in run else run["no_plan"]


def _seconds(runs: list[dict[str, Any]]) -> str:
    return f"{common.spread(run['wall_s'] for run in runs)['median']:.3f}"


def _runs(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in result["zoo"].values():
        for planner, runs in row["planners"].items():
            yield from ((planner, run) for run in runs)


def _slowest(zoo: dict[str, dict[str, Any]]) -> float:
    return max((run["wall_s"] for planner, run in _runs({"zoo": zoo}) if planner != "improve"), default=0.0)


def _verdicts(result: dict[str, Any]) -> set[str]:
    runs = [run for _, run in _runs(result)] + [run for runs in result["hard"].values() for run in runs]
    return {run["judged"] for run in runs if "judged" in run}


def options_of() -> argparse.Namespace:
    """Return what the command line says."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each planner on each problem")
    parser.add_argument("--instances", type=Path, default=INSTANCES, metavar="DIR", help="minimalloc's CSV files")
    parser.add_argument("--only", choices=("hard", "zoo"), help="one part")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = options_of()
    settings = {"repeat": options.repeat, "hard_s": HARD_S, "zoo_s": ZOO_S, "large_s": LARGE_S, "peer_s": PEER_S}
    result = common.document("planners", QUESTION, settings)
    result |= {"hard": {}, "zoo": {}}
    if options.smoke:
        result["zoo"] = measure_zoo(stand_in(), 1)
    else:
        from zoo import zoo_problems

        warm()
        if options.only != "zoo":
            result["hard"] = measure_hard(options.instances, HARD_S, options.repeat)
        if options.only != "hard":
            result["zoo"] = measure_zoo(itertools.chain(zoo_problems(), large_problem()), options.repeat)
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
