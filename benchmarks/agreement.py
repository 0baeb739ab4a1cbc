"""Does the simulator say what really happens, and how near does that come to what is possible?

A machine's speed drifts by a third within minutes, so nothing is compared across runs that could be
compared within one. A pair trains under each policy in one run whose budget goes round: more than
the sum of peaks, then each share of it, and again (``live.py``). A share's throughput is the mean
over jobs of iterations per second over the same job's without a limit, the mean of just before and
just after. ``shift`` goes one by one for a while after a wrong prediction, whatever the budget is
by then: its base is its own first stretch. ``serial`` always does: it has a run in the lowest
share, over the last stretch without a limit of the run of ``zico`` before it.

Then the same is simulated, from what the jobs show without a limit: profiles (each alone), lengths
of iterations, how much those vary, and the *slowdown*, by what factor each is slower beside the
other although memory is no concern, which plain processes show, both at work and one stopped in
turn. *Possible* is the oracle's throughput, over the same base.

Neighbours of the machine take its processors away for moments (*stolen*), which makes iterations of
equal work twice as long now and then. So pairs come in other forms as well (``--form paced``): jobs
that hold what the trained ones held, and when, and wait where those computed (``paced_job.py``),
with iterations that are all alike and with such as vary by up to a tenth. In these the machine has
no part.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import live
import numpy as np
import together
from agreement_text import LOW_SHARE, TWINS, TWINS_SHARE, UNEQUAL_SHARE, again_text, are_twins, text_of
from together import Job

from zico.broker.protocol.messages import WaitKind
from zico.lab.simulator.oracle import possible
from zico.report.files import JSON_NAME
from zico.scheduler.curves import profile_of
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, Simulation
from zico.scheduler.state import Profile

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from zico.report.model import Record


QUESTION = "Does the simulator say what really happens, and how near does that come to what is possible?"
NAMES = {"trained": "agreement", "paced": "agreement-paced"}
POLICIES = ("zico", "shift", "serial")
SERIAL = "serial"
SERIAL_FACTOR = 3
"""Its only stretch lasts so much longer."""
NO_BUDGET = "none"
UNLIMITED = 120
"""Per cent of the sum of peaks: nobody ever waits."""
ITERATIONS = 60
"""Of the longest job, simulated after the warm-up."""
_UNIFORM = math.sqrt(3)  # half the width of a uniform distribution over its standard deviation
_FEWEST = 4  # iterations, of which the spread says something

# The examples at a third of their batch, so that a stretch holds a dozen iterations on a slow
# machine, too.
RESNET = Job("resnet", "examples/digits_resnet.py", ("--batch", "128"))
LM = Job("lm", "examples/stdlib_lm.py", ("--batch", "7"))
WIDE = Job("wide-resnet", "examples/digits_resnet.py", ("--depth", "56", "--width", "16", "--batch", "112"))
"""Nearly as large, and longer: so that three fifths of the sum of peaks hold the larger of any two."""
DEEP = Job("deep-resnet", "examples/digits_resnet.py", ("--depth", "74", "--width", "12", "--batch", "104"))
SHORT = Job("short-lm", "examples/stdlib_lm.py", ("--layers", "6", "--context", "144", "--batch", "16"))
"""These two no other benchmark runs, and no constant was chosen by them."""
TINY = Job("tiny", "examples/digits_resnet.py", ("--depth", "20", "--batch", "256"))
HELD_OUT = {
    "deep+short": (DEEP, SHORT),
    "deep+deep": (DEEP, dataclasses.replace(DEEP, name="deep-resnet-2", arguments=(*DEEP.arguments, "--seed", "2"))),
    "deep+lm": (DEEP, LM),
    "resnet+short": (RESNET, SHORT),
}
"""Measured only if asked for by name."""
REGION = "1MiB"
PACED = {", paced": 0.0, ", paced, varied by 10 %": 0.1}
"""Forms of a pair whose jobs only wait, each with its jitter."""


def pairs(*, smoke: bool) -> dict[str, tuple[Job, ...]]:
    """Return the pairs to measure; a smoke run's is tiny."""
    if smoke:
        return {
            "tiny+tiny": (TINY, dataclasses.replace(TINY, name="tiny-2", arguments=(*TINY.arguments, "--seed", "2")))
        }
    return {
        TWINS: (RESNET, dataclasses.replace(RESNET, name="resnet-2", arguments=(*RESNET.arguments, "--seed", "2"))),
        "resnet+lm": (RESNET, LM),
        "resnet+wide": (RESNET, WIDE),
        "lm+wide": (LM, WIDE),
        **HELD_OUT,
    }


