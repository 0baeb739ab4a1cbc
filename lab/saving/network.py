r"""How much of each gap leaves, as the cheapest flow of bytes through a network in time.

Each point of time (``lab/saving/bound.py``) is three nodes: what wants out, what is
elsewhere, and what is back. Bytes go round: out in their gap, back before it closes, and by the
gap's own arc to where it opened. The arcs between neighbouring points are time that passes::

    wants out    o -----> o -----> o -----> o        the slots of a link lead from one row to the next: begin and end
                   \ slot            \               of a transfer of one part, so that memory is held as it will be
    elsewhere    o -----> o =====> o =====> o        ===  at least so much as the load lies above the limit
                            \ slot            \
    back         o -----> o -----> o -----> o
                 ^---------- gap -----------'        from the row's end, at most the gap's bytes

Slots are as many as there is time for. Further transfers at a point cost what everybody waits for
them. As each arc has whole capacities, so has the cheapest flow: a part is counted in units, some
of them.

Known limitations
    * The iteration is cut open where the fewest bytes of gaps pass. A gap that passes there is used
      on one side, or on both. What is away at the cut is then chosen first, with the ends joined.
      There a toll at the cut keeps bytes from going round that never left.
    * Waits for both directions at one point add up here, though they would overlap.
    * That what returns is what left is not seen here; the schedule looks after it.
    * A slot may carry bytes of two gaps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.lab.saving.bound import Fluid
    from zico.planning.saving.problem import Int64s, Link

    Arrays = tuple[NDArray[Any], ...]
    Latencies = tuple[NDArray[np.float64], NDArray[np.float64]]


# -- the cheapest circulation in a network: compiled, with whole numbers only ----------------------
#
# Arcs have a least and a most flow and a cost for each unit. The network simplex keeps a spanning
# tree of arcs whose flow is free; all other arcs are at their least or their most. Each pivot
# brings in an arc whose reduced cost has the wrong sign. It pushes flow round the cycle that it
# closes, and drops the arc that blocks::
#
#           first ---entering---> second
#             \                    /        pi: potential of a node, so that every arc of the tree has
#              +-- .. join .. ----+             cost + pi[tail] - pi[head] == 0
#
# The tree stays strongly feasible (the last blocking arc from the join in the direction of the push
# leaves), so that it does not cycle.
#
# Source: R. K. Ahuja, T. L. Magnanti, J. B. Orlin, "Network flows" (1993), chapter 11; which arc
# enters: the best of a block, as in P. Kovacs, "Minimum-cost flow algorithms: an experimental
# evaluation" (2015).

UNBOUNDED = 1 << 40
"""The most flow of an arc without a limit."""
_MISSING = 1 << 45  # cost of a unit that cannot be had
_AT_LEAST, _IN_TREE, _AT_MOST = 1, 0, -1
_LEAST_BLOCK = 20


@dataclasses.dataclass(frozen=True, eq=False)
class Circulation:
    """The cheapest circulation."""

    flow: Int64s
    """Of each arc."""
    missing: int
    """Units of the least flows that the network cannot carry; 0 if the circulation is feasible."""


def cheapest_circulation(
    n_nodes: int, arcs: tuple[Int64s, Int64s], bounds: tuple[Int64s, Int64s], cost: Int64s
) -> Circulation:
    """Return a circulation of least cost among those that miss the fewest units.

    Args:
        n_nodes: Nodes are numbered from 0.
        arcs: Tail and head of each arc.
        bounds: Least and most flow of each arc, up to ``UNBOUNDED``.
        cost: Of one unit on each arc; less than 2**45 along any path.
    """
    tail, head = arcs
    least, most = bounds
    supply = np.zeros(n_nodes, np.int64)
    np.add.at(supply, head, least)
    np.subtract.at(supply, tail, least)
    nodes = np.arange(n_nodes)
    gives = supply >= 0
    tails = np.concatenate([tail, np.where(gives, nodes, n_nodes)])
    heads = np.concatenate([head, np.where(gives, n_nodes, nodes)])
    room = np.concatenate([most - least, np.full(n_nodes, UNBOUNDED)])
    costs = np.concatenate([cost, np.full(n_nodes, _MISSING)])
    flow = np.concatenate([np.zeros(len(tail), np.int64), np.abs(supply)])
    state = np.concatenate([np.full(len(tail), _AT_LEAST, np.int8), np.full(n_nodes, _IN_TREE, np.int8)])
    tree = np.full((5, n_nodes + 1), -1)  # parent, arc to it, first child, next and previous sibling
    depth = np.ones(n_nodes + 1, np.int64)
    potential = np.zeros(n_nodes + 1, np.int64)
    _star(tree, depth, potential, len(tail), gives)
    _pivot_all((tails, heads, room, costs), flow, state, tree, (depth, potential))
    missing = int(flow[len(tail) :].sum()) // 2
    return Circulation(flow[: len(tail)] + least, missing)


@compiled
def _star(tree: Int64s, depth: Int64s, potential: Int64s, n_arcs: int, gives: NDArray[np.bool_]) -> None:
    """Hang all nodes under the root, each by its own arc that stands for missing units."""
    root = len(gives)
    depth[root] = 0
    for node in range(root):
        tree[0, node] = root
        tree[1, node] = n_arcs + node
        _adopt(tree, root, node)
        potential[node] = -_MISSING if gives[node] else _MISSING


@compiled
def _adopt(tree: Int64s, parent: int, node: int) -> None:
    first = tree[2, parent]
    tree[3, node] = first
    tree[4, node] = -1
    if first >= 0:
        tree[4, first] = node
    tree[2, parent] = node


@compiled
def _disown(tree: Int64s, parent: int, node: int) -> None:
    """Take a node from its parent's children."""
    after, before = tree[3, node], tree[4, node]
    if before >= 0:
        tree[3, before] = after
    else:
        tree[2, parent] = after
    if after >= 0:
        tree[4, after] = before


