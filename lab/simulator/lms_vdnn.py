"""What paging is compared with: swapping of whole tensors, on demand as LMS does and by a fixed rule as vDNN does.

*LMS* (the large model support of PyTorch 1.1 to 1.5): when an allocation does not fit, tensors
leave that no running operation uses. The least recently used leave first. They come back when they
are used. Nothing overlaps with computing.

*vDNN*: what the forward pass reads and the backward pass reads again leaves at its last forward
reader. It comes back one such operation before its first backward reader. Each of these operations
waits for its copy. ``all`` takes every operation for a layer, ``conv`` convolutions only. It knows
no limit: it needs what it needs.

Source: M. Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
Network Design" (MICRO 2016), section 3; T. Le et al., "TFLMS: Large Model Support in TensorFlow by
Graph Rewriting" (2018), and IBM's patches to PyTorch of the same name.

Known limitations
    * Bytes are counted, addresses are not: both get memory without fragmentation, which flatters
      them.
    * LMS's early page-out, and vDNN's choice of slower algorithms that need less memory, are left
      out.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.lab.simulator.paging_workload import rows_of
from zico.trace.events import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.trace.events import Trace
    from zico.trace.iterations import Iteration, Iterations
    from zico.trace.lifetimes import Lifetimes

_NS = 1e9
_LAYERS = "convolution"


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that an iteration does, in terms of its tensors."""

    kind: Kind
    """ALLOC, FREE or OP."""
    tensors: tuple[int, ...]
    duration_ns: int = 0
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Tensors:
    """One iteration, tensor by tensor."""

    size_bytes: list[int]
    alive: list[int]
    """When the iteration begins."""
    steps: list[Step]

    @property
    def compute_ns(self) -> int:
        """Nanoseconds of an iteration that never waits."""
        return sum(step.duration_ns for step in self.steps)


@dataclasses.dataclass(frozen=True)
class Swapped:
    """What an iteration took."""

    time_ns: int
    moved_bytes: int
    """Both ways."""
    peak_bytes: int


def tensors_of(trace: Trace, life: Lifetimes, iterations: Iterations, iteration: Iteration) -> Tensors:
    """Return one iteration of a trace, tensor by tensor."""
    begin, end = iterations.events_of(iteration.number)
    first, after = life.step_of_event(begin), life.step_of_event(end)
    row = rows_of(life, iteration, first, after)
    alive = [row[int(number)] for number in life.tensor[(life.begin < first) & (life.end > first)] if number in row]
    steps, operands = [], dict[int, None]()
    for _, tensor, size, name, _, kind, _ in trace.events[begin:end].tolist():
        if kind == Kind.OP:
            steps.append(Step(Kind.OP, tuple(operands), size, trace.names[name]))
            operands = {}
        elif tensor in row and kind in (Kind.READ, Kind.WRITE):
            operands[row[tensor]] = None
        elif tensor in row and kind in (Kind.ALLOC, Kind.FREE):
            steps.append(Step(Kind(kind), (row[tensor],)))
    return Tensors(iteration.size_bytes.tolist(), alive, steps)


# -- LMS -------------------------------------------------------------------------------------------


def lms(work: Tensors, memory_bytes: int, copy_bytes_per_s: float, iterations: int = 3) -> Swapped | None:
    """Return what the last of some iterations takes if tensors are swapped on demand; ``None``: it cannot run."""
    memory = _Memory(work, memory_bytes)
    result = None
    for _ in range(iterations):
        memory.moved_bytes = memory.peak_bytes = 0
        for step in work.steps:
            if not memory.do(step):
                return None
        took_ns = work.compute_ns + round(memory.moved_bytes / copy_bytes_per_s * _NS)
        result = Swapped(took_ns, memory.moved_bytes, memory.peak_bytes)
    return result