def paced(
    jobs: Sequence[Job], known: dict[Job, Alone], jitter: float, directory: Path, *, same: bool
) -> tuple[Job, ...]:
    """Return jobs that hold what those hold, and wait where those compute; they are described in ``directory``.

    Twins are what the first of them showed: alone one after the other, they do not show the same.
    """
    copies = []
    for seed, job in enumerate(jobs, 1):
        load = known[jobs[0] if same else job].load
        t_s = [t_ns / 1e9 for t_ns in load.profile.t_ns]
        curve = list(zip(t_s, load.profile.held, strict=True))
        path = directory / f"{job.name}-{jitter:g}.json"
        content = {"curve": curve, "iteration_s": load.profile.duration_ns / 1e9, "persistent": load.persistent}
        path.write_text(json.dumps(content | {"region_bytes": known[job].region_bytes, "jitter": jitter}))
        copies.append(Job(job.name, "benchmarks/paced_job.py", (str(path), "--seed", str(seed))))
    return tuple(copies)


# -- real runs -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Alone:
    """What a run of one job by itself tells of what it holds."""

    load: Load
    region_bytes: int


def alone(job: Job, options: Namespace) -> Alone:
    """Run one job by itself and return its profile."""
    record, report = run([job], "zico", [NO_BUDGET], options.alone_seconds, options)
    region_bytes = report["pool"]["region_bytes"]
    t_s, held_bytes = record.curve_of(0)
    t_ns = np.append(np.rint(t_s * 1e9), round(record.iteration_s[0] * 1e9)).astype(np.int64)
    kept = int(record.persistent_bytes[0]) // region_bytes
    return Alone(Load(job.name, profile_of(held_bytes // region_bytes, t_ns), kept), region_bytes)


def run(
    jobs: Sequence[Job], policy: str, budgets: Sequence[str], seconds: float, options: Namespace
) -> tuple[Record, dict[str, Any]]:
    """Run jobs through budgets; return the record and the report."""
    with tempfile.TemporaryDirectory(prefix="zico-bench-") as directory:
        run = live.LiveRun(jobs, budgets, seconds, options.warm_up, policy, REGION)
        record = run.record_to(Path(directory))
        return record, json.loads((Path(directory) / JSON_NAME).read_text()) | {"stolen": run.stolen}


def stretches(
    record: Record, jobs: Sequence[Job], shares: Sequence[int], stolen: Sequence[float], options: Namespace
) -> list[dict[str, Any]]:
    """Return what each job did under each budget in turn, the first moments of each left out."""
    began_s = max(float(record.boundaries_of(job)[options.warm_up - 1]) for job in range(len(record.names)))
    begins_s = [began_s, *record.budget_t_s[1:].tolist()]
    ends_s = [*begins_s[1:], min(float(record.boundaries_of(job)[-1]) for job in range(len(record.names)))]
    return [
        {"share": share, "stolen": taken, **_stretch(record, jobs, begin_s + options.settle, end_s)}
        for share, taken, begin_s, end_s in zip(shares, stolen, begins_s, ends_s, strict=True)
    ]


def _stretch(record: Record, jobs: Sequence[Job], begin_s: float, end_s: float) -> dict[str, Any]:
    numbers = [record.names.index(job.name) for job in jobs]  # whoever joined first is the record's first
    ends = [record.boundaries_of(number) for number in numbers]
    inside = (record.t_s >= begin_s) & (record.t_s < end_s)
    waited_s = {
        kind.name.lower(): [_waited_s(record.waits_of(number, kind), begin_s, end_s) for number in numbers]
        for kind in (WaitKind.BOUNDARY, WaitKind.ALLOCATION)
    }
    counts = [together.count_at(of, end_s) - together.count_at(of, begin_s) for of in ends]  # type: ignore[arg-type]
    return {
        "rates": [count / (end_s - begin_s) for count in counts],
        "lengths_s": [np.diff(of[(of >= begin_s) & (of < end_s)]).tolist() for of in ends],
        "waited": {kind: [each / (end_s - begin_s) for each in of] for kind, of in waited_s.items()},
        "peak_held_bytes": int(record.held_bytes[inside].sum(axis=1).max(initial=0)),
    }


def _waited_s(waits: NDArray[np.float64], begin_s: float, end_s: float) -> float:
    waits = np.clip(waits, begin_s, end_s)
    return float((waits[:, 1] - waits[:, 0]).sum())


# -- simulated ones --------------------------------------------------------------------------------


def simulated(loads: Sequence[Load], policy: str, budget: int, slowdown: Sequence[float]) -> tuple[list[float], int]:
    """Return each job's throughput over alone's, and the most regions granted."""
    longest_ns = max(load.profile.duration_ns for load in loads)
    simulation = Simulation(policy_named(policy), loads, budget, slowdown=slowdown)
    outcome = simulation.run((together.WARM_UP + ITERATIONS) * longest_ns, together.WARM_UP * longest_ns)
    return list(outcome.normalised), outcome.peak_granted


def as_measured(load: Load, lengths_s: Sequence[Sequence[float]], slowdown: float) -> Load:
    """Return a job whose iterations are as long, and vary as much, as they did beside the other without a limit."""
    usual_s = statistics.median(itertools.chain(*lengths_s))
    profile = load.profile
    factor = usual_s / slowdown * 1e9 / profile.duration_ns
    t_ns = [round(t_ns * factor) for t_ns in (*profile.t_ns, profile.duration_ns)]
    spreads = [float(np.std(each) / np.mean(each)) for each in lengths_s if len(each) >= _FEWEST]
    jitter = min(0.5, _UNIFORM * statistics.median(spreads or [0.0]))
    scaled = dataclasses.replace(profile, t_ns=tuple(t_ns[:-1]), duration_ns=t_ns[-1])
    return dataclasses.replace(load, profile=scaled, jitter=jitter)


def over(ours: Sequence[float], base: Sequence[float]) -> float:
    """Return the mean over jobs of a figure over the same job's without a limit."""
    return statistics.mean(one / of for one, of in zip(ours, base, strict=True))


# -- a pair ----------------------------------------------------------------------------------------


def learn(jobs: Sequence[Job], known: dict[Job, Alone], options: Namespace) -> None:
    """Add to ``known`` what each of the jobs shows alone."""
    for job in jobs:
        if job not in known:
            common.note(f"{job.name} alone")
            known[job] = alone(job, options)


def measure(
    name: str, jobs: tuple[Job, ...], known: dict[Job, Alone], options: Namespace, *, trained: bool
) -> dict[str, Any]:
    """Return all figures of a pair; jobs that only wait do not slow each other down."""
    learn(jobs, known, options)
    shares = options.share or [LOW_SHARE, TWINS_SHARE if are_twins(name) else UNEQUAL_SHARE]
    region_bytes = known[jobs[0]].region_bytes
    peaks = sum(known[job].load.profile.peak for job in jobs)
    budgets = {share: share * peaks // 100 for share in (*shares, UNLIMITED)}
    beside = live.Beside([], [])
    if trained:
        common.note(f"{name}: plain processes, together and alone in turn")
        beside = live.alone_and_together(jobs, options.seconds, options.settle, options.repeat, options.warm_up)
    slowdown = max(1.0, statistics.median(_slowdowns(beside))) if trained else 1.0
    runs = {policy: _round(name, jobs, policy, budgets, region_bytes, options) for policy in options.policy}
    lengths = [
        [one["lengths_s"][i] for each in runs.values() for one in each if one["share"] == UNLIMITED]
        for i in range(len(jobs))
    ]
    loads = [as_measured(known[job].load, of, slowdown) for job, of in zip(jobs, lengths, strict=True)]
    return {
        "region_bytes": region_bytes,
        "slowdown": slowdown,
        "plain": beside._asdict(),
        "jobs": [
            {"name": load.name, "peak": load.profile.peak, "jitter": load.jitter, "persistent": load.persistent}
            | {"iteration_s": load.profile.duration_ns / 1e9}
            | {"curve": list(zip(load.profile.t_ns, load.profile.held, strict=True))}
            for load in loads
        ],
        "budgets": budgets,
        "rows": list(_rows(runs, loads, budgets, (1.0, 1.0, slowdown), region_bytes)),
        "runs": runs,
    }


def _slowdowns(beside: live.Beside) -> Iterator[float]:
    for one, other in zip(beside.together, beside.alone, strict=True):
        yield from (alone / together for together, alone in zip(one, other, strict=True))


def _round(
    name: str, jobs: Sequence[Job], policy: str, budgets: dict[int, int], region_bytes: int, options: Namespace
) -> list[dict[str, Any]]:
    """Run a pair under a policy through all budgets, again and again; nothing if that failed: others go on."""
    shares = [UNLIMITED, *([*budgets] * options.repeat)]
    if policy == SERIAL:
        shares = [min(budgets)]
    try:
        in_bytes = [f"{budgets[share] * region_bytes}B" for share in shares]
        seconds = SERIAL_FACTOR * options.seconds if policy == SERIAL else options.seconds
        record, report = run(jobs, policy, in_bytes, seconds, options)
        done = stretches(record, jobs, shares, report["stolen"], options)
    except (ValueError, IndexError, OSError, subprocess.SubprocessError) as error:
        common.note(f"{name} {policy}: {type(error).__name__}: {error}")
        return []
    for one in done:
        common.note(
            f"{name} {policy} {one['share']} %: "
            + ", ".join(f"{rate:.2f}" for rate in one["rates"])
            + f" it/s, {one['stolen']:.0%} stolen"
        )
    return done


def throughputs(policy: str, runs: dict[str, list[dict[str, Any]]], share: int) -> list[float]:
    """Return the throughput of each stretch with a share over the same jobs' without a limit."""
    done = runs[policy]
    free = [i for i, one in enumerate(done) if one["share"] == UNLIMITED]
    found = []
    for i, one in enumerate(done):
        if one["share"] != share:
            continue
        bases = [runs["zico"][-1]] if policy == SERIAL else [done[0]]
        if policy == "zico":
            bases = [done[max(k for k in free if k < i)], done[min(k for k in free if k > i)]]
        found.append(over(one["rates"], np.mean([base["rates"] for base in bases], axis=0).tolist()))
    return found


def _rows(
    runs: dict[str, list[dict[str, Any]]],
    loads: Sequence[Load],
    budgets: dict[int, int],
    slowdown: tuple[float, ...],
    region_bytes: int,
) -> Iterator[dict[str, Any]]:
    """Yield what happened, what was simulated and what is possible."""
    base, _ = simulated(loads, "zico", budgets[UNLIMITED], slowdown)
    for policy, done in runs.items():
        for share in sorted({one["share"] for one in done} - {UNLIMITED}):
            ours, peak = simulated(loads, policy, budgets[share], slowdown)
            best = possible(loads, budgets[share], slowdown)
            if policy == SERIAL and not runs.get("zico"):
                continue
            real = throughputs(policy, runs, share)
            held_bytes = max(one["peak_held_bytes"] for one in done if one["share"] == share)
            yield {
                "policy": policy,
                "share": share,
                "throughput": common.spread(real),
                "stolen": [
                    statistics.median(one["stolen"] for one in of if one["share"] == each)
                    for each, of in ((share, done), (UNLIMITED, runs["zico"] if policy == SERIAL else done))
                ],
                "simulated": over(ours, base),
                "possible": over(best.normalised, base) if best else 0.0,
                "simulated_peak": peak,
                "peak_held_bytes": held_bytes,
                "peak_ratio": peak * region_bytes / held_bytes,
            }


# -- all of them -----------------------------------------------------------------------------------


def _kept(result: dict[str, Any], options: Namespace) -> dict[str, Any]:
    """Return the pairs of an earlier run with the same settings that are not measured now."""
    directory = common.output_directory(options)
    before = directory / f"{result['name']}.json" if directory and options.pair else None
    if before is None or not before.exists():
        return {}
    found = json.loads(before.read_text())
    if found["settings"] != result["settings"]:
        return {}
    return {
        name: {"commit": found["commit"], "date": found["date"]} | pair
        for name, pair in found["pairs"].items()
        if name.partition(",")[0] not in options.pair
    }


def simulated_again(form: str, options: Namespace) -> None:
    """Simulate the pairs of the committed result with today's rules, and write both beside what was real."""
    found = json.loads((common.RESULTS / f"{NAMES[form]}.json").read_text())
    settings = {"measured_at": found["commit"], "measured": found["date"]}
    result = common.document(f"{NAMES[form]}-again", QUESTION, settings)
    result["pairs"] = {name: list(_again(pair)) for name, pair in found["pairs"].items()}
    common.write(result, again_text(result), common.output_directory(options))


def _again(pair: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield for each row of a pair what was real, what was simulated then, and what is simulated now."""
    loads = [load_of(job) for job in pair["jobs"]]
    slowdown = (1.0, 1.0, pair["slowdown"])
    base, _ = simulated(loads, "zico", pair["budgets"][str(UNLIMITED)], slowdown)
    for row in pair["rows"]:
        now, _ = simulated(loads, row["policy"], pair["budgets"][str(row["share"])], slowdown)
        real = row["throughput"]["median"]
        kept = {name: row[name] for name in ("policy", "share")}
        yield kept | {"real": real, "then": row["simulated"], "now": over(now, base)}


def load_of(job: dict[str, Any], shift: int = 0) -> Load:
    """Return the job that a result tells of, with 2 ** shift events for each step of its curve."""
    t_ns, held = zip(*job["curve"], strict=True)
    profile = Profile(held, t_ns, round(job["iteration_s"] * 1e9), shift, len(held) << shift)
    return Load(job["name"], profile, job["persistent"], jitter=job["jitter"])


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each budget lasts at a time")
    parser.add_argument("--settle", type=float, default=5.0, help="of that, left out at its beginning")
    parser.add_argument("--alone-seconds", type=float, default=5.0, help="how long a job runs alone once it is warm")
    parser.add_argument("--repeat", type=int, default=3, help="how often each budget comes round")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, help="iterations of each job before the first")
    parser.add_argument("--share", type=int, action="append", help="budget in percent (default: 60, and 75 or 70)")
    parser.add_argument("--policy", action="append", help=f"default: {', '.join(POLICIES)}")
    parser.add_argument("--form", choices=("trained", "paced"), default="trained")
    parser.add_argument("--pair", action="append", help="a pair's name (default: all); others stay as they are")
    parser.add_argument("--name", help="of the files of results (default: agreement, or agreement-paced)")
    parser.add_argument("--again", action="store_true", help="measure nothing: simulate the committed result anew")
    options = parser.parse_args()
    if options.again:
        simulated_again(options.form, options)
        return 0
    options.policy = options.policy or list(POLICIES)
    if options.smoke:
        options.seconds, options.settle, options.alone_seconds, options.repeat = 4.0, 1.0, 1.0, 1
        options.warm_up, options.share = 2, [70]
    known_pairs = pairs(smoke=options.smoke)
    asked = options.pair or [name for name in known_pairs if name not in HELD_OUT]
    chosen = {name: jobs for name, jobs in known_pairs.items() if name in asked}
    settings = common.chosen(options, "seconds", "settle", "form", "repeat", "warm_up", "share", "policy")
    result = common.document(options.name or NAMES[options.form], QUESTION, settings)
    known: dict[Job, Alone] = {}
    result["pairs"] = _kept(result, options)
    for name, jobs in chosen.items():
        if options.form == "trained":
            result["pairs"][name] = measure(name, jobs, known, options, trained=True)
        else:
            learn(jobs, known, options)
            for form, jitter in PACED.items():
                with tempfile.TemporaryDirectory(prefix="zico-bench-") as directory:
                    copies = paced(jobs, known, jitter, Path(directory), same=are_twins(name))
                    result["pairs"][name + form] = measure(name + form, copies, known, options, trained=False)
        common.write(result, text_of(result), common.output_directory(options))
    return int(any(not done for pair in result["pairs"].values() for done in pair["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
