"""From the shared table's records to what a policy sees. Pure: records in, frozen views out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zico.broker.protocol.messages import MAX_COUNT
from zico.pool import rules
from zico.pool.layout import NOBODY, JobState, SaveMode
from zico.pool.profiles import MAIN_PHASE
from zico.pool.shown import shown_of
from zico.scheduler.state import JobView, PoolView, Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

Record = npt.NDArray[np.void]
"""The header, or the jobs' records, as ``PoolTable.snapshot`` copies them."""

_AS_IT_IS = ("persistent", "progress", "iteration", "started_ns", "need", "limit")
"""Of a job's record, under the same names in what a policy sees."""
_MOST_SHIFT = 62  # of a word
_DEBT = tuple(field.name for field in dataclasses.fields(rules.Debt))


class _Known(NamedTuple):
    raw: bytes
    limit: int
    profile: Profile


class ProfileCache:
    """Convert a job's profile only when it has changed, as it does once per iteration at most."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._sums: dict[int, tuple[tuple[Profile, ...], int, Profile]] = {}

    def sum(self, job: int, profiles: tuple[Profile, ...], budget: int) -> Profile:
        """Return the profile of a group, which is known by one of its ranks."""
        known = self._sums.get(job)
        if known is None or known[:2] != (profiles, budget):
            known = self._sums[job] = (profiles, budget, sum_of(profiles, budget))
        return known[2]

    def profile(self, job: int, record: Any) -> Profile | None:  # noqa: ANN401 - a numpy record
        """Return the profile of ``record``, ``None`` while there is none, or it does not know what runs."""
        if not record["profiled"] or record["outgrown"]:
            return None
        raw, limit = record["profile"].tobytes(), int(record["limit"])
        known = self._known.get(job)
        if known is None or (known.raw, known.limit) != (raw, limit):
            known = _Known(raw, limit, profile_of(record["profile"], limit))
            self._known[job] = known
        return known.profile


def profile_of(curve: Any, limit: int = 0) -> Profile:  # noqa: ANN401 - a numpy record
    """Return the profile that a ``CURVE`` record holds, with times that never fall, which policies rely on.

    What lies above the job's own limit (0: none) is not in it, since that never comes to be held in
    the pool.

    A job's own times may fall: one thread's wait is taken off the clock when it ends, while others
    went on.
    """
    used = slice(max(1, int(curve["n_bins"])))
    t_ns = np.maximum.accumulate(curve["t_ns"][used]).tolist()
    return Profile(
        held=tuple((np.minimum(curve["held"][used], limit) if limit else curve["held"][used]).tolist()),
        t_ns=tuple(t_ns),
        duration_ns=max(int(curve["duration_ns"]), t_ns[-1]),
        shift=int(curve["shift"]),
        n_events=int(curve["n_events"]),
    )


def sum_of(profiles: Sequence[Profile], budget: int) -> Profile:
    """Return what ranks of one job hold together: they run the same program at the same pace.

    The steps are those of the first rank; each holds the most that another rank holds in that share
    of its own iteration. As in ``rules.merge_groups``, together they hold no more than the budget.
    """
    first = profiles[0]
    n = len(first.held)
    held = np.zeros(n, np.int64)
    for profile in profiles:
        levels = np.asarray(profile.held)
        begins = np.arange(n) * len(levels) // n
        lasts = np.maximum(begins, -(-np.arange(1, n + 1) * len(levels) // n) - 1)
        held += np.maximum(np.maximum.reduceat(levels, begins), levels[lasts])
    longest_ns = max(profile.duration_ns for profile in profiles)
    return dataclasses.replace(first, held=tuple(np.minimum(held, budget).tolist()), duration_ns=longest_ns)


def text_of(raw: bytes) -> str:
    """Return a name as the table holds it."""
    return raw.decode("utf-8", errors="replace")


def job_view(job: int, record: Any, debt: Any, now_ns: int, profiles: ProfileCache) -> JobView:  # noqa: ANN401 - numpy records
    """Return the job at place ``job`` of a pool, which has and owes what the SHOWN record ``debt`` says."""
    state = JobState(int(record["state"]))
    since_ns = record["boundary_since_ns"] if state is JobState.BOUNDARY else record["need_since_ns"]
    as_it_is: dict[str, Any] = {name: int(record[name]) for name in _AS_IT_IS}
    profile = profiles.profile(job, record)
    return JobView(
        **as_it_is,
        **_debt_of(debt),
        job=job,
        name=text_of(bytes(record["name"])),
        phase=state,
        profile=profile,
        in_bin_ns=0 if profile is None or state is JobState.BOUNDARY else _in_bin_ns(record, profile, now_ns),
        in_main_phase=bool(record["phase"] == MAIN_PHASE and not record["outgrown"] and not record["remembered"]),
        waiting_since_ns=int(since_ns),
        wanted=count_of(record["wanted"]),
        waited_ns=count_of(int(record["boundary_waited_ns"]) + int(record["need_waited_ns"])),
        saves=_saves(record),
    )


def _in_bin_ns(record: Any, profile: Profile, now_ns: int) -> int:  # noqa: ANN401 - a numpy record
    """Return for how long the job has been in the bin of its profile, by the curve of the iteration that goes on.

    A job writes these words itself, so none of them is trusted.
    """
    current = record["current"]
    shift, own_shift = (min(count_of(each), _MOST_SHIFT) for each in (profile.shift, current["shift"]))
    begin = min(count_of(record["progress"]) >> shift, len(profile.t_ns) - 1) << shift
    last = min(count_of(current["n_bins"]), len(current["t_ns"])) - 1
    entered_ns = int(current["t_ns"][min(begin >> own_shift, last)]) if last >= 0 else 0
    until_ns = int(record["need_since_ns"]) or now_ns
    return count_of(until_ns - int(record["started_ns"]) - int(record["iteration_waited_ns"]) - entered_ns)


def _debt_of(record: Any) -> dict[str, Any]:  # noqa: ANN401 - a numpy record
    return {name: int(record[name]) for name in _DEBT}


def _saves(record: Any) -> bool:  # noqa: ANN401 - a numpy record
    """Tell whether the broker chooses what a job may hold: one that swaps says what it wants once it can save."""
    return bool(record["auto"] and (record["save"] == SaveMode.PAGE or record["wanted"] > 0))


def count_of(value: Any, unit: int = 1) -> int:  # noqa: ANN401 - a numpy integer
    """Return a word that a job writes, times ``unit``, as a count that a message can carry.

    A job that died half-way may have left the word negative.
    """
    return min(max(0, int(value)) * unit, MAX_COUNT)


# -- groups: ranks that begin together are one job to a policy --------------------------------------


def group_view(views: Sequence[JobView], debt: Any, profiles: ProfileCache, budget: int) -> JobView:  # noqa: ANN401 - a numpy record
    """Return a group as one job, by the views of its ranks and the SHOWN record at the place of the first.

    It stands at its boundary when no rank has to wait for another one there.
    """
    waiting = [view for view in views if view.phase == JobState.BOUNDARY]
    inside = [view for view in views if view.phase == JobState.RUNNING]
    at_boundary = bool(debt["at_boundary"])
    behind = min(inside or views, key=_share_done)
    known = [view.profile for view in views if view.profile is not None]
    since_ns = [view.waiting_since_ns for view in (waiting if at_boundary else inside) if view.waiting_since_ns]
    return dataclasses.replace(
        views[0],
        **_debt_of(debt),
        ranks=tuple(view.job for view in views),
        phase=JobState.BOUNDARY if at_boundary else JobState.RUNNING,
        persistent=min(budget, sum(view.persistent for view in views)),
        progress=_progress_of(behind, views[0]),
        iteration=max(view.iteration for view in views),
        started_ns=views[0].started_ns if at_boundary else behind.started_ns,
        in_bin_ns=behind.in_bin_ns,
        waiting_since_ns=(max if at_boundary else min)(since_ns, default=0),
        need=sum(view.need for view in views),
        limit=sum(view.limit for view in views) if all(view.limit for view in views) else 0,
        in_main_phase=all(view.in_main_phase for view in views),
        profile=profiles.sum(views[0].job, tuple(known), budget) if len(known) == len(views) else None,
        wanted=sum(view.wanted for view in views) if all(view.wanted for view in views) else 0,
        saves=False,
    )


def _share_done(view: JobView) -> float:
    return view.progress / max(1, view.profile.n_events) if view.profile is not None else 0.0


def _progress_of(behind: JobView, first: JobView) -> int:
    """Return where a group is, in events of its first rank."""
    return behind.progress if first.profile is None else round(_share_done(behind) * first.profile.n_events)


def pool_view(header: Record, jobs: Record, now_ns: int, profiles: ProfileCache) -> PoolView:
    """Return all jobs at the instant of a snapshot; the ranks of a group are one job, at the place of the first.

    A job that is paused at its boundary, or stands there behind a closed gate, is left out. What it
    keeps is left out of the budget. To policies and their plans it is as if it had gone, so nobody
    waits for it to start.
    """
    budget = int(header["budget_regions"])
    shown, growing = shown_of(header, jobs, now_ns)
    ranks_of: dict[int, list[int]] = {}
    for place in np.flatnonzero(jobs["state"] != JobState.EMPTY).tolist():
        ranks_of.setdefault(int(shown[place]["first"]), []).append(place)
    views, left_out = [], 0
    for first, ranks in ranks_of.items():
        own = [job_view(job, jobs[job], shown[job], now_ns, profiles) for job in ranks]
        view = own[0] if len(own) == 1 else group_view(own, shown[first], profiles, budget)
        if view.phase == JobState.BOUNDARY and any(shown[rank]["stays"] for rank in ranks):
            left_out += view.held
        else:
            views.append(view)
    return PoolView(
        now_ns=now_ns,
        budget=max(0, budget - left_out),
        jobs=tuple(views),
        alone_job=None if growing == NOBODY else int(shown[growing]["first"]),
        late=tuple(np.flatnonzero(shown["awaited"]).tolist()),
        staying=tuple(np.flatnonzero((shown["stays"] != 0) & (jobs["held"] > 0)).tolist()),
    )


def jobs_in(mask: int) -> tuple[int, ...]:
    """Return the jobs whose bits ``mask`` has."""
    unsigned = mask & 0xFFFF_FFFF_FFFF_FFFF
    return tuple(job for job in range(unsigned.bit_length()) if unsigned >> job & 1)


def mask_of(jobs: tuple[int, ...]) -> int:
    """Return a bit for each job, as the table's signed 64-bit word holds them."""
    unsigned = 0
    for job in jobs:
        unsigned |= 1 << job
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned
