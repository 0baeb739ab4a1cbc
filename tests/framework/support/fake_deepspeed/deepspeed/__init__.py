"""A fake of DeepSpeed: as much of it as ``offload_libraries_job.py`` and Zico's adapter use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.runtime.engine import DeepSpeedEngine

if TYPE_CHECKING:
    from torch import nn


def initialize(
    model: nn.Module, model_parameters: list[dict[str, Any]], config: dict[str, Any]
) -> tuple[DeepSpeedEngine]:
    """Return an engine, first in a tuple."""
    return (DeepSpeedEngine(model, model_parameters, config),)
