r"""Tensor classes, learned from lifetimes: what is a weight, what does a forward pass keep for the backward pass.

The peak of live bytes is where the backward pass begins::

    live    /\              persistent     ################   lives all the time
           /  \             feature map      ########         born before the peak, dies after it
          /    \            gradient map             ####     born after the peak
    _____/      \____      temporary       #  # ##  ##  #    dies soon, wherever it is

Where the trace says who reads a tensor, the classes can follow the operators instead of the lengths
of lives. The two differ most in gradient maps that the next operation uses up, which by their
lifetimes are temporaries.

Source: G. Lim et al., "Zico: Efficient GPU Memory Sharing for Concurrent DNN Training" (USENIX ATC
2021), section 4.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from zico.trace.events import Kind
from zico.trace.iterations import live_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.trace.events import Trace
    from zico.trace.iterations import Iteration, Iterations
    from zico.trace.lifetimes import Lifetimes

    Int64s = NDArray[np.int64]
    Labels = NDArray[np.int8]

NOT_READ = -1
_SHORT_TICKS = 8  # as the heap's: what dies within so many ticks, or a 64th of the iteration, is a temporary
_SHORT_SHARE = 64


class TensorClass(enum.IntEnum):
    """What a tensor is to its iteration."""

    PERSISTENT = 0
    FEATURE_MAP = 1
    GRADIENT_MAP = 2
    TEMPORARY = 3

    @property
    def label(self) -> str:
        """Return the name for people."""
        return self.name.lower().replace("_", " ")


def classify(lower: Int64s, upper: Int64s, size_bytes: Int64s, n_ticks: int, last_read: Int64s | None = None) -> Labels:
    """Return each tensor's class, as ``TensorClass`` values.

    Args:
        lower: First tick at which each tensor lives.
        upper: First tick at which it no longer lives; beyond ``n_ticks`` it goes on at the
            beginning of a circle.
        size_bytes: Its size.
        n_ticks: Ticks of the iteration. What lives so long is persistent.
        last_read: The last tick at which an operation other than its source reads each tensor, or
            ``NOT_READ``. Without it, a tensor is taken to be read to its end unless it dies soon.
    """
    length = upper - lower
    peak = int(np.argmax(live_bytes(lower, upper, size_bytes, n_ticks)))
    labels = np.full(len(lower), TensorClass.TEMPORARY, np.int8)
    if last_read is None:
        kept = length > max(_SHORT_TICKS, n_ticks // _SHORT_SHARE)
        crosses = upper > peak + 1
    else:
        kept = last_read != NOT_READ
        crosses = last_read > peak
    is_forward = lower <= peak
    labels[kept & is_forward & crosses] = TensorClass.FEATURE_MAP
    labels[kept & ~is_forward] = TensorClass.GRADIENT_MAP
    labels[length >= n_ticks] = TensorClass.PERSISTENT
    return labels


def classify_trace(life: Lifetimes, iterations: Iterations) -> Labels:
    """Return the class of each of a trace's tensors, by the iteration in which it was allocated.

    What was allocated outside all iterations is persistent if it lives on into one, else temporary.
    """
    first, last = np.searchsorted(life.step_event, (iterations.begin, iterations.end))
    begins = np.searchsorted(first, life.end)  # the iterations that begin before each tensor's end
    labels = np.where(begins > np.searchsorted(first, life.begin), TensorClass.PERSISTENT, TensorClass.TEMPORARY)
    labels = labels.astype(np.int8)
    for a, b in zip(first.tolist(), last.tolist(), strict=True):
        own = slice(*np.searchsorted(life.begin, (a, b)))
        if b > a and own.start < own.stop:
            lower = life.begin[own] - a
            upper = np.minimum(life.end[own] - a, lower + (b - a))
            labels[own] = classify(lower, upper, life.size_bytes[own], b - a)
    return labels


def last_reads(trace: Trace, life: Lifetimes, iteration: Iteration) -> Int64s | None:
    """Return at which tick of an iteration another operation than its source reads each tensor for the last time.

    Returns:
        ``NOT_READ`` for tensors that none reads; ``None`` if the trace does not say who reads what.
    """
    kind = trace.events["kind"]
    reads = np.flatnonzero(kind == Kind.READ)
    if not len(reads):
        return None
    operations = np.flatnonzero(kind == Kind.OP)
    source = np.full(len(life), -1)
    writes = np.flatnonzero(kind == Kind.WRITE)[::-1]  # backwards, so that the first one stays
    row = _rows(life, trace.events["tensor"][writes])
    source[row[row >= 0]] = np.searchsorted(operations, writes[row >= 0])
    row = _rows(life, trace.events["tensor"][reads])
    others = (row >= 0) & (np.searchsorted(operations, reads) != source[row])
    last = np.full(len(life), NOT_READ)
    last[row[others]] = np.searchsorted(life.step_event, reads[others]) - 1  # events are in order: the last one stays
    step = last[iteration.row]
    since = step - life.begin[iteration.row]
    return np.where(step == NOT_READ, NOT_READ, np.minimum(iteration.lower + since, iteration.upper - 1))


def _rows(life: Lifetimes, tensor: Int64s) -> Int64s:
    """Return which lifetime each tensor number is, -1 where it is none."""
    order = np.argsort(life.tensor, kind="stable")
    place = np.minimum(np.searchsorted(life.tensor[order], tensor), len(order) - 1)
    return np.where(life.tensor[order][place] == tensor, order[place], -1)
