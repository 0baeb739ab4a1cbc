"""What a job held while it was recorded, beside what was alive in it: what its allocator costs the other jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from zico.trace.events import Kind
from zico.trace.lifetimes import live_after_steps

if TYPE_CHECKING:
    from zico.trace.events import Trace
    from zico.trace.lifetimes import Lifetimes


class HeldFigures(Struct, frozen=True):
    """Regions held in one iteration, as it was."""

    peak_bytes: int
    peak_ratio: float
    """Most bytes of regions held over most bytes alive."""
    mean_ratio: float
    """Bytes of regions held over bytes alive, both integrated over time."""


def held_figures(trace: Trace, life: Lifetimes, begin: int, end: int) -> HeldFigures | None:
    """Return what was held between two events of a trace; ``None`` if it does not say, or nothing lived."""
    kind = trace.events["kind"]
    says = np.flatnonzero(kind == Kind.HELD)
    at = begin + np.flatnonzero(np.isin(kind[begin:end], (Kind.ALLOC, Kind.FREE, Kind.HELD)))
    if not len(says) or not len(at) or says[0] >= end:
        return None
    held = np.append(0, trace.events["size_bytes"][says])[np.searchsorted(says, at, side="right")]
    live = np.append(0, live_after_steps(life))[np.searchsorted(life.step_event, at, side="right")]
    last = trace.events["t_ns"][min(end, len(kind) - 1)]
    lasted_ns = np.diff(np.append(trace.events["t_ns"][at], last))
    alive = float((live * lasted_ns).sum())
    if alive <= 0:
        return None
    peak_bytes = int(held.max())
    return HeldFigures(peak_bytes, peak_bytes / int(live.max()), float((held * lasted_ns).sum()) / alive)
