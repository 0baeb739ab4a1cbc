"""What do two, three and four jobs get under ``zico``, and does a job get what it is owed?

Sets of jobs share 50 to 90 % of the sum of their peaks in the simulator, once without guarantees
and once with .8 owed to the first. The sets are all of two to four of the curves that
``agreement.py`` observed, and random ones of ``greedy_comparison.py``. ``lacks`` is what the first
job is short of; what it is owed counts as met if that is below ``MET``. ``serial`` runs one
iteration at a time, ``greedy`` is ``zico`` without a plan. ``plan_s`` is what the last plan took of
a processor, so it varies with the machine. All else is deterministic::

    python benchmarks/few_jobs.py --name few_jobs -o benchmarks/results
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from agreement import load_of
from greedy_comparison import MS, Kind, random_job

from zico.scheduler.packed import Compiled
from zico.scheduler.plan import decide
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, Simulation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zico.scheduler.state import CompiledPolicy, PoolView
    from zico.scheduler.state import Plan as PolicyPlan

QUESTION = "What do two, three and four jobs get under zico, and does a job get what it is owed?"
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
JOBS = (2, 3, 4)
OWED = 0.8
MET = 0.01
WARM_UP, ITERATIONS = 60, 200
"""Of the longest job."""
RANDOM = 24
"""Sets of each size."""
SEED = 3
EVENTS_SHIFT = 4


def curves() -> dict[str, Load]:
    """Return the jobs whose curves were observed."""
    observed = json.loads((common.RESULTS / "agreement.json").read_text())["pairs"]
    jobs = [job for pair in observed.values() for job in pair["jobs"][::-1]]
    return {job["name"]: dataclasses.replace(load_of(job, EVENTS_SHIFT), jitter=0.0) for job in jobs}


def sets() -> Iterator[tuple[str, list[Load]]]:
    """Yield sets of jobs with the names of their groups."""
    known = [load for name, load in sorted(curves().items()) if name in {"resnet", "lm", "wide-resnet"}]
    for n in JOBS:
        for some in itertools.combinations_with_replacement(known, n):
            yield f"{n} observed", list(some)
        rng = np.random.default_rng([SEED, n])
        for number in range(RANDOM):
            steps_ns = rng.choice([MS // 2, MS, 2 * MS, 4 * MS], n) if number % 2 else [2 * MS] * n
            yield f"{n} random", [random_job(rng, int(step_ns), Kind(n)).load(0) for step_ns in steps_ns]


def budget_of(loads: Sequence[Load], share: float) -> int:
    """Return a share of the sum of the peaks, at least what lets each job end."""
    kept = sum(load.persistent for load in loads)
    least = max(load.profile.peak - load.persistent + kept for load in loads)
    return max(least, int(share * sum(load.profile.peak for load in loads)))


@dataclasses.dataclass
class Clock:
    """What plans take of a processor."""

    last_s: float = 0.0

    def plan(self, view: PoolView) -> PolicyPlan | None:
        """Plan as ``zico`` does."""
        planner = policy_named("zico").plan
        assert planner is not None  # noqa: S101 - it plans
        since = time.process_time()
        made = planner(view)
        self.last_s = time.process_time() - since
        return made


def run(policy: CompiledPolicy, loads: Sequence[Load], budget: int) -> tuple[float, ...]:
    """Return what each job gets of its throughput alone."""
    longest_ns = max(load.profile.duration_ns for load in loads)
    return Simulation(policy, loads, budget).run((WARM_UP + ITERATIONS) * longest_ns, WARM_UP * longest_ns).normalised


def judged(group: str, loads: Sequence[Load], share: float, owed: float) -> dict[str, Any]:
    """Return the figures of one case."""
    budget, clock = budget_of(loads, share), Clock()
    loads = [
        dataclasses.replace(load, name=f"job{i}", arrive_ns=7 * i * MS, floor=0.0 if i else owed)
        for i, load in enumerate(loads)
    ]
    policies = {
        "zico": Compiled("zico", decide, plan=clock.plan),
        "greedy": Compiled("greedy", decide),
        "serial": policy_named("serial"),
    }
    got = {name: run(policy, loads, budget) for name, policy in policies.items()}
    means = {name: statistics.fmean(each) for name, each in got.items()}
    lacks = max(0.0, owed - got["zico"][0])
    return {"group": group, "share": share, "owed": owed, "means": means, "got": got["zico"], "lacks": lacks} | {
        "least": min(got["zico"]),
        "plan_s": clock.last_s,
    }


def text_of(cases: Sequence[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for group, owed in dict.fromkeys((case["group"], case["owed"]) for case in cases):
        some = [case for case in cases if (case["group"], case["owed"]) == (group, owed)]
        median = functools.partial(_median, some)
        rows.append(
            (
                f"{group}, {owed:g} owed" if owed else group,
                str(len(some)),
                f"{statistics.fmean(case['means']['zico'] for case in some):.4f}",
                f"{median('serial'):.3f}",
                f"{median('greedy'):.3f}",
                f"{sum(case['lacks'] < MET for case in some)}" if owed else "",
                f"{statistics.fmean(case['lacks'] for case in some):.3f}" if owed else "",
                f"{statistics.median(case['plan_s'] for case in some):.2f}",
            )
        )
    header = ("sets", "n", "zico", "over serial", "over greedy", "met", "lacks, mean", "plan, s of a processor")
    return common.table(header, rows)


def _median(cases: Sequence[dict[str, Any]], other: str) -> float:
    return statistics.median(case["means"]["zico"] / max(case["means"][other], 1e-9) for case in cases)


def main() -> None:
    """Simulate, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--name", default="few_jobs", help="of the result")
    options = parser.parse_args()
    result = common.document(options.name, QUESTION, {"shares": SHARES, "owed": OWED, "seed": SEED, "sets": RANDOM})
    some = list(sets())[:: 20 if options.smoke else 1]
    shares = SHARES[2:3] if options.smoke else SHARES
    result["cases"] = []
    for number, (group, loads) in enumerate(some):
        result["cases"] += [judged(group, loads, share, owed) for share in shares for owed in (0.0, OWED)]
        common.note(f"{number + 1} of {len(some)}")
    common.write(result, text_of(result["cases"]), common.output_directory(options))


if __name__ == "__main__":
    main()
