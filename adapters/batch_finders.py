"""Batch-size finders end at the job's limit: they enlarge a batch until the framework has no memory.

On the host, what exceeds the limit goes to a file, so a finder would go on to three budgets, ever
slower. While a finder runs, a request beyond the limit gets the framework's error instead, unless the
user has asked for ``--save``. Known are accelerate's, which Hugging Face's Trainer uses
(``auto_find_batch_size``), and Lightning's. Accelerate's runs the whole training.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

_DONE = "zico_ends_at_limit"


def enable() -> None:
    """Let the finders that are imported end at the limit; changes their modules.

    Raises:
        AttributeError: A module has no such function; it has not been changed.
    """
    for name, (function, wrap) in FINDERS.items():
        module = sys.modules.get(name)
        if module is not None and not hasattr(getattr(module, function), _DONE):
            wrapped = wrap(getattr(module, function))
            setattr(wrapped, _DONE, True)
            setattr(module, function, wrapped)


def _refusing(finder: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what finds a size, and leave alone what it returns."""

    @functools.wraps(finder)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the finder
        joined = session.current()
        with contextlib.nullcontext() if joined is None else joined.refusing_beyond_limit():
            return finder(*args, **kwargs)

    return wrapped


def _making_refusing(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decorator, whose arguments may come first: it then gives a partial call of itself."""

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the decorator
        made = make(*args, **kwargs)
        return made if isinstance(made, functools.partial) else _refusing(made)

    return wrapped


FINDERS = {
    "accelerate.utils.memory": ("find_executable_batch_size", _making_refusing),
    "lightning.pytorch.tuner.batch_size_scaling": ("_scale_batch_size", _refusing),
    "pytorch_lightning.tuner.batch_size_scaling": ("_scale_batch_size", _refusing),
}
"""Modules, the function of each that finds a size or makes what does, and what wraps it."""
