"""Which constants of the scheduler, of paging and of sweeps matter?

Each is changed in turn. Ratios are of throughputs, changed over unchanged. Deterministic.

* *right*: every eighth set of two and three jobs of ``few_jobs.py`` is simulated in 60, 70 and 80 %
  of the sum of its peaks, without guarantees and with .8 owed to the first job. ``lacks`` is what
  the first job is short of.
* *wrong*: random cases of ``greedy_comparison.py``, in which times vary, or profiles are wrong at
  first or for ever. ``lacks`` is what a job is short of its floor in the mean.
* *degree*: paging's degree is tuned by what each degree cost in ``paging.json``, exactly and with
  noise of 5 and 20 %.
* *sweep*, *ends*: jobs of one kind start where ``zico fit`` says that one more adds enough. The
  throughput is by the end of the last one, and by the mean of all ends.

::

    python benchmarks/search_constants.py -o benchmarks/results
    python benchmarks/search_constants.py -o benchmarks/results --only BETTER_BY --only RANK

Compiled code reads them from memory (``changeable.py``). With ``--only``, a result of the same
commit that is there is added to.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import statistics
from typing import TYPE_CHECKING, Any

import common
import few_jobs
import greedy_comparison
import numpy as np
from changeable import change, read_from_memory

from zico.cli import room
from zico.paging import tuning
from zico.paging.layout import DEGREE, PAGING, TUNE
from zico.pool import rules
from zico.scheduler import learning, plan, plan_search, shares
from zico.scheduler.fit import Answer, fit
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from zico.scheduler.simulate import Load

QUESTION = "Which constants of the scheduler, of paging and of sweeps matter?"
SHARES = (0.6, 0.7, 0.8)
EVERY = 8
WRONG = (
    greedy_comparison.Kind(2, 0.1, "first"),
    greedy_comparison.Kind(3, 0.1, "first"),
    greedy_comparison.Kind(4, 0.1, "right"),
    greedy_comparison.Kind(2, 0.2, "wrong"),
    greedy_comparison.Kind(3, 0.0, "wrong"),
)
CASES = 6
"""Of each kind."""
SEED = 3
NOISES = (0.0, 0.05, 0.2)
TUNED_ITERATIONS = 700
"""Ten rests of the tuning."""
BUDGETS = (1.25, 1.5, 2.0, 3.0)
"""Of a sweep, in peaks of its jobs."""
KINDS = 12
SWEPT = 16
"""Jobs of a sweep."""
MOST = 6
"""Of them at once."""
JOBS, DEGREES, SWEEPS = ("right", "wrong"), ("degree",), ("sweep", "ends")
CHANGES: tuple[tuple[ModuleType, str, tuple[str, ...], tuple[float, ...]], ...] = (
    (shares, "RANK", JOBS, (1.0, 3.0, 24.0)),
    (plan_search, "_UNFAIR", JOBS, (2.0, 30.0)),
    (rules, "FADE_ITERATIONS", JOBS, (8.0, 32.0)),
    (plan, "_PASSED_OVER", JOBS, (0, 1, 6)),
    (learning, "LOOK_ROUNDS", JOBS, (4, 16)),
    (learning, "BETTER_BY", JOBS, (0.0, 0.004, 0.016)),
    (tuning, "_TRIAL", DEGREES, (2, 8)),
    (room, "WORTH", SWEEPS, (0.0, 0.0625, 0.25, 0.5)),
)


NAMES = [name for _, name, _, _ in CHANGES]


# -- cases -----------------------------------------------------------------------------------------


def right() -> Iterator[tuple[float, float]]:
    """Yield the mean throughput of each case with right profiles, and what the first job is short of."""
    sets = [loads for group, loads in few_jobs.sets() if group[0] in "23"][::EVERY]
    for loads in sets:
        for share in SHARES:
            for owed in (0.0, few_jobs.OWED):
                floors = [owed, *[0.0] * (len(loads) - 1)]
                asked = [
                    dataclasses.replace(load, name=f"job{i}", arrive_ns=7 * i * greedy_comparison.MS, floor=floor)
                    for i, (load, floor) in enumerate(zip(loads, floors, strict=True))
                ]
                got = few_jobs.run(policy_named("zico"), asked, few_jobs.budget_of(loads, share))
                yield statistics.fmean(got), max(0.0, owed - got[0])


def wrong() -> Iterator[tuple[float, float]]:
    """Yield the same for cases that are not as profiles say; a job is short of its floor."""
    for kind in WRONG:
        for case in greedy_comparison.cases(SEED, CASES, kind):
            mean, lacking = case.got(policy_named("zico"))
            yield mean, lacking / len(case.jobs)


def degree() -> Iterator[tuple[float, float]]:
    """Yield iterations a second of each model whose degree is tuned, by what an iteration takes at a degree."""
    models = json.loads((common.RESULTS / "paging.json").read_text())["sweeps"]
    for name, noise in itertools.product(models, NOISES):
        costs = models[name]["furthest"]
        rng = random.Random(SEED)  # noqa: S311 - noise
        paging = np.zeros(1, PAGING).view(np.recarray)[0]
        paging["flags"], paging["degree"] = TUNE, DEGREE
        took_ns = 0
        for _ in range(TUNED_ITERATIONS):
            cost = costs[str(paging["degree"])]
            more_ns = round(noise * rng.uniform(-1, 1) * cost["lost_ns"])
            took_ns += cost["time_ns"]
            tuning.note_lost(paging, cost["lost_ns"] + more_ns)
            tuning.note_iteration(paging, cost["time_ns"] + more_ns)
        yield TUNED_ITERATIONS / (took_ns * 1e-9), 0.0


@functools.cache
def _together() -> list[list[float]]:
    """Return for each kind of job and budget what 0, 1, 2, ... jobs do together, until they fit no more."""
    rng = np.random.default_rng(SEED)
    found: list[list[float]] = []
    for _ in range(KINDS):
        load = greedy_comparison.random_job(rng, greedy_comparison.MS, greedy_comparison.Kind(1)).load(0)
        found += [[0.0, *_common_throughputs(load, int(budget * load.profile.peak))] for budget in BUDGETS]
    return found


def _common_throughputs(load: Load, budget: int) -> Iterator[float]:
    for n in range(1, MOST + 1):
        answer = fit([dataclasses.replace(load, name=str(i)) for i in range(n)], budget, policy_named("zico"), 1)
        if answer.answer is Answer.NO:
            return
        yield sum(job.normalised for job in answer.jobs)


def _ends(common_throughput: Sequence[float]) -> list[float]:
    """Return when the jobs of a sweep end that take 1 alone, more or less."""
    rng = random.Random(SEED)  # noqa: S311 - lengths
    waiting = [rng.uniform(0.5, 1.5) for _ in range(SWEPT)]
    running: list[float] = []
    ends, now = [], 0.0
    while waiting or running:
        n = len(running)
        pays = n + 1 < len(common_throughput) and common_throughput[n + 1] >= common_throughput[n] + room.WORTH
        if waiting and (not running or pays):
            running.append(waiting.pop())
            continue
        least = min(running)
        now += least * n / common_throughput[n]
        ends += [now] * running.count(least)
        running = [left - least for left in running if left > least]
    return ends


def sweep() -> Iterator[tuple[float, float]]:
    """Yield jobs over the time until the last of a sweep has ended."""
    return ((SWEPT / max(_ends(each)), 0.0) for each in _together())


def ends() -> Iterator[tuple[float, float]]:
    """Yield one over the mean of the times until a job of a sweep has ended."""
    return ((1 / statistics.fmean(_ends(each)), 0.0) for each in _together())


GRIDS = {"right": right, "wrong": wrong, "degree": degree, "sweep": sweep, "ends": ends}


def compared(grid: str, before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return what a change comes to, and the figures of each case after it."""
    ratios = [b / a for (a, _), (b, _) in zip(before, after, strict=True)]
    return {
        "cases": grid,
        "ratio": {"mean": statistics.fmean(ratios), "least": min(ratios), "most": max(ratios)},
        "other": sum(ratio != 1 for ratio in ratios),
        "lacks": {"mean": statistics.fmean(lacks for _, lacks in after), "most": max(lacks for _, lacks in after)},
        "means": [mean for mean, _ in after],
        "lacks_each": [lacks for _, lacks in after],
    }


