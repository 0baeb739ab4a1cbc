"""DeepSpeed: an engine's step ends an iteration, and state that DeepSpeed offloads is left to it.

PyTorch's adapter (``zico.adapters.torch``) shares the tensors. An engine steps its optimizer once
for each group of parameters, so those steps are parts of one. Tested with the version in
``TESTED_VERSION``.

Known limitations
    What an optimizer makes before the engine's first step is taken for that of PyTorch alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zico.job import joining, session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TESTED_VERSION = "0.19"


def enable() -> None:
    """Mark an iteration at each step of every engine, once this process is in a pool; changes ``DeepSpeedEngine``.

    Raises:
        AttributeError: This DeepSpeed steps in another way; nothing has been changed.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    DeepSpeedEngine._take_model_step = _ending(DeepSpeedEngine._take_model_step)  # noqa: SLF001 - all engines step by it


def _ending(take: Callable[..., None]) -> Callable[..., None]:
    """Wrap what steps an engine's optimizers."""

    @functools.wraps(take)
    def _take_model_step(engine: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as DeepSpeed's
        joined = session.current_here()
        if joined is None:
            take(engine, *args, **kwargs)
            return
        for optimizer in _optimizers(engine.optimizer):
            joined.parts[optimizer] = _keeper(engine)
        take(engine, *args, **kwargs)
        for watcher in joined.watchers:
            watcher.end_step(engine, args, kwargs)

    return _take_model_step


def _optimizers(outermost: Any) -> Iterator[Any]:  # noqa: ANN401 - DeepSpeed's around PyTorch's
    """Yield an engine's optimizer and those that it steps."""
    if outermost is not None:
        yield outermost
        yield from _optimizers(getattr(outermost, "optimizer", None))
        yield from _optimizers(getattr(outermost, "backup_optimizer", None))


def _keeper(engine: Any) -> str:  # noqa: ANN401 - a DeepSpeedEngine
    """Return who offloads the state of an engine's optimizer, empty if DeepSpeed does not."""
    wish = engine.zero_offload_optimizer()
    if wish is None or wish.device == "none":
        return ""
    return f"DeepSpeed (offload_optimizer: {wish.device})"


joining.enter()  # the import is the front door
