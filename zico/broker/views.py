"""From the shared table's records to what a policy sees. Pure: records in, frozen views out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zico.base.compiled import interpreted
from zico.broker.protocol.messages import MAX_COUNT
from zico.broker.speeds import Look
from zico.pool import rules
from zico.pool.layout import NO_MORE, NOBODY, Auto, JobState, SaveMode
from zico.scheduler.state import JobView, OperatingPoint, PoolView, Profile

Record = npt.NDArray[np.void]
"""The header, or the jobs' records, as ``PoolTable.snapshot`` copies them."""

_grows_alone = interpreted(rules.grows_alone)
_is_still = interpreted(rules.is_still)

_AS_IT_IS = ("held", "persistent", "progress", "iteration", "started_ns", "need", "limit")
"""Of a job's record, under the same names in what a policy sees."""
_LOOKED_AT = (
    *("state", "profiled", "atypical", "waiting_threads", "progress", "iteration", "started_ns", "last_boundary_ns"),
    *("need_since_ns", "need_waited_ns", "iteration_waited_ns"),
)


class _Known(NamedTuple):
    raw: bytes
    limit: int
    profile: Profile


class ProfileCache:
    """Convert a job's profile only when it has changed, as it does once per iteration at most."""

    def __init__(self) -> None:
        """Know nothing."""
        self._known: dict[int, _Known] = {}

    def profile(self, job: int, record: Any) -> Profile | None:  # noqa: ANN401 - a numpy record
        """Return the profile of ``record``, ``None`` while there is none."""
        if not record["profiled"]:
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


def text_of(raw: bytes) -> str:
    """Return a name as the table holds it."""
    return raw.decode("utf-8", errors="replace")


def job_view(job: int, record: Any, profiles: ProfileCache, *, crowded: bool) -> JobView:  # noqa: ANN401 - a numpy record
    """Return the job at place ``job``; ``crowded``: all jobs of its pool yield at boundaries."""
    state = JobState(int(record["state"]))
    since_ns = record["boundary_since_ns"] if state is JobState.BOUNDARY else record["need_since_ns"]
    return JobView(
        **{name: int(record[name]) for name in _AS_IT_IS},
        job=job,
        name=text_of(bytes(record["name"])),
        phase=state,
        profile=profiles.profile(job, record),
        waiting_since_ns=int(since_ns),
        wanted=count_of(record["wanted"]),
        less=_less_of(record),
        yields_at_boundary=bool((crowded or _swaps(record)) and record["evict"] != NO_MORE),
    )


def _swaps(record: Any) -> bool:  # noqa: ANN401 - a numpy record
    return bool(record["save"] == SaveMode.SWAP and record["auto"] != Auto.WAITS)


def _less_of(record: Any) -> tuple[OperatingPoint, ...]:  # noqa: ANN401 - a numpy record
    """Return how a job that leaves it to the broker could go on with less; paging jobs: ``operating_points``."""
    if not record["auto"]:
        return ()
    how = SaveMode(int(record["save"])).name.lower()
    told = zip(record["less_limit"].tolist(), record["less_ns"].tolist(), strict=True)
    return tuple(
        OperatingPoint(how, limit, duration_ns) for limit, duration_ns in told if limit > 0 and duration_ns > 0
    )


def count_of(value: Any, unit: int = 1) -> int:  # noqa: ANN401 - a numpy integer
    """Return a word that a job writes, times ``unit``, as a count that a message can carry.

    A job that died half-way may have left the word negative.
    """
    return min(max(0, int(value)) * unit, MAX_COUNT)


def pool_view(header: Record, jobs: Record, now_ns: int, profiles: ProfileCache) -> PoolView:
    """Return all jobs at the instant of a snapshot."""
    places = np.flatnonzero(jobs["state"] != JobState.EMPTY).tolist()
    return PoolView(
        now_ns=now_ns,
        budget=int(header["budget_regions"]),
        jobs=tuple(job_view(job, jobs[job], profiles, crowded=bool(header["crowded"])) for job in places),
        alone_job=alone_job(header, jobs, now_ns),
    )


def looks_of(jobs: Record, now_ns: int) -> dict[int, Look]:
    """Return where all jobs are, for ``Speeds``."""
    places = np.flatnonzero(jobs["state"] != JobState.EMPTY)
    own = {name: jobs[name][places] for name in _LOOKED_AT}
    profiles = {name: jobs["profile"][name][places] for name in ("n_events", "duration_ns", "n_bins")}
    known = (own["profiled"] == 1) & (profiles["n_bins"] > 1)  # a single bin is of an iteration that set things up
    n_events = np.where(known, profiles["n_events"], 0)
    inside_ns = now_ns - own["started_ns"] - own["iteration_waited_ns"]
    still = known & _is_still(own["waiting_threads"] > 0, inside_ns, profiles["duration_ns"])
    # A job that was admitted has not begun before it has woken.
    inside = (own["state"] == JobState.RUNNING) & (own["started_ns"] >= own["last_boundary_ns"]) & ~still
    columns = (
        own["iteration"],
        inside,
        own["started_ns"],
        own["last_boundary_ns"],
        own["need_since_ns"],
        own["need_waited_ns"],
        np.minimum(1.0, own["progress"] / np.maximum(1, n_events)),
        n_events,
        own["atypical"] == 0,
    )
    looks = map(Look, *(column.tolist() for column in columns))
    return dict(zip(places.tolist(), looks, strict=True))


def alone_job(header: Record, jobs: Record, now_ns: int) -> int | None:
    """Return the job without a profile that keeps the others at their boundaries."""
    job = int(header["alone_job"])
    if job == NOBODY:
        return None
    names = ("alone_spent_ns", "waiting_threads", "need_since_ns")
    spent_ns, waits, since_ns = (int(jobs[job][name]) for name in names)
    grown_ns = now_ns - int(header["alone_since_ns"])
    return job if _grows_alone(spent_ns, waits > 0, now_ns - since_ns, grown_ns) else None


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
