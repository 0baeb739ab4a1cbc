"""What compiled policies and the simulator read and write: records, in regions and nanoseconds.

A snapshot is a pool at one instant, laid out so that the same machine code decides for the broker
and in the simulator. Addresses stand for what lies elsewhere; who makes a record keeps what it
points to.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated

from zico.base.records import F8, I4, I8, U8, Numbers, Record, dtype_of
from zico.pool.rules import Debt
from zico.trace.profile import CURVE_BINS, Curve

NOBODY = -1
NO_TIME = -1
BLOCKERS = 64
"""Who keeps a job waiting is told of the first so many jobs of a snapshot, a bit for each."""


class Reason(enum.IntEnum):
    """Why a job waits at its boundary."""

    NONE = 0
    ALONE = 1
    """Another job's first iteration, of which nothing is known, grows alone."""
    MISFIT = 2
    """Its peak does not fit beside what the others keep between iterations."""
    MEETS = 3
    """Its peak would meet the others'."""
    UNSAFE = 4
    """With one more iteration begun, no order would let all of them finish."""
    TURN = 5
    """One iteration at a time, and another's is going on."""
    BETTER = 6
    """It starts later so that the jobs together get further."""
    LANE = 7
    """Another of its lane is inside an iteration."""
    QUANTUM = 8
    """The device is another's for a while."""
    SHARE = 9
    """Its peak exceeds the share of the budget that is its own."""
    YIELDS = 10
    """It runs only as far as another, which comes before it, loses nothing."""
    ANEW = 11
    """All come to their boundaries first, and begin together."""


class ProfileRecord(Curve):
    """A profile, converted once: its curve, with times that never fall, and what is worked out from it."""

    tick_ns: I8  # no prediction is finer: the width of a bin, were all equal
    peak: I8
    n_steps: I4
    claims: Annotated[Numbers, "i4", (CURVE_BINS,)]  # the most regions held from each bin on
    step_ns: Annotated[Numbers, "i8", (CURVE_BINS,)]  # bins of equal levels joined: when each run of them begins
    level: Annotated[Numbers, "i8", (CURVE_BINS,)]


PROFILE = dtype_of(ProfileRecord)


@dataclasses.dataclass(kw_only=True)
class JobFields(Debt):
    """One job at one instant: what its record in a snapshot, the simulator's and Python's view have in common."""

    job: I8
    """Its place in the pool: plans know it by that."""
    phase: I8
    """``JobState``"""
    persistent: I8
    """Regions that stay when the iteration ends."""
    progress: I8 = 0
    """Allocations and frees since the iteration began."""
    iteration: I8
    """So many have ended."""
    started_ns: I8 = 0
    """When the current iteration was admitted."""
    in_bin_ns: I8 = 0
    """For how long it has been in the bin of its profile that its progress is in, waits for memory left out."""
    waiting_since_ns: I8 = 0
    """When the wait at the boundary or in an allocation began, 0 if it does not wait."""
    waited_ns: I8 = 0
    """For how long it has waited for memory, ever, but for the wait that goes on."""
    need: I8 = 0
    """Regions that an allocation of it waits for now, 0 if none."""
    served: F8 = 1.0
    """Its recent throughput over alone's."""
    floor: F8 = 0.0
    """The least that it is owed of that."""
    weight: F8 = 1.0
    """What its throughput counts beside the others'."""
    priority: I8 = 0
    """Its turn comes before that of any lower one."""
    left: I8 = 0
    """Iterations until it leaves; 0: unknown."""


class SnapshotJob(JobFields):
    """One job of a snapshot."""

    profile_address: I8  # 0 until the first iteration has ended


JOB = dtype_of(SnapshotJob)


class DecisionRecord(Record):
    """What a policy says of a job at its boundary; of any other job only those that pause say something."""

    starts: I8
    until_ns: I8  # NO_TIME: only an event can change it
    reason: I8
    against: I8  # a job's index in the snapshot, or NOBODY
    blockers: U8
    # -- for policies whose capabilities are to pause
    pauses: I8  # a running job stops at its next step's end, and goes on once this is 0
    evicts: I8  # what a waiting job holds is copied out, and back before it starts
    yields: I8  # its pages go first


DECISION = dtype_of(DecisionRecord)

MEMORY_BYTES = 128
MEMO_BYTES = 64
"""What a policy may remember of all jobs that are there, and of each: zeros whenever those are others."""


class Snapshot(Record):
    """All jobs of a pool at one instant."""

    now_ns: I8
    budget: I8
    n: I8
    alone: I8  # the index of the job whose first iteration grows, or NOBODY
    jobs_address: I8
    decisions_address: I8
    plan_address: I8  # of what a policy has worked out about these jobs; 0: nothing
    options_address: I8  # of its parameters, 64-bit floats in the order of their declaration
    memory_address: I8  # of MEMORY_BYTES that it changes as it likes
    memos_address: I8  # of MEMO_BYTES for each job, in the order of the snapshot


SNAPSHOT = dtype_of(Snapshot)
