"""Two copies of one model: figures 5 and 6."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import common
from paper.loads import ASSUMPTIONS, job_of, job_of_size, regions_of, slowdown
from paper.published import IDENTICAL
from paper.runs import ROUNDS, Setting, measure, unlimited
from paper.text import gain, number, percent

from zico.lab.simulator.roofline import device_model

if TYPE_CHECKING:
    from paper.loads import Job
    from paper.published import Identical

NAME = "paper-identical"
QUESTION = "What do two copies of a model gain by sharing a GPU's memory? (the paper's figures 5 and 6, simulated)"
POLICIES = ("zico", "shift", "shift:fallback=0", "claims", "serial", "mps")
PRINTED, PRESSURE = "as printed", "equal pressure"
SLICE = 0.5
"""Of alone's throughput: what a job has by time slices of equal length, switched without cost."""


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Simulate every model at every batch of the paper, twice: at that batch, and at equal memory pressure."""
    models = [IDENTICAL["RN"]] if smoke else list(IDENTICAL.values())
    rounds = 3 if smoke else ROUNDS
    result = common.document(NAME, QUESTION, {"policies": POLICIES, "rounds": rounds})
    result["models"] = {}
    for model in models:
        common.note(f"two of {model.title}")
        batches = model.batches[-1:] if smoke else model.batches
        largest = _largest(model)
        result["models"][model.key] = {
            "title": model.title,
            "card": model.card,
            PRINTED: [_row(batch, job_of(model.key, batch, model.card), rounds) for batch in batches],
            PRESSURE: [
                _row(batch, job_of(model.key, max(1, round(batch * largest.batch / batches[-1])), model.card), rounds)
                for batch in batches
            ],
        }
    return result


def largest_row(key: str) -> dict[str, Any]:
    """Return a model's last row at equal memory pressure."""
    return _row(IDENTICAL[key].batches[-1], _largest(IDENTICAL[key]), ROUNDS)


def _largest(model: Identical) -> Job:
    """Return the job that takes of the card what the paper's takes at the largest batch."""
    return job_of_size(model.key, model.aggregate / 2 * device_model(model.card).memory_bytes, model.card)


def _row(tick: int, job: Job, rounds: int) -> dict[str, Any]:
    """Return one batch's figures."""
    card = regions_of(job.card)
    row: dict[str, Any] = {
        "tick": tick,
        "batch": job.batch,
        "peak_bytes": job.peak_bytes,
        "two_peaks": 2 * job.profile.peak / card,
        "iteration_s": job.iteration_s,
        "slowdown": slowdown((job, job), "roofline")[-1],
    }
    for assumption in ASSUMPTIONS:
        setting = Setting((job, job), card, assumption, rounds)
        row[assumption] = {"unlimited": unlimited(setting)}
        row[assumption] |= {policy: measure(setting, policy) for policy in POLICIES}
    return row


# -- what is shown ---------------------------------------------------------------------------------


def mean_gain(rows: list[dict[str, Any]], assumption: str, policy: str = "zico") -> float | None:
    """Return the throughput over time slices, mean over batches that run."""
    found = [row[assumption][policy]["mean"] / SLICE for row in rows if row[assumption].get(policy)]
    return sum(found) / len(found) if found else None


def last_gain(rows: list[dict[str, Any]], assumption: str, policy: str = "zico") -> float | None:
    """Return the throughput over time slices at the largest batch."""
    found = rows[-1][assumption].get(policy)
    return found["mean"] / SLICE if found else None


def over_mps(rows: list[dict[str, Any]], assumption: str) -> float | None:
    """Return the throughput over that of MPS at the largest batch."""
    ours, theirs = (rows[-1][assumption].get(policy) for policy in ("zico", "mps"))
    return ours["mean"] / theirs["mean"] if ours and theirs and theirs["mean"] else None


def first_over(rows: list[dict[str, Any]]) -> int | None:
    """Return the first batch of the paper's axis whose two peaks exceed the card."""
    return next((row["tick"] for row in rows if row["two_peaks"] > 1), None)


def throughput_table(result: dict[str, Any]) -> str:
    """Return throughput over time slices beside the paper's."""
    header = (
        *("two of", "at the largest batch: paper [fig]", "apart", "roofline", "mean over batches: paper [text]"),
        *("apart", "roofline", "over MPS: paper [fig]", "apart", "roofline"),
    )
    lines = []
    for key, found in result["models"].items():
        model, rows = IDENTICAL[key], found[PRESSURE]
        zico, _, mps = model.samples_per_s
        lines.append(
            (
                *(found["title"], gain(model.gain), *(gain(last_gain(rows, each)) for each in ASSUMPTIONS)),
                gain(None if model.mean_gain is None else 1 + model.mean_gain),
                *(gain(mean_gain(rows, each)) for each in ASSUMPTIONS),
                *(gain(zico / mps), *(gain(over_mps(rows, each)) for each in ASSUMPTIONS)),
            )
        )
    return common.table(header, lines)


def memory_table(result: dict[str, Any]) -> str:
    """Return what two jobs need beside the paper's."""
    header = (
        *("two of", "two peaks over the card at the largest batch: paper [fig]", "as printed"),
        *("first batch that exceeds it: paper", "as printed", "equal pressure", "batch at equal pressure"),
        *("peak granted over the card", "iteration alone, ms: paper [calc]", "as printed, at least"),
    )
    return common.table(header, (_memory_line(IDENTICAL[key], found) for key, found in result["models"].items()))


def _memory_line(model: Identical, found: dict[str, Any]) -> tuple[str, ...]:
    printed, pressure = found[PRINTED], found[PRESSURE]
    granted = pressure[-1]["roofline"]["zico"]
    return (
        *(model.title, percent(model.aggregate), percent(printed[-1]["two_peaks"])),
        *(str(model.first_over), *(str(first_over(rows) or "none") for rows in (printed, pressure))),
        f"{pressure[-1]['batch']} for {model.batches[-1]}",
        percent(granted["peak_granted"] / regions_of(model.card) if granted else None),
        number(1e3 * model.batches[-1] / model.samples_per_s[1]),
        number(1e3 * printed[-1]["iteration_s"]),
    )


def policies_table(result: dict[str, Any]) -> str:
    """Return every policy's throughput at the largest batch, at equal pressure."""
    header = ("two of", "assumption", "slowdown of two", "unlimited", *POLICIES)
    lines = []
    for found in result["models"].values():
        row = found[PRESSURE][-1]
        for assumption in ASSUMPTIONS:
            means = (row[assumption].get(name) for name in ("unlimited", *POLICIES))
            factor = row["slowdown"] if assumption == "roofline" else 1.0
            shown = (number(each["mean"] if each else None, 3) for each in means)
            lines.append((found["title"], assumption, number(factor, 2), *shown))
    return common.table(header, lines)


def text_of(result: dict[str, Any]) -> str:
    """Return all tables."""
    return (
        "Throughput over time slices of equal length, at equal memory pressure:\n\n"
        + throughput_table(result)
        + "\nMemory:\n\n"
        + memory_table(result)
        + "\nMean of the jobs' throughput over alone's, at the largest batch and equal pressure:\n\n"
        + policies_table(result)
    )
