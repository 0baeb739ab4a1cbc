"""When does sharing pay, against one job after the other with the whole machine?

Jobs of ``idle_job.py`` leave their device idle: they wait for batches, for a simulator or for a
person, or one thread bounds them. Groups of them train in a budget, with no budget, and one after
the other with the whole machine. Rounds go through these in turn, every second one backwards.

*Times one after the other* is the sum over the jobs of rate together over rate alone. Start-up is
left out, and iterations in which Zico learns, as ``colocation.py`` does it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import colocation
import common
import together
from colocation import BASE, Configuration
from colocation_text import ONE_BY_ONE
from together import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "When does sharing pay, against one job after the other with the whole machine?"
TINY = {
    "input": ("--depth", "20", "--batch", "256", "--wait", "0.1"),
    "light": ("--depth", "8", "--wait", "0.1"),
    "recurrent": ("--batch", "8"),
    "notebook": ("--depth", "8", "--batch", "256", "--pause", "0.1"),
    "evaluating": ("--depth", "8", "--batch", "256", "--pause", "0.1"),
    "rl": ("--wait", "0.005"),
}
"""What a smoke run tells each kind."""
HEADLINE = ("two input-bound", "four input-bound", "eight light")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A group, its budget, and what is asked of it."""

    group: colocation.Group
    share: int
    """Budget in percent of the sum of the peaks."""
    times: float = 1.0
    """How many times as fast as one after the other the group is at least."""
    of_no_budget: float = 0.0
    """The least throughput over that with no budget."""
    seconds: float = 45.0
    """How long each job trains in each run."""
    warm_up: int = 3
    """Iterations of each job left out."""


def groups(*, smoke: bool) -> list[Asked]:
    """Return the groups; those of a smoke run are tiny, behind one of three that has a goal."""

    def group(name: str, *kinds: str) -> colocation.Group:
        jobs = [
            Job(
                f"{kind}-{seed}",
                "benchmarks/idle_job.py",
                (kind, *(TINY[kind] if smoke else ()), "--seed", str(seed)),
            )
            for seed, kind in enumerate(kinds, 1)
        ]
        return colocation.Group(name, tuple(jobs))

    asked = [
        Asked(group(HEADLINE[0], *["input"] * 2), 70, 1.55, 0.95, seconds=40, warm_up=together.WARM_UP),
        Asked(group(HEADLINE[1], *["input"] * 4), 60, 2.75, seconds=60, warm_up=together.WARM_UP),
        Asked(group(HEADLINE[2], *["light"] * 8), 60, 4.0, seconds=30, warm_up=together.WARM_UP),
        Asked(group("two recurrent", *["recurrent"] * 2), 70, seconds=20, warm_up=together.WARM_UP),
        Asked(group("notebook and evaluating", "notebook", "evaluating"), 70, seconds=18, warm_up=2),
        # The larger job alone has 86 % of the sum of both peaks.
        Asked(group("rl and input-bound", "rl", "input"), 90, seconds=16, warm_up=4),
    ]
    if smoke:
        asked = [Asked(group("three tiny", *["input"] * 3), 70, 1.5), *asked]
        asked = [dataclasses.replace(one, seconds=4.0, warm_up=1) for one in asked]
    return asked


def plan(asked: Asked) -> list[Configuration]:
    """Return what one round runs."""
    return [BASE, Configuration("zico", asked.share), Configuration(ONE_BY_ONE)]


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown, and of each goal whether it is reached."""
    rows, goals, failures = [], [], []
    for name, group in result["groups"].items():
        summary, label = group["summary"], f"zico {group['asked']['share']} %"
        failures += [f"* {name}: failed: {failure}\n" for failure in group["failures"]]
        if not {label, BASE.label, ONE_BY_ONE} <= set(summary):
            continue
        bounded, free = summary[label], summary[BASE.label]
        equal = bounded["losses_equal"] and free["losses_equal"]
        rows.append(
            (
                name,
                " + ".join(f"{peak / 2**20:.0f}" for peak in group["peaks_bytes"]),
                f"{group['asked']['share']} %",
                _shown(bounded["over_one_by_one"]),
                _shown(free["over_one_by_one"]),
                _shown(bounded["throughput"]),
                f"{bounded['waited_share']:.0%}",
                f"{bounded['granted_over_budget']:.0%}",
                f"{'same' if equal else 'DIFFER'} ({bounded['losses_compared_min']})",
            )
        )
        goals += list(_goals(name, group["asked"], bounded))
    header = (
        "jobs",
        "peaks, MiB",
        "budget",
        "times one after the other",
        "with no budget",
        "budget over no budget",
        "most waited",
        "granted",
        "losses",
    )
    return "\n".join((common.table(header, rows), *goals, *failures))


def _shown(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f}-{spread['max']:.2f})"


def _goals(name: str, asked: dict[str, Any], bounded: dict[str, Any]) -> Iterator[str]:
    for what, measured, least in (
        ("times one after the other", "over_one_by_one", asked["times"]),
        ("over no budget", "throughput", asked["of_no_budget"]),
    ):
        value = bounded[measured]["median"]
        if least:
            yield f"* {name}: {what} {value:.2f}, goal {least:.2f}: {'reached' if value >= least else 'missed'}\n"


def measure(asked: Asked, repeat: int) -> dict[str, Any]:
    """Return the raw figures of a group, what was asked, and what they come to."""
    facts = {name: value for name, value in dataclasses.asdict(asked).items() if name != "group"}
    jobs = [" ".join((job.script, *job.arguments)) for job in asked.group.jobs]
    runner = colocation.Runner(asked.group, asked.seconds, asked.warm_up)
    return {"jobs": jobs, "asked": facts, **colocation.measure(runner, plan(asked), repeat)}


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--name", default="idle_jobs", help="of the files of results")
    parser.add_argument(
        "--group", action="append", help=f"such as {HEADLINE[0]} (default: all; with --smoke three tiny)"
    )
    options = parser.parse_args()
    repeat = 1 if options.smoke else options.repeat
    known = groups(smoke=options.smoke)
    unknown = set(options.group or ()) - {asked.group.name for asked in known}
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(a.group.name for a in known)}")
    chosen = [asked for asked in known if asked.group.name in (options.group or ())]
    chosen = chosen or (known[:1] if options.smoke else known)
    result = common.document(options.name, QUESTION, {"repeat": repeat})
    result["groups"] = {}
    directory = common.output_directory(options)
    for asked in chosen:
        result["groups"][asked.group.name] = measure(asked, repeat)
        if directory is not None:
            common.save(result, text_of(result), directory)
    common.write(result, text_of(result), directory)
    return int(any(group["failures"] for group in result["groups"].values()))


if __name__ == "__main__":
    sys.exit(main())
