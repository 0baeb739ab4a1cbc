"""Is ``zico`` ever behind the best greedy policy that is as fair, or behind what is possible at all?

Random jobs of several shapes are simulated. Each case runs under ``zico`` and under the greedy
policies: the published ``shift``, ``claims``, and ``unplanned``, which is ``zico`` without a plan.
Pairs are also compared with the bound. A greedy policy that leaves jobs further below their floors
(``zico.scheduler.shares``) than ``zico`` does is not better: throughput that comes of starving a
job does not count. The script prints the worst ratios of every group::

    python benchmarks/greedy_comparison.py --cases 50 --json worst.json

``--json`` writes the worst cases, to be kept as tests. ``-o DIR --name NAME`` writes every case's
figures as a result. Many jobs in little memory, as in ``results/greedy_comparison-many.md``::

    python benchmarks/greedy_comparison.py --jobs 6,8,10,12 --shares 0.3,0.5 --jitter 0 \
        --profiles right --shapes triangle
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np

from zico.base.errors import ProblemError
from zico.lab.simulator import oracle
from zico.scheduler.packed import Compiled
from zico.scheduler.plan import decide
from zico.scheduler.policies import policy_named
from zico.scheduler.shares import floors
from zico.scheduler.simulate import Load, Simulation
from zico.scheduler.state import Profile
from zico.trace.profile import CURVE, merge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.scheduler.state import CompiledPolicy

    Floats = np.ndarray[Any, np.dtype[np.float64]]

QUESTION = "Is zico ever behind the best greedy policy that is as fair?"
MS = 1_000_000
EVENTS_SHIFT = 4
WARM_UP = 60
ITERATIONS = 200
"""Of the longest job, after the warm-up."""
SEEDS = 2
MENDED = 16
"""Iterations after which a profile is what its job does, whatever was believed at first."""
STEPS = (60, 251)
SHARES = (0.5, 0.95)
"""Of the sum of the peaks, that the budget is."""
FEW_STEPS = {3: (12, 41), 4: (8, 21)}
"""With three or four jobs of so few, of equal length, the oracle looks at every step: its figure is exact."""
WRONG = 0.15
PROFILES = {"right": "right", "first": f"{WRONG:.0%} wrong at first", "wrong": f"{WRONG:.0%} wrong for ever"}
"""What the scheduler is told. In size and time each may be wrong by up to that."""
POLICIES: dict[str, CompiledPolicy] = {
    "zico": policy_named("zico"),
    "unplanned": Compiled("unplanned", decide),  # what ``zico`` does without a plan: every iteration is reserved
    "shift": policy_named("shift"),  # as published: nothing is reserved
    "claims": policy_named("claims"),
}


GREEDY = ("unplanned", "shift", "claims")
BOUND = 0.98
_UNFAIR = 0.01


@dataclasses.dataclass(frozen=True)
class Job:
    """What one job holds in the equal steps of its iteration."""

    shape: str
    levels: tuple[int, ...]
    step_ns: int
    jitter: float = 0.0
    believed: tuple[int, ...] | None = None
    believed_step_ns: int = 0
    mends: bool = False
    """What is believed follows what the job does, by the rule by which recorded iterations are folded in."""

    @property
    def duration_ns(self) -> int:
        """Return the length of an iteration."""
        return self.step_ns * len(self.levels)

    def load(self, number: int) -> Load:
        """Return the job as the simulator takes it."""
        true = _profile(self.levels, self.step_ns)
        believed = None if self.believed is None else _profile(self.believed, self.believed_step_ns)
        later = mended(believed, true) if believed is not None and self.mends else ()
        name = f"{self.shape} {number}"
        return Load(name, true, self.levels[-1], believed, self.jitter, arrive_ns=number * 7 * MS, later=later)


@dataclasses.dataclass(frozen=True)
class Case:
    """Jobs and a budget."""

    group: str
    jobs: tuple[Job, ...]
    budget: int

    def got(self, policy: CompiledPolicy) -> tuple[float, float]:
        """Return the jobs' mean throughput over alone's under a policy, and what they lack of their floors."""
        longest_ns = max(job.duration_ns for job in self.jobs)
        until_ns, warm_up_ns = (WARM_UP + ITERATIONS) * longest_ns, WARM_UP * longest_ns
        loads = [job.load(number) for number, job in enumerate(self.jobs)]
        seeds = range(SEEDS if any(job.jitter for job in self.jobs) else 1)
        runs = [Simulation(policy, loads, self.budget, seed).run(until_ns, warm_up_ns).normalised for seed in seeds]
        each = np.mean(runs, axis=0)
        return float(each.mean()), float(np.maximum(0.0, np.array(floors(loads)) - each).sum())

    def possible(self) -> float:
        """Return what no scheduler exceeds, for a pair or few steps; else 0."""
        if len(self.jobs) != 2 and math.prod(len(job.levels) for job in self.jobs) > oracle.MOST_NODES:
            return 0.0
        try:
            best = oracle.possible([job.load(0) for job in self.jobs], self.budget)
        except ProblemError:  # iterations too unequal
            return 0.0
        return best.mean if best else 0.0


def _profile(levels: Sequence[int], step_ns: int) -> Profile:
    n = len(levels)
    return Profile(tuple(levels), tuple(i * step_ns for i in range(n)), n * step_ns, EVENTS_SHIFT, n << EVENTS_SHIFT)


def _recorded(profile: Profile) -> Any:  # noqa: ANN401 - a CURVE record
    curve = np.zeros(1, CURVE)[0]
    n = len(profile.held)
    curve["shift"], curve["n_bins"], curve["n_events"] = profile.shift, n, profile.n_events
    curve["duration_ns"], curve["held"][:n], curve["t_ns"][:n] = profile.duration_ns, profile.held, profile.t_ns
    return curve


def mended(believed: Profile, true: Profile) -> tuple[tuple[int, Profile], ...]:
    """Return what is believed after each iteration from the second on, until that changes no more."""
    folded = _recorded(believed)
    later: list[tuple[int, Profile]] = []
    for done in range(2, 2 + MENDED):
        merge(folded, _recorded(true))
        n = int(folded["n_bins"])
        held, t_ns = (tuple(folded[name][:n].tolist()) for name in ("held", "t_ns"))
        mended = Profile(held, t_ns, int(folded["duration_ns"]), int(folded["shift"]), int(folded["n_events"]))
        if later and mended == later[-1][1]:
            break
        later.append((done, mended))
    return tuple(later)


# -- shapes: shares of the peak over time from 0 to 1 ----------------------------------------------


def _ramps(rise: float, fall: float) -> Callable[[Floats], Floats]:
    return lambda t: np.minimum(1.0, np.minimum(t / rise, (1 - t) / fall))


def _rnn(rng: np.random.Generator) -> Callable[[Floats], Floats]:
    teeth, depth = rng.integers(2, 7), rng.uniform(0.1, 0.5)
    return lambda t: np.minimum(t / 0.45, (1 - t) / 0.45).clip(0, 1) * (1 - depth * (teeth * t % 1.0))


def _spike(rng: np.random.Generator) -> Callable[[Floats], Floats]:
    at, width, low = rng.uniform(0.1, 0.9), rng.uniform(0.04, 0.2), rng.uniform(0.15, 0.5)
    return lambda t: np.where(np.abs(t - at) < width, 1.0, low)


def _levels(rng: np.random.Generator) -> Callable[[Floats], Floats]:
    n = int(rng.integers(3, 12))
    cuts, values = np.sort(rng.uniform(0, 1, n - 1)), rng.uniform(0.1, 1.0, n)
    return lambda t: values[np.searchsorted(cuts, t)]


def _cnn(rng: np.random.Generator) -> Callable[[Floats], Floats]:
    forward, power = rng.uniform(0.3, 0.45), rng.uniform(0.4, 1.0)
    return lambda t: np.minimum((t / forward) ** power, (1 - t) / (1 - forward)).clip(0, 1)


def _real(rng: np.random.Generator) -> Callable[[Floats], Floats]:
    smooth, noise = _cnn(rng), rng.uniform(0, 0.15, 256)
    return lambda t: (smooth(t) + noise[(t * 255).astype(int)]).clip(0, 1)


def _triangle(_rng: np.random.Generator) -> Callable[[Floats], Floats]:
    return _ramps(0.5, 0.5)


def _late(rng: np.random.Generator) -> Callable[[Floats], Floats]:
    return _ramps(rng.uniform(0.7, 0.95), 0.05)


def _plateau(rng: np.random.Generator) -> Callable[[Floats], Floats]:
    return _ramps(rng.uniform(0.05, 0.4), rng.uniform(0.05, 0.4))


SHAPES = {
    "triangle": _triangle,
    "late": _late,
    "plateau": _plateau,
    "rnn": _rnn,
    "spike": _spike,
    "levels": _levels,
    "cnn": _cnn,
    "real": _real,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of what kind random cases are."""

    n_jobs: int
    jitter: float = 0.0
    profiles: str = "right"
    few_steps: bool = False
    shapes: tuple[str, ...] = tuple(SHAPES)
    shares: tuple[float, float] = SHARES

    @property
    def wrong(self) -> float:
        """Return by up to what share profiles are wrong."""
        return 0.0 if self.profiles == "right" else WRONG

    def __str__(self) -> str:
        """Return what the group is called."""
        told = [f"{self.n_jobs} jobs", f"jitter {self.jitter:.0%}", f"profiles {PROFILES[self.profiles]}"]
        told += [f"budgets {self.shares[0]:.0%} to {self.shares[1]:.0%}"] if self.shares != SHARES else []
        told += ["/".join(self.shapes)] if self.shapes != tuple(SHAPES) else []
        return ", ".join(told)


