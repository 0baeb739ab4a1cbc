"""Two jobs whose budget falls and rises again: figure 10."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from paper.loads import ASSUMPTIONS, job_of_size, regions_of, slowdown
from paper.published import BUDGET_CHANGE, REGION_BYTES
from paper.runs import named
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
_LOG = 1 << 18
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
        chosen, [job.load(0), job.load(1)], shares[0], slowdown=factors, log=_LOG, budgets=budgets[1:]
    )
    periods = []
    done, waited_ns = np.zeros(2), np.zeros(2)
    for begin_ns, regions in budgets:
        counts = []
        for share in (_SETTLED, 1.0):
            simulation.run(int(begin_ns + share * period_ns))
            counts.append((simulation.sim_jobs["iteration"] - done, simulation.sim_jobs["waited_ns"] - waited_ns))
            done, waited_ns = simulation.sim_jobs["iteration"].copy(), simulation.sim_jobs["waited_ns"].copy()
        n, waited = counts[-1]
        seconds = (1 - _SETTLED) * period_ns / 1e9
        periods.append(
            {"regions": regions, "gap_ms": (waited / n / 1e6).tolist(), "iterations_per_s": (n / seconds).tolist()}
        )
    times_s, totals = _totals(simulation)
    for period, (begin_ns, end_ns) in zip(
        periods, itertools.pairwise([*(begin for begin, _ in budgets), 3 * period_ns]), strict=True
    ):
        inside = (times_s >= (begin_ns + _SETTLED * period_ns) / 1e9) & (times_s < end_ns / 1e9)
        period["most_bytes"] = int(totals[inside].max()) * REGION_BYTES
    return {"periods": periods, "period_s": period_ns / 1e9, "held": _thinned(times_s, totals)}


def _totals(simulation: Simulation) -> tuple[Any, Any]:
    """Return when what is held in all changes, in seconds, and to how many regions."""
    log = simulation.log[: int(simulation._run[0]["n_log"])]  # noqa: SLF001 - how much of the log is filled
    held, totals = {0: 0, 1: 0}, []
    for sim_job, regions in zip(log["sim_job"].tolist(), log["held"].tolist(), strict=True):
        held[sim_job] = regions
        totals.append(sum(held.values()))
    return log["t_ns"] / 1e9, np.array(totals)


def _thinned(times_s: Any, totals: Any) -> list[tuple[float, int]]:  # noqa: ANN401 - arrays
    """Return the most held in each of many stretches of time."""
    edges = np.linspace(0, times_s[-1], _STRETCHES + 1)
    at = np.clip(np.searchsorted(times_s, edges) - 1, 0, None)
    most = [int(totals[first : max(first, last) + 1].max()) for first, last in itertools.pairwise(at.tolist())]
    return list(zip(edges[:-1].round(4).tolist(), most, strict=True))


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
