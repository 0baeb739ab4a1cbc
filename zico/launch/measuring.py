"""How fast jobs are alone and together: runs of real jobs, each ended when it has been seen for long enough.

Iterations are counted from when every job has warmed up, between the first and the last one that was
seen to end. So neither start-up nor the ends of the window cost anything::

    job A   |start|1|2|..  warm  |x=====x=====x==|  ended by us
    job B   |  start  |1|2| warm |==x======x====x|  ended by us

A job that has no sign of its iterations' ends cannot be measured (``zico.step``).
"""

from __future__ import annotations

import dataclasses
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from zico.base.errors import CommandError
from zico.launch.jobs import Listener
from zico.launch.supervisor import supervise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zico.launch.jobs import Command, Stream
    from zico.launch.pools import Target
    from zico.report.model import Snapshot

WARM_UP = 8
"""Iterations of each job before its steady state: profiles are learned in the first few, one job after the other."""
LEAST = 5
"""Iterations of each job that are counted at least."""
LOOK_S = 0.05
"""Seconds between two looks at the counts, half a percent of ten."""
TELL_S = 10.0


class Seen(NamedTuple):
    """What was seen of a job at one time."""

    t_s: float
    iterations: int
    waited_s: float
    shared_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a job was."""

    iterations_per_s: float
    waited: float
    """Share of the time in which it waited, for memory or for its turn."""
    shared_bytes: int = 0
    """Frozen memory that it had in common with others in the end."""


class Window:
    """Counts of jobs' iterations while all of them are warm."""

    def __init__(self, names: Sequence[str], seconds: float) -> None:
        """Begin before the jobs do; it is full ``seconds`` after all have warmed up."""
        self._names = tuple(names)
        self._seconds = seconds
        self._began_s: float | None = None
        self._latest: dict[str, Seen] = {}
        self._first: dict[str, Seen] = {}
        self._last: dict[str, Seen] = {}

    def add(self, now: Mapping[str, Seen]) -> None:
        """Take in a look at the jobs that are there."""
        for name, seen in now.items():
            ended = name in self._latest and seen.iterations > self._latest[name].iterations
            self._latest[name] = seen
            if self._began_s is not None and ended:
                self._first.setdefault(name, seen)
                self._last[name] = seen
        if self._began_s is None and all(self.iterations(name) >= WARM_UP for name in self._names):
            self._began_s = max(seen.t_s for seen in self._latest.values())

    def iterations(self, name: str) -> int:
        """Return how many iterations of a job have ended."""
        return self._latest[name].iterations if name in self._latest else 0

    @property
    def is_warm(self) -> bool:
        """Tell whether iterations are counted."""
        return self._began_s is not None

    @property
    def is_enough(self) -> bool:
        """Tell whether each job was seen for ``LEAST`` iterations."""
        return all(
            name in self._first and self._last[name].iterations - self._first[name].iterations >= LEAST
            for name in self._names
        )

    @property
    def is_full(self) -> bool:
        """Tell whether that took as long as it should, too."""
        if self._began_s is None or not self.is_enough:
            return False
        return min(seen.t_s for seen in self._latest.values()) - self._began_s >= self._seconds

    def speeds(self) -> dict[str, Speed]:
        """Return each job's speed. Only where it ``is_enough``."""
        found = {}
        for name in self._names:
            first, last = self._first[name], self._last[name]
            took_s = last.t_s - first.t_s
            found[name] = Speed(
                (last.iterations - first.iterations) / took_s,
                min(1.0, (last.waited_s - first.waited_s) / took_s),
                last.shared_bytes,
            )
        return found


