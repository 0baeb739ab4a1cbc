"""The planners that save memory, by the names that users type. A planner's code is imported when it is asked for."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zico.planning.saving.combined import SavePlanner
    from zico.planning.saving.problem import SwapPlanner


def _made(module: str, name: str, *arguments: str) -> Any:  # noqa: ANN401 - a planner of either kind
    return getattr(importlib.import_module(f"zico.planning.saving.{module}"), name)(*arguments)


SWAP_PLANNERS: Mapping[str, Callable[[], SwapPlanner]] = {
    **{name: functools.partial(_made, "autoswap", "AutoSwap", name) for name in ("doa", "aoa", "wdoa", "swdoa")},
    "vdnn": functools.partial(_made, "published", "VDNN"),
    "tflms": functools.partial(_made, "published", "TFLMS"),
    "lms": functools.partial(_made, "published", "LMS"),
    "flashneuron": functools.partial(_made, "published", "FlashNeuron"),
    "gist": functools.partial(_made, "published", "Gist"),
    "flow": functools.partial(_made, "flow", "Flow"),
    "flow-whole": functools.partial(_made, "flow", "Flow", "flow-whole"),
    "bayes": functools.partial(_made, "bayes", "Bayes"),
    "autotm": functools.partial(_made, "autotm", "AutoTM"),
    "swapadvisor": functools.partial(_made, "swapadvisor", "SwapAdvisor"),
}
"""Those that only move tensors."""
_RECOMPUTING = ("chen", "dtr", "checkmate", "checkmate-lp")
SAVE_PLANNERS: Mapping[str, Callable[[], SavePlanner]] = {
    "zico": functools.partial(_made, "portfolio", "Zico"),
    "capuchin": functools.partial(_made, "combined", "Capuchin"),
    "superneurons": functools.partial(_made, "combined", "SuperNeurons"),
    "echo": functools.partial(_made, "combined", "Echo"),
    **{name: functools.partial(_made, "combined", "Recomputing", name) for name in _RECOMPUTING},
}
"""Those that drop tensors and make them again, and may move others."""
LONGEST = "longest"
"""What jobs follow if nothing else was asked for: see ``zico.offload.swap_schedule``."""
SEGMENTS = "segments"
"""Modules run again in the backward pass; what that leaves over moves as by ``LONGEST``."""
AUTO_PLANNERS = (LONGEST, "zico")
"""Of which a job under ``auto`` keeps the fastest."""
REDUCING = {"gist-fp16": "fp16", "gist-fp10": "fp10", "gist-fp8": "fp8"}
"""As ``gist``, with what leaves in fewer bits: gradients are not the same bits any more."""
JOB_PLANNERS = (LONGEST, SEGMENTS, *SAVE_PLANNERS, *(name for name in SWAP_PLANNERS if name != "flow"), *REDUCING)
"""Those that jobs can follow: they move whole tensors."""
DEVICE_PLANNERS = tuple(name for name in JOB_PLANNERS if name not in {SEGMENTS, "gist", *REDUCING})
"""Those that jobs on a GPU can follow: they move tensors as they are, or make them again by rules."""


def is_encoding(name: str) -> bool:
    """Tell whether a planner of jobs is for tiers that encode."""
    return name == "gist" or name in REDUCING


def swap_planner(name: str) -> SwapPlanner:
    """Return the planner of that name.

    Raises:
        ConfigError: There is none; the message names those there are.
    """
    if name not in SWAP_PLANNERS:
        raise ConfigError(f"{name!r} plans no swaps: give one of {', '.join(SWAP_PLANNERS)}")
    return SWAP_PLANNERS[name]()


def save_planner(name: str) -> SavePlanner:
    """Return the planner of that name, of those that move tensors, too.

    Raises:
        ConfigError: There is none; the message names those there are.
    """
    if name in SWAP_PLANNERS or name in REDUCING:
        from zico.planning.saving.combined import Swapping

        return Swapping(swap_planner("gist" if name in REDUCING else name))
    if name not in SAVE_PLANNERS:
        raise ConfigError(f"{name!r} is no planner: give one of {', '.join((*SAVE_PLANNERS, *SWAP_PLANNERS))}")
    return SAVE_PLANNERS[name]()
