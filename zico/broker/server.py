"""The broker's loop: connections, deaths, wake-ups from compiled code, and time.

Theory of operation
    One thread waits for the listening socket, the connections, a pidfd of every member, a pipe, and
    the next point in time. Jobs write to the pipe when a boundary or memory needs the broker. What
    any of them means for the pool is the pool manager's (``zico.broker.pool_manager``). Nothing in
    the loop blocks on a peer.

Guarantees
    A member's regions come back at once when its process is dead, on a GPU when its context has
    ended (``zico.broker.lingering``). A connection that closes earlier makes it LEAVING, since its
    process may still use the memory. A peer that breaks the protocol is told so and dropped, and
    nobody else notices. So is a peer whom the broker cannot answer.

Known limitation: the kernel may not let us watch a member's process, as in another pid namespace
before Linux 6.5. Such a member counts as dead when its connection closes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import resource
import selectors
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, assert_never, cast

import msgspec

from zico.base.errors import BrokerError, LocalProtocolError, RemoteProtocolError
from zico.broker import transport
from zico.broker.lingering import Lingering
from zico.broker.link import PATIENCE_NS, Link
from zico.broker.notes import NOT_SEEN, Process
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import State
from zico.broker.transport import SPARE_FDS
from zico.pool.layout import NAME_BYTES

if TYPE_CHECKING:
    from zico.broker.handover import Inherited
    from zico.broker.lingering import Contexts
    from zico.broker.members import Member
    from zico.broker.pool_manager import PoolManager
    from zico.broker.transport import Listener

IDLE_NS = 1_000_000_000
MAX_LINKS = 128
JOINING_NS = 15_000_000_000
"""Joining may take so long after its place is given: longer than a client's deadline."""
FDS_PER_LINK = 2
"""A connection has its own descriptor, and its process's."""

_log = logging.getLogger(__name__)
Handler = Callable[[int], None]


@dataclasses.dataclass
class _Heir:
    """A member that was taken over, and when it was last seen to have the table open."""

    member: Member
    seen_ns: int
    look_ns: int = 0


