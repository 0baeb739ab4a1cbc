"""TensorFlow without Keras' ``fit``: what updates variables by gradients ends an iteration.

Theory of operation
    A training step is the outermost ``tf.function`` that computes gradients and writes a variable
    which is to be trained: each execution ends an iteration. Its graph says so, once for each trace.
    Where gradients come from a function or tape of their own, what writes such a variable next ends
    the iteration. That is a function, an optimizer of Keras (``zico.adapters.keras``), or an
    assignment. Without new gradients a write ends nothing: a target network is updated, or weights are loaded.

    Of several such functions in an iteration the one that writes the variable seen first counts
    (``Session.stepped``).

Known limitations
    A function that loops over batches within its graph is one iteration. Optimizers of
    ``tf.compat.v1`` are seen in functions only.
"""

# ruff: noqa: ANN401 - tensors, functions and variables are TensorFlow's
from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import backprop
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import auto_control_deps_utils as dependencies
from tensorflow.python.ops import resource_variable_ops

from zico.job.autoload import complain

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.job.session import Session

GRADIENT_SCOPE = "gradient_tape/"
"""Where ``tf.GradientTape`` puts the operations of a backward pass."""


class _Kind(NamedTuple):
    """What a function does."""

    differentiates: bool
    trained: weakref.ref[Any] | None
    """The first of the variables to be trained that it writes."""


class StepMarker:
    """Marks an iteration where variables have been updated by gradients."""

    def __init__(self, of: Session) -> None:
        self._session = of
        self._kinds: dict[bytes, _Kind] = {}

    def install(self) -> None:
        """Wrap the calls of functions, tapes, and assignments."""
        functions: Any = atomic_function.AtomicFunction
        functions.call_flat = self._calling(functions.call_flat)
        tapes: Any = backprop.GradientTape
        tapes.__init__ = self._expecting(tapes.__init__)
        tapes.gradient = self._differentiating(tapes.gradient)
        variables: Any = resource_variable_ops.ResourceVariable
        for name in ("assign", "assign_add", "assign_sub"):
            setattr(variables, name, self._assigning(getattr(variables, name)))

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_flat(function: Any, *args: Any) -> Any:
            outputs = call(function, *args)
            if tf.executing_eagerly():
                if function.name not in self._kinds:
                    self._kinds[function.name] = _kind_of(function, args)
                kind = self._kinds[function.name]
                self._session.differentiated |= kind.differentiates
                if kind.trained is not None:
                    self._updated(kind.trained())
            return outputs

        return call_flat

    def _expecting(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def __init__(tape: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - as TensorFlow's
            if not self._session.expects_marks:
                self._session.expect_marks()
            init(tape, *args, **kwargs)

        return __init__

    def _differentiating(self, gradient: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(gradient)
        def gradient_of(tape: Any, *args: Any, **kwargs: Any) -> Any:
            self._session.differentiated |= tf.executing_eagerly()
            return gradient(tape, *args, **kwargs)

        return gradient_of

    def _assigning(self, assign: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(assign)
        def assign_to(variable: Any, *args: Any, **kwargs: Any) -> Any:
            assigned = assign(variable, *args, **kwargs)
            if self._session.differentiated and variable.trainable and tf.executing_eagerly():
                self._updated(variable)
            return assigned

        return assign_to

    def _updated(self, variable: Any) -> None:
        if self._session.differentiated and variable is not None:
            self._session.stepped(variable)


def _kind_of(function: Any, args: tuple[Any, ...]) -> _Kind:
    try:
        return _looked_at(function, args)
    except Exception as error:  # noqa: BLE001 - the user's function must go on
        complain("a function of TensorFlow marks no iteration: use zico.step(), should it train", error)
        return _Kind(differentiates=False, trained=None)


def _looked_at(function: Any, args: tuple[Any, ...]) -> _Kind:
    graph = function.graph
    read_only = set(dependencies.get_read_only_resource_input_indices_graph(graph))
    written = {id(given) for i, given in enumerate(args) if given.dtype == tf.resource and i not in read_only}
    trained = (one for one in graph.variables if one.trainable and not written.isdisjoint(_handles(one)))
    first = next(trained, None)
    return _Kind(_differentiates(function), None if first is None else weakref.ref(first))


def _handles(variable: Any) -> list[int]:
    """Return the handles of a variable, or of its copies on several devices."""
    return [id(one.handle) for one in getattr(variable, "values", (variable,))]


def _differentiates(function: Any) -> bool:
    """Tell whether a function, or one that it calls, computes gradients by a tape."""
    names = (operation.name for operation in function.graph.get_operations())
    return any(GRADIENT_SCOPE in name for name in names) or any(map(_differentiates, function.children))
