"""Keras, with any backend: a train step ends an iteration. The backend's own adapter shares its tensors."""

from __future__ import annotations

import functools
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
    return joined


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
        result = step(*args, **kwargs)
        joined.mark()
        return result

    train_function.marks_iterations = True  # type: ignore[attr-defined]
    return train_function


joining.join()  # the import is the front door
