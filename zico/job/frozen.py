"""Frozen memory that this job has in common with others (``zico.broker.frozen``), whatever the framework.

How it works
    The job digests bytes that nobody changes any more, and asks the broker for a content of that
    digest and size. Where there is one, the job maps it and compares it with its own bytes, so
    that a digest decides nothing by itself. Where there is none, the job fills it. What comes back
    is a mapping of its own for each of its tensors: whoever writes there writes a page of this
    tensor. An adapter (``Sharer``) says what is frozen, puts the mapping in the place of the bytes,
    and frees those. All adapters of a process have one ``Sharing``, since the broker knows a job once.

Guarantees (numbers as in docs/design/invariants.md)
    6. A mapping has the same bits as the bytes that it replaces, since they were compared.
    12. What is written to a mapping is seen by no other mapping, nor by another process.
    If the broker does not answer once, this job shares nothing more. It goes on with its own bytes.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from zico.base.errors import DriverError, ZicoError
from zico.base.saying import inform
from zico.base.units import format_bytes
from zico.broker.protocol import messages as m
from zico.device.host import map_privately
from zico.job.autoload import complain
from zico.job.session import Watcher
from zico.swap.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from zico.device.api import Owned
    from zico.job.session import Session

OFFERS = 3
"""Ends of iterations at which what is not shared yet is offered again."""
WAIT_S = 2.0
"""For contents that other jobs are filling; later they are asked for once more."""
LOOK_S = 0.005
_WRITTEN_BYTES = 64 << 20
"""At a time: write(2) takes 2 GiB at most, and a signal is seen in between."""
_PAGEMAP = Path("/proc/self/pagemap")
_PRESENT, _OF_A_FILE = 1 << 63, 1 << 61
"""Of an entry of pagemap (proc(5)): the page is in memory; it is the file's, and not a copy of this process's."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Bytes(NamedTuple):
    """Bytes of this process, which stay where they are until they have been dealt with."""

    address: int
    size_bytes: int
    of: Any
    """What the caller knows them by."""

    @property
    def n_tensors(self) -> int:
        """Return how many tensors they are."""
        return 1


Gone = tuple[str, "Owned | None"]
"""The key of a mapping that nothing refers to any more, and its window where that is still mapped."""


class Mapping:
    """A content that is mapped here; unmapped when nothing refers to it any more."""

    def __init__(self, window: Owned, gone: collections.deque[Gone], key: str) -> None:
        """Own the window; its key is put into ``gone`` when it is unmapped."""
        self.address = window.handle
        self.size_bytes = window.size_bytes
        weakref.finalize(self, _unmap, window, gone, key).atexit = False

    def buffer(self) -> Any:  # noqa: ANN401 - a ctypes array
        """Return the bytes as a buffer that keeps the mapping."""
        array = (ctypes.c_char * self.size_bytes).from_address(self.address)
        array.mapping = self  # type: ignore[attr-defined] # an instance of a class that is made here has a dictionary
        return array


def _unmap(window: Owned, gone: collections.deque[Gone], key: str) -> None:
    window.close()
    gone.append((key, None))


