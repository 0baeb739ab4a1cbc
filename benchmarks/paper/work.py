"""A model's training step at any batch and on any device, from two traces.

Theory of operation
    The same operations run whatever the batch is; what they compute and move, and what tensors
    take, are affine in it. So a trace at two batches gives it at all others, as exactly as if
    traced there. Floating-point operations and bytes moved are noted apart, so that a roofline
    gives the times on any device, and says which of the two was busy.

Known limitations
    * Times are lower bounds: no operation takes less than its roofline, nor than ``KERNEL_NS``;
      real ones take longer.
    * Workspaces of kernels, the framework's context and the allocator's rounding are not in the
      traces.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from paper.traced import traced

from zico.lab.simulator.roofline import device_model
from zico.trace.events import Kind, Origin, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from paper.published import Identical

    Int64s = NDArray[np.int64]

KERNEL_NS = 3800
"""The least time of one kernel after another on a V100, launch overlapped.

Source: A. Gray, "Getting started with CUDA graphs", NVIDIA developer blog, 2019.
"""
_MOVED, _FLOPS = 1, 0


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """A training step: events whose sizes and work are affine in the batch."""

    name: str
    events: NDArray[np.void]
    sizes: NDArray[np.float64]
    """Bytes of each event's tensor: at no batch, and for each sample; 0 unless an ALLOC."""
    work: NDArray[np.float64]
    """Of each operation: floating-point operations and bytes moved, at no batch and for each sample."""
    kinds: tuple[tuple[int, bool], ...]
    """Of each operation: bytes of a number, and whether it may be TF32."""

    def trace(self, batch: int, device: str) -> Trace:
        """Return the trace at a batch on a device model."""
        events = self.events.copy()
        allocates, is_op = events["kind"] == Kind.ALLOC, events["kind"] == Kind.OP
        events["size_bytes"][allocates] = np.rint(self.sizes[allocates] @ (1, batch)).astype(np.int64)
        durations_ns = self.durations_ns(batch, device)
        events["size_bytes"][is_op] = durations_ns
        ends_ns = np.zeros(len(events), np.int64)
        ends_ns[is_op] = durations_ns
        events["t_ns"] = np.cumsum(ends_ns) - ends_ns
        return Trace(Origin(self.name, device=device, source="fake"), events)

    def durations_ns(self, batch: int, device: str) -> Int64s:
        """Return the least time of each operation."""
        model = device_model(device)
        amounts = self._amounts(batch)
        return np.array(
            [
                max(KERNEL_NS, model.duration_ns(flops, moved, itemsize, tf32=tf32))
                for (flops, moved), (itemsize, tf32) in zip(amounts.tolist(), self.kinds, strict=True)
            ]
        )

    def busy(self, batch: int, device: str) -> NDArray[np.float64]:
        """Return the time of each operation of the second iteration, and how busy processors and memory are in it."""
        model, chosen = device_model(device), self._second()
        durations_ns = self.durations_ns(batch, device)[chosen].astype(np.float64)
        flops, moved = self._amounts(batch)[chosen].T
        peak = np.array(
            [
                model.fp16 if itemsize <= 2 else model.tf32 if tf32 else model.fp32
                for itemsize, tf32 in np.array(self.kinds, dtype=object)[chosen]
            ]
        )
        return np.stack([durations_ns, flops / peak * 1e9 / durations_ns, moved / model.bandwidth * 1e9 / durations_ns])

    def peak_bytes(self, batch: int) -> int:
        """Return the most bytes alive in the second iteration."""
        fixed, each = self._alive
        return int(np.rint((fixed + each * batch).max()))

    def batch_for(self, peak_bytes: float) -> int:
        """Return the batch whose peak is nearest to some bytes, at least 1."""
        least, most = 1, 1
        while self.peak_bytes(most) < peak_bytes:
            most *= 2
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.peak_bytes(middle) < peak_bytes else (least, middle)
        return min((least, most), key=lambda batch: abs(self.peak_bytes(batch) - peak_bytes))

    @functools.cached_property
    def _alive(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what is alive after each event of the second iteration, at no batch and for each sample."""
        kind, tensor = self.events["kind"], self.events["tensor"]
        allocates, frees = kind == Kind.ALLOC, kind == Kind.FREE
        of_tensor = np.zeros((int(tensor.max()) + 1, 2))
        of_tensor[tensor[allocates]] = self.sizes[allocates]
        changes = np.zeros((len(kind), 2))
        changes[allocates] = self.sizes[allocates]
        changes[frees] = -of_tensor[tensor[frees]]
        alive = np.cumsum(changes, axis=0)[self._begins()[1] : self._begins()[2]]
        return alive[:, 0], alive[:, 1]

    def _begins(self) -> list[int]:
        """Return where iterations begin, and where the last one ends."""
        kind = self.events["kind"]
        return [*np.flatnonzero(kind == Kind.BEGIN).tolist(), int(np.flatnonzero(kind == Kind.END)[-1])]

    def _second(self) -> slice:
        """Return the operations of the second iteration."""
        before = np.cumsum(self.events["kind"] == Kind.OP)
        first, last = self._begins()[1:3]
        return slice(int(before[first]), int(before[last]))

    def _amounts(self, batch: int) -> NDArray[np.float64]:
        return np.stack([self.work[:, 0] + self.work[:, 1] * batch, self.work[:, 2] + self.work[:, 3] * batch], axis=1)


# -- from two traces -------------------------------------------------------------------------------


@functools.cache
def work_of(model: Identical) -> Work:
    """Return a model's step, from its traces at the smallest and the largest batch of the paper."""
    return step_of(
        model.title, model.script, model.function, dict(model.arguments), model.batches[0], model.batches[-1]
    )


def step_of(name: str, script: str, function: str, arguments: dict[str, int | str], small: int, large: int) -> Work:
    """Return a step of a model of ``benchmarks/models`` from its traces at two batches, kept in the cache directory.

    Raises:
        ValueError: The operations are not the same at both.
    """
    said = "-".join(f"{key}{value}" for key, value in arguments.items())
    (events, one), (others, two) = (
        traced(script, function, arguments | {"batch": batch}, f"{function}{said}-{batch}") for batch in (small, large)
    )
    same = all(np.array_equal(events[field], others[field]) for field in ("kind", "tensor", "name"))
    if not same or not np.array_equal(one[:, 2:], two[:, 2:]):
        raise ValueError(f"{name}: other operations run at batch {large} than at batch {small}: trace each batch")
    sizes = np.stack([events["size_bytes"], others["size_bytes"]]) * (events["kind"] == Kind.ALLOC)
    amounts = np.stack([one[:, :2], two[:, :2]])
    work = np.concatenate([_affine(amounts[..., kind], small, large) for kind in (_FLOPS, _MOVED)], axis=1)
    kinds = tuple((int(itemsize), bool(tf32)) for itemsize, tf32 in one[:, 2:])
    return Work(name, events, _affine(sizes, small, large), work, kinds)


def _affine(at_two: NDArray[Any], small: int, large: int) -> NDArray[np.float64]:
    """Return the values at no batch and what each sample adds, a row for each."""
    each = (at_two[1] - at_two[0]) / (large - small)
    return np.stack([at_two[0] - each * small, each], axis=1)