class _Memory:
    """Which tensors are on the device, least recently used first."""

    def __init__(self, work: Tensors, memory_bytes: int) -> None:
        self._size_bytes = work.size_bytes
        self._free_bytes = memory_bytes
        self._memory_bytes = memory_bytes
        self._there: dict[int, None] = {}
        self.moved_bytes = self.peak_bytes = 0

    def do(self, step: Step) -> bool:
        """Do a step; tell whether memory sufficed."""
        if step.kind == Kind.FREE:
            self._leave(step.tensors[0])
            return True
        if step.kind == Kind.ALLOC:
            self._leave(step.tensors[0])  # of the last iteration, where the trace does not say
            return self._take(step.tensors[0], step.tensors)
        for tensor in step.tensors:
            if tensor in self._there:
                self._there[tensor] = self._there.pop(tensor)
            else:
                if not self._take(tensor, step.tensors):
                    return False
                self.moved_bytes += self._size_bytes[tensor]
        return True

    def _take(self, tensor: int, pinned: tuple[int, ...]) -> bool:
        """Make room for a tensor, and put it there."""
        size_bytes = self._size_bytes[tensor]
        for victim in list(self._there):
            if size_bytes <= self._free_bytes:
                break
            if victim not in pinned:
                self._leave(victim)
                self.moved_bytes += self._size_bytes[victim]
        if size_bytes > self._free_bytes:
            return False
        self._there[tensor] = None
        self._free_bytes -= size_bytes
        self.peak_bytes = max(self.peak_bytes, self._memory_bytes - self._free_bytes)
        return True

    def _leave(self, tensor: int) -> None:
        if tensor in self._there:
            del self._there[tensor]
            self._free_bytes += self._size_bytes[tensor]


# -- vDNN ------------------------------------------------------------------------------------------


def vdnn(work: Tensors, copy_bytes_per_s: float, *, layers: str = _LAYERS) -> Swapped:
    """Return what an iteration takes if feature maps are swapped by the fixed rule.

    Args:
        work: The iteration.
        copy_bytes_per_s: Each way.
        layers: Only of operations whose name begins so; nothing: of all.
    """
    out, back = _plan(work, layers)
    time_ns = moved = peak = 0
    live = sum(work.size_bytes[tensor] for tensor in work.alive)
    for i, step in enumerate(work.steps):
        if step.kind == Kind.OP:
            leave, come = out.get(i, []), back.get(i, [])
            leave_bytes, come_bytes = (sum(work.size_bytes[tensor] for tensor in some) for some in (leave, come))
            live += come_bytes
            peak = max(peak, live)
            copy_ns = max(leave_bytes, come_bytes) / copy_bytes_per_s * _NS
            time_ns += max(step.duration_ns, round(copy_ns))
            live -= leave_bytes
            moved += leave_bytes + come_bytes
        else:
            live += work.size_bytes[step.tensors[0]] * (1 if step.kind == Kind.ALLOC else -1)
        peak = max(peak, live)
    return Swapped(time_ns, moved, peak)


def _plan(work: Tensors, layers: str) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return which tensors leave during which step, and which come back during which."""
    middle = _peak_step(work)
    out: dict[int, list[int]] = {}
    needed: dict[int, list[int]] = {}
    for tensor, leaves, returns in _feature_maps(work, middle, layers):
        out.setdefault(leaves, []).append(tensor)
        needed.setdefault(returns, []).append(tensor)
    back: dict[int, list[int]] = {}
    previous = next((i for i in range(middle + 1, len(work.steps)) if work.steps[i].kind == Kind.OP), 0)
    for i in sorted(needed):
        ready = previous if previous < i else max(k for k in range(i) if work.steps[k].kind == Kind.OP)
        back.setdefault(ready, []).extend(needed[i])
        previous = i
    return out, back


def _peak_step(work: Tensors) -> int:
    """Return the operation that runs while most is alive: the backward pass begins behind it."""
    sign = {Kind.ALLOC: 1, Kind.FREE: -1, Kind.OP: 0}
    changes = [sign[step.kind] * (work.size_bytes[step.tensors[0]] if step.tensors else 0) for step in work.steps]
    peak = int(np.argmax(np.cumsum(changes)))
    return next((i for i in range(peak, len(work.steps)) if work.steps[i].kind == Kind.OP), peak)


def _feature_maps(work: Tensors, middle: int, layers: str) -> Iterator[tuple[int, int, int]]:
    """Yield what is made before the middle and read on both sides: tensor, last reader before, first one behind."""
    born = {step.tensors[0] for step in work.steps[:middle] if step.kind == Kind.ALLOC}
    born -= set(work.alive)
    source: dict[int, int] = {}
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for i, step in enumerate(work.steps):
        if step.kind != Kind.OP:
            continue
        for tensor in step.tensors:
            if tensor in born and i <= middle:
                if source.setdefault(tensor, i) != i:
                    last[tensor] = i
            elif tensor in born:
                first.setdefault(tensor, i)
    for tensor, returns in first.items():
        if tensor in last and work.steps[last[tensor]].name.startswith(layers):
            yield tensor, last[tensor], returns