@compiled
def _pivot_all(
    network: Arrays, flow: Int64s, state: NDArray[np.int8], tree: Int64s, nodes: tuple[Int64s, Int64s]
) -> int:
    """Pivot until no arc has a reduced cost of the wrong sign; return how often."""
    tails, heads, _, _ = network
    block = max(int(np.sqrt(len(tails))), _LEAST_BLOCK)
    stack = np.empty(len(nodes[0]), np.int64)
    at = 0
    pivots = 0
    while True:
        entering, at = _find(network, state, nodes[1], at, block)
        if entering < 0:
            return pivots
        pivots += 1
        forward = state[entering] == _AT_LEAST
        first = tails[entering] if forward else heads[entering]
        second = heads[entering] if forward else tails[entering]
        leaving, on_first = _push(network, flow, tree, nodes[0], (entering, first, second))
        if leaving < 0:
            state[entering] = -state[entering]
            continue
        out = tree[1, leaving]
        state[out] = _AT_LEAST if flow[out] == 0 else _AT_MOST
        state[entering] = _IN_TREE
        inner = first if on_first else second
        outer = second if on_first else first
        _rehang(tree, inner, outer, leaving, entering)
        _refresh(network, tree, nodes, inner, stack)


@compiled
def _find(network: Arrays, state: NDArray[np.int8], potential: Int64s, at: int, block: int) -> tuple[int, int]:
    """Return the arc of the worst reduced cost in the first block that has one, -1 if none, and where to go on."""
    tails, heads, _, costs = network
    n = len(tails)
    best, found, left = 0, -1, block
    for _ in range(n):
        wrong = state[at] * (costs[at] + potential[tails[at]] - potential[heads[at]])
        if wrong < best:
            best, found = wrong, at
        at += 1
        if at == n:
            at = 0
        left -= 1
        if left == 0:
            if found >= 0:
                break
            left = block
    return found, at


@compiled
def _push(
    network: Arrays, flow: Int64s, tree: Int64s, depth: Int64s, entering: tuple[int, int, int]
) -> tuple[int, bool]:
    """Push all that the cycle takes; return the lower node of the blocking arc, -1 if that is the entering one."""
    tails, _, room, _ = network
    arc, first, second = entering
    delta = room[arc]
    leaving, on_first = -1, False
    u, v = first, second
    # Going up from both ends, the strict comparison on the first side and the weak one on the
    # second keep the tree strongly feasible.
    while u != v:
        if depth[u] >= depth[v]:
            k = tree[1, u]
            free = flow[k] if tails[k] == u else room[k] - flow[k]
            if free < delta:
                delta, leaving, on_first = free, u, True
            u = tree[0, u]
        else:
            k = tree[1, v]
            free = room[k] - flow[k] if tails[k] == v else flow[k]
            if free <= delta:
                delta, leaving, on_first = free, v, False
            v = tree[0, v]
    join = u
    if delta > 0:
        flow[arc] += delta if tails[arc] == first else -delta
        u = first
        while u != join:
            k = tree[1, u]
            flow[k] += -delta if tails[k] == u else delta
            u = tree[0, u]
        v = second
        while v != join:
            k = tree[1, v]
            flow[k] += delta if tails[k] == v else -delta
            v = tree[0, v]
    return leaving, on_first


