"""What a decision costs: the policy's machine code, timed on snapshots that a simulation has kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import call, compiled
from zico.base.libc import monotonic_ns
from zico.scheduler.jobs import SAMPLE
from zico.scheduler.layout import DECISION, JOB, MEMO_BYTES, MEMORY_BYTES

if TYPE_CHECKING:
    from zico.scheduler.simulate import Simulation

REPEATS = 20


@compiled
def _least_ns(policy_address: int, snapshot_address: int, memory: Any, memos: Any, repeats: int) -> int:  # noqa: ANN401
    """Return the shortest of so many decisions, each without memory of the one before."""
    least_ns = np.int64(1) << 62
    for _ in range(repeats):
        memory[:] = 0
        memos[:] = 0
        began_ns = monotonic_ns()
        call(policy_address, (snapshot_address,))
        least_ns = min(least_ns, monotonic_ns() - began_ns)
    return int(least_ns)


def decision_us(simulation: Simulation) -> float:
    """Return the median over a simulation's snapshots of what a decision takes at least; 0 if it keeps none."""
    samples, jobs_address, plan_address = simulation.snapshots()
    if not len(samples):
        return 0.0
    snapshots = samples.copy()
    most = int(snapshots["snapshot"]["n"].max())
    decisions, memos = np.zeros(most, DECISION), np.zeros(most * MEMO_BYTES, np.uint8)
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    for sample in snapshots:
        snapshot = sample["snapshot"]
        snapshot["jobs_address"] = jobs_address + int(sample["first"]) * JOB.itemsize
        snapshot["decisions_address"], snapshot["plan_address"] = decisions.ctypes.data, plan_address
        snapshot["memory_address"], snapshot["memos_address"] = memory.ctypes.data, memos.ctypes.data
    addresses = snapshots.ctypes.data + np.arange(len(snapshots)) * SAMPLE.itemsize
    policy = simulation.policy.address
    return float(np.median([_least_ns(policy, int(address), memory, memos, REPEATS) for address in addresses])) / 1e3
