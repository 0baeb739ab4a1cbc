"""A cluster, event by event: jobs come, wait in one queue, are placed by a policy, and end.

Theory of operation
    One queue, first come, first served: the job at its head is placed as soon as the policy has a
    device for it, and nobody overtakes. Devices that hold the same kinds of jobs are one to every
    policy, so a placement looks at sets of kinds, not at devices. A job's remaining work falls with
    the speed of its device's set; a set that changes gives its jobs new ends::

        arrival -> queue -> placed: the set grows -> ends: the set shrinks -> the head is tried again

Guarantees
    * Each job runs once, but for those that a policy lets run out of memory: these begin again.
    * What a job does, at its set's speeds over the time, is its work.
    * Deterministic.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from clusters.speeds import Speeds

Members = tuple[int, ...]
"""The kinds of a device's jobs, sorted."""


class Policy(Protocol):
    """Where a job goes."""

    def value(self, members: Members, kind: int, estimate: float) -> float | None:
        """Return how good it is to add a job to a device with such jobs; ``None``: it may not go there.

        Args:
            members: What the device has.
            kind: The job's.
            estimate: By what factor the job's predicted peak is wrong, for policies that predict.
        """
        ...

    def speeds(self, members: Members) -> Speeds | None:
        """Return how fast jobs are together; ``None``: the one that was added last runs out of memory."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What came of all jobs, each by its number."""

    start_s: NDArray[np.float64]
    """When it was placed for the last time."""
    end_s: NDArray[np.float64]
    device: NDArray[np.int64]
    failures: NDArray[np.int64]
    """How often it ran out of memory."""
    device_s: float
    """How long devices had a job, added up."""
    most_sets: int
    """The most different sets that a placement looked at."""


@dataclasses.dataclass
class _Device:
    """One device; times in seconds."""

    jobs: list[int] = dataclasses.field(default_factory=list)
    members: Members = ()
    speeds: Speeds = ()
    since_s: float = 0.0
    version: int = 0


_ARRIVES, _ENDS, _RETURNS = 0, 1, 2
FAILURE_S = 60.0
"""After which a job that runs out of memory is seen to have ended, and queues again."""


