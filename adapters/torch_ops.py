"""See PyTorch's operations while a trace is recorded: names, times, and which tensors they read and write.

Costs some microseconds an operation, so ``zico trace --ops`` asks for it, and of a program that
marks its iterations only some are recorded. What an operation's schema says is looked up once;
tensors are told apart by where their storages begin, in one compiled call
(``zico.heap.allocator``). Operations of compiled graphs (``torch.compile``) are not seen one by
one. Nor are those of other threads than the one that imported PyTorch and its backward passes.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from zico.heap import allocator
from zico.heap.layout import HEAP, RECORDING
from zico.job.session import Watcher
from zico.trace import ring

if TYPE_CHECKING:
    from zico.heap.build import Heap

Tensor = torch.Tensor

FIRST = 4
"""Iterations recorded at the begin, the one before the first mark among them: even a short trace has two in a row."""
TOGETHER = 2
"""Iterations recorded each time after that: a swap plan follows tensors into the iteration after its own."""
COST = 0.04
"""What recording may add to the time of iterations, as a share of it; a hundredth less than what is promised."""
FEWEST, MOST = 16, 4096
"""Iterations that are not recorded between two turns, at least and at most."""
_COMPARED = 8


class _Known(NamedTuple):
    """What there is to know of an operation."""

    name: int
    written: tuple[int, ...]
    """Positions of the arguments that it writes to."""
    written_by_name: tuple[str, ...]


class OpRecorder(TorchDispatchMode):  # type: ignore[misc] # torch has no types
    """Records every operation of the thread that enters it, and of its backward passes."""

    def __init__(self, heap: Heap) -> None:
        """Record into the ring of a heap that records.

        Raises:
            ValueError: The heap records nothing.
        """
        super().__init__()
        if heap.ring is None:
            message = "the heap records nothing"
            raise ValueError(message)
        self._heap = heap
        self._address = int(heap.record.ctypes.data)
        op_offset = HEAP.fields["recording"][1] + RECORDING.fields["op"][1]
        self._op = ctypes.c_int64.from_address(self._address + op_offset)
        self._ring = ctypes.c_int64.from_address(self._address + HEAP.fields["ring_address"][1])
        self._number_of = heap.ring.number_of
        self._known: dict[Any, _Known] = {}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's protocol
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and record it."""
        if not self._ring.value:  # a forked child records nothing
            return func(*args, **kwargs or {})
        known = self._known.get(func) or self._learn(func)
        op = self._op
        outer, op.value = op.value, known.name
        begin_ticks = ring.now_ticks()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            op.value = outer
        tensors: list[int] = []
        for value in args:
            _add(tensors, value)
        for value in kwargs.values() if kwargs else ():
            _add(tensors, value)
        n_read = len(tensors)
        for position in known.written:
            if position < len(args):
                _add(tensors, args[position])
        if kwargs:
            for name in known.written_by_name:
                _add(tensors, kwargs.get(name))
        n_written = len(tensors) - n_read
        _add(tensors, result)
        if tensors:
            addresses = (ctypes.c_int64 * len(tensors))(*tensors)
            n_made = len(tensors) - n_read - n_written
            at = ctypes.addressof(addresses)
            allocator.record_op(self._address, at, n_read, n_written, n_made, known.name, begin_ticks)
        else:
            allocator.record_op(self._address, 0, 0, 0, 0, known.name, begin_ticks)
        return result

    def _learn(self, func: Any) -> _Known:  # noqa: ANN401 - an operation
        schema = func._schema  # noqa: SLF001 - the only place that has it
        written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        positions, names = tuple(position for position, _ in written), tuple(name for _, name in written)
        return self._known.setdefault(func, _Known(self._number_of(str(schema.name)), positions, names))


class Sampling(Watcher):
    """Turns a recorder on and off at boundaries of iterations, so that recording costs ``COST`` of the time at most.

    What a turn costs is measured: its iterations beside those before it. A program that marks
    nothing is recorded whole. Another mode of the program's own is never taken off the stack, nor
    ours put on top of it. A turn waits until it is gone.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        """Enter the recorder in the calling thread."""
        self._recorder = recorder
        self._plain_s: deque[float] = deque(maxlen=_COMPARED)
        self._recorded_s: list[float] = []
        self._left = FIRST
        self._begun_s: float | None = None
        self.is_on = True
        recorder.__enter__()

    def at_boundary(self) -> None:
        """Note that an iteration has ended and another begins; the recorder is entered or left if it is time."""
        if self._begun_s is not None:
            (self._recorded_s if self.is_on else self._plain_s).append(time.perf_counter() - self._begun_s)
        self._left -= 1
        if self._left <= 0:
            self._turn()
        self._begun_s = time.perf_counter()

    def _turn(self) -> None:
        if _get_current_dispatch_mode() is not (self._recorder if self.is_on else None):
            return
        if self.is_on:
            self._recorder.__exit__(None, None, None)
            self._left = self._pause()
        else:
            self._recorder.__enter__()
            self._left = TOGETHER
        self._recorded_s.clear()
        self.is_on = not self.is_on

    def _pause(self) -> int:
        """Return how many iterations must pass for the turn that ends to have cost no more than its share."""
        if not self._plain_s:
            return FEWEST
        plain_s = statistics.median(self._plain_s)
        more_s = sum(self._recorded_s) - len(self._recorded_s) * plain_s
        return max(FEWEST, min(MOST, math.ceil(more_s / (COST * plain_s))))


def _add(tensors: list[int], value: Any) -> None:  # noqa: ANN401 - any argument
    """Add where the storages of the tensors in a value begin."""
    if isinstance(value, Tensor):
        try:
            offset = value.storage_offset()
            tensors.append(value.data_ptr() - offset * value.itemsize if offset else value.data_ptr())
        except RuntimeError:  # it has no storage: a sparse one, say
            return
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(tensors, item)
