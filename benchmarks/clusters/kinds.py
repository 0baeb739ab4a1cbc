"""Kinds of jobs: a model at a batch on the simulated card, its memory over an iteration, and how long the card idles.

The card's idle share is the part of an iteration in which its operations would have ended sooner
than one kernel follows another (``paper.work.KERNEL_NS``). It is a lower bound: loading of data,
synchronisation and kernels that fill a part of the card are not in a trace.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np
from paper.published import REGION_BYTES
from paper.work import KERNEL_NS, step_of

from zico.lab.simulator.roofline import device_model
from zico.planning.packing.from_trace import iteration_problem
from zico.planning.packing.judge import live_bytes
from zico.scheduler.curves import profile_of

if TYPE_CHECKING:
    from zico.scheduler.state import Profile

CARD = "a100-40gb"
"""That of the published evaluation which the results stand beside."""
CONTEXT_BYTES = 524 << 20
"""What a process takes of a device before its first tensor: benchmarks/results/gpu/driver_facts.json, an H200."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A kind's model and batch, and the batches at which it is traced."""

    script: str
    function: str
    batch: int
    small: int
    large: int
    share: float
    """Of all jobs."""
    arguments: tuple[tuple[str, int | str], ...] = ()


_BERT = (("length", 384), ("optimizer", "SGD"))
MIXES = {
    "mixed": {
        "DCGAN": Model("dcgan", "dcgan", 128, 64, 256, 0.10),
        "RHN": Model("rhn", "rhn", 20, 20, 60, 0.10),
        "ResNet-110": Model("resnet", "resnet110", 128, 100, 800, 0.15),
        "U-Net": Model("unet", "unet", 6, 2, 6, 0.05),
        "ResNet-50, small": Model("resnet", "resnet50", 32, 60, 200, 0.10),
        "MobileNetV2": Model("mobilenet", "mobilenet_v2", 96, 32, 96, 0.10),
        "ResNet-50": Model("resnet", "resnet50", 128, 60, 200, 0.10),
        "DenseNet-121": Model("densenet", "densenet121", 84, 28, 84, 0.05),
        "ViT-B/16": Model("transformer", "vit_b16", 64, 32, 128, 0.05),
        "BERT": Model("transformer", "bert_base", 24, 5, 40, 0.10, _BERT),
        "GPT-2": Model("transformer", "gpt2", 8, 2, 8, 0.10),
    },
    "large": {
        "MobileNetV2": Model("mobilenet", "mobilenet_v2", 320, 32, 96, 0.20),
        "ResNet-50": Model("resnet", "resnet50", 288, 60, 200, 0.20),
        "DenseNet-121": Model("densenet", "densenet121", 192, 28, 84, 0.15),
        "ViT-B/16": Model("transformer", "vit_b16", 160, 32, 128, 0.15),
        "BERT": Model("transformer", "bert_base", 48, 5, 40, 0.15, _BERT),
        "GPT-2": Model("transformer", "gpt2", 8, 2, 8, 0.15),
    },
}
"""Two mixes of jobs. *mixed*: light, medium and heavy ones, as evaluations on this card use. *large*: no two peaks fit.

The shares are ours.
"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the simulations need to know of a kind."""

    name: str
    profile: Profile
    """Regions held against time, alone."""
    keeps: int
    """Regions, between iterations."""
    idle: float
    """The share of the time in which the card has nothing to do, alone."""
    share: float
    """Of all jobs."""


def regions_of(jobs: int) -> int:
    """Return the regions that so many jobs have to share, their contexts left out."""
    return (device_model(CARD).memory_bytes - jobs * CONTEXT_BYTES) // REGION_BYTES


@functools.cache
def kinds(mix: str, most: int | None = None) -> tuple[Kind, ...]:
    """Return the kinds of a mix, or its first few; the first call on a machine traces their models, for two minutes."""
    return tuple(_kind(name, model) for name, model in list(MIXES[mix].items())[:most])


def _kind(name: str, model: Model) -> Kind:
    work = step_of(name, model.script, model.function, dict(model.arguments), model.small, model.large)
    problem = iteration_problem(work.trace(model.batch, CARD)).problem
    assert problem.tick_ns is not None  # noqa: S101 - a trace has times
    held = -(-live_bytes(problem) // REGION_BYTES)
    profile = profile_of(held, problem.tick_ns[: len(held) + 1])
    taken_ns, computing, moving = work.busy(model.batch, CARD)
    busy_ns = np.where(taken_ns > KERNEL_NS, taken_ns, taken_ns * np.maximum(computing, moving))
    return Kind(name, profile, int(held.min()), float(1 - busy_ns.sum() / taken_ns.sum()), model.share)