class Server:
    """Serve one pool until told to stop; pool manager and listener stay their owners' to close."""

    def __init__(self, manager: PoolManager, listener: Listener, contexts: Contexts | None = None) -> None:
        """Begin with no connection; nothing happens before ``serve``.

        Args:
            manager: Of the pool.
            listener: Where clients connect.
            contexts: Of dead jobs on the pool's GPU; ``None``: a job's work ends with its process.
        """
        self._manager = manager
        self._contexts = contexts
        self._dead: list[Lingering] = []
        self._inherited: Inherited | None = None
        self._heirs: dict[int, _Heir] = {}
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._links: set[Link] = set()
        open_fds = SPARE_FDS + len(manager.descriptors)
        room = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - open_fds) // FDS_PER_LINK
        self._max_links = min(MAX_LINKS, room)
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._stops = False
        self._is_orphan = False

    def inherit(self, inherited: Inherited, now_ns: int) -> None:
        """Serve the jobs of a pool that was taken over, too: they have no connection here, but their processes tell."""
        self._inherited = inherited
        for member in self._manager.adopt(inherited.note):
            if member.pidfd is not None:
                self._heirs[member.index] = _Heir(member, now_ns)
                self._watch(member.pidfd, functools.partial(self._on_death, None, member))

    def serve(self, *, stop_fd: int, parent_pidfd: int | None = None) -> None:
        """Serve until told to stop, or until parent, members and connections are gone; then write the record.

        Args:
            stop_fd: Anything written to it ends the loop.
            parent_pidfd: Of the process without which the broker has no reason to live; stays the
                caller's.
        """
        self._watch(self._listener.socket.fileno(), self._on_accept)
        self._watch(self._manager.notify_fd, self._on_notify)
        self._watch(stop_fd, self._on_stop)
        if parent_pidfd is not None:
            self._watch(parent_pidfd, functools.partial(self._on_parent_death, parent_pidfd))
        try:
            while not self._stops and not (self._is_orphan and not self._is_needed()):
                self._turn()
        finally:
            self._close()

    # -- the loop ----------------------------------------------------------------------------------

    def _is_needed(self) -> bool:
        """Tell whether there are members, or connections of anybody but of dead members' children."""
        return bool(self._manager.members) or bool(self._links - {dead.link for dead in self._dead})

    def _turn(self) -> None:
        """Wait for the next event or time and deal with all that is due."""
        for key, events in self._selector.select(self._timeout_s()):
            handler: Handler = key.data
            handler(events)
        now_ns = time.monotonic_ns()
        self._end_patience(now_ns)
        self._settle_dead(now_ns)
        self.look_after_heirs(now_ns)
        self._manager.act(now_ns)

    def _timeout_s(self) -> float:
        now_ns = time.monotonic_ns()
        due_ns = [link.deadline_ns for link in self._links if link.deadline_ns is not None]
        return max(0, min(self._manager.due_ns, now_ns + IDLE_NS, *due_ns) - now_ns) * 1e-9

    def _watch(self, fd: int, handler: Handler) -> None:
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def _on_stop(self, _events: int) -> None:
        self._stops = True

    def _on_parent_death(self, pidfd: int, _events: int) -> None:
        _log.info("the parent is gone, ending after the last job")
        self._selector.unregister(pidfd)
        self._is_orphan = True

    def _on_notify(self, _events: int) -> None:
        self._manager.take_notice()

    # -- connections -------------------------------------------------------------------------------

    def _on_accept(self, _events: int) -> None:
        """Take one connection; the loop comes back for the next."""
        try:
            connection, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            self._turn_away(error)
            return
        link = Link(connection, time.monotonic_ns())
        self._links.add(link)
        self._watch(connection.fileno(), functools.partial(self._on_link, link))
        with self._faults_of(link):
            if link.peer.uid != os.geteuid():
                self._refuse(link, f"this broker serves user {os.geteuid()}, you are {link.peer.uid}")
            elif len(self._links) > self._max_links:
                self._refuse(link, f"all {self._max_links} connections are taken")

    def _turn_away(self, error: OSError) -> None:
        """Hang up on a connection for which no descriptor is left, by the one that is kept for this.

        The selector would announce the connection for ever otherwise.
        """
        _log.warning("turned a connection away: %s", error.strerror)
        self._drop_spare()
        with contextlib.suppress(OSError):
            self._listener.socket.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _drop_spare(self) -> None:
        spare_fd, self._spare_fd = self._spare_fd, -1
        if spare_fd >= 0:
            os.close(spare_fd)

    def _on_link(self, link: Link, events: int) -> None:
        """Move one connection on."""
        if not link.is_open:  # closed by an earlier event of the same turn
            return
        now_ns = time.monotonic_ns()
        with self._faults_of(link):
            if events & selectors.EVENT_WRITE:
                link.flush()
            else:
                link.read(now_ns)
            while (message := link.next_message()) is not None:
                self._answer(link, message, now_ns)

    @contextlib.contextmanager
    def _faults_of(self, link: Link) -> Iterator[None]:
        """Let a peer's faults end its own connection only; afterwards wait for what it may do next."""
        try:
            yield
        except RemoteProtocolError as error:
            self._reject(link, str(error))
        except LocalProtocolError as error:  # a fault of ours, which must not be everybody's
            self._reject(link, f"asked for what cannot be answered: {error}")
        except OSError as error:
            _log.info("connection of process %d lost: %s", link.peer.pid, error)
            self._drop(link)
        if link.is_open and link.is_done:
            self._drop(link)
        elif link.is_open:
            key = self._selector.get_key(link.socket)
            self._selector.modify(link.socket, link.interest, key.data)

    def _answer(self, link: Link, message: m.Message, now_ns: int) -> None:  # noqa: C901 - a case for each message
        """Do what an accepted message asks for."""
        match message:
            case m.Hello():
                self._join(link, message, now_ns)
            case m.MoreRequest():
                self._send_more(link, now_ns)
            case m.ShareRequest() | m.Filled() | m.Unshare():
                self._share(link, message, now_ns)
            case m.Outside():
                self._manager.note_outsider(msgspec.structs.replace(message, pid=link.peer.pid or message.pid))
            case m.Observe():
                if message.version != m.PROTOCOL_VERSION:
                    self._refuse(link, _wrong_version(message.version))
            case m.StatusRequest():
                link.say(self._manager.status(now_ns), now_ns)
            case m.ReportRequest():
                if message.record:
                    self._manager.write_record(now_ns)
                link.say(self._manager.report(now_ns, message.profiles_to), now_ns)
            case m.Change():
                link.say(self._manager.change(message), now_ns)
            case m.Goodbye():
                pass  # the connection is closed by now, and dropped for it
            case _:
                raise AssertionError(message)  # the protocol accepts none of the broker's from a client

    def _refuse(self, link: Link, reason: str) -> None:
        refused = m.Refused(m.as_text(reason))
        _log.warning("refused process %d: %s", link.peer.pid, refused.reason)
        link.say(refused, time.monotonic_ns())

    def _reject(self, link: Link, reason: str) -> None:
        """Tell the peer of its fault, as far as it still listens, and drop it."""
        error = m.ErrorReply(m.as_text(reason))
        _log.warning("dropped process %d: it %s", link.peer.pid, error.reason)
        if link.protocol.state is not State.CLOSED:
            with contextlib.suppress(OSError):
                link.say(error, time.monotonic_ns())
        self._drop(link)

    def _drop(self, link: Link) -> None:
        """Close a connection; its member goes, or stays as LEAVING while its process lives."""
        self._selector.unregister(link.socket)
        self._links.remove(link)
        link.close()
        member, link.member = link.member, None
        if member is None:
            return
        if member.pidfd is None:
            self._manager.reap(member)
        else:
            self._manager.leave(member)

    def _end_patience(self, now_ns: int) -> None:
        for link in list(self._links):
            if link.deadline_ns is not None and now_ns >= link.deadline_ns:
                self._reject(
                    link,
                    f"owed the rest of a message or the taking of an answer for {PATIENCE_NS * 1e-9:g} s",
                )

    # -- members -----------------------------------------------------------------------------------

    def _join(self, link: Link, hello: m.Hello, now_ns: int) -> None:
        """Make the peer a member, or refuse it."""
        if hello.version != m.PROTOCOL_VERSION:
            self._refuse(link, _wrong_version(hello.version))
            return
        hello = msgspec.structs.replace(hello, name=m.visible(hello.name), framework=m.visible(hello.framework))
        for name in (hello.name, hello.framework):
            if len(name.encode()) > NAME_BYTES:
                self._refuse(link, f"the name {name!r} takes more than {NAME_BYTES} bytes: give a shorter one")
                return
        try:
            link.member = self._admit_member(link, hello)
        except (BrokerError, ProcessLookupError) as error:
            self._refuse(link, str(error))
            return
        link.say(self._manager.welcome(link.member), now_ns, self._manager.descriptors[: m.WELCOME_FDS])
        link.fds_sent = m.WELCOME_FDS

    def _send_more(self, link: Link, now_ns: int) -> None:
        first = link.fds_sent
        batch = self._manager.descriptors[first : first + m.FDS_PER_MESSAGE]
        if not batch:
            raise RemoteProtocolError(f"asked for more than the {first} descriptors that there are")
        link.say(m.More(first=first, count=len(batch)), now_ns, batch)
        link.fds_sent += len(batch)

    def _share(self, link: Link, message: m.ShareRequest | m.Filled | m.Unshare, now_ns: int) -> None:
        """Give the peer memory that it has in common with others, or take it back."""
        member = link.member
        if member is None:  # its process is dead, and the connection a child's
            raise RemoteProtocolError("asked for a dead job's memory")
        shared = self._manager.shared
        match message:
            case m.ShareRequest():
                found, fd = shared.ask(member.index, message.key, message.size_bytes)
                self._manager.note_shared(member)
                regions = shared.regions_of(message.key) if found in {"here", "fill"} else ()
                link.say(m.Shared(found, regions), now_ns, () if fd is None else (fd,))
            case m.Filled():
                found = shared.filled(member.index, message.key)
                self._manager.note_shared(member)
                link.say(m.Shared(found), now_ns)
            case m.Unshare():
                shared.give_back(member.index, message.key)
            case _:
                assert_never(message)

    def _admit_member(self, link: Link, hello: m.Hello) -> Member:
        """Give the peer a place and watch its process."""
        with contextlib.ExitStack() as undo:
            pidfd = transport.peer_pidfd(link.socket)
            if pidfd is not None:
                undo.callback(os.close, pidfd)
            is_seen = link.peer.pid > 0 and pidfd is not None
            process = Process.of(link.peer.pid) if is_seen else NOT_SEEN
            self._end_predecessor(process)
            member = self._manager.join(hello, process=process, pidfd=pidfd)
            undo.pop_all()
        if pidfd is not None:
            self._watch(pidfd, functools.partial(self._on_death, link, member))
        return member

    def _end_predecessor(self, process: Process) -> None:
        """Take back what a process held before it replaced its program (``exec``), which unmapped all of it."""
        for member in self._manager.members:
            if process.started and member.process == process and (member.leaving or self._has_let_go(member)):
                self._unwatch_process(member)
                self._manager.reap(member)

    def _has_let_go(self, member: Member) -> bool:
        """Tell whether a member without a connection has the table open no more: it has replaced its program."""
        is_heir = member.index in self._heirs and self._inherited is not None
        return is_heir and not cast("Inherited", self._inherited).has_open(member.process)

    def look_after_heirs(self, now_ns: int) -> None:
        """Let jobs leave that were taken over and do not have the table open, as a closed connection does for others.

        One that was joining when the old broker died has time to map what it was sent.
        """
        for heir in list(self._heirs.values()):
            if now_ns < heir.look_ns:
                continue
            heir.look_ns = now_ns + IDLE_NS
            if not self._has_let_go(heir.member):
                heir.seen_ns = now_ns
            elif now_ns - heir.seen_ns >= JOINING_NS:
                del self._heirs[heir.member.index]
                self._manager.leave(heir.member)

    def _on_death(self, link: Link | None, member: Member, _events: int) -> None:
        """Take everything back from a member whose process is dead, now or when its work on a GPU is done."""
        self._unwatch_process(member)
        if link is not None:
            link.member = None
        if link is not None and self._contexts is not None:
            self._manager.bury(member)
            self._dead.append(Lingering(member, link, time.monotonic_ns()))
            return
        self._manager.reap(member)
        if link is not None and link.is_open:
            self._drop(link)

    def _settle_dead(self, now_ns: int) -> None:
        """Take back what dead members held whose contexts have ended, or had the time to; free ended ones' places.

        Members are looked at every ``SAMPLE_NS``.
        """
        for dead in list(self._dead):
            held_bytes = self._manager.held_bytes(dead.member)
            has_ended = self._contexts is None or self._contexts.has_ended(dead, held_bytes, now_ns)
            if dead.is_reaped:
                self._manager.settle_place(dead.member, has_ended=has_ended)
            elif has_ended or dead.is_late(now_ns):
                dead.is_reaped = True
                self._manager.reap(dead.member, lingers=not has_ended)
            if has_ended:
                self._dead.remove(dead)
                if dead.link.is_open:
                    self._drop(dead.link)

    def _unwatch_process(self, member: Member) -> None:
        self._heirs.pop(member.index, None)
        if member.pidfd is not None:
            self._selector.unregister(member.pidfd)
            os.close(member.pidfd)
            member.pidfd = None

    # -- the end -----------------------------------------------------------------------------------

    def _close(self) -> None:
        """Let the jobs see to themselves, write the record, and let go of every connection and process."""
        self._manager.resign()
        self._manager.write_record(time.monotonic_ns())
        for link in self._links:
            link.close()
        for member in self._manager.members:
            self._unwatch_process(member)
        self._selector.close()
        self._drop_spare()


def _wrong_version(version: int) -> str:
    return f"you speak version {version}, this broker {m.PROTOCOL_VERSION}: use one installation for both"
