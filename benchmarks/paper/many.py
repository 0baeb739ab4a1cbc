"""What the paper left open: three to sixteen jobs on one device, memory saved, throughput at equal memory, fairness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import common
from paper.loads import ASSUMPTIONS, job_of_size, regions_of
from paper.published import REGION_BYTES
from paper.runs import ENOUGH, Setting, enough_memory, measure, named, unlimited
from paper.text import number, percent

if TYPE_CHECKING:
    from paper.loads import Job

NAME = "paper-many"
QUESTION = "What do 2 to 16 jobs gain by sharing a GPU's memory, and how much of it do they need? (simulated)"
CARD = "v100-32gb"
POLICIES = ("zico", "shift", "shift:fallback=0", "claims", "serial", "salus:order=pack", "partition", "tgs")
SAVING = ("zico", "shift", "claims")
SETS = {"identical": ("NN",), "mixed": ("NN", "RN", "GT", "RH")}
COUNTS = (2, 3, 4, 6, 8, 12, 16)
SHARES = (0.5, 0.6, 0.8)
"""The card over the sum of the peaks."""
_ROUNDS = 30
SHOWN = 0.6
"""What the tables by number of jobs are about."""


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Simulate sets of jobs of equal peaks whose sum exceeds the card."""
    counts, shares, rounds = ((2,), (0.6,), 3) if smoke else (COUNTS, SHARES, _ROUNDS)
    sets = {"identical": ("RN",)} if smoke else SETS
    result = common.document(NAME, QUESTION, {"policies": POLICIES, "card": CARD, "shares": shares, "rounds": rounds})
    result["sets"], result["memory"] = {}, {}
    for name, keys in sets.items():
        rows = result["sets"][name] = []
        for n in counts:
            for share in shares:
                common.note(f"{n} {name}, {share:.0%}")
                rows.append(row_of(keys, n, share, rounds))
        result["memory"][name] = [_saved(_jobs(keys, n, 0.6), rounds) for n in counts if n <= 8]
    return result


def row_of(keys: tuple[str, ...], n: int, share: float, rounds: int = _ROUNDS) -> dict[str, Any]:
    """Return what every policy does for so many jobs, of whose peaks the card has a share."""
    jobs = _jobs(keys, n, share)
    row = {"n": n, "share": share, "batches": [job.batch for job in jobs]}
    return row | {each: _compared(jobs, each, rounds) for each in ASSUMPTIONS}


def _jobs(keys: tuple[str, ...], n: int, share: float) -> tuple[Job, ...]:
    """Return jobs of equal peaks, of which the card has that share of the sum."""
    peak_bytes = regions_of(CARD) * REGION_BYTES / (share * n)
    return tuple(job_of_size(keys[i % len(keys)], peak_bytes, CARD) for i in range(n))


def _compared(jobs: tuple[Job, ...], assumption: str, rounds: int) -> dict[str, Any]:
    setting = Setting(jobs, regions_of(CARD), assumption, rounds)
    return {"unlimited": unlimited(setting)} | {policy: measure(setting, policy) for policy in POLICIES}


def _saved(jobs: tuple[Job, ...], rounds: int) -> dict[str, Any]:
    """Return the memory that does as well as all of it."""
    peaks = sum(job.profile.peak for job in jobs)
    setting = Setting(jobs, peaks, "apart", rounds)
    found = {policy: enough_memory(setting, policy) for policy in SAVING if named(policy) is not None}
    return {"n": len(jobs), "peaks": peaks, "one": max(job.profile.peak for job in jobs)} | found


# -- what is shown ---------------------------------------------------------------------------------


def throughput_table(rows: list[dict[str, Any]], assumption: str) -> str:
    """Return the sum of the jobs' throughput over alone's, at one share, by number of jobs."""
    header = ("jobs", "unlimited", *POLICIES)
    lines = []
    for row in rows:
        if row["share"] == SHOWN:
            found = [row[assumption].get(policy) for policy in ("unlimited", *POLICIES)]
            lines.append((str(row["n"]), *(number(each["mean"] * row["n"] if each else None, 2) for each in found)))
    return common.table(header, lines)


def shares_table(rows: list[dict[str, Any]], assumption: str, n: int) -> str:
    """Return throughput over unlimited memory's at equal memory, for so many jobs."""
    header = (f"{n} jobs, card over peaks", *POLICIES)
    lines = []
    for row in rows:
        if row["n"] == n:
            base = row[assumption]["unlimited"]["mean"]
            found = [row[assumption].get(policy) for policy in POLICIES]
            lines.append((percent(row["share"]), *(number(each["mean"] / base if each else None, 3) for each in found)))
    return common.table(header, lines)


def fairness_table(rows: list[dict[str, Any]], assumption: str) -> str:
    """Return Jain's index, at one share, by number of jobs."""
    header = ("jobs", *POLICIES)
    lines = []
    for row in rows:
        if row["share"] == SHOWN:
            found = [row[assumption].get(policy) for policy in POLICIES]
            lines.append((str(row["n"]), *(number(each["jain"] if each else None, 3) for each in found)))
    return common.table(header, lines)


def saved_table(result: dict[str, Any]) -> str:
    """Return the least memory with which throughput is nearly that of unlimited memory."""
    header = ("jobs", "one peak over their sum", *SAVING)
    lines = []
    for name, rows in result["memory"].items():
        for row in rows:
            shares = (row.get(policy) and row[policy] / row["peaks"] for policy in SAVING)
            lines.append((f"{row['n']} {name}", percent(row["one"] / row["peaks"]), *map(percent, shares)))
    return common.table(header, lines)


def text_of(result: dict[str, Any]) -> str:
    """Return all tables."""
    parts = [f"Least budget over the sum of the peaks that gives {ENOUGH} of the throughput of unlimited memory:\n"]
    parts.append(saved_table(result))
    for name, rows in result["sets"].items():
        for assumption in ASSUMPTIONS:
            parts.append(f"Sum of the throughputs, {name}, {assumption}, card {SHOWN:.0%} of the peaks:\n")
            parts.append(throughput_table(rows, assumption))
        parts.append(f"Throughput over that of unlimited memory, {name}, apart:\n")
        parts.append(shares_table(rows, "apart", 4))
        parts.append(f"Jain's index, {name}, roofline, card {SHOWN:.0%} of the peaks:\n")
        parts.append(fairness_table(rows, "roofline"))
    return "\n".join(parts)
