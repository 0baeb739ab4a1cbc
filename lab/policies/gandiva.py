"""Time slices: a job is suspended between two iterations, where it holds least, and two share a slice if that pays.

Theory of operation
    The device passes on in the order in which jobs came. The next two of them try a slice together
    if their peaks fit at once. They keep doing so if they did more together than one would have
    done alone. Else they have a slice each. Whoever has no slice has its memory copied out, and
    back when its turn comes.

Source: W. Xiao et al., "Gandiva: Introspective Cluster Scheduling for Deep Learning", OSDI 2018.
That a trial which does not pay is reverted follows from its text; how the pair of a trial is chosen
is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, compiled, inlined, record_at
from zico.base.records import I8, Record, dtype_of
from zico.lab.policies.time_slices import goes_on, is_inside, stands_back
from zico.scheduler.demand import job_at, profile_at
from zico.scheduler.layout import MEMO_BYTES, NOBODY, Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.parameters import Parameter, Unit
from zico.scheduler.state import Capabilities
from zico.scheduler.turns import decision_at, snapshot_at

if TYPE_CHECKING:
    from zico.scheduler.layout import Snapshot, SnapshotJob

PARAMETERS = (
    Parameter("slice", "60s", Unit.TIME, "for how long a job, or a pair, has the device", least="1ms"),
    Parameter("pack", "on", Unit.CHOICE, "whether two jobs are tried together", ("on", "off")),
)
_SLICE, _PACK = range(2)
_ON = 0.0
_N_OPTIONS = len(PARAMETERS)


class Memory(Record, align=False):
    """The present slice, 0 before the first one: whose it is, and whether it is shared with the next in order."""

    began_ns: I8
    ends_ns: I8
    holder: I8
    packed: I8


MEMORY = dtype_of(Memory)


class Memo(Record, align=False):
    """A job's iterations when the slice began; whether to share a slice with the next in order has not paid."""

    iteration: I8
    reverted: I8


MEMO = dtype_of(Memo)

_FLOAT64 = np.dtype(np.float64)
_QUANTUM = int(Reason.QUANTUM)


@inlined
def _memo_of(snapshot: Snapshot, index: int) -> Memo:
    return record_at(snapshot.memos_address + index * MEMO_BYTES, MEMO)


@compiled
def _worked_ns(snapshot: Snapshot, index: int) -> int:
    """Return the work that a job has done in the present slice, in time alone."""
    job = job_at(snapshot, index)
    if job.profile_address == 0:
        return 0
    return (job.iteration - _memo_of(snapshot, index).iteration) * profile_at(job).duration_ns


@compiled
def _peak(job: SnapshotJob) -> int:
    return job.held if job.profile_address == 0 else profile_at(job).peak


@compiled
def _judge(snapshot: Snapshot) -> None:
    """Remember it if two jobs together did not do more than one would have done."""
    memory = record_at(snapshot.memory_address, MEMORY)
    if memory.packed:
        together_ns = _worked_ns(snapshot, memory.holder) + _worked_ns(snapshot, (memory.holder + 1) % snapshot.n)
        _memo_of(snapshot, memory.holder).reverted = together_ns <= snapshot.now_ns - memory.began_ns


@compiled
def _pass_on(snapshot: Snapshot, slice_ns: int, packs: bool) -> None:  # noqa: FBT001 - compiled
    """Begin the next slice."""
    memory = record_at(snapshot.memory_address, MEMORY)
    if memory.ends_ns > 0:
        _judge(snapshot)
        memory.holder = (memory.holder + 1 + memory.packed) % snapshot.n
    memory.began_ns = snapshot.now_ns
    memory.ends_ns = snapshot.now_ns + slice_ns
    one, other = job_at(snapshot, memory.holder), job_at(snapshot, (memory.holder + 1) % snapshot.n)
    fit = _peak(one) + _peak(other) <= snapshot.budget
    memory.packed = packs and snapshot.n > 1 and fit and not _memo_of(snapshot, memory.holder).reverted
    for i in range(snapshot.n):
        _memo_of(snapshot, i).iteration = job_at(snapshot, i).iteration


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Let those go on whose slice it is, once the others have come to their boundaries."""
    snapshot = snapshot_at(snapshot_address)
    options = array_at(snapshot.options_address, _N_OPTIONS, _FLOAT64)
    memory = record_at(snapshot.memory_address, MEMORY)
    if snapshot.now_ns >= memory.ends_ns and snapshot.n > 0:
        _pass_on(snapshot, max(1, int(options[_SLICE])), options[_PACK] == _ON)
    partner = (memory.holder + 1) % max(1, snapshot.n) if memory.packed else memory.holder
    in_the_way = NOBODY
    for i in range(snapshot.n):
        if i not in (memory.holder, partner) and is_inside(snapshot, i):
            in_the_way = i
    for i in range(snapshot.n):
        if i in (memory.holder, partner) and (in_the_way == NOBODY or is_inside(snapshot, i)):
            goes_on(snapshot, i, memory.ends_ns)
            continue
        waits_for_slice = i not in (memory.holder, partner)
        stands_back(snapshot, i, _QUANTUM, memory.ends_ns, memory.holder if waits_for_slice else in_the_way)
        decision_at(snapshot, i).pauses = 0
        decision_at(snapshot, i).evicts = waits_for_slice


POLICY = Compiled(
    "gandiva",
    decide,
    use_claims=False,
    parameters=PARAMETERS,
    knows="peak, measured progress, clock",
    capabilities=Capabilities(runs=False, pauses=True, asks=True, offline=True),
)
