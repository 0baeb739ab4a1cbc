"""The planners that save memory, by the names that users type. A planner's code is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.base import laboratory
from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zico.planning.saving.mixed import SavePlanner
    from zico.planning.saving.problem import SwapPlanner


SWAP_PLANNERS: Mapping[str, tuple[str, ...]] = {
    **{name: ("autoswap", "AutoSwap", name) for name in ("doa", "aoa", "wdoa", "swdoa")},
    "vdnn": ("published", "VDNN"),
    "tflms": ("published", "TFLMS"),
    "lms": ("published", "LMS"),
    "flashneuron": ("published", "FlashNeuron"),
    "gist": ("published", "Gist"),
    "flow": ("flow", "Flow"),
    "flow-whole": ("flow", "Flow", "flow-whole"),
    "bayes": ("bayes", "Bayes"),
    "autotm": ("autotm", "AutoTM"),
    "swapadvisor": ("swapadvisor", "SwapAdvisor"),
}
"""Those that only move tensors: module of ``zico.lab.saving``, class and its arguments, by name."""
_RECOMPUTING = ("chen", "dtr", "checkmate", "checkmate-lp")
_LABORATORYS: Mapping[str, tuple[str, ...]] = {
    "portfolio": ("portfolio", "Portfolio"),
    "capuchin": ("combined", "Capuchin"),
    "superneurons": ("combined", "SuperNeurons"),
    "echo": ("combined", "Echo"),
    **{name: ("combined", "Recomputing", name) for name in _RECOMPUTING},
}
OURS = "zico"
SAVE_PLANNERS = (OURS, *_LABORATORYS)
"""Those that drop tensors and make them again, and may move others."""
MODES = ("none", "swap", "page", "auto")
SAVES = (*MODES, *SAVE_PLANNERS, *SWAP_PLANNERS)
"""What a traced job may do: a mode of ``zico run``, or the name of a planner."""
LONGEST = "longest"
"""What jobs follow if nothing else was asked for: see ``zico.swap.schedule``."""
AUTO_PLANNERS = (LONGEST, OURS)
"""Of which a job under ``auto`` keeps the fastest."""
REDUCING = {"gist-fp16": "fp16", "gist-fp10": "fp10", "gist-fp8": "fp8"}
"""As ``gist``, with what leaves in fewer bits: gradients are not the same bits any more."""
_IN_PARTS = {"flow", "portfolio"}
JOB_PLANNERS = (LONGEST, *(name for name in (*SAVE_PLANNERS, *SWAP_PLANNERS) if name not in _IN_PARTS), *REDUCING)
"""Those that jobs can follow: they move whole tensors."""
PAGERS = ("deepum", "sentinel", "oc-dnn", "dragon")
"""Published systems that page, in ``zico.lab.saving.pagers``: jobs on the host can page as they do."""
OF_FILES = "dragon"
"""Of these the one whose pages are those of files."""
DEVICE_PLANNERS = tuple(name for name in JOB_PLANNERS if name not in {"gist", *REDUCING})
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
    planner: SwapPlanner = _made(name, *SWAP_PLANNERS[name])
    return planner


def save_planner(name: str) -> SavePlanner:
    """Return the planner of that name, of those that move tensors, too.

    Raises:
        ConfigError: There is none; the message names those there are.
    """
    if name in SWAP_PLANNERS or name in REDUCING:
        from zico.planning.saving.mixed import Swapping

        return Swapping(swap_planner("gist" if name in REDUCING else name))
    if name == OURS:
        from zico.planning.saving.planner import Planner

        return Planner()
    if name not in _LABORATORYS:
        raise ConfigError(f"{name!r} is no planner: give one of {', '.join((*SAVE_PLANNERS, *SWAP_PLANNERS))}")
    planner: SavePlanner = _made(name, *_LABORATORYS[name])
    return planner


def _made(asked: str, module: str, name: str, *arguments: object) -> Any:  # noqa: ANN401 - a planner of either kind
    return laboratory.part(f"saving.{module}", name, f"the planner {asked}")(*arguments)
