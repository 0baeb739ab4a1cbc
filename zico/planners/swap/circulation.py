r"""The cheapest circulation in a network: compiled, with whole numbers only.

Arcs have a least and a most flow and a cost for each unit. The network simplex keeps a spanning tree of arcs whose flow
is free; all other arcs are at their least or their most. Each pivot brings in an arc whose reduced cost has the wrong
sign, pushes flow round the cycle that it closes, and drops the arc that blocks::

          first ---entering---> second
            \                    /        pi: potential of a node, so that every arc of the tree has
             +-- .. join .. ----+             cost + pi[tail] - pi[head] == 0

The tree stays strongly feasible (the last blocking arc from the join in the direction of the push leaves), so that it
does not cycle.

Source: R. K. Ahuja, T. L. Magnanti, J. B. Orlin, "Network flows" (1993), chapter 11; which arc enters: the best of a
block, as in P. Kovacs, "Minimum-cost flow algorithms: an experimental evaluation" (2015).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
    Arrays = tuple[NDArray[Any], ...]

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
    """Make a node the first child."""
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
    # Going up from both ends, the strict comparison on the first side and the weak one on the second keep the tree
    # strongly feasible.
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
