"""An engine that steps one optimizer for one group of parameters after the other, as ZeRO's stages 1 and 2 do."""

from __future__ import annotations

import types
from typing import Any

import torch


class GroupByGroup:
    """An optimizer around PyTorch's, which is no ``torch.optim.Optimizer`` itself."""

    def __init__(self, groups: list[dict[str, Any]], config: dict[str, Any]) -> None:
        """Make PyTorch's."""
        self.optimizer = torch.optim.AdamW(groups, lr=config["params"]["lr"])

    def step(self) -> None:
        """Step each group."""
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups
        self.optimizer.zero_grad()


class DeepSpeedEngine:
    """A model and its optimizer."""

    def __init__(self, model: torch.nn.Module, groups: list[dict[str, Any]], config: dict[str, Any]) -> None:
        """Take over a model."""
        self.module = model
        self.optimizer = GroupByGroup(groups, config["optimizer"])
        self._offload = config["zero_optimization"].get("offload_optimizer")

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Return what the model makes of a batch."""
        made: torch.Tensor = self.module(batch)
        return made

    def zero_offload_optimizer(self) -> types.SimpleNamespace | None:
        """Return what the configuration says of offloading."""
        return types.SimpleNamespace(device=self._offload["device"]) if self._offload else None

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass."""
        loss.backward()

    def step(self) -> None:
        """End an iteration."""
        self._take_model_step(None)

    def _take_model_step(self, _lr_kwargs: dict[str, Any] | None) -> None:
        self.optimizer.step()