class Cluster:
    """Devices, a queue and a clock."""

    def __init__(
        self,
        policy: Policy,
        devices: int,
        *,
        arrive_s: NDArray[np.float64],
        work_s: NDArray[np.float64],
        kind: NDArray[np.int64],
        estimate: NDArray[np.float64] | None = None,
    ) -> None:
        """Take jobs in the order of their arrival; nothing runs yet."""
        n = len(arrive_s)
        self._policy, self._n = policy, n
        self._arrive_s, self._kind = arrive_s.tolist(), kind.tolist()
        self._estimate = (np.ones(n) if estimate is None else estimate).tolist()
        self._left_s: list[float] = work_s.tolist()
        self._work_s: list[float] = work_s.tolist()
        self._devices = [_Device() for _ in range(devices)]
        self._by_set: dict[Members, dict[int, None]] = {(): dict.fromkeys(reversed(range(devices)))}
        self._queue: deque[int] = deque()
        self._alone: deque[int] = deque()
        """Jobs that ran out of memory; each comes first, and gets an empty device."""
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order = 0
        self._start_s, self._end_s = np.full(n, np.nan), np.full(n, np.nan)
        self._device, self._failures = np.full(n, -1), np.zeros(n, np.int64)
        self._exclusive: set[int] = set()
        self._device_s = 0.0
        self._most_sets = 0
        self._values: dict[tuple[int, float], dict[Members, float | None]] = {}
        self._blocked = -1
        """The job at the head if no set is for it; a set that a device comes to is then all that can be."""

    def run(self) -> Run:
        """Run until every job has ended.

        Raises:
            ValueError: A job fits no device.
        """
        arrivals = iter(range(self._n))
        following = next(arrivals, None)
        while following is not None or self._events:
            changed: Members | None = None
            if following is not None and (not self._events or self._arrive_s[following] <= self._events[0][0]):
                now_s = self._arrive_s[following]
                self._queue.append(following)
                following = next(arrivals, None)
            else:
                now_s, _, what, number, version = heapq.heappop(self._events)
                if what == _RETURNS:
                    self._alone.append(number)
                elif version == self._devices[number].version:
                    self._end(number, now_s)
                    changed = self._devices[number].members
                else:
                    continue
            self._place_all(now_s, changed)
        if self._queue or self._alone:
            head = (self._alone or self._queue)[0]
            raise ValueError(f"job {head} of kind {self._kind[head]} fits no device: leave the kind out")
        return Run(
            *(self._start_s, self._end_s, self._device, self._failures),
            device_s=self._device_s,
            most_sets=self._most_sets,
        )

    def _push(self, at_s: float, what: int, number: int, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, what, number, version))

    def _place_all(self, now_s: float, changed: Members | None) -> None:
        """Place the job at the head for as long as there is a device for it; a device may have come to a set."""
        while self._alone or self._queue:
            job = (self._alone or self._queue)[0]
            if job != self._blocked:
                members = self._best(job, self._by_set)
            else:
                members = None if changed is None else self._best(job, (changed,))
            if members is None:
                self._blocked = job
                return
            self._blocked = -1
            (self._alone or self._queue).popleft()
            self._start(job, members, now_s)

    def _best(self, job: int, sets: Iterable[Members]) -> Members | None:
        """Return to which of these sets a job is best added."""
        if self._failures[job]:
            return () if () in self._by_set else None
        self._most_sets = max(self._most_sets, len(self._by_set))
        best, chosen = None, None
        kind, estimate = self._kind[job], self._estimate[job]
        values = self._values.setdefault((kind, estimate), {})
        for members in sets:
            if members in values:
                value = values[members]
            else:
                value = values[members] = self._policy.value(members, kind, estimate)
            if value is not None and (best is None or value > best):
                best, chosen = value, members
        return chosen

    def _start(self, job: int, members: Members, now_s: float) -> None:
        kind = self._kind[job]
        grown = tuple(sorted((*members, kind)))
        speeds = self._policy.speeds(grown)
        if speeds is None:
            self._failures[job] += 1
            self._push(now_s + FAILURE_S, _RETURNS, job)
            return
        number = next(reversed(self._by_set[members]))
        self._start_s[job], self._device[job] = now_s, number
        device = self._devices[number]
        if self._failures[job]:
            self._exclusive.add(number)
        self._change(number, [*device.jobs, job], grown, speeds, now_s)

    def _end(self, number: int, now_s: float) -> None:
        """End the job of a device whose work is done: the one with the least left."""
        device = self._devices[number]
        self._settle(device, now_s)
        ended = min(device.jobs, key=self._left_s.__getitem__)
        self._left_s[ended] = 0.0
        self._end_s[ended] = now_s
        self._exclusive.discard(number)
        rest = [job for job in device.jobs if job != ended]
        members = tuple(sorted(self._kind[job] for job in rest))
        speeds = self._policy.speeds(members)
        assert speeds is not None  # noqa: S101 - fewer jobs than ran before
        self._change(number, rest, members, speeds, now_s)

    def _settle(self, device: _Device, now_s: float) -> None:
        """Take off what a device's jobs have done since its set changed."""
        passed_s = now_s - device.since_s
        for job, speed in zip(device.jobs, device.speeds, strict=True):
            self._left_s[job] -= passed_s * speed
        if device.jobs:
            self._device_s += passed_s
        device.since_s = now_s

    def _change(self, number: int, jobs: list[int], members: Members, speeds: Speeds, now_s: float) -> None:
        """Give a device another set of jobs, and its next end a time."""
        device = self._devices[number]
        self._settle(device, now_s)
        old = self._by_set.get(device.members)
        if old is not None and number in old:
            del old[number]
            if not old:
                del self._by_set[device.members]
        device.jobs = sorted(jobs, key=self._kind.__getitem__)
        device.members, device.speeds = members, speeds
        device.version += 1
        if number not in self._exclusive:
            self._by_set.setdefault(members, {})[number] = None
        if jobs:
            ends_s = now_s + min(
                max(0.0, self._left_s[job]) / speed for job, speed in zip(device.jobs, speeds, strict=True)
            )
            self._push(ends_s, _ENDS, number, device.version)
