"""PyTorch without ``torch.optim``: gradients of a new iteration end it.

Theory of operation
    Who updates parameters by hand computes gradients for each update, or adds several up before it.
    What is added to stays as the backward pass before has left it. A pass is the first one of an
    iteration if the gradient is missing, is zero, or was changed by something else. One parameter
    tells, the first one that its graph leads to. ``torch.autograd.grad`` and
    ``torch.func.grad`` add nothing up: each call ends an iteration.

    The mark comes after the pass, when feature maps are gone.

Known limitations
    A loop that calls ``torch.autograd.grad`` or ``torch.func.grad`` several times for an update, or
    uses ``torch.func.vjp``, marks its iterations by ``zico.step()``.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.job.session import Session

_LEAF = "torch::autograd::AccumulateGrad"
_CREATE_GRAPH_AT = 2  # among the arguments of ``torch.autograd.grad`` that follow outputs and inputs


class GradientMarker:
    """Marks an iteration where gradients are computed for it first."""

    def __init__(self, of: Session) -> None:
        """Mark the iterations of a session, until an optimizer is made."""
        self._session = of
        self._left: tuple[weakref.ref[Any], int] | None = None
        """A parameter's gradient, and its version, as the last backward pass has left it."""

    def install(self) -> None:
        """Wrap what all backward passes go through: ``torch.autograd.backward`` and ``torch.autograd.grad``."""
        torch.autograd.backward = self._backward(torch.autograd.backward)
        torch.autograd.grad = self._grad(torch.autograd.grad)

    def _backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def marking_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
            parameter = None
            if not torch.compiler.is_dynamo_compiling() and self._session.is_outside_steps:
                parameter = _first_parameter(tensors)
            if parameter is None:
                backward(tensors, *args, **kwargs)
                return
            is_first = self._is_first(parameter)
            with self._session.as_one():
                backward(tensors, *args, **kwargs)
            gradient = parameter.grad
            self._left = None if gradient is None else (weakref.ref(gradient), gradient._version)  # noqa: SLF001
            if is_first:
                self._session.stepped(parameter)

        return marking_backward

    def _is_first(self, parameter: Any) -> bool:  # noqa: ANN401 - a tensor
        gradient: Any = parameter.grad
        if gradient is None or self._left is None:
            return True
        left, version = self._left
        is_as_left = gradient._version == version and left() is gradient  # noqa: SLF001
        return not is_as_left or not gradient.any()

    def _grad(self, grad: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(grad)
        def marking_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's
            if torch.compiler.is_dynamo_compiling() or not self._session.is_outside_steps:
                return grad(outputs, inputs, *args, **kwargs)
            with self._session.as_one():
                returned = grad(outputs, inputs, *args, **kwargs)
            goes_on = kwargs.get("create_graph") or args[_CREATE_GRAPH_AT : _CREATE_GRAPH_AT + 1] == (True,)
            depth = _transforms()
            if depth == 1 or (depth == 0 and not goes_on and _is_real(_first(outputs))):
                self._session.stepped(self if depth else _first(inputs))
            return returned

        return marking_grad


def _first(tensors: Any) -> Any:  # noqa: ANN401 - one or several
    return tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors


def _is_real(tensor: Any) -> bool:  # noqa: ANN401 - anything
    """Tell whether this is a tensor that has contents, and none of those with which a compiler traces."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _transforms() -> int:
    """Return within how many ``torch.func.grad`` this is."""
    functorch = torch._C._functorch  # noqa: SLF001 - PyTorch has no other name for it
    stack = functorch.get_interpreter_stack() or ()
    return sum(one.key() == functorch.TransformType.Grad for one in stack)


def _first_parameter(tensors: Any) -> Any:  # noqa: ANN401 - a tensor, or None
    """Return the first parameter to which a graph leads; ``None`` if it leads to none."""
    root = _first(tensors)
    if not _is_real(root):
        return None
    if root.grad_fn is None:
        return root
    todo, seen = [root.grad_fn], set()
    while todo:
        node = todo.pop()
        if node.name() == _LEAF:
            return node.variable
        if node not in seen:
            seen.add(node)
            todo += [before for before, _ in reversed(node.next_functions) if before is not None]
    return None
