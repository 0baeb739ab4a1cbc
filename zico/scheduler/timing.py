"""What a decision costs: the policy's machine code, timed on scenes that a simulation has kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.compiled import call, compiled
from zico.libc import monotonic_ns
from zico.scheduler.layout import DECISION, JOB, MEMO_BYTES, MEMORY_BYTES
from zico.scheduler.tenants import SAMPLE

REPEATS = 20
_JOB_BYTES = JOB.itemsize


@compiled
def _least_ns(policy_address: int, scene_address: int, memory: Any, memos: Any, repeats: int) -> int:  # noqa: ANN401
    """Return the shortest of so many decisions, each without memory of the one before."""
    least_ns = np.int64(1) << 62
    for _ in range(repeats):
        memory[:] = 0
        memos[:] = 0
        began_ns = monotonic_ns()
        call(policy_address, (scene_address,))
        least_ns = min(least_ns, monotonic_ns() - began_ns)
    return int(least_ns)


def decision_cost_us(policy_address: int, samples: Any, jobs_address: int, plan_address: int) -> float:  # noqa: ANN401
    """Return the median over scenes of what a decision takes at least, in microseconds; 0 without scenes.

    Args:
        policy_address: Of the function that decides.
        samples: SAMPLE records.
        jobs_address: Of the JOB records that they lead to; the profiles that these lead to must still be there.
        plan_address: Of what the policy has worked out last.
    """
    if not len(samples):
        return 0.0
    scenes = samples.copy()
    most = int(scenes["scene"]["n"].max())
    decisions, memos = np.zeros(most, DECISION), np.zeros(most * MEMO_BYTES, np.uint8)
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    for sample in scenes:
        scene = sample["scene"]
        scene["jobs_address"] = jobs_address + int(sample["first"]) * _JOB_BYTES
        scene["decisions_address"], scene["plan_address"] = decisions.ctypes.data, plan_address
        scene["memory_address"], scene["memos_address"] = memory.ctypes.data, memos.ctypes.data
    addresses = scenes.ctypes.data + np.arange(len(scenes)) * SAMPLE.itemsize
    costs_ns = [_least_ns(policy_address, int(address), memory, memos, REPEATS) for address in addresses]
    return float(np.median(costs_ns)) / 1e3