@compiled
def _rehang(tree: Int64s, inner: int, outer: int, leaving: int, entering: int) -> None:
    """Cut the subtree at ``leaving`` off and hang it below ``outer`` by ``inner``, which becomes its root."""
    node, parent, arc = inner, outer, entering
    while True:
        old_parent, old_arc = tree[0, node], tree[1, node]
        _disown(tree, old_parent, node)
        tree[0, node] = parent
        tree[1, node] = arc
        _adopt(tree, parent, node)
        if node == leaving:
            return
        node, parent, arc = old_parent, node, old_arc


@compiled
def _refresh(network: Arrays, tree: Int64s, nodes: tuple[Int64s, Int64s], root: int, stack: Int64s) -> None:
    """Set depths and potentials below a node anew."""
    _, heads, _, costs = network
    depth, potential = nodes
    stack[0] = root
    n = 1
    while n > 0:
        n -= 1
        node = stack[n]
        parent, arc = tree[0, node], tree[1, node]
        depth[node] = depth[parent] + 1
        potential[node] = potential[parent] + (costs[arc] if heads[arc] == node else -costs[arc])
        child = tree[2, node]
        while child >= 0:
            stack[n] = child
            n += 1
            child = tree[3, child]


# --------------------------------------------------------------------------------------------------