def random_job(rng: np.random.Generator, step_ns: int, kind: Kind) -> Job:
    """Return a job of random shape, size and length, whose profile is wrong by up to such a share."""
    shape = str(rng.choice(list(kind.shapes)))
    steps = FEW_STEPS.get(kind.n_jobs, STEPS) if kind.few_steps else STEPS
    n, peak, kept = int(rng.integers(*steps)), int(rng.integers(30, 121)), rng.uniform(0.0, 0.3)
    share = SHAPES[shape](rng)((np.arange(n) + 0.5) / n)
    keeps = round(peak * kept)
    levels = (*(int(x) for x in np.round(keeps + (peak - keeps) * share)[:-1]), keeps)
    job = Job(shape, levels, step_ns, kind.jitter)
    if kind.wrong == 0:
        return job
    scale, slower = rng.uniform(1 - kind.wrong, 1 + kind.wrong, 2)
    believed = (*(max(keeps, round(x * scale)) for x in levels[:-1]), keeps)
    return dataclasses.replace(
        job, believed=believed, believed_step_ns=round(step_ns * slower), mends=kind.profiles == "first"
    )


def cases(seed: int, n_cases: int, kind: Kind) -> Iterator[Case]:
    """Yield random cases: equal and unequal lengths, jobs of one kind and of several."""
    n_jobs = kind.n_jobs
    rng = np.random.default_rng([seed, n_jobs, round(kind.jitter * 100), round(kind.wrong * 100)])
    for number in range(n_cases):
        unequal = number % 2 and not kind.few_steps
        steps_ns = rng.choice([MS // 2, MS, 2 * MS, 4 * MS], n_jobs) if unequal else [2 * MS] * n_jobs
        jobs = [random_job(rng, int(step_ns), kind) for step_ns in steps_ns]
        if number % 5 == 4:
            jobs = jobs[:1] * n_jobs
        sum_of_peaks = sum(max(job.levels) for job in jobs)
        kept = sum(job.levels[-1] for job in jobs)
        most = [max(*job.levels, *(job.believed or ())) for job in jobs]
        least = max(peak - job.levels[-1] + kept for peak, job in zip(most, jobs, strict=True))
        yield Case(str(kind), tuple(jobs), max(least, int(rng.uniform(*kind.shares) * sum_of_peaks)))


# -- the hunt --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    """One case and what became of it."""

    case: Case
    means: dict[str, float]
    possible: float
    lacking: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def over_greedy(self) -> float:
        """Return ``zico`` over the best of the greedy policies that are as fair."""
        most = self.lacking.get("zico", 0.0) + _UNFAIR
        fair = [self.means[name] for name in GREEDY if self.lacking.get(name, 0.0) <= most]
        return self.means["zico"] / max(fair, default=self.means["zico"])

    @property
    def reached(self) -> float:
        """Return ``zico`` over the bound; 1 where none is known."""
        return self.means["zico"] / self.possible if self.possible else 1.0


def judge(case: Case) -> Found:
    """Simulate a case under all policies."""
    got = {name: case.got(policy) for name, policy in POLICIES.items()}
    means, lacking = ({name: each[i] for name, each in got.items()} for i in range(2))
    return Found(case, means, case.possible(), lacking)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of one group of cases."""

    means: dict[str, float]
    over_greedy: dict[str, float]
    """``zico`` over the best greedy policy that is as fair: mean, least and second least."""
    below: int
    """In so many cases that is below ``BOUND``."""
    unfair: int
    """In so many more cases ``zico`` is behind a greedy policy that is less fair."""

    @classmethod
    def of(cls, found: Sequence[Found]) -> Summary:
        """Return the figures of a group."""
        overs = sorted(one.over_greedy for one in found)
        below = sum(over_greedy < BOUND for over_greedy in overs)
        behind = sum(one.means["zico"] < BOUND * max(one.means[name] for name in GREEDY) for one in found)
        least = {"mean": float(np.mean(overs)), "worst": overs[0], "second": overs[min(1, len(overs) - 1)]}
        means = {name: float(np.mean([one.means[name] for one in found])) for name in POLICIES}
        return cls(means, least, below, behind - below)


def report(found: Sequence[Found]) -> str:
    """Return a row of figures of one group."""
    of = Summary.of(found)
    row = " ".join(f"{name} {mean:.4f}" for name, mean in of.means.items())
    reached = [one.reached for one in found if one.possible]
    most = np.mean([one.possible for one in found])
    against = f"; bound {most:.4f}, of it {np.mean(reached):.3f}, worst {min(reached):.3f}" if reached else ""
    ratios = " ".join(f"{name} {ratio:.3f}" for name, ratio in of.over_greedy.items())
    worst = f"of the best greedy: {ratios}, {of.below} below {BOUND}, {of.unfair} behind the unfair"
    return f"{found[0].case.group}: {row}; {worst}{against}"


def text_of(groups: Sequence[Sequence[Found]]) -> str:
    """Return the figures of all groups as Markdown."""
    header = ("cases", "n", *POLICIES, "ratio, mean", "worst", f"below {BOUND}", "behind the unfair")
    rows = []
    for found in groups:
        of = Summary.of(found)
        figures = [f"{mean:.4f}" for mean in of.means.values()] + [
            f"{of.over_greedy[name]:.3f}" for name in ("mean", "worst")
        ]
        rows.append((found[0].case.group, str(len(found)), *figures, str(of.below), str(of.unfair)))
    return common.table(header, rows)


def figures_of(one: Found) -> dict[str, Any]:
    """Return the figures of a case, for a file."""
    figures = {"over_greedy": one.over_greedy, "reached": one.reached, "possible": one.possible, "means": one.means}
    return {"group": one.case.group, **figures, "lacking": one.lacking}


def as_json(one: Found) -> dict[str, Any]:
    """Return a case and its figures, for a file."""
    return figures_of(one) | {"case": dataclasses.asdict(one.case)}


def main() -> None:
    """Hunt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="of each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", default="2,3,4,8")
    parser.add_argument("--jitter", default="0,0.1,0.2")
    parser.add_argument("--profiles", default=",".join(PROFILES), help=str(PROFILES))
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of the sum of peaks, least and most")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--few-steps", action="store_true", help="so that what is possible is known for 3 and 4 jobs")
    parser.add_argument("--json", type=Path, help="where to write the worst cases")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write the figures of every case here")
    parser.add_argument("--name", default="greedy_comparison", help="of the result")
    arguments = parser.parse_args()
    told = {"jobs", "jitter", "profiles", "cases", "seed", "shares", "shapes", "few_steps"}
    result = common.document(arguments.name, QUESTION, {name: getattr(arguments, name) for name in sorted(told)})
    groups = [text.split(",") for text in (arguments.jobs, arguments.jitter, arguments.profiles)]
    low, high = (float(share) for share in arguments.shares.split(","))
    shapes = tuple(arguments.shapes.split(","))
    everything: list[list[Found]] = []
    for n_jobs, jitter, profiles in itertools.product(*groups):
        since = time.monotonic()
        kind = Kind(int(n_jobs), float(jitter), profiles, arguments.few_steps, shapes, (low, high))
        found = [judge(case) for case in cases(arguments.seed, arguments.cases, kind)]
        everything.append(found)
        sys.stdout.write(f"{report(found)} ({time.monotonic() - since:.0f} s)\n")
        sys.stdout.flush()
        if arguments.json:
            each = itertools.chain.from_iterable(everything)
            worst = sorted(each, key=lambda one: min(one.over_greedy / BOUND, one.reached / 0.95))[:20]
            arguments.json.write_text(json.dumps([as_json(one) for one in worst]))
    result["cases"] = [figures_of(one) for found in everything for one in found]
    if arguments.output:
        common.write(result, text_of(everything), arguments.output)


if __name__ == "__main__":
    main()
