"""Two different models on the RTX 2080 Ti: figure 8."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import common
from paper.identical import SLICE
from paper.loads import ASSUMPTIONS, job_of_size, regions_of, slowdown
from paper.published import PAIR_GAINS, PAIR_MPS, PAIRS
from paper.runs import ROUNDS, Setting, measure, unlimited
from paper.text import gain, number, percent

from zico.lab.simulator.roofline import device_model

if TYPE_CHECKING:
    from paper.published import Pair

NAME = "paper-pairs"
QUESTION = "What do two different models gain by sharing a GPU's memory? (the paper's figure 8, simulated)"
CARD = "rtx-2080-ti"
POLICIES = ("zico", "shift", "shift:fallback=0", "claims", "serial", "mps")


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Simulate the paper's pairs, each model at the batch with which it takes the paper's share of the card alone."""
    pairs = PAIRS[-1:] if smoke else PAIRS
    result = common.document(NAME, QUESTION, {"policies": POLICIES, "card": CARD, "rounds": 3 if smoke else ROUNDS})
    result["pairs"] = {}
    for pair in pairs:
        common.note(pair.name)
        result["pairs"][pair.name] = _measured(pair, result["settings"]["rounds"])
    return result


def _measured(pair: Pair, rounds: int) -> dict[str, Any]:
    card_bytes = device_model(CARD).memory_bytes
    sizes = ((pair.first, pair.first_percent), (pair.second, pair.second_percent))
    jobs = tuple(job_of_size(key, share / 100 * card_bytes, CARD) for key, share in sizes)
    card = regions_of(CARD)
    row: dict[str, Any] = {
        "batches": [job.batch for job in jobs],
        "iteration_s": [job.iteration_s for job in jobs],
        "two_peaks": sum(job.profile.peak for job in jobs) / card,
        "slowdown": slowdown(jobs, "roofline")[-1],
    }
    for assumption in ASSUMPTIONS:
        setting = Setting(jobs, card, assumption, rounds)
        row[assumption] = {"unlimited": unlimited(setting)}
        row[assumption] |= {policy: measure(setting, policy) for policy in POLICIES}
    return row


# -- what is shown ---------------------------------------------------------------------------------


def _both(values: tuple[float, ...] | list[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def gains(row: dict[str, Any], assumption: str, policy: str) -> list[float] | None:
    """Return each job's throughput over time slices; ``None`` if the pair does not run."""
    found = row[assumption].get(policy)
    return [value / SLICE for value in found["normalised"]] if found else None


def _gains_text(row: dict[str, Any], assumption: str, policy: str) -> str:
    found = gains(row, assumption, policy)
    return _both(found) if found else "-"


def pairs_table(result: dict[str, Any]) -> str:
    """Return each pair's throughput over time slices beside the paper's, job by job."""
    header = (
        *("pair", "both peaks over the card", "iterations alone, ms", "slowdown of two", "paper [fig]"),
        *("zico, apart", "zico, roofline", "shift:fallback=0, roofline", "claims, roofline", "unlimited, roofline"),
    )
    known = {pair.name: pair for pair in PAIRS}
    lines = []
    for name, row in result["pairs"].items():
        lines.append(
            (
                *(name, percent(row["two_peaks"]), " / ".join(number(1e3 * each) for each in row["iteration_s"])),
                *(number(row["slowdown"], 2), _both(known[name].zico), _gains_text(row, "apart", "zico")),
                *(_gains_text(row, "roofline", each) for each in ("zico", "shift:fallback=0", "claims", "unlimited")),
            )
        )
    return common.table(header, lines)


def group_gain(result: dict[str, Any], group: tuple[str, str], assumption: str, policy: str = "zico") -> float | None:
    """Return the mean over pairs of two models of the mean of both jobs' throughput over time slices."""
    found = [
        statistics.fmean(both)
        for pair in PAIRS
        if (pair.first, pair.second) == group
        and pair.name in result["pairs"]
        and (both := gains(result["pairs"][pair.name], assumption, policy))
    ]
    return statistics.fmean(found) if found else None


def most_over_mps(result: dict[str, Any], group: tuple[str, str], assumption: str) -> float | None:
    """Return the most, over pairs of two models, of the mean of both jobs' ratios to MPS."""
    found = []
    for pair in PAIRS:
        row = result["pairs"].get(pair.name)
        if (pair.first, pair.second) != group or row is None:
            continue
        ours, theirs = row[assumption].get("zico"), row[assumption].get("mps")
        if ours and theirs and min(theirs["normalised"]) > 0:
            ratios = (a / b for a, b in zip(ours["normalised"], theirs["normalised"], strict=True))
            found.append(statistics.fmean(ratios))
    return max(found, default=None)


def groups_table(result: dict[str, Any]) -> str:
    """Return the means that the paper prints."""
    header = (
        *("pairs of", "over time slices: paper [text]", "apart", "roofline", "shift:fallback=0, roofline"),
        *("most over MPS: paper [text]", "apart", "roofline"),
    )
    lines = []
    for group, published in PAIR_GAINS.items():
        means = (group_gain(result, group, each) for each in ASSUMPTIONS)
        most = (most_over_mps(result, group, each) for each in ASSUMPTIONS)
        shift = group_gain(result, group, "roofline", "shift:fallback=0")
        lines.append(
            (
                *("+".join(group), gain(1 + published), *map(gain, means), gain(shift)),
                *(gain(PAIR_MPS[group]), *map(gain, most)),
            )
        )
    return common.table(header, lines)


def policies_table(result: dict[str, Any]) -> str:
    """Return mean and fairness of every policy."""
    header = ("pair, roofline", "unlimited", *POLICIES)
    lines = []
    for name, row in result["pairs"].items():
        found = [row["roofline"].get(policy) for policy in ("unlimited", *POLICIES)]
        lines.append((name, *(f"{each['mean']:.3f} ({each['jain']:.2f})" if each else "-" for each in found)))
    return common.table(header, lines)


def text_of(result: dict[str, Any]) -> str:
    """Return all tables."""
    return (
        "Throughput over time slices of equal length, first job / second job:\n\n"
        + pairs_table(result)
        + "\nMeans as the paper prints them:\n\n"
        + groups_table(result)
        + "\nMean of both jobs' throughput over alone's, and Jain's index in brackets:\n\n"
        + policies_table(result)
    )
