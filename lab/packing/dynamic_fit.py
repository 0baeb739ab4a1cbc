"""Allocators that decide at each allocation, without knowledge of the future: what a plan is compared with.

In order of start, best fit over all tensors places each one as an allocator would at that moment:
only tensors that live at its first tick can be in its way. So ``Classic(Order.START, Fit.BEST)`` is
dynamic best fit without classes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.lab.packing.classic import Classic, Fit, Order, finished, part_of, peak_of, too_large
from zico.planning.packing.problem import NoPlan, Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planning.packing.problem import Problem

DYNAMIC = Classic(Order.START, Fit.BEST)
"""Dynamic best fit: the smallest gap that is large enough, else on top."""


class ByClass:
    """Dynamic best fit with a stretch of addresses for each class: persistent, feature maps, temporaries.

    Each stretch is as long as its own peak and begins at a multiple of the region size, so that no
    region is shared.
    """

    name = "by-class"

    def __init__(self, labels: NDArray[np.integer], region_bytes: int = 1) -> None:
        """Take for each tensor the stretch that it belongs to; the lowest label's lies lowest."""
        self._labels = np.asarray(labels)
        self._region_bytes = region_bytes

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Place each class by itself; answers as the classic heuristics do."""
        began_s = time.monotonic()
        refusal = too_large(problem, self.name)
        if refusal is not None:
            return refusal
        unit = math.lcm(self._region_bytes, problem.alignment_bytes)
        offsets = np.empty(len(problem), np.int64)
        base = 0
        for label in np.unique(self._labels):
            inside = np.flatnonzero(self._labels == label)
            part = part_of(problem, inside)
            answer = DYNAMIC.plan(part, deadline_s - (time.monotonic() - began_s))
            if isinstance(answer, NoPlan):
                return dataclasses.replace(answer, planner=self.name)
            offsets[inside] = base + answer.offset_bytes
            base += -(-peak_of(part, answer.offset_bytes) // unit) * unit
        return finished(problem, offsets, self.name, time.monotonic() - began_s)
