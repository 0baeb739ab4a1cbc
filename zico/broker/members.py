"""One job as the broker remembers it, and the marks it leaves in the picture."""

from __future__ import annotations

import array
import dataclasses
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from zico.broker.protocol.messages import WaitKind
from zico.device.host import HostDriver

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zico.broker.notes import Process
    from zico.broker.protocol.messages import Share

_SINCE_FIELDS = {WaitKind.BOUNDARY: "boundary_since_ns", WaitKind.ALLOCATION: "need_since_ns"}


@dataclasses.dataclass(eq=False)
class Member:
    """One job from joining on; ``record`` keeps its last figures after it has gone."""

    index: int
    """Among all jobs ever seen."""
    job: int
    """Its place in the table, another's after it has gone."""
    pid: int
    """What people call its process: a number in its own pid namespace where the broker sees none."""
    name: str
    framework: str
    pidfd: int | None
    """Readable when its process is dead; ``None``: only its connection tells."""
    process: Process
    """As the broker sees it. Its connection and its pidfd are what it is known by."""
    record: Any
    share: Share
    run: str = ""
    """The ``zico run`` that started it, empty: none."""
    leaving: bool = False
    waited_before_ns: int | None = None
    """What it had waited when its first iteration ended; ``None`` until then."""
    paging: Paging | None = None
    """The pager of its memory, where it is paged and this broker serves its faults."""
    open_waits: dict[WaitKind, int] = dataclasses.field(default_factory=dict)
    blockers: dict[WaitKind, set[int]] = dataclasses.field(default_factory=dict)
    """Indexes of the jobs that each open wait has been for so far."""

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
        if after["iteration"] > member.record["iteration"]:
            self.boundary_job.append(member.index)
            self.boundary_ns.append(int(after["last_boundary_ns"]))
        for kind, field in _SINCE_FIELDS.items():
            since_ns = int(after[field])
            begin_ns = member.open_waits.get(kind, 0)
            if begin_ns and begin_ns != since_ns:
                self.add_wait(member, kind, begin_ns, _wait_end_ns(kind, begin_ns, after, now_ns))
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


def _wait_end_ns(kind: WaitKind, begin_ns: int, after: Any, now_ns: int) -> int:  # noqa: ANN401 - a record
    """Return when a wait ended: as the table tells at a boundary, in an allocation by this look.

    An allocation's wait ends where the next one begins, if one has.
    """
    started_ns = int(after["started_ns"])
    if kind is WaitKind.BOUNDARY and started_ns >= begin_ns:
        return started_ns
    return int(after[_SINCE_FIELDS[kind]]) or now_ns


# -- the pager of one member: a thread that serves its faults until its process is dead ------------
#
# The thread runs compiled code without the GIL, so neither the broker's own work nor other pagers
# stand in its way. If it cannot begin, or the broker ends, the job is told to be its own pager.

END_S = 0.5
"""How long the end of a thread is waited for: it has one block in hand at most."""

STAT_BLOCK_BYTES = 512  # st_blocks counts these (stat(2))

_log = logging.getLogger(__name__)


class Paging:
    """Serve one member's faults. Owns what came with it; ``end`` or ``let_go`` once."""

    def __init__(self, descriptors: Sequence[int], member: Any, wait_limit_s: float, *, pid: int) -> None:  # noqa: ANN401 - a MEMBER record
        """Take over the descriptors and begin.

        Raises:
            ConfigError: They are none of a paged job, or of another version of Zico.
            DriverError: The kernel refuses to map them.
            OSError: Too many descriptors are open.
        """
        from zico.paging.pager import Pager

        self._pager = Pager(descriptors, member, wait_limit_s, pid=pid)
        try:
            self._memory_fd = os.dup(self._pager.memory_fd)
        except OSError:
            self._pager.close()
            raise
        self._closing = threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="zico-pager", daemon=True).start()

    def _run(self) -> None:
        try:
            self._pager.run()
        except Exception:  # noqa: BLE001 - the job must not wait for ever, whatever is wrong with us
            _log.exception("a pager has failed")
        finally:
            with self._closing:
                self._pager.let_go()
                self._is_over.set()
                self._pager.close()

    def physical_bytes(self) -> int:
        """Return what the kernel says that the job's pages take."""
        return os.fstat(self._memory_fd).st_blocks * STAT_BLOCK_BYTES

    def let_go(self) -> None:
        """End, so that the job goes on as its own pager; waits ``END_S`` at most."""
        with self._closing:
            if not self._is_over.is_set():
                self._pager.stop()
        self._is_over.wait(END_S)

    def end(self) -> None:
        """End because the job is dead, and give its memory to the kernel, before its regions are another's."""
        self.let_go()
        with HostDriver().import_memory(self._memory_fd) as memory:
            HostDriver().discard(memory, 0, memory.size_bytes)
