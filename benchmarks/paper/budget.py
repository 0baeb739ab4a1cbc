"""Two jobs whose budget falls and rises again: figure 10."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import common
import numpy as np
from paper.loads import ASSUMPTIONS, job_of_size, regions_of, slowdown
from paper.published import BUDGET_CHANGE, REGION_BYTES
from paper.runs import LOG, during, held_over_time, named, thinned
from paper.text import number

from zico.scheduler.simulate import Simulation

if TYPE_CHECKING:
    from paper.loads import Job

NAME = "paper-budget"
QUESTION = "What becomes of two jobs whose budget falls and rises again? (the paper's figure 10, simulated)"
POLICIES = ("zico", "shift", "claims", "serial")
_ITERATIONS = 20
"""In each period."""
_SETTLED = 0.5
"""The second half of a period counts."""
_STRETCHES = 1500
_GB = 1e9


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Simulate two NASNets on the V100 whose budget is 70, 50 and again 70 percent of the card."""
    iterations = 8 if smoke else _ITERATIONS
    job = job_of_size("NN", BUDGET_CHANGE.alone_gb * _GB, BUDGET_CHANGE.card)
    result = common.document(NAME, QUESTION, {"policies": POLICIES, "iterations": iterations})
    result["batch"], result["iteration_s"] = job.batch, job.iteration_s
    result["shares"], result["card_bytes"] = BUDGET_CHANGE.shares, regions_of(BUDGET_CHANGE.card) * REGION_BYTES
    for assumption in ASSUMPTIONS:
        common.note(assumption)
        factors = slowdown((job, job), assumption)
        result[assumption] = {
            policy: _changed(job, policy, factors, iterations) for policy in POLICIES if named(policy) is not None
        }
    return result


def _changed(job: Job, policy: str, factors: tuple[float, ...], iterations: int) -> dict[str, Any]:
    """Run three periods under one policy."""
    period_ns = int(iterations * job.profile.duration_ns * factors[-1])
    card = regions_of(BUDGET_CHANGE.card)
    shares = [int(share * card) for share in BUDGET_CHANGE.shares]
    budgets = [(number * period_ns, regions) for number, regions in enumerate(shares)]
    chosen = named(policy)
    assert chosen is not None  # noqa: S101 - the caller has looked
    simulation = Simulation(
        chosen, [job.load(0), job.load(1)], shares[0], slowdown=factors, log=LOG, budgets=budgets[1:]
    )
    periods = []
    for begin_ns, regions in budgets:
        found = during(simulation, int(begin_ns + _SETTLED * period_ns), begin_ns + period_ns)
        periods.append({"regions": regions} | found)
    times_ns, held = held_over_time(simulation)
    total = held.sum(axis=0)
    for period, (begin_ns, _) in zip(periods, budgets, strict=True):
        inside = (times_ns >= begin_ns + _SETTLED * period_ns) & (times_ns < begin_ns + period_ns)
        period["most_bytes"] = int(total[inside].max()) * REGION_BYTES
    edges_ns = np.linspace(0, len(budgets) * period_ns, _STRETCHES + 1)
    return {"periods": periods, "period_s": period_ns / 1e9, "held": thinned(times_ns, total, edges_ns)}


def budget_table(result: dict[str, Any]) -> str:
    """Return gaps and memory in each period beside the paper's."""
    header = (
        *("policy, assumption", "period", "budget GB", "gap ms: paper [text]", "waited in each iteration, ms"),
        *("most in use, GB: paper [fig]", "simulated", "iterations/s of both"),
    )
    lines = []
    for assumption in ASSUMPTIONS:
        for policy, found in result[assumption].items():
            for i, period in enumerate(found["periods"]):
                low, high = BUDGET_CHANGE.total_gb[i]
                published = (number(BUDGET_CHANGE.gaps_ms[i]), f"{low:.0f}-{high:.0f}" if i < 2 else "-")
                lines.append(
                    (
                        *(f"{policy}, {assumption}", f"{100 * BUDGET_CHANGE.shares[i]:.0f} %"),
                        *(number(period["regions"] * REGION_BYTES / _GB, 1), published[0]),
                        *(" / ".join(number(each) for each in period["gap_ms"]), published[1]),
                        number(period["most_bytes"] / _GB, 1),
                        number(sum(period["iterations_per_s"]), 2),
                    )
                )
    return common.table(header, lines)


def text_of(result: dict[str, Any]) -> str:
    """Return the table."""
    return f"Two NASNets of batch {result['batch']} on the V100:\n\n" + budget_table(result)
