"""The degree, tuned while the job runs: how many executions the chain is ahead.

Theory of operation
    What faults cost an iteration is compared between degrees a factor of two apart, four iterations
    each, of which the best one counts. In the first ones of a degree, blocks are still where the
    last degree left them. The tuning goes on in a direction while that helps. It tries the other
    one once if the first did not help, and then keeps the best for 64 iterations. A trial may cost
    what an iteration takes, so none begins where less than that is lost in 64::

        32 -> 64 worse -> 16 better -> 8 worse -> 16 for 64 iterations -> 32 ...

Guarantees
    * The degree stays within ``LEAST_DEGREE`` and ``MOST_DEGREE``.
    * Between trials it is the best one of the last trial, so no worse than the first degree was
      then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, inlined
from zico.paging.layout import MOST_DEGREE, TUNE

if TYPE_CHECKING:
    from zico.paging.layout import PagingRecord

LEAST_DEGREE = 8
"""Source: the least that DeepUM's authors tried."""
_TRIAL = 4  # iterations in which tables fill, at first as with another degree
_REST = 16 * _TRIAL  # so that few iterations are trials


@compiled
def note_lost(paging: PagingRecord, lost_ns: int) -> None:
    """Note that the job has waited so long for blocks."""
    paging.lost_ns += lost_ns


@compiled
def note_iteration(paging: PagingRecord, took_ns: int) -> None:
    """Note that an iteration is over, which took so long or ``0``. With ``TUNE``, the next may have another degree."""
    lost_ns = paging.lost_ns
    paging.lost_ns = 0
    if not paging.flags & TUNE:
        return
    paging.trial += 1
    if paging.direction == 0:  # nothing is tried
        rest = _TRIAL if paging.best_degree == 0 else _REST
        if paging.trial >= rest and _is_worth_a_trial(lost_ns, took_ns):
            paging.best_degree = paging.degree
            paging.best_ns = lost_ns
            _try(paging, 2 if paging.degree < MOST_DEGREE else -2)
        return
    paging.trial_ns = lost_ns if paging.trial == 1 else min(paging.trial_ns, lost_ns)
    if paging.trial >= _TRIAL:
        _conclude(paging, took_ns)


@inlined
def _is_worth_a_trial(lost_ns: int, took_ns: int) -> bool:
    return bool(lost_ns > 0 and _REST * lost_ns >= took_ns)


@compiled
def _conclude(paging: PagingRecord, took_ns: int) -> None:
    """Go on, turn back or rest, as the trial of a degree went."""
    direction = paging.direction
    if paging.trial_ns < paging.best_ns:
        paging.best_degree = paging.degree
        paging.best_ns = paging.trial_ns
        paging.turned = 1
        if _is_worth_a_trial(paging.best_ns, took_ns):
            _try(paging, direction)
        else:
            _rest(paging)
    else:
        paging.degree = paging.best_degree
        if paging.turned:
            _rest(paging)
        else:
            paging.turned = 1
            _try(paging, -direction)


@compiled
def _try(paging: PagingRecord, direction: int) -> None:
    """Go from the degree of now to the next one in a direction, 2 up or -2 down, or rest if there is none."""
    degree = paging.degree * 2 if direction > 0 else paging.degree // 2
    if LEAST_DEGREE <= degree <= MOST_DEGREE:
        paging.degree = degree
        paging.direction = direction
        paging.trial = 0
    else:
        _rest(paging)


@compiled
def _rest(paging: PagingRecord) -> None:
    paging.direction = 0
    paging.turned = 0
    paging.trial = 0
