"""Traces of training steps in which an operation notes what it does instead of how long it takes; kept in the cache."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from typing import TYPE_CHECKING

import common
import numpy as np

from zico.base.paths import cache_root
from zico.lab.simulator.roofline import DEVICES, DeviceModel
from zico.trace.events import EVENT

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MODELS = common.ROOT / "benchmarks" / "models"
_TRACED_BY = (
    *("benchmarks/models/*.py", "benchmarks/paper/traced.py", "lab/frameworks/torch_fake.py"),
    *("zico/trace/events.py", "lab/simulator/roofline.py"),
)
_ITERATIONS = 2


@dataclasses.dataclass(frozen=True)
class _Noting(DeviceModel):  # type: ignore[misc] # mypy does not follow zico.lab
    """A device that notes what each operation computes and moves: operations, bytes, bytes of a number, TF32 or not."""

    work: list[tuple[float, float, int, bool]] = dataclasses.field(default_factory=list)

    def duration_ns(self, flops: float, moved_bytes: float, itemsize: int = 4, *, tf32: bool = False) -> int:
        self.work.append((flops, moved_bytes, itemsize, tf32))
        return 1


def traced(
    script: str, function: str, arguments: dict[str, int | str], name: str
) -> tuple[NDArray[np.void], NDArray[np.float64]]:
    """Return the events of a step, and of each operation: operations, bytes moved, bytes of a number, TF32 or not."""
    path = cache_root() / "paper" / f"{name}-{_digest()}.npz"
    if not path.exists():
        common.note(f"tracing {name}")
        _write(path, script, function, arguments)
    with np.load(path) as kept:
        return kept["events"], kept["work"]


def _write(path: Path, script: str, function: str, arguments: dict[str, int | str]) -> None:
    fake_trace = importlib.import_module("zico.lab.frameworks.torch_fake").fake_trace
    if str(MODELS) not in sys.path:
        sys.path.insert(0, str(MODELS))
    build = functools.partial(getattr(importlib.import_module(script), function), **arguments)
    device = _Noting(**dataclasses.asdict(DEVICES["v100-32gb"]))
    events = fake_trace(build, device, _ITERATIONS).events.astype(EVENT)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, events=events, work=np.array(device.work, np.float64))
    part.replace(path)


@functools.cache
def _digest() -> str:
    return common.digest(importlib.import_module("torch").__version__, _TRACED_BY)