class Sharing:
    """What this process has in common with other jobs of its pool."""

    def __init__(self, joined: Session) -> None:
        """Have nothing in common."""
        self._membership = joined.membership
        self._begin, self._end = joined.heap.base, joined.heap.base + int(joined.heap.record[0]["window_bytes"])
        self._lock = threading.RLock()
        self._is_inside = False
        """A thread, or a handler of signals in it, talks to the broker."""
        self._mapped: collections.Counter[str] = collections.Counter()
        """Mappings of each content."""
        self._gone: collections.deque[Gone] = collections.deque()
        """Mappings that are gone; whatever thread that was in."""
        self._untold: list[tuple[int, int]] = []
        """Tensors, and their bytes, that have been shared since the user was last told."""
        self.is_off = False
        """Nothing more is shared."""
        self.is_alone = False
        """The broker has not answered, so it is told nothing more either."""

    def has(self, address: int) -> bool:
        """Tell whether memory is the pool's, and so worth sharing."""
        return self._begin <= address < self._end

    def share(self, wanted: Iterable[Bytes], move: Callable[[Bytes, Mapping], bool]) -> None:
        """Give each of these a mapping, the largest first.

        What the budget has no room for, or other jobs fill for longer than ``WAIT_S``, is left out.

        Args:
            wanted: What is to be shared.
            move: Puts the mapping in the place of the bytes and frees those; false: they have changed meanwhile.
        """
        largest_first = sorted(wanted, key=lambda one: -one.size_bytes)
        with contextlib.closing(self._each(largest_first)) as each:  # at once, also where a move raises
            moved = [bytes_ for bytes_, mapping in each if move(bytes_, mapping)]
            self._untold += [(bytes_.n_tensors, bytes_.size_bytes) for bytes_ in moved]

    def _each(self, wanted: Iterable[Bytes]) -> Generator[tuple[Bytes, Mapping], None, None]:
        with self._lock:
            if self._is_inside:  # in a handler of signals: the same thread is at it already
                return
            self._is_inside = True
            try:
                self._give_back()
                yield from self._shared([*wanted])
            finally:
                self._is_inside = False

    def _shared(self, waiting: list[Bytes]) -> Iterator[tuple[Bytes, Mapping]]:
        end_s = time.monotonic() + WAIT_S
        while waiting:
            busy = []
            for bytes_ in waiting:
                found, mapping = ("full", None) if self.is_off else self._mapping(bytes_)
                if mapping is not None:
                    yield bytes_, mapping
                elif found == "busy":
                    busy.append(bytes_)
            if busy and time.monotonic() > end_s:
                return
            if len(busy) == len(waiting):
                time.sleep(LOOK_S)
            waiting = busy

    def tell(self) -> None:
        """Tell the user what is shared, and the broker of mappings that are gone."""
        if self._untold:
            counts, sizes = zip(*self._untold, strict=True)
            self._untold = []
            total = format_bytes(sum(sizes))
            inform(f"{sum(counts)} frozen tensors, {total}, are held once for all jobs that have the same")
        if self._gone and not self.is_alone:
            for _ in self._each(()):
                pass

    def _give_back(self) -> None:
        try:
            while self._gone and not self.is_alone:
                key, window = self._gone.popleft()
                if window is not None:
                    self._close(window)
                self._let_go(key)
        except (ZicoError, OSError) as error:
            self._turn_off(error)

    def _let_go(self, key: str) -> None:
        """Note that one mapping of a content is gone, and tell the broker if it was the last."""
        self._mapped[key] -= 1
        if not self._mapped[key]:
            del self._mapped[key]
            self._membership.tell(m.Unshare(key))

    def _close(self, window: Owned) -> None:
        """Unmap what nothing refers to any more, where that has to wait."""
        window.close()

    def _digest(self, bytes_: Bytes) -> int:
        return digest(bytes_.address, bytes_.size_bytes)

    def _mapping(self, bytes_: Bytes) -> tuple[m.Found, Mapping | None]:
        key = f"{self._digest(bytes_) & (1 << 64) - 1:016x}{bytes_.size_bytes:016x}"
        try:
            return self._asked(bytes_, key)
        except (ZicoError, OSError) as error:
            self._turn_off(error)
            return "full", None

    def _asked(self, bytes_: Bytes, key: str) -> tuple[m.Found, Mapping | None]:
        answer, descriptors = self._membership.ask(m.ShareRequest(key, bytes_.size_bytes))
        mapping = None
        try:
            with descriptors:
                fds = descriptors.take()[:1]
                try:
                    if answer.found in {"here", "fill"}:
                        mapping = self._mapped_from(answer, fds, bytes_, key)
                finally:
                    for fd in fds:
                        os.close(fd)
        finally:
            if mapping is None and answer.found in {"here", "fill"} and not self._mapped[key]:
                with contextlib.suppress(ZicoError, OSError):  # what came before it says why
                    self._membership.tell(m.Unshare(key))
        return answer.found, mapping

    def _mapped_from(self, answer: m.Shared, fds: list[int], bytes_: Bytes, key: str) -> Mapping | None:
        if answer.found == "fill":
            _fill(fds[0], bytes_)
            if not self._is_sealed(key):
                return None
        try:
            mapping = Mapping(map_privately(fds[0], bytes_.size_bytes), self._gone, key)
        except DriverError:
            return None
        self._mapped[key] += 1
        return mapping if is_same(bytes_, mapping) else None

    def _is_sealed(self, key: str) -> bool:
        """Tell the broker that a content is filled; false: it is not to be used."""
        return self._membership.ask(m.Filled(key))[0].found == "here"

    def _turn_off(self, error: Exception) -> None:
        self.is_off = True
        self.is_alone = not isinstance(error, DriverError)
        complain("this process shares no more frozen memory", error)


