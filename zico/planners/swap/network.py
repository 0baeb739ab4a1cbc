r"""How much of each gap leaves, as the cheapest flow of bytes through a network in time.

Each point of time (``zico/planners/swap/fluid.py``) is three nodes: what wants out, what is elsewhere, and what is
back. Bytes go round: out in their gap, back before it closes, and by the gap's own arc to where it opened. The arcs
between neighbouring points are time that passes::

    wants out    o -----> o -----> o -----> o        the slots of a link lead from one row to the next: begin and end
                   \ slot            \               of a transfer of one part, so that memory is held as it will be
    elsewhere    o -----> o =====> o =====> o        ===  at least so much as the load lies above the limit
                            \ slot            \
    back         o -----> o -----> o -----> o
                 ^---------- gap -----------'        from the row's end, at most the gap's bytes

Slots are as many as there is time for. Further transfers at a point cost what everybody waits for them. As each arc
has whole capacities, so has the cheapest flow: a part is counted in units, some of them.

Known limitations
    * The iteration is cut open where the fewest bytes of gaps pass; a gap that passes there is used on one side.
    * Waits for both directions at one point add up here, though they would overlap.
    * That what returns is what left is not seen here; the schedule looks after it.
    * A slot may carry bytes of two gaps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.swap.circulation import UNBOUNDED, cheapest_circulation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planners.swap.fluid import Fluid
    from zico.planners.swap.problem import Int64s, Link

    Latencies = tuple[NDArray[np.float64], NDArray[np.float64]]

_EXACT = 1e-9  # parts: what sums of fractions may be off
_UNITS = 32  # in a part
_MOVED = 1  # ns that a unit costs besides, so that none moves for nothing


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A fluid cut open, with gaps that lie between the first and the last point."""

    fluid: Fluid
    cut: int
    """The point of the fluid that is the first one here."""
    opens: Int64s
    closes: Int64s
    point_ns: Int64s
    """Of each point, the last one included, from the first one on."""
    load_bytes: Int64s
    """Of each segment."""
    piece: Int64s
    """Which piece of its segment each segment here is; a wait is possible at the beginning of a first one only."""


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """How much of each gap leaves, and where that takes time."""

    size_bytes: Int64s
    """All bytes of the gap, or a multiple of a unit."""
    wait_ns: Int64s
    """At each point of the line."""


