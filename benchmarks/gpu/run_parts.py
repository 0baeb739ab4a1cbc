"""What a run on a GPU consists of: parts with goals, and configurations, which are run one by one.

A configuration's command is a script of this folder. The runner calls it with ``--result FILE`` and
``--round N`` behind the script's name, and with ``--go FILE`` where ``waits`` is true. The script
appends a line (``record.append``) under the configuration's part and name as soon as it has the
figures, and may append more under other names before that. In a rehearsal the runner adds the words
of ``rehearsal`` at the end.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Found = dict[str, list[dict[str, Any]]]
"""Name of a configuration of a part -> figures of each round that was done."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The unit of work: what is run once, or skipped, or goes on in a later lease."""

    part: str
    name: str
    command: tuple[str, ...]
    """A script of this folder and its arguments."""
    expected_s: float
    needs: tuple[str, ...] = ()
    """Configurations that must be done before, as ``part/name``."""
    order: int = 0
    """By value: the least is run first."""
    rounds: int = 1
    """How often it is to be measured; second rounds come behind all first ones."""
    waits: bool = False
    """Whether its command takes ``--go`` and holds nothing of the device before: the runner starts it early."""
    rehearsal: tuple[str, ...] = ("--twin",)

    @property
    def key(self) -> str:
        """Return what others need it by."""
        return f"{self.part}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure that a part must show."""

    figure: str
    value: Callable[[Found], float | None]
    """Returns nothing where it has not been measured."""
    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        """Tell whether a figure is as good as it must be."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclasses.dataclass(frozen=True)
class Part:
    """Configurations that answer one question."""

    name: str
    question: str
    goals: tuple[Goal, ...] = ()


def mean(name: str, *keys: str) -> Callable[[Found], float | None]:
    """Return how to read a figure of one configuration: its mean over the rounds that have it."""

    def read(found: Found) -> float | None:
        values = [value for figures in found.get(name, ()) if (value := _at(figures, keys)) is not None]
        return statistics.fmean(values) if values else None

    return read


def _at(figures: Any, keys: tuple[str, ...]) -> float | None:  # noqa: ANN401 - parsed JSON
    for key in keys:
        figures = figures.get(key) if isinstance(figures, dict) else None
    if isinstance(figures, list):  # of what failed, for example
        return float(len(figures))
    return None if figures is None else float(figures)


def _as_line(part: str, name: str, *what: str) -> tuple[str, ...]:
    return ("as_line.py", "--part", part, "--name", name, *what)


_HOST = ("--smoke", "--device", "host")

PARTS = (
    Part(
        "driver",
        "What does the driver do that the manual leaves open, and what does each call cost?",
        (
            Goal(
                "a map and its access with a context, us",
                mean("facts", "facts", "calls_with_context", "figures", "microseconds", "map and access", "median"),
                most=300.0,
            ),
        ),
    ),
    Part("marks", "What does a mark on the device cost, by kernel, by stream operation and by event?"),
    Part(
        "bits",
        "Do drivers, kernels and other programs keep their contracts, with the same bits as without Zico?",
        (
            Goal("tests/gpu that failed", mean("tests", "failed"), most=0),
            Goal("exit code of the programs", mean("programs", "exit_code"), most=0),
        ),
    ),
    Part("alone", "What does Zico cost a job that has the GPU to itself?"),
    Part("pairs", "What do pairs gain?"),
)

CONFIGURATIONS = (
    Configuration("driver", "facts", _as_line("driver", "facts", "driver_facts.py"), 30, order=10),
    Configuration(
        "marks", "ways", _as_line("marks", "ways", "progress.py", "--rounds", "10"), 8, order=20, rehearsal=("--smoke",)
    ),
    Configuration(
        "bits", "tests", _as_line("bits", "tests", "tests/gpu"), 45, order=30, rehearsal=("--twin", "-k", "driver")
    ),
    Configuration(
        "bits",
        "programs",
        _as_line("bits", "programs", "programs.py"),
        90,
        order=35,
        rehearsal=("--smoke", "--only", "numba"),
    ),
    Configuration("alone", "cases", _as_line("alone", "cases", "alone.py"), 240, order=40, rehearsal=_HOST),
    Configuration("pairs", "brief", _as_line("pairs", "brief", "pairs.py", "--brief"), 240, order=50, rehearsal=_HOST),
)