class _Watch(Listener):
    """Counts, and tells when the jobs may end."""

    interval_s = LOOK_S

    def __init__(self, names: Sequence[str], seconds: float, deadline_s: float, tell: Callable[[str], None]) -> None:
        self.window = Window(names, seconds)
        self.names = names
        self.words: dict[str, str] = {}
        """Each job's last line."""
        self._ended: set[str] | None = None
        """Which jobs had ended when the others were told to; ``None`` while nobody was."""
        self._seconds = seconds
        self._deadline_s = deadline_s
        self._tell = tell
        self._ready_s: float | None = None
        self._tell_s = time.monotonic() + TELL_S

    def output(self, name: str, stream: Stream, lines: list[bytes]) -> None:
        del stream  # either may have the reason of a failure
        said = [line for line in lines if line.strip()]
        if said:
            self.words[name] = said[-1].decode(errors="replace").strip()

    def problem(self, text: str) -> None:
        self._tell(text)

    def progress(self, snapshot: Snapshot) -> None:
        now_s = time.monotonic()
        seen = {}
        for job in snapshot.jobs:
            for member in snapshot.processes_of(job)[:1]:
                seen[job.name] = Seen(now_s, member.iterations, member.waited_s, member.shared_bytes)
        was_warm = self.window.is_warm
        self.window.add(seen)
        if self.window.is_warm and not was_warm:
            self._tell(f"all have warmed up; counting for {self._seconds:g} s")
        elif now_s >= self._tell_s:
            self._tell_s = now_s + TELL_S
            self._tell(", ".join(f"{name}: {self.window.iterations(name)} iterations" for name in self.names))

    def is_over(self, snapshot: Snapshot) -> bool:
        """Tell whether the jobs need not go on."""
        now_s = time.monotonic()
        if self._ready_s is None and snapshot.pools[0].status is not None:
            self._ready_s = now_s
        ended = {job.name for job in snapshot.jobs if job.exit_code is not None}
        is_late = self._ready_s is not None and now_s - self._ready_s > self._deadline_s
        if not ended and not is_late and not self.window.is_full:
            return False
        self._ended = ended
        return True

    def ended_by_itself(self, name: str) -> bool:
        """Tell whether a job that has ended was not told to."""
        return self._ended is None or name in self._ended


def measure(
    commands: Sequence[Command], target: Target, seconds: float, deadline_s: float, tell: Callable[[str], None]
) -> dict[str, Speed]:
    """Run jobs at once, end them by SIGTERM when they have been seen for long enough, and return their speeds.

    Args:
        commands: The jobs.
        target: The device to run on.
        seconds: How long iterations are counted once all jobs have warmed up.
        deadline_s: How long that may take in all, from when the pool is ready.
        tell: Is called with a line now and then.

    Raises:
        CommandError: A job failed or ended too soon, too few iterations were seen in time, or the
            broker could not start. All jobs have ended.
        KeyboardInterrupt: A signal came. All jobs have ended.
    """
    watch = _Watch([command.name for command in commands], seconds, deadline_s, tell)
    outcome = supervise(commands, [target], watch, until=watch.is_over)
    if outcome.signum:
        tell(f"{signal.Signals(outcome.signum).name}: the jobs have been ended, and nothing was measured")
        raise KeyboardInterrupt
    by_itself = {job.command.name: job.exit_code for job in outcome.jobs if watch.ended_by_itself(job.command.name)}
    if any(by_itself.values()) or not watch.window.is_enough:
        raise CommandError(_why_not(watch, by_itself, deadline_s), exit_code=1)
    return watch.window.speeds()


def _why_not(watch: _Watch, ended: Mapping[str, int], deadline_s: float) -> str:
    """Return why there are no speeds, and what to do."""
    needed = WARM_UP + LEAST + 1
    for name, code in ended.items():
        count = watch.window.iterations(name)
        if code:
            said = f": {watch.words[name]}" if name in watch.words else ""
            return f"{name} ended with exit code {code} after {count} iterations{said}"
    for name in ended:
        count = watch.window.iterations(name)
        if not count:
            return f"{name} ended, and Zico saw no iteration end: zico doctor -- COMMAND says why, or call zico.step()"
        return f"{name} ended after {count} iterations, and {needed} are needed: let it train for longer"
    counts = ", ".join(f"{name} {watch.window.iterations(name)}" for name in watch.names)
    return (
        f"too few iterations within {deadline_s:g} s ({counts}), and each job needs {needed}: "
        "give a longer --deadline, or mark iterations by zico.step()"
    )