def cut_open(fluid: Fluid, piece_ns: int) -> Line:
    """Return a fluid on a line, with segments above the level cut into pieces of about ``piece_ns``."""
    n = fluid.n_segments
    passing = np.zeros(2 * n + 1, np.int64)
    np.add.at(passing, fluid.opens + 1, fluid.size_bytes)
    np.subtract.at(passing, fluid.closes, fluid.size_bytes)
    passing = np.cumsum(passing)
    cut = int(np.argmin(passing[:n] + passing[n : 2 * n]))
    opens = (fluid.opens - cut) % n
    closes = opens + fluid.closes - fluid.opens
    point_ns = np.concatenate([[0], np.cumsum(np.roll(fluid.duration_ns, -cut))])
    wraps = closes > n
    after = point_ns[closes[wraps] - n]
    keeps_end = fluid.returns[wraps] & (point_ns[-1] - point_ns[opens[wraps]] >= after)
    closes[wraps] = np.where(keeps_end, n, closes[wraps] - n)
    opens[wraps] = np.where(keeps_end, opens[wraps], 0)
    load = np.roll(fluid.load_bytes, -cut)
    pieces = np.where(load > 0, np.maximum(-(-np.diff(point_ns) // piece_ns), 1), 1)
    first = np.concatenate([[0], np.cumsum(pieces)])
    of = np.repeat(np.arange(n), pieces)
    part = np.arange(first[-1]) - first[of]
    inner_ns = point_ns[of] + np.diff(point_ns)[of] * part // pieces[of]
    return Line(fluid, cut, first[opens], first[closes], np.append(inner_ns, point_ns[-1]), load[of], part)


def shares_within(
    line: Line, part_bytes: int, limit_bytes: int, links: tuple[Link, Link], latency: Latencies
) -> Shares | None:
    """Return the shares with the least wait, ``None`` if no shares keep the limit.

    Args:
        line: From ``cut_open``.
        part_bytes: What a transfer moves.
        limit_bytes: What may be in memory at once.
        links: Out and back.
        latency: What share of a link's latency a part takes in each segment, out and back.
    """
    n, n_points = len(line.load_bytes), len(line.point_ns)
    points = np.arange(n_points)
    wants, away, back = points, points + n_points, points + 2 * n_points
    unit = max(part_bytes // _UNITS, 1)
    units = -(-part_bytes // unit)
    need = np.maximum(-(-(line.load_bytes - limit_bytes) // unit), 0) * (line.load_bytes > 0)
    none, many = np.zeros(n, np.int64), np.full(n, UNBOUNDED)
    rows = [(row[:-1], row[1:], none, many, none) for row in (wants, back)]
    rows.append((away[:-1], away[1:], need, many, none))
    out_ns, back_ns = (link.transfer_ns(part_bytes) for link in links)
    part_ns = [
        ns - link.latency_ns * (1 - share) for ns, link, share in zip((out_ns, back_ns), links, latency, strict=True)
    ]
    for begin, end, (first, last, count) in (
        (wants, away, _slots(line.point_ns, part_ns[0], from_end=False)),
        (away, back, _slots(line.point_ns, part_ns[1], from_end=True)),
    ):
        rows.append((begin[first], end[last], np.zeros_like(count), count * units, np.zeros_like(count)))
    zero, any_ = np.zeros(n_points, np.int64), np.where(np.append(line.piece, 0) == 0, UNBOUNDED, 0)
    extra = sum(len(row[0]) for row in rows)
    rows += [(wants, away, zero, any_, zero + out_ns), (away, back, zero, any_, zero + back_ns)]
    most_units = line.fluid.size_bytes // unit
    ends = np.where(line.fluid.returns, back[line.closes], away[line.closes])
    nothing = np.zeros_like(most_units)
    rows.append((ends, wants[line.opens], nothing, most_units, nothing + _MOVED))
    tail, head, least, most, cost = (np.concatenate(column) for column in zip(*rows, strict=True))
    found = cheapest_circulation(3 * n_points, (tail, head), (least, most), cost)
    if found.missing:
        return None
    waits_ns = -(-found.flow[extra : extra + 2 * n_points].reshape(2, n_points) * [[out_ns], [back_ns]] // units)
    flow = found.flow[len(found.flow) - len(most_units) :]
    return Shares(np.where(flow < most_units, flow * unit, line.fluid.size_bytes * (flow > 0)), waits_ns.max(axis=0))


def _slots(point_ns: Int64s, part_ns: NDArray[np.float64], *, from_end: bool) -> tuple[Int64s, Int64s, Int64s]:
    """Return the points between which a link can move a part, and how many it can move between the same two.

    Args:
        point_ns: Of each point.
        part_ns: How long a part takes in each segment.
        from_end: Let the last slot, not the first one, touch the line's end.
    """
    moved = np.concatenate([[0.0], np.cumsum(np.diff(point_ns) / part_ns)])  # parts, if the link never rests
    whole = int(moved[-1])
    begin = np.arange(whole) + (moved[-1] - whole if from_end else 0.0)
    first = np.clip(np.searchsorted(moved, begin + _EXACT, side="right") - 1, 0, len(point_ns) - 2)
    last = np.clip(np.searchsorted(moved, begin + 1 - _EXACT, side="left"), 1, len(point_ns) - 1)
    pair, count = np.unique(first * len(point_ns) + last, return_counts=True)
    return pair // len(point_ns), pair % len(point_ns), count
