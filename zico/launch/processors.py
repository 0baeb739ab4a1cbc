"""The host's processors: how many count, and which of them a job runs on that is to have a share of them.

Theory of operation
    A share is an upper bound, rounded down to whole processors; one is the least. The thread that
    starts a job first limits itself to the job's processors (sched(7)), and the job inherits that.
    So it holds from the job's first instruction, for all that the job starts, and needs no rights.
    Frameworks count the processors that they may use when they are loaded, and have as many
    threads::

        a=50%, b=30%      0  1  2  3  4  5  6  7
                          a  a  a  a  b  b  .  .      c, without a share, runs on all of them

    Each job gets the processors that fewest jobs with a share have, threads of one core together.
    So no two of them meet if their shares add up to at most all, and each is worth a processor.

    A control group may allow less time than its processors have. Then a share is of that time, in
    processors.

Known limitations
    Runs do not know of each other: jobs with shares of two runs may get the same processors. A job
    that sets its affinity itself gets what it asks for.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from zico.launch.devices import CGROUP_OF_SELF, CGROUP_ROOT, cgroup_directories

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

_DESCRIBED = Path("/sys/devices/system/cpu")
_INEXACT = 1e-9  # 29 % of 100 is 28.999... in floating point
# Of version 2, then of version 1: microseconds of processor time in each period, and the period.
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


@dataclasses.dataclass(frozen=True)
class Processors:
    """The processors that this process may use."""

    numbers: tuple[int, ...]
    """The kernel's, neighbours first: threads of a core, then cores of a package."""
    count: int
    """As how many they count, at least one: control groups may allow less time than they have."""

    @classmethod
    def usable(
        cls, cgroup_root: Path = CGROUP_ROOT, cgroup_of_self: Path = CGROUP_OF_SELF, described: Path = _DESCRIBED
    ) -> Self:
        """Return those that the calling thread, and so what it starts, may use now."""
        numbers = sorted(os.sched_getaffinity(0), key=lambda number: _place_of(number, described))
        groups = cgroup_directories(cgroup_root, cgroup_of_self, "cpu")
        allowed = min(map(_allowed_by, groups), default=math.inf)
        return cls(tuple(numbers), max(1, math.ceil(min(len(numbers), allowed))))

    def chosen(self, share: float, taken: Iterable[Collection[int]]) -> frozenset[int]:
        """Return the processors of a job that is to have at most a share of them, at least one.

        Args:
            share: Above 0, at most 1.
            taken: What each job has that runs with a share.
        """
        wanted = max(1, math.floor(share * self.count + _INEXACT))
        users = collections.Counter(itertools.chain.from_iterable(taken))
        return frozenset(sorted(self.numbers, key=lambda number: users[number])[:wanted])


@contextlib.contextmanager
def limited_to(processors: Collection[int]) -> Iterator[None]:
    """Let the calling thread, and so what it starts meanwhile, run on these processors only.

    Raises:
        OSError: The kernel does not limit it; nothing has changed.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # they have been taken from this process meanwhile
            os.sched_setaffinity(0, before)


def _place_of(number: int, described: Path) -> tuple[int, int, int]:
    """Return what sorts a processor beside its neighbours; by number alone where the kernel does not tell."""
    topology = described / f"cpu{number}" / "topology"
    try:
        package, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        package, core = 0, number
    return package, core, number


def _allowed_by(group: Path) -> float:
    """Return how many processors' time a control group has at once; infinity without a limit."""
    for names in _QUOTA_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number, and means that there is no limit
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            if quota > 0 and period > 0:
                return quota / period
    return math.inf
