"""The state of PyTorch's optimizers rests between their steps: by PyTorch's own hooks around every step.

An optimizer makes its state in its first step, or when a state is loaded into it; what is allocated then is put where
it can rest (``zico.heap.state_offload``).
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.offload.state_return import Resting


class Stepping:
    """The hooks, for as long as the process lives."""

    def __init__(self, resting: Resting) -> None:
        """Tell of every step of every optimizer."""
        self._resting = resting
        self._begun: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that have a state."""

    def install(self) -> None:
        """Begin; before whoever ends an iteration behind a step."""
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        Optimizer.load_state_dict = self._apart(Optimizer.load_state_dict)

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401 - torch's hook signature
        self._resting.begin_step()
        self._resting.put_apart(on=optimizer not in self._begun)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401 - torch's hook signature
        self._resting.put_apart(on=False)
        self._begun.add(optimizer)
        self._resting.end_step()

    def _apart(self, load: Callable[..., None]) -> Callable[..., None]:
        """Wrap what makes copies of a state."""

        @functools.wraps(load)
        def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's
            self._resting.begin_step()
            with self._resting.apart():
                load(optimizer, *args, **kwargs)
            self._begun.add(optimizer)

        return load_state_dict
