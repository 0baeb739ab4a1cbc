"""Whether a dead job's work on its GPU may still go on: what holds the job's context, as far as can be seen.

The driver ends a context when the last process closes its files. Three signs tell that this has not
happened:

* The job's connection is still open. A forked child inherits it together with the driver's files and
  their mappings. The job's fork hook closes the files, and the connection where nothing is mapped. A
  child that C code has forked keeps all.
* NVIDIA's management library still lists the process. In a container it tells nothing.
* An MPS server still lists the client. Such a server tears clients down in its own time.

After ``LINGER_NS`` the regions are taken back all the same. The job's place is not: the context may
still set its counters (``zico.pool.deaths``).

Known limitations: of a child that C code has forked and that closes the connection alone, only the
second sign tells.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import TYPE_CHECKING

from zico.base import mps
from zico.base.units import format_bytes
from zico.broker.outside import is_listed
from zico.pool.deaths import LINGER_NS

if TYPE_CHECKING:
    from pathlib import Path

    from zico.broker.link import Link
    from zico.broker.members import Member

LOOK_NS = 100_000_000
"""Two questions to the management library or to MPS are so long apart."""
SAY_AFTER_NS = 1_000_000_000
"""A context that ends within this time is worth no line."""
_log = logging.getLogger(__name__)


class _MpsList:
    """The clients of an MPS daemon, asked for by a thread: the control program may take seconds."""

    def __init__(self, pipes: Path) -> None:
        self._pipes = pipes
        self._thread: threading.Thread | None = None
        self._found: tuple[int, frozenset[int] | None] | None = None

    def may_have(self, pid: int, since_ns: int, now_ns: int, *, unless_told: bool) -> bool:
        """Tell whether a process may be a client still; asks again if no answer is younger than ``since_ns``.

        While there is no answer, it may be one if ``unless_told``.
        """
        if self._found is None or self._found[0] < max(since_ns, now_ns - LOOK_NS):
            self._ask(now_ns)
        if self._found is None or self._found[0] < since_ns or self._found[1] is None:
            return unless_told
        return pid in self._found[1]

    def _ask(self, now_ns: int) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._answer, args=(now_ns,), daemon=True)
            self._thread.start()

    def _answer(self, asked_ns: int) -> None:
        servers = mps.clients(self._pipes)
        self._found = (asked_ns, None if servers is None else frozenset().union(*servers.values()))


@dataclasses.dataclass(eq=False)
class Lingering:
    """A dead job whose regions are not taken back yet."""

    member: Member
    link: Link
    """By which it was connected: open as long as a forked child has its end, too."""
    died_ns: int
    asked_ns: int = 0
    """When the management library was asked last."""
    listed: bool = True
    """What it said."""
    said: bool = False
    """Whether a line about it has been written."""
    is_reaped: bool = False
    """Whether its regions have been taken back, and only its place has not."""

    def is_late(self, now_ns: int) -> bool:
        """Tell whether its regions are to be taken back although its context has not been seen to end."""
        return now_ns - self.died_ns >= LINGER_NS


class Contexts:
    """Looks after the contexts of dead jobs on one GPU."""

    def __init__(self, identity: str, mps_pipes: Path | None = None) -> None:
        """Look at the GPU with that UUID, whose jobs are clients of the MPS daemon with that directory, if any."""
        self._identity = identity
        self._mps = None if mps_pipes is None else _MpsList(mps_pipes)

    def has_ended(self, dead: Lingering, held_bytes: int, now_ns: int) -> bool:
        """Tell whether a dead job's context has ended, as far as can be seen; writes one line if that takes long.

        An MPS daemon that does not tell holds nothing any more once the job is late.
        """
        holder = self._holder(dead, now_ns)
        age_ns = now_ns - dead.died_ns
        if holder and age_ns >= min(SAY_AFTER_NS, LINGER_NS) and not dead.said:
            dead.said = True
            _log.warning(
                "%s (process %d) has ended, but %s, so its work on the GPU may go on: its %s stay held until that "
                "ends, %g s at most",
                *(dead.member.name, dead.member.pid, holder, format_bytes(held_bytes), LINGER_NS / 1e9),
            )
        return not holder

    def _holder(self, dead: Lingering, now_ns: int) -> str:
        """Return what still holds a dead job's context, as a part of a sentence; empty if nothing is seen to."""
        if dead.link.is_open:
            return "a process that it has forked has its files open"
        pid, unless_told = dead.member.process.pid, not dead.is_late(now_ns)
        if self._mps is not None and self._mps.may_have(pid, dead.died_ns, now_ns, unless_told=unless_told):
            return "the MPS server has it among its clients, or does not tell"
        if now_ns - dead.asked_ns >= LOOK_NS:
            dead.asked_ns, dead.listed = now_ns, is_listed(self._identity, pid)
        return "the driver lists its process" if dead.listed else ""
