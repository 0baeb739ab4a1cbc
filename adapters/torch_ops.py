"""See PyTorch's operations while a trace is recorded: names, times, and which tensors they read and write.

Costs some microseconds an operation, so ``zico trace --ops`` asks for it. Operations of compiled graphs
(``torch.compile``) are not seen one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zico.heap import allocator
from zico.trace import ring
from zico.trace.events import Kind

if TYPE_CHECKING:
    from zico.heap.build import Heap


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
        self._heap = heap.record[0]
        self._ring = heap.ring
        self._mutex_address = int(self._heap["mutex_address"])

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's protocol
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and record it."""
        name = self._ring.number_of(str(func._schema.name))  # noqa: SLF001 - the only place that has it
        outer, self._heap["op"] = int(self._heap["op"]), name
        begin_ticks = ring.now_ticks()
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._heap["op"] = outer
        self._record_uses(func, args, kwargs or {}, result, name)
        ring.put_op(self._mutex_address, self._ring.address, name, begin_ticks)
        return result

    def _record_uses(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, name: int) -> None:  # noqa: ANN401
        """Record which tensors of the pool were read and written."""
        schema = func._schema  # noqa: SLF001
        written = [
            value
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [args[index] if index < len(args) else kwargs.get(argument.name)]
        ]
        read = self._numbers([args, kwargs])
        made = self._numbers(result) - read  # what shares memory with an argument is a view of it, or was written
        for kind, numbers in ((Kind.READ, read), (Kind.WRITE, self._numbers(written) | made)):
            for number in sorted(numbers):
                ring.put_locked(self._mutex_address, self._ring.address, int(kind), number, 0, name)

    def _numbers(self, values: Any) -> set[int]:  # noqa: ANN401 - any nesting of arguments
        """Return the numbers of the recorded tensors among some values."""
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return {int(allocator.number_at(self._heap, address)) for address in addresses} - {allocator.NO_TENSOR}
