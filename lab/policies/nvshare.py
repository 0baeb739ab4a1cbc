"""The whole device for one job at a time, for a quantum, in the order in which they came; all others stand still.

Source: G. Alexopoulos, D. Mitropoulos, "nvshare: Practical GPU Sharing Without Memory Size
Constraints", ICSE Companion 2024. Memory is the driver's managed one, so that whoever gets the
device faults its pages in.
"""

from __future__ import annotations

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, record_at
from zico.base.records import I8, Record, dtype_of
from zico.lab.policies.time_slices import goes_on, stands_back
from zico.scheduler.layout import Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.parameters import Parameter, Unit
from zico.scheduler.state import Capabilities
from zico.scheduler.turns import snapshot_at

PARAMETERS = (Parameter("quantum", "30s", Unit.TIME, "for how long a job has the device", least="1ms"),)


class Memory(Record, align=False):
    """Whose quantum it is, and when it ends; 0: it has not begun."""

    ends_ns: I8
    holder: I8


MEMORY = dtype_of(Memory)

_FLOAT64 = np.dtype(np.float64)
_QUANTUM = int(Reason.QUANTUM)


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Pass the device on when a quantum has ended."""
    snapshot = snapshot_at(snapshot_address)
    quantum_ns = max(1, int(array_at(snapshot.options_address, 1, _FLOAT64)[0]))
    memory = record_at(snapshot.memory_address, MEMORY)
    if snapshot.now_ns >= memory.ends_ns:
        memory.holder = 0 if memory.ends_ns == 0 else (memory.holder + 1) % max(1, snapshot.n)
        memory.ends_ns = snapshot.now_ns + quantum_ns
    for i in range(snapshot.n):
        if i == memory.holder:
            goes_on(snapshot, i, memory.ends_ns)
        else:
            stands_back(snapshot, i, _QUANTUM, memory.ends_ns, memory.holder)


POLICY = Compiled(
    "nvshare",
    decide,
    use_claims=False,
    parameters=PARAMETERS,
    knows="clock",
    capabilities=Capabilities(runs=False, pauses=True, pages=True, asks=True),
)
