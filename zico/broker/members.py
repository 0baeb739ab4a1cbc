"""One job as the broker notes it down and remembers it, and the marks it leaves in the picture."""

from __future__ import annotations

import array
import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from zico.broker.growth import Growth
from zico.broker.notes import NamedJob
from zico.broker.protocol.messages import Share, WaitKind
from zico.broker.spending import Spending
from zico.broker.views import count_of

if TYPE_CHECKING:
    from collections.abc import Iterable


_SINCE_FIELDS = {WaitKind.BOUNDARY: "boundary_since_ns", WaitKind.ALLOCATION: "need_since_ns"}


MOST_BETWEEN = 16
"""Iterations between two looks, each of which is in the record: a look may be seconds late where nothing happens."""


class Entry(NamedJob, kw_only=True):
    """One job in the note for the next broker."""

    job: int
    """Its place in the table, another's after it has gone."""
    framework: str
    share: Share
    run: str = ""
    """The ``zico run`` that started it, empty: none."""


class Member(Entry, kw_only=True, eq=False):
    """One job from joining on; ``record`` keeps its last figures after it has gone."""

    index: int
    """Among all jobs ever seen."""
    pid: int
    """What people call its process: a number in its own pid namespace where the broker sees none."""
    pidfd: int | None = None
    """Readable when its process is dead; ``None``: only its connection tells."""
    record: Any
    leaving: bool = False
    shared_bytes: int = 0
    """What it has in common with other jobs, as last seen."""
    waited_before_ns: int | None = None
    """What it had waited when its first iteration ended; ``None`` until then."""
    open_waits: dict[WaitKind, int] = msgspec.field(default_factory=dict)
    blockers: dict[WaitKind, set[int]] = msgspec.field(default_factory=dict)
    """Indexes of the jobs that each open wait has been for so far."""
    spending: Spending = msgspec.field(default_factory=Spending)
    growth: Growth = msgspec.field(default_factory=Growth)

    def note_blockers(self, indexes: Iterable[int]) -> None:
        """Add whom the member waits for to its open waits."""
        for kind in self.open_waits:
            self.blockers.setdefault(kind, set()).update(indexes)


@dataclasses.dataclass
class Marks:
    """Ends of iterations and waits, packed."""

    boundary_job: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    boundary_ns: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))
    wait_job: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    wait_ns: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))
    wait_kind: array.array[int] = dataclasses.field(default_factory=lambda: array.array("b"))
    blocker_wait: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    blocker_job: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))

    def add_wait(self, member: Member, kind: WaitKind, begin_ns: int, end_ns: int) -> None:
        """Add a wait that is over, and whom it was for."""
        for blocker in sorted(member.blockers.get(kind, ())):
            self.blocker_wait.append(len(self.wait_job))
            self.blocker_job.append(blocker)
        self.wait_job.append(member.index)
        self.wait_ns.extend((begin_ns, max(begin_ns, end_ns)))
        self.wait_kind.append(kind)

    def observe(self, member: Member, after: Any, now_ns: int) -> None:  # noqa: ANN401 - a numpy record
        """Add what happened between the member's last record and ``after``."""
        ends_ns = _ends_ns(member.record, after)
        self.boundary_job.extend([member.index] * len(ends_ns))
        self.boundary_ns.extend(ends_ns)
        for kind, field in _SINCE_FIELDS.items():
            since_ns = int(after[field])
            begin_ns = member.open_waits.get(kind, 0)
            if begin_ns and begin_ns != since_ns:
                self.add_wait(member, kind, begin_ns, _wait_end_ns(kind, begin_ns, member.record, after, now_ns))
                del member.open_waits[kind]
                member.blockers.pop(kind, None)
            if since_ns:
                member.open_waits[kind] = since_ns

    def close(self, member: Member, now_ns: int) -> None:
        """End the waits of a member that goes."""
        for kind, begin_ns in member.open_waits.items():
            self.add_wait(member, kind, begin_ns, now_ns)
        member.open_waits.clear()
        member.blockers.clear()


def _ends_ns(before: Any, after: Any) -> list[int]:  # noqa: ANN401 - records
    """Return when iterations ended since the look before: the last as the table tells, the others evenly before it.

    Where more have ended than ``MOST_BETWEEN``, the last one stands for all.
    """
    n = count_of(after["iteration"]) - count_of(before["iteration"])
    first_ns, last_ns = int(before["last_boundary_ns"]), int(after["last_boundary_ns"])
    if not 1 < n <= MOST_BETWEEN or not 0 < first_ns < last_ns:
        return [last_ns] if n > 0 else []
    return [last_ns - (n - k) * (last_ns - first_ns) // n for k in range(1, n + 1)]


def _wait_end_ns(kind: WaitKind, begin_ns: int, before: Any, after: Any, now_ns: int) -> int:  # noqa: ANN401 - records
    """Return when a wait ended, by what the table tells: a look may be a tenth of a second late.

    A wait in an allocation lasted no longer than what the job has waited since the look before. It
    ended where the next one begins, if one has.
    """
    if kind is WaitKind.BOUNDARY:
        started_ns = int(after["started_ns"])
        return started_ns if started_ns >= begin_ns else int(after["boundary_since_ns"]) or now_ns
    waited_ns = count_of(after["need_waited_ns"]) - count_of(before["need_waited_ns"])
    return min(int(after["need_since_ns"]) or now_ns, begin_ns + max(0, waited_ns))
