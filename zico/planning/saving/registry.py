"""The planners of swaps by the names that users type. A planner's code is imported when it is asked for."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zico.planning.saving.problem import SwapPlanner


def _made(module: str, name: str, *arguments: str) -> SwapPlanner:
    planner: SwapPlanner = getattr(importlib.import_module(f"zico.planning.saving.{module}"), name)(*arguments)
    return planner


SWAP_PLANNERS: Mapping[str, Callable[[], SwapPlanner]] = {
    **{name: functools.partial(_made, "autoswap", "AutoSwap", name) for name in ("doa", "aoa", "wdoa", "swdoa")},
    "flow": functools.partial(_made, "flow", "Flow"),
    "flow-whole": functools.partial(_made, "flow", "Flow", "flow-whole"),
    "bayes": functools.partial(_made, "bayes", "Bayes"),
}


def swap_planner(name: str) -> SwapPlanner:
    """Return the planner of that name.

    Raises:
        ConfigError: There is none; the message names those there are.
    """
    if name not in SWAP_PLANNERS:
        raise ConfigError(f"{name!r} plans no swaps: give one of {', '.join(SWAP_PLANNERS)}")
    return SWAP_PLANNERS[name]()