class Sharer(Watcher, abc.ABC):
    """What one framework's adapter does with its frozen memory."""

    takes: ClassVar[str]
    """What ``zico.share`` may be given, as people read it."""

    def __init__(self, joined: Session) -> None:
        """Share nothing yet."""
        self._session = joined
        self._sharing = joined.frozen
        self._offers = 0

    @abc.abstractmethod
    def knows(self, given: Any) -> bool:  # noqa: ANN401 - whatever a user gives
        """Tell whether something is, or has, frozen memory of this framework."""

    @abc.abstractmethod
    def share(self, given: Any) -> Any:  # noqa: ANN401 - as given
        """Share what is frozen in this as far as it can be; returns what is to be used from now on."""

    def install(self) -> None:
        """Share without being asked; nothing, where a framework does not say what is frozen."""

    def at_boundary(self) -> None:
        """Take back what is frozen no more, and offer what is not shared yet."""
        if not self._session.is_member:
            return
        self._take_back()
        if self._offers:
            self._offers -= 1
            self._offer(self._still_frozen)
        self._sharing.tell()

    def _take_back(self) -> None:
        """Let what was written have memory of the pool again; nothing, where the framework does that by writing."""

    def _still_frozen(self) -> list[Any]:
        """Return what can be offered at the end of an iteration."""
        return []

    def _offer(self, find: Callable[[], Iterable[Any]]) -> None:
        if not self._session.is_member:  # a forked child's first computation
            return
        try:
            self.share(find())
        except Exception as error:  # noqa: BLE001 - the job goes on, whatever the framework says
            self._offers = 0
            complain("this process keeps its own frozen memory", error)


def is_same(bytes_: Bytes, mapping: Mapping) -> bool:
    """Tell whether a mapping has the same bits."""
    return bool(_libc.memcmp(bytes_.address, mapping.address, bytes_.size_bytes) == 0)


def is_written(address: int, size_bytes: int) -> bool:
    """Tell whether a mapping has pages of this process's own, which whoever writes there gets; reads 8 bytes a page."""
    first, end = address // mmap.PAGESIZE, -(-(address + size_bytes) // mmap.PAGESIZE)
    try:
        with _PAGEMAP.open("rb") as file:
            file.seek(8 * first)
            entries = np.frombuffer(file.read(8 * (end - first)), np.uint64)
    except OSError:
        return False
    return bool(((entries & np.uint64(_PRESENT | _OF_A_FILE)) == np.uint64(_PRESENT)).any())


def _fill(fd: int, bytes_: Bytes) -> None:
    """Write bytes to the beginning of a file.

    Raises:
        OSError: As the kernel says.
    """
    view = memoryview((ctypes.c_char * bytes_.size_bytes).from_address(bytes_.address)).cast("B")
    done = 0
    while done < bytes_.size_bytes:
        done += os.pwrite(fd, view[done : done + _WRITTEN_BYTES], done)
