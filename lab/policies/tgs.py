"""One job comes first and the others run as far as it loses nothing: their share of time rises slowly, and is halved.

First is the job of the highest priority; of those the one of the largest weight, and of those who
came first.

Source: B. Wu et al., "Transparent GPU Sharing in Container Clouds for Deep Learning Workloads"
(TGS), NSDI 2023. It has adaptive rate control by the first job's own progress, and managed memory
in which its pages stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, compiled, record_at
from zico.base.records import F8, I8, Record, dtype_of
from zico.lab.policies.time_slices import goes_on, stands_back
from zico.scheduler.demand import job_at
from zico.scheduler.layout import Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.parameters import Parameter, Unit
from zico.scheduler.state import Capabilities
from zico.scheduler.turns import decision_at, snapshot_at

if TYPE_CHECKING:
    from zico.scheduler.layout import Snapshot

PARAMETERS = (
    Parameter("tolerance", "0.05", Unit.SHARE, "what the first job may lose of its throughput and still lose nothing"),
    Parameter("period", "5s", Unit.TIME, "after which the share of time is set anew", least="1ms"),
    Parameter("rise", "0.05", Unit.SHARE, "by which the others' share of time rises while the first job loses nothing"),
)
_TOLERANCE, _PERIOD, _RISE = range(3)
_N_OPTIONS = len(PARAMETERS)


class Memory(Record, align=False):
    """The present period, 0 before the first one, and the share of it in which the others run."""

    began_ns: I8
    ends_ns: I8
    share: F8


MEMORY = dtype_of(Memory)

_HALF = 0.5
_FLOAT64 = np.dtype(np.float64)
_YIELDS = int(Reason.YIELDS)


@compiled
def _first(snapshot: Snapshot) -> int:
    first = 0
    for i in range(1, snapshot.n):
        one, best = job_at(snapshot, i), job_at(snapshot, first)
        if one.priority > best.priority or (one.priority == best.priority and one.weight > best.weight):
            first = i
    return first


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Let the first go on, and the others in the first part of every period."""
    snapshot = snapshot_at(snapshot_address)
    options = array_at(snapshot.options_address, _N_OPTIONS, _FLOAT64)
    memory = record_at(snapshot.memory_address, MEMORY)
    first = _first(snapshot)
    if snapshot.now_ns >= memory.ends_ns:
        loses = job_at(snapshot, first).served < 1 - options[_TOLERANCE]
        memory.share = memory.share * _HALF if loses else min(1.0, memory.share + options[_RISE])
        memory.began_ns = snapshot.now_ns
        memory.ends_ns = snapshot.now_ns + max(1, int(options[_PERIOD]))
    stops_ns = memory.began_ns + int((memory.ends_ns - memory.began_ns) * memory.share)
    for i in range(snapshot.n):
        if i == first:
            goes_on(snapshot, i, memory.ends_ns)
            continue
        if snapshot.now_ns < stops_ns:
            goes_on(snapshot, i, stops_ns)
        else:
            stands_back(snapshot, i, _YIELDS, memory.ends_ns, first)
        decision_at(snapshot, i).yields = 1


POLICY = Compiled(
    "tgs",
    decide,
    use_claims=False,
    parameters=PARAMETERS,
    knows="priority, measured progress, clock",
    capabilities=Capabilities(runs=False, pauses=True, pages=True, asks=True),
)
