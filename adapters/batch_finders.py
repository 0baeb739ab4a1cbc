"""Batch-size finders end at the job's limit: they enlarge a batch until the framework has no memory.

On the host, what exceeds the limit goes to a file, so a finder would go on to three budgets, ever
slower. While a finder runs, a request beyond the limit gets the framework's error instead, unless the
user has asked for ``--save``. Known are accelerate's, which Hugging Face's Trainer uses
(``auto_find_batch_size``), and Lightning's. Accelerate's runs the whole training.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

FINDERS = {
    "accelerate.utils.memory": "find_executable_batch_size",
    "lightning.pytorch.tuner.batch_size_scaling": "_scale_batch_size",
    "pytorch_lightning.tuner.batch_size_scaling": "_scale_batch_size",
}
"""Modules, and the function of each that finds a size or returns what does."""
_DONE = "zico_ends_at_limit"


def enable() -> None:
    """Let the finders that are imported end at the limit; changes their modules.

    Raises:
        AttributeError: A module has no such function; it has not been changed.
    """
    for name, function in FINDERS.items():
        module = sys.modules.get(name)
        if module is not None and not hasattr(getattr(module, function), _DONE):
            setattr(module, function, _at_limit(getattr(module, function)))


def _at_limit(finder: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a finder, and a finder that it returns."""

    @functools.wraps(finder)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the finder
        joined = session.current()
        if joined is None:
            found = finder(*args, **kwargs)
        else:
            with joined.refusing_beyond_limit():
                found = finder(*args, **kwargs)
        # A decorator's arguments come first, and give a partial call of this.
        return _at_limit(found) if callable(found) and not isinstance(found, functools.partial) else found

    setattr(wrapped, _DONE, True)
    return wrapped
