"""Memory that jobs have in common: equal frozen bytes are held once, outside the regions and inside the budget.

Theory of operation
    A *content* is bytes that nobody changes any more, such as a frozen weight. It is known by a key
    that a job computes of them. The first job that asks for a key gets empty memory, fills it,
    and says so. From then on the memory is sealed: the kernel lets nobody write it. Every other job
    that asks gets the same memory and compares it with its own bytes. Then it maps it in their
    place, and frees its own::

        a   ask -> fill ... filled -> here
        b        ask -> busy            ask -> here
        c                 ask -> full               the budget has no room for it now

    Jobs map it privately, so that one that writes after all gets a page of its own.

    On a GPU all memory of a pool is its regions, so a content takes some, which a holder has
    (``zico.pool.contents``). Jobs import them as all others. Nothing seals them: each job maps them
    to be read alone.

Guarantees (numbers as in docs/design/invariants.md)
    1. What is shared and what is granted together never exceed the budget by a sharing.
    12. A content stays while a job that has it lives, whoever made it, and leaves with the last
        one. The kernel keeps the memory of whoever has it mapped, whatever becomes of the broker.
    Nobody owns it, so it is in no job's profile, claim or limit.

    On a GPU regions go back only when no job uses them. One that lives has waited for its device
    before it says so. Of a dead one the context has ended, as for its own regions.

Known limitations: a broker that takes a pool over gives out no content of the one before. That
one's stays in the budget until no job is left. On a GPU who is filling is waited for as long as it
lives, since its device may still write.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import logging
import os
import time
from typing import TYPE_CHECKING

from zico.base.errors import ConfigError, RemoteProtocolError
from zico.broker.protocol.messages import MOST_REGIONS
from zico.broker.transport import make_room
from zico.device.host import physical_bytes_of
from zico.pool.contents import Holder

if TYPE_CHECKING:
    from zico.broker.protocol.messages import Found
    from zico.pool.table import PoolTable

MOST_CONTENTS = 4096
"""Each is a descriptor of the broker's."""
FILL_S = 10.0
"""A job that has not filled a content by then may be stopped, or has been interrupted."""
_log = logging.getLogger(__name__)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclasses.dataclass
class _Content:
    fd: int | None
    size_bytes: int
    regions: tuple[int, ...] = ()
    """On a GPU, instead of a descriptor."""
    users: set[int] = dataclasses.field(default_factory=set)
    """Indexes of the members that have it."""
    filler: int | None = None
    """The member that is filling it."""
    physical_bytes: int = 0
    """As the kernel counts it, once it is sealed."""
    end_s: float = dataclasses.field(default_factory=lambda: time.monotonic() + FILL_S)
    """From then on another member may fill it."""


