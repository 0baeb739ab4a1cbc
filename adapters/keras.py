"""Keras, with any backend: a train step ends an iteration. The backend's own adapter shares its tensors.

A train step is a call of a model's train function (``fit``, ``train_on_batch``). In a loop of one's
own it is a step of an optimizer. Where that is part of a graph or of a function without state, the
backend's adapter sees the execution of these.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from zico.job import joining, session

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.job.session import Session

TESTED_VERSION = "3.15"


@session.once
def enable() -> Session | None:
    """Mark an iteration at each train step of every Keras model, with any backend."""
    joined = session.attach("keras", kind=session.pool_kind())
    if joined is None:
        return None
    import keras

    keras.Model.make_train_function = _marking(keras.Model.make_train_function, joined)
    optimizer: Any = keras.optimizers.Optimizer
    optimizer.__init__ = _expecting_marks(optimizer.__init__, joined)
    optimizer.apply = _stepping(optimizer.apply, joined)
    return joined


def _expecting_marks(init: Callable[..., None], joined: Session) -> Callable[..., None]:
    """Wrap ``Optimizer.__init__``: whoever makes an optimizer is going to step it."""

    @functools.wraps(init)
    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807 - as Keras'
        joined.expect_marks()
        init(optimizer, *args, **kwargs)

    return __init__


def _stepping(apply: Callable[..., None], joined: Session) -> Callable[..., None]:
    """Wrap ``Optimizer.apply``, by which gradients are applied one way or another."""

    @functools.wraps(apply)
    def apply_and_mark(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as Keras'
        with joined.as_one():
            apply(optimizer, *args, **kwargs)
        if not _is_recorded():
            joined.stepped(optimizer)

    return apply_and_mark


def _is_recorded() -> bool:
    """Tell whether operations are recorded for later now: for a graph of TensorFlow, or without a model's state."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    tensorflow: Any = sys.modules.get("tensorflow")
    in_graph = hasattr(tensorflow, "inside_function") and tensorflow.inside_function()
    return bool(in_graph or in_stateless_scope())


def _marking(make: Callable[..., Any], joined: Session) -> Callable[..., Any]:
    """Wrap ``Model.make_train_function`` so that the function it leaves in the model marks each step."""

    @functools.wraps(make)
    def make_train_function(model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Keras'
        joined.expect_marks()
        made = make(model, *args, **kwargs)
        step = model.train_function
        if step is not None and not getattr(step, "marks_iterations", False):
            model.train_function = _marked(step, joined)
        return made

    return make_train_function


def _marked(step: Callable[..., Any], joined: Session) -> Callable[..., Any]:
    def train_function(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Keras'
        with joined.as_one():
            result = step(*args, **kwargs)
        joined.mark()
        return result

    train_function.marks_iterations = True  # type: ignore[attr-defined]
    return train_function


joining.enter()  # the import is the front door
