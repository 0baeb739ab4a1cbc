"""What two jobs hold over time: figures 7 and 9."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import common
import numpy as np
from paper.loads import ASSUMPTIONS, job_of_size, regions_of, slowdown
from paper.published import IDENTICAL, OVER_TIME
from paper.runs import LOG, WARM_UP, during, held_over_time, named
from paper.text import number, percent

from zico.lab.simulator.roofline import device_model
from zico.scheduler.simulate import Simulation

if TYPE_CHECKING:
    from paper.loads import Job
    from paper.published import OverTime

NAME = "paper-over-time"
QUESTION = "What do two jobs hold over time, and what does each wait? (the paper's figures 7 and 9, simulated)"
POLICIES = ("zico", "shift", "shift:fallback=0")
DRAWN = ("zico", "shift:fallback=0")
ROUNDS = 60
"""Iterations of the longer job that count."""
_WINDOW = 4
"""Of these that are drawn, the last ones."""
_INSTANTS = 400
"""At which it is drawn what the jobs hold: what they hold at one instant never exceeds the card."""


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Simulate the pairs of the paper's figures on its cards."""
    pairs = OVER_TIME[:1] if smoke else OVER_TIME
    rounds = _WINDOW if smoke else ROUNDS
    result = common.document(NAME, QUESTION, {"policies": POLICIES, "rounds": rounds, "window": _WINDOW})
    result["pairs"] = {}
    for pair in pairs:
        common.note(pair.title)
        result["pairs"][pair.title] = _measured(pair, rounds)
    return result


def _measured(pair: OverTime, rounds: int) -> dict[str, Any]:
    card_bytes = device_model(pair.card).memory_bytes
    jobs = tuple(job_of_size(key, share * card_bytes, pair.card) for key, share in pair.jobs)
    row: dict[str, Any] = {
        "figure": pair.figure,
        "names": [f"{IDENTICAL[key].title}, job {i}" for i, (key, _) in enumerate(pair.jobs, 1)],
        "card": pair.card,
        "card_regions": regions_of(pair.card),
        "batches": [job.batch for job in jobs],
        "iteration_s": [job.iteration_s for job in jobs],
        "two_peaks": sum(job.profile.peak for job in jobs) / regions_of(pair.card),
    }
    for assumption in ASSUMPTIONS:
        row[assumption] = {policy: _followed(jobs, policy, assumption, rounds) for policy in POLICIES}
    return row


def _followed(jobs: tuple[Job, ...], policy: str, assumption: str, rounds: int) -> dict[str, Any]:
    """Return what jobs waited once they have settled, and what each held in the last iterations."""
    chosen = named(policy)
    assert chosen is not None  # noqa: S101 - every version has these
    factors = slowdown(jobs, assumption)
    longest_ns = max(job.profile.duration_ns for job in jobs) * factors[-1]
    loads = [job.load(number) for number, job in enumerate(jobs)]
    simulation = Simulation(chosen, loads, regions_of(jobs[0].card), slowdown=factors, log=LOG)
    begin_ns, end_ns = int(WARM_UP * longest_ns), int((WARM_UP + rounds) * longest_ns)
    found: dict[str, Any] = dict(during(simulation, begin_ns, end_ns))
    times_ns, held = held_over_time(simulation)
    found["most_regions"] = int(held.sum(axis=0)[times_ns >= begin_ns].max())
    if policy in DRAWN and assumption == "roofline":
        found["window_ms"] = _WINDOW * longest_ns / 1e6
        instants_ns = np.linspace(end_ns - _WINDOW * longest_ns, end_ns, _INSTANTS, endpoint=False)
        found["held"] = held[:, np.searchsorted(times_ns, instants_ns, side="right") - 1].tolist()
    return found


# -- what is shown ---------------------------------------------------------------------------------


def over_time_table(result: dict[str, Any], figure: int) -> str:
    """Return what the jobs of a figure wait, beside what the paper says of it."""
    header = (
        *("jobs", "policy, assumption", "both peaks over the card", "most in use", "alone, ms", "together, ms"),
        *("waited in each, ms", "waited: paper [fig]", "of the second for one of the first"),
    )
    lines = []
    for pair in OVER_TIME:
        if pair.figure != figure or pair.title not in result["pairs"]:
            continue
        found = result["pairs"][pair.title]
        for assumption in ASSUMPTIONS:
            for policy in POLICIES:
                row = found[assumption][policy]
                first, second = row["iterations_per_s"]
                lines.append(
                    (
                        *(pair.title, f"{policy}, {assumption}", percent(found["two_peaks"])),
                        percent(row["most_regions"] / found["card_regions"]),
                        " / ".join(number(1e3 * each) for each in found["iteration_s"]),
                        " / ".join(number(1e3 / each) for each in row["iterations_per_s"]),
                        " / ".join(number(each) for each in row["gap_ms"]),
                        *(pair.waits, number(second / first, 2)),
                    )
                )
    return common.table(header, lines)


def text_of(result: dict[str, Any]) -> str:
    """Return a table for each figure."""
    tables = "\n".join(f"Figure {figure}:\n\n{over_time_table(result, figure)}" for figure in (7, 9))
    return f"The last {result['settings']['rounds']} iterations of the longer job count.\n\n{tables}"
