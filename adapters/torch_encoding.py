"""Who reads what of the tensors that autograd saves: ReLU's result for its signs, the input of pooling for its shape.

A result of ReLU that goes into pooling, or into dropout, is saved by nobody who reads its numbers.
So a tier may keep one bit of each (``zico.tiers.encodings``), and gradients are the same bits.

Source: A. Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training" (ISCA
2018), section 4.1.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from zico.adapters.torch_rebuilding import replace
from zico.adapters.torch_saving import PLAIN, is_transformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.adapters.torch_saving import Saved, Saving


class _Reader(NamedTuple):
    """Functions that save a tensor of floats, and read no more of it than signs."""

    paths: tuple[str, ...]
    compiled: Callable[..., Any]
    """The same, as compilers know it."""


READERS = (
    _Reader(("torch:relu", "torch:Tensor.relu"), torch.relu),
    _Reader(("torch:relu_", "torch:Tensor.relu_"), torch.relu_),
    _Reader(("torch:max_pool2d",), torch.max_pool2d),
    _Reader(("torch.nn.functional:avg_pool2d",), torch.nn.functional.avg_pool2d),
    _Reader(("torch._C._nn:adaptive_avg_pool2d",), torch._C._nn.adaptive_avg_pool2d),  # noqa: SLF001
)
"""The backward pass of pooling asks for its input's shape, and of max pooling for places, which are no floats.

Source: PyTorch, ``derivatives.yaml``: ``threshold_backward(grad, result, 0)``, and the CPU kernels
of pooling.
"""


class Readers:
    """The functions with something around them, for as long as the process lives."""

    def __init__(self, saving: Saving, encoding: int) -> None:
        """Let tiers keep the signs of what nobody reads more of, and ``encoding`` of all other floats."""
        self._saving = saving
        self._encoding = encoding
        self._calls = threading.local()

    def install(self) -> None:
        """Begin."""
        self._saving.encoding = self._encoding
        self._saving.on_saved = self._note_saved
        for reader in READERS:
            for path in reader.paths:
                replace(path, lambda original, compiled=reader.compiled: self._reading(original, compiled))

    def _reading(self, original: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's own
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            before = getattr(self._calls, "are_signs", False)
            # Nobody's Python runs inside: only of a plain tensor it is PyTorch's own function that saves.
            self._calls.are_signs = bool(args) and type(args[0]) in PLAIN and not is_transformed()
            try:
                return original(*args, **kwargs)
            finally:
                self._calls.are_signs = before

        return function

    def _note_saved(self, saved: Saved, _tensor: torch.Tensor) -> None:
        """Note what is saved inside one of the functions."""
        saved.is_read = not getattr(self._calls, "are_signs", False)
