"""The time shift: the smallest delay after which a whole iteration fits beside what the others are going to hold.

Theory of operation
    Both sides are staircases. A step of the newcomer and a step of the others that together exceed the budget forbid
    every delay with which they would overlap, an open interval of delays. The answer is the smallest delay in none of
    these intervals, so it is 0 or the end of one of them: an instant at which a step of the newcomer would begin just
    when the others come down a step. From a delay that is forbidden we go to the end of an interval that forbids it,
    all at once, until no step complains::

        budget 6     others   4 4 4 1 1 ...        delay 0: 3 + 4 > 6 from 1 to 3: the 3 may begin at 3, so delay 2
                     job      1 3 3 2              delay 2: - - 1 3 3 2 fits

    Time here is exact (nanoseconds, no polling interval), and steps on which the newcomer holds no more than it does
    while it waits forbid nothing.

Source: the delay search of the Zico paper (USENIX ATC 2021, section 4), which polls instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled
from zico.scheduler.demand import profile_at

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zico.scheduler.layout import SceneJob

    Int64s = NDArray[np.int64]

NEVER = -1
"""No delay helps: the others' last step leaves too little."""

_PLENTY = 1 << 62  # of regions


@compiled
def smallest_delay(others: tuple[Int64s, Int64s], job: SceneJob, budget: int) -> tuple[int, int]:
    """Return the smallest delay after which the job's whole next iteration fits, and what forbids a start now.

    Args:
        others: What everybody but the job is going to hold.
        job: The JOB record, at its boundary, with a profile; what it holds there it may hold in any case.
        budget: Regions.

    Returns:
        The delay in nanoseconds, or ``NEVER``; and when, after a start now, memory would first be short, -1 if never.
    """
    t_ns, levels = others
    profile = profile_at(job)
    own_ns, own, n = profile.step_ns, profile.level, profile.n_steps
    last = len(t_ns) - 1
    delay_ns = 0
    conflict_ns = -1
    clean = 0  # newcomer's steps in a row that fit at this delay; n of them, round the end, prove it
    i = k = begin = 0  # the newcomer's step, the others' beside it, and the others' that the delay lies in
    while clean < n:
        if i == n:
            while begin < last and t_ns[begin + 1] <= delay_ns:
                begin += 1
            i, k = 0, begin
        room = budget - own[i] if own[i] > job.held else _PLENTY
        end_ns = own_ns[i + 1] if i + 1 < n else profile.duration_ns
        moved_ns = delay_ns
        while k < last and t_ns[k + 1] <= delay_ns + own_ns[i]:
            k += 1
        at = k
        while True:
            if levels[at] > room:
                if conflict_ns < 0:
                    conflict_ns = max(own_ns[i], t_ns[at])
                if at == last:
                    return NEVER, conflict_ns
                moved_ns = t_ns[at + 1] - own_ns[i]
            if at == last or t_ns[at + 1] >= moved_ns + end_ns:
                break
            at += 1
        k = at
        clean = clean + 1 if moved_ns == delay_ns else 1
        delay_ns = moved_ns
        i += 1
    return delay_ns, conflict_ns
