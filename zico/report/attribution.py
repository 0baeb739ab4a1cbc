"""What a job's time in the pool went to: parts that add up to it, from what the broker tells.

Theory of operation
    Running time is what is neither a wait nor a copy. Of that of usual iterations, their number
    times the job's own iteration time is no loss. The kernel tells what the rest went to::

        elapsed | else | learning | waits | copies | iterations | page faults | processor | slower |
                                                   |<-- usual iterations, without waits and copies -->|

    In each iteration the job's threads used a processor, and waited for one, for longer than they
    do when it is by itself. These seconds are those of threads: where p of them compute or wait for
    a processor at a time, p are one second elapsed. If they are more than was lost, what was lost
    is shared by them. A page fault is taken to last ``FAULT_S``, and all of them no longer than the
    job was in the kernel. What remains is slower computing.

Guarantees
    No part is below 0, and their sum is the elapsed time.

Known limitations
    The best iteration time is not that alone: what neighbours always cost is not in it. A thread
    waits for a processor because of any other, also of its own job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from zico.broker.protocol.messages import Counted, Spent

FAULT_S = 2.3e-6
"""Seconds that the first touch of a page takes, its share of 2.4 ms for 4 MiB."""

Known = float | msgspec.UnsetType
"""Seconds, left out where nobody knows."""


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job's time went, in seconds; the parts are in ``PARTS``."""

    elapsed_s: float
    iterations_s: float
    """Usual iterations, each at the job's own time; as long as they took where that is not known."""
    learning_s: float
    """Lost until the policy had thought about the job."""
    boundary_waited_s: float
    inside_waited_s: float
    copies_s: float
    page_faults_s: Known = msgspec.UNSET
    """Estimated."""
    processor_waited_s: Known = msgspec.UNSET
    slower_s: Known = msgspec.UNSET
    other_s: float
    """The start, evaluations, pauses and the end."""
    own_iteration_s: Known = msgspec.UNSET
    own_iteration_is: Literal["alone", "best", "not known"] = "not known"
    minor_faults: int | msgspec.UnsetType = msgspec.UNSET
    major_faults: int | msgspec.UnsetType = msgspec.UNSET


PARTS = {
    "iterations_s": "iterations",
    "learning_s": "learning",
    "boundary_waited_s": "waits to start",
    "inside_waited_s": "waits inside",
    "copies_s": "copies",
    "page_faults_s": "page faults",
    "processor_waited_s": "waits for a processor",
    "slower_s": "slower computing",
    "other_s": "else",
}
"""What they are called."""


def attribute(spent: Spent) -> Attribution:
    """Return the parts of the time of one job."""
    left = _Left(spent.elapsed_s)
    learning_s = left.take(spent.learning_s)
    parts: dict[str, Any] = {
        "boundary_waited_s": left.take(spent.boundary_s),
        "inside_waited_s": left.take(spent.inside_s),
        "copies_s": left.take(spent.copies_s),
    }
    usual = _Left(left.take(spent.usual.running_s))
    parts["other_s"] = left.s
    own = spent.own
    if own is None or not own.iterations:
        return Attribution(elapsed_s=spent.elapsed_s, iterations_s=usual.s, learning_s=learning_s, **parts)
    own_s = own.running_s / own.iterations
    then_s = min(learning_s, spent.learning_iterations * own_s)
    iterations_s = usual.take(spent.usual.iterations * own_s)
    causes: dict[str, Any] = _causes(spent, own, usual.s)
    if spent.windows.processor_s is not None:
        parts |= {"minor_faults": spent.windows.minor_faults, "major_faults": spent.windows.major_faults}
    return Attribution(
        elapsed_s=spent.elapsed_s,
        iterations_s=iterations_s + then_s,
        learning_s=learning_s - then_s,
        slower_s=max(0.0, usual.s - sum(causes.values())),
        own_iteration_s=own_s,
        own_iteration_is="alone" if spent.own_is_alone else "best",
        **parts,
        **causes,
    )


class _Left:
    """Time of which parts are taken."""

    def __init__(self, s: float) -> None:
        self.s = s

    def take(self, s: float) -> float:
        """Take so much, or what is left."""
        taken = min(s, self.s)
        self.s -= taken
        return taken


def _causes(spent: Spent, own: Counted, lost_s: float) -> dict[str, float]:
    """Return what the kernel tells of the time that usual iterations lost, no more than that in all."""
    seen = spent.windows
    if seen.processor_s is None or own.processor_s is None:
        return {}
    tells_queue = seen.queued_s is not None and own.queued_s is not None
    queued_s, own_queued_s = (seen.queued_s or 0.0, own.queued_s or 0.0) if tells_queue else (0.0, 0.0)
    share = seen.iterations / own.iterations
    more_s = max(0.0, seen.processor_s - share * own.processor_s)
    waited_s = max(0.0, queued_s - share * own_queued_s)
    faults = max(0.0, seen.minor_faults - share * own.minor_faults)
    faults_s = min(faults * FAULT_S, seen.system_s, more_s)
    threads = max(1.0, (seen.processor_s + queued_s) / (seen.running_s or 1.0))
    all_iterations = spent.usual.iterations / max(1, seen.iterations)
    elapsed = min(all_iterations / threads, lost_s / (more_s + waited_s or 1.0))
    causes = {"page_faults_s": elapsed * faults_s}
    return causes | {"processor_waited_s": elapsed * waited_s} if tells_queue else causes