def text_of(changes: Sequence[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    rows = [
        (
            f"{one['constant']} {one['from']:g} -> {one['to']:g}" if one["constant"] else "unchanged",
            one["cases"],
            *(f"{one['ratio'][name]:.4f}" for name in ("mean", "least", "most")),
            f"{one['other']} of {len(one['means'])}",
            *(f"{one['lacks'][name]:.4f}" for name in ("mean", "most")),
        )
        for one in changes
    ]
    return common.table(
        ("constant", "cases", "ratio, mean", "least", "most", "other", "lacks, mean", "most"),
        rows,
    )


def main() -> None:
    """Simulate, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, help="change this one; may be repeated")
    parser.add_argument("--name", default="search_constants", help="of the result")
    options = parser.parse_args()
    settings = {"shares": SHARES, "every": EVERY, "wrong": [str(kind) for kind in WRONG], "cases": CASES, "seed": SEED}
    result = common.document(options.name, QUESTION, settings)
    read_from_memory([(module, name) for module, name, _, _ in CHANGES], cache="scheduler")
    directory = common.output_directory(options)
    changes = _before(result, directory) if options.only else []
    result["changes"] = changes
    chosen = [one for one in CHANGES if not options.only or one[1] in options.only]
    for grid in GRIDS:
        here = [(module, name, values) for module, name, grids, values in chosen if grid in grids]
        known = [one for one in changes if (one["cases"], one["constant"]) == (grid, "")]
        if here and not known:
            before = _simulated(grid, smoke=options.smoke)
            known = [{"constant": "", "from": 0, "to": 0} | compared(grid, before, before)]
            changes += known
        for module, name, values in here:
            before = list(zip(known[0]["means"], known[0]["lacks_each"], strict=True))
            was = getattr(module, name)
            for value in values[: 1 if options.smoke else None]:
                change(module, name, value)
                after = _simulated(grid, smoke=options.smoke)
                changes.append({"constant": name, "from": was, "to": value} | compared(grid, before, after))
                common.note(f"{grid}: {name} {was} -> {value}: {changes[-1]['ratio']['mean']:.4f}")
            change(module, name, was)
    changes.sort(key=lambda one: ["", *NAMES].index(one["constant"]))
    common.write(result, text_of(changes), directory)


def _simulated(grid: str, *, smoke: bool) -> list[tuple[float, float]]:
    return list(itertools.islice(GRIDS[grid](), 1 if smoke else None))


def _before(result: dict[str, Any], directory: Path | None) -> list[dict[str, Any]]:
    """Return the changes of a result of the same commit that is there."""
    path = (directory or common.BUILT) / f"{result['name']}.json"
    if not path.exists():
        return []
    there = json.loads(path.read_text())
    changes: list[dict[str, Any]] = there["changes"] if there["commit"] == result["commit"] else []
    return changes


if __name__ == "__main__":
    main()
