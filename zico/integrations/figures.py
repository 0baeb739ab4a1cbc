"""What a running job has used of its pool so far, as trainers log it.

Loads no framework, no NumPy and no Numba by being imported.
"""

from __future__ import annotations

import dataclasses

from zico.job import session

PREFIX = "zico_"
COUNTED = ("waited_s", "moved_out_bytes", "moved_in_bytes", "page_faults", "spilled_bytes", "evicted_bytes")
LOGGED = ("peak_bytes", *COUNTED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A job's figures since it joined its pool, or those of a part of the job (``Part``)."""

    peak_bytes: int
    """The most that the job held at a time, in whole regions."""
    waited_s: float
    """The time that the job waited for its turn and for memory."""
    moved_out_bytes: int
    """What was copied out of the budget; 0 for a job that neither swaps nor pages."""
    moved_in_bytes: int
    """What was copied back."""
    page_faults: int
    """Page faults that Zico served, of a job that pages."""
    spilled_bytes: int
    """Tensors that were placed outside the budget, since nobody could go on otherwise."""
    evicted_bytes: int
    """What left the budget because other jobs needed the room."""
    refusals: int
    """Requests that could never be met: out of memory."""
    needed_bytes: int
    """What the last of them needed together with what the job held; 0 if there was none."""

    def named(self) -> dict[str, int | float]:
        """Return what is worth a curve, by the names under which loggers show it: ``zico_peak_bytes`` ..."""
        return {f"{PREFIX}{name}": getattr(self, name) for name in LOGGED}


def figures() -> Figures | None:
    """Return this process's figures so far.

    Returns:
        ``None`` if this process is no job of a pool: outside ``zico run``, or in a child forked
        from a job.
    """
    found = session.status() if session.current_here() is not None else None
    if found is None:
        return None
    return Figures(**{field.name: found[field.name] for field in dataclasses.fields(Figures)})


class Part:
    """A part of a job that begins when this object is made, such as a trial of a search.

    One part of a process is measured at a time: the peak is that since the last one began.
    """

    def __init__(self) -> None:
        self._before = figures()
        joined = session.current_here()
        if joined is not None:
            joined.pool.restart_peak()

    def so_far(self) -> Figures | None:
        """Return the figures since the part began; ``None`` outside a pool.

        A process that joins a pool within the part, by importing its framework, counts from there.
        """
        joined, now = session.current_here(), figures()
        if joined is None or now is None:
            return None
        counted = {name: getattr(now, name) - getattr(self._before, name, 0) for name in (*COUNTED, "refusals")}
        peak_bytes = int(joined.record["recent_peak"]) * joined.pool.region_bytes
        needed_bytes = now.needed_bytes if counted["refusals"] else 0
        return Figures(peak_bytes=peak_bytes, needed_bytes=needed_bytes, **counted)