class FrozenMemory:
    """What the jobs of one pool have in common; owns its descriptors."""

    def __init__(self, table: PoolTable) -> None:
        """Begin with nothing."""
        self._table = table
        self._holder = Holder(table) if table.header["on_timeline"] else None
        self._contents: dict[str, _Content] = {}
        self._before = int(table.header["shared"])
        """What jobs of an earlier broker have in common, in regions."""
        self.size_bytes = 0
        """Of all contents, those that are being filled included."""
        self.physical_bytes = 0
        """What the kernel says the filled ones take."""
        self.bytes_of: collections.Counter[int] = collections.Counter()
        """What each member has of it, by its index."""

    def ask(self, member: int, key: str, size_bytes: int) -> tuple[Found, int | None]:
        """Give a member the content of a key, or memory to fill.

        Returns:
            What is found, and a descriptor (not a copy) where that is ``here`` or ``fill``; on a GPU
            ``regions_of`` has it.

        Raises:
            RemoteProtocolError: The key is known with another size.
        """
        content = self._contents.get(key)
        if content is None:
            return self._begin(member, key, size_bytes)
        if content.size_bytes != size_bytes:
            raise RemoteProtocolError(f"asked for {size_bytes} bytes of a content that has {content.size_bytes}")
        if content.filler is not None:
            if self._holder is not None or time.monotonic() < content.end_s:
                return "busy", None
            self._drop(key)
            return self._begin(member, key, size_bytes)
        self._give(content, member)
        return "here", content.fd

    def regions_of(self, key: str) -> tuple[int, ...]:
        """Return the regions of a content, in order; none on the host."""
        content = self._contents.get(key)
        return () if content is None else content.regions

    def _give(self, content: _Content, member: int) -> None:
        if member not in content.users:
            content.users.add(member)
            self.bytes_of[member] += content.size_bytes

    def _begin(self, member: int, key: str, size_bytes: int) -> tuple[Found, int | None]:
        if len(self._contents) >= MOST_CONTENTS:
            return "full", None
        if self._holder is not None:
            return self._begin_on_device(self._holder, member, key, size_bytes)
        self.size_bytes += size_bytes
        fd = _empty(size_bytes) if self._settle() else None
        if fd is None:
            self.size_bytes -= size_bytes
            self._settle()
            return "full", None
        self._contents[key] = _Content(fd, size_bytes, filler=member)
        return "fill", fd

    def _begin_on_device(self, holder: Holder, member: int, key: str, size_bytes: int) -> tuple[Found, None]:
        n = -(-size_bytes // self._table.region_bytes)
        regions = holder.take(n) if n <= MOST_REGIONS else ()
        if not regions:
            return "full", None
        self.size_bytes += size_bytes
        self._contents[key] = _Content(None, size_bytes, regions, filler=member)
        return "fill", None

    @property
    def regions(self) -> int:
        """Return how many of the pool's regions hold contents, which no job owns; on the host none."""
        return sum(len(content.regions) for content in self._contents.values())

    def filled(self, member: int, key: str) -> Found:
        """Seal what a member has filled, which has it from now on.

        ``full``: the kernel does not seal it and it is gone, or the member was not to fill it, or
        is too late.
        """
        content = self._contents.get(key)
        if content is None or content.filler != member:
            return "full"
        if content.fd is not None:
            try:
                fcntl.fcntl(content.fd, fcntl.F_ADD_SEALS, _SEALS)
            except OSError:  # somebody has it mapped to write
                self._drop(key)
                return "full"
            content.physical_bytes = physical_bytes_of(os.fstat(content.fd))
        content.filler = None
        self.physical_bytes += content.physical_bytes
        self._give(content, member)
        return "here"

    def give_back(self, member: int, key: str) -> None:
        """Note that a member has a content no more, or does not fill it."""
        content = self._contents.get(key)
        if content is None:
            return
        if member in content.users:
            content.users.remove(member)
            self.bytes_of[member] -= content.size_bytes
        if content.filler in (None, member) and not content.users:
            self._drop(key)

    def depart(self, member: int) -> None:
        """Note that a member is dead."""
        for key in list(self._contents):
            self.give_back(member, key)
        del self.bytes_of[member]

    def forget_before(self) -> None:
        """Give back to the budget what jobs of an earlier broker had in common: none of them is left."""
        if self._before:
            self._before = 0
            self._settle()

    def close(self) -> None:
        """Close its descriptors; a second time does nothing."""
        for content in self._contents.values():
            if content.fd is not None:
                os.close(content.fd)
        self._contents.clear()

    def _drop(self, key: str) -> None:
        content = self._contents.pop(key)
        if content.fd is not None:
            os.close(content.fd)
        elif self._holder is not None:
            self._holder.put_back(content.regions)
        self.size_bytes -= content.size_bytes
        self.physical_bytes -= content.physical_bytes
        if self._holder is None:
            self._settle()

    def _settle(self) -> bool:
        """Let the budget have what there is now; false: it has no room for that."""
        return self._table.share(self._before + -(-self.size_bytes // self._table.region_bytes))


def _empty(size_bytes: int) -> int | None:
    """Return memory that can be sealed, ``None`` where the system has none or no descriptor; the caller closes it."""
    with contextlib.ExitStack() as undo:
        try:
            make_room(1, "what jobs share")
            fd = os.memfd_create("zico-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, fd)
            os.ftruncate(fd, size_bytes)
        except (ConfigError, OSError) as error:
            _log.warning("jobs share no more than before: %s", error)
            return None
        undo.pop_all()
    return fd