_EXACT = 1e-9  # parts: what sums of fractions may be off
_UNITS = 32  # in a part
_TOLLS = 7  # tried, by bisection
_MOVED = 1  # ns that a unit costs besides, so that none moves for nothing


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A fluid cut open, with gaps that lie between the first and the last point, or leave out what lies between."""

    fluid: Fluid
    cut: int
    """The point of the fluid that is the first one here."""
    opens: Int64s
    closes: Int64s
    """Before ``opens`` for a gap over the cut: it is one up to here, and again from where it opens."""
    point_ns: Int64s
    """Of each point, the last one included, from the first one on."""
    load_bytes: Int64s
    """Of each segment."""
    piece: Int64s
    """Which piece of its segment each segment here is; a wait is possible at the beginning of a first one only."""

    @property
    def over(self) -> NDArray[np.bool_]:
        """Return which gaps pass the cut."""
        return np.asarray(self.closes < self.opens)


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """How much of each gap leaves, and where that takes time."""

    size_bytes: Int64s
    """All bytes of the gap, or a multiple of a unit."""
    wait_ns: Int64s
    """At each point of the line."""


def cut_open(fluid: Fluid, piece_ns: int, *, over: bool = False) -> Line:
    """Return a fluid on a line, with segments above the level cut into pieces of about ``piece_ns``.

    Args:
        fluid: The fluid.
        piece_ns: The length.
        over: Let gaps pass the cut whose bytes return; else they end there.
    """
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
    if over:
        both = wraps & fluid.returns & (closes - n < opens)
        closes[both] -= n
        wraps &= ~both
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
    network = _Network(line, part_bytes, limit_bytes, links, latency)
    if not line.over.any():
        return network.shares()
    found: list[Shares] = []
    low, high = 0, sum(network.part_ns)
    for _ in range(_TOLLS):
        toll = (low + high) // 2
        over, too_many = network.over_at(toll)
        shares = network.shares(over)
        if shares is not None:
            found.append(shares)
        if too_many == 0:
            break
        low, high = (toll, high) if too_many > 0 else (low, toll)
    return min(found, key=lambda shares: int(shares.wait_ns.sum()), default=None)


class _Network:
    """The arcs between a line's points, and what flows in them."""

    def __init__(
        self, line: Line, part_bytes: int, limit_bytes: int, links: tuple[Link, Link], latency: Latencies
    ) -> None:
        n, n_points = len(line.load_bytes), len(line.point_ns)
        points = np.arange(n_points)
        self._wants, self._away, self._back = points, points + n_points, points + 2 * n_points
        wants, away, back = self._wants, self._away, self._back
        self._line, self._n_points = line, n_points
        self._unit = unit = max(part_bytes // _UNITS, 1)
        self._units = units = -(-part_bytes // unit)
        need = np.maximum(-(-(line.load_bytes - limit_bytes) // unit), 0) * (line.load_bytes > 0)
        none, many = np.zeros(n, np.int64), np.full(n, UNBOUNDED)
        rows = [(row[:-1], row[1:], none, many, none) for row in (wants, back)]
        rows.append((away[:-1], away[1:], need, many, none))
        out_ns, back_ns = self.part_ns = tuple(link.transfer_ns(part_bytes) for link in links)
        took_ns = [
            ns - link.latency_ns * (1 - share) for ns, link, share in zip(self.part_ns, links, latency, strict=True)
        ]
        for begin, end, (first, last, count) in (
            (wants, away, _slots(line.point_ns, took_ns[0], from_end=False)),
            (away, back, _slots(line.point_ns, took_ns[1], from_end=True)),
        ):
            rows.append((begin[first], end[last], np.zeros_like(count), count * units, np.zeros_like(count)))
        zero, any_ = np.zeros(n_points, np.int64), np.where(np.append(line.piece, 0) == 0, UNBOUNDED, 0)
        self._extra = sum(len(row[0]) for row in rows)
        rows += [(wants, away, zero, any_, zero + out_ns), (away, back, zero, any_, zero + back_ns)]
        self._rows = rows
        self._most = line.fluid.size_bytes // unit
        self._ends = np.where(line.fluid.returns, back[line.closes], away[line.closes])

    def shares(self, over: Int64s | None = None) -> Shares | None:
        """Return the shares with the least wait, of gaps over the cut just so many units; ``None`` if there are none.

        What is away at the cut begins there, and leaves by the end.
        """
        line, passes = self._line, self._line.over
        nothing = np.zeros_like(self._most)
        fixed = nothing[passes] if over is None else over
        rows = [(self._ends, self._wants[line.opens], nothing, np.where(passes, 0, self._most), nothing + _MOVED)]
        for tail, head in (
            (self._ends[passes], np.full(len(fixed), self._away[0])),
            (np.full(len(fixed), self._away[-1]), self._wants[line.opens[passes]]),
        ):
            rows.append((tail, head, fixed, fixed, np.zeros_like(fixed)))
        flow = self._flow(rows)
        if flow is None:
            return None
        waits = flow[self._extra : self._extra + 2 * self._n_points].reshape(2, self._n_points)
        waits_ns = -(-waits * np.array(self.part_ns)[:, None] // self._units)
        moved = flow[-len(nothing) - 2 * len(fixed) :][: len(nothing)]
        moved[passes] = fixed
        size = self._line.fluid.size_bytes
        return Shares(np.where(moved < self._most, moved * self._unit, size * (moved > 0)), waits_ns.max(axis=0))

    def over_at(self, toll: int) -> tuple[Int64s, int]:
        """Return how many units of each gap over the cut are away there, and how many more go round.

        Args:
            toll: Nanoseconds that a unit pays which passes the cut, and a gap over it gets back.
        """
        line, passes = self._line, self._line.over
        nothing = np.zeros_like(self._most)
        cost = np.where(passes, _MOVED - toll, _MOVED)
        gaps = (self._ends, self._wants[line.opens], nothing, self._most, cost)
        one = np.ones(1, np.int64)
        flow = self._flow([gaps, (self._away[-1:], self._away[:1], 0 * one, UNBOUNDED * one, toll * one)])
        if flow is None:
            return nothing[passes], 0
        over = flow[-1 - len(nothing) : -1][passes]
        return over, int(flow[-1] - over.sum())

    def _flow(self, rows: Sequence[tuple[Int64s, ...]]) -> Int64s | None:
        """Return the cheapest flow with further arcs, ``None`` if some operation's need is not met."""
        columns = zip(*self._rows, *rows, strict=True)
        tail, head, least, most, cost = (np.concatenate(column) for column in columns)
        found = cheapest_circulation(3 * self._n_points, (tail, head), (least, most), cost)
        return None if found.missing else found.flow


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
