"""Frozen memory that this job has in common with others on a GPU: mapped to be read, and its own again before a write.

How it works
    A content is whole regions, so several tensors are *packed* into one. The job copies a pack to the
    host, digests it, and asks the broker, as on the host (``zico.job.frozen``). It fills the regions
    from there, or compares them with its copy. Then they are mapped at addresses of their own, which
    the device may read alone. Tensors of the pack get their memory there.

    Nobody can catch a write on the device: it loses the context. So the adapter sees to it that what
    writes a tensor asks first (``own``). The whole pack gets other regions then, behind the same
    addresses and with the same bytes: a content that only this job knows.

Guarantees (numbers as in docs/design/invariants.md)
    1. What a job gets to write is a content as well, within the budget.
    4. A tensor does not move when it becomes the job's own.
    6, 12. As on the host: bytes are compared before they are used, and written by nobody.
    A mapping that nothing refers to goes when the device has done everything, and the broker hears of
    it after that.

Known limitations
    Without a broker no content becomes a job's own, so its writes are refused.
    A pack's memory is copied to the host and back once, and takes as much of it meanwhile.
    ``own`` unmaps for an instant. The device is waited for before, but a kernel of another thread
    that reads the pack in that instant loses the context.
"""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zico.base.errors import DriverError, ZicoError
from zico.broker.protocol import messages as m
from zico.heap.cuda.imports import import_regions
from zico.job.frozen import LOOK_S, WAIT_S, Sharing
from zico.swap.digest import digest

if TYPE_CHECKING:
    import collections
    from collections.abc import Callable, Iterable, Sequence

    from zico.device.api import Owned
    from zico.device.cuda.driver import CudaDriver
    from zico.job.frozen import Bytes, Gone, Mapping
    from zico.job.session import Session

ALIGNMENT_BYTES = 512
"""As of all tensors that CUDA allocators give out."""
PACK_REGIONS = 8
"""A pack is complete with so many: then its last region wastes at most an eighth."""
_LEAST_SHARE = 0.5
"""Of its regions; a pack that fills less is not worth it."""
_CHUNK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Pack:
    """Tensors that become one content, one behind the other."""

    parts: tuple[tuple[int, Bytes], ...]
    """Where in the content, and what."""
    size_bytes: int

    @property
    def n_tensors(self) -> int:
        """Return how many tensors they are."""
        return len(self.parts)


@dataclasses.dataclass
class _Held:
    """What goes when nothing refers to a content any more."""

    window: Owned
    key: str
    regions: tuple[int, ...]
    is_own: bool = False


class Content:
    """A content that is mapped here; queued to be unmapped when nothing refers to it any more."""

    def __init__(self, held: _Held, size_bytes: int, sharing: DeviceSharing, gone: collections.deque[Gone]) -> None:
        """Own what is held."""
        self.held = held
        self._sharing = sharing
        self.address = held.window.handle
        self.size_bytes = size_bytes
        weakref.finalize(self, _queue, held, gone).atexit = False

    def own(self) -> bool:
        """Let this process write it from now on (``DeviceSharing.own``)."""
        return self._sharing.own(self)

    @property
    def is_alone(self) -> bool:
        """Tell whether the broker has not answered, so that it cannot become this process's any more."""
        return self._sharing.is_alone


def _queue(held: _Held, gone: collections.deque[Gone]) -> None:
    gone.append((held.key, held.window))


def packed(wanted: Iterable[Bytes], region_bytes: int) -> list[Pack]:
    """Pack tensors in their order, which is the same in every job that makes the same model."""
    packs: list[Pack] = []
    parts: list[tuple[int, Bytes]] = []
    end = 0
    for bytes_ in wanted:
        parts.append((end, bytes_))
        end += -(-bytes_.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if end >= PACK_REGIONS * region_bytes:
            packs.append(Pack(tuple(parts), end))
            parts, end = [], 0
    if parts and end >= _LEAST_SHARE * -(-end // region_bytes) * region_bytes:
        packs.append(Pack(tuple(parts), end))
    return packs


class DeviceSharing(Sharing):
    """What this process has in common with other jobs of its pool on a GPU."""

    def __init__(self, joined: Session) -> None:
        """Have nothing in common."""
        super().__init__(joined)
        self._heap, self._pool = joined.heap, joined.pool
        self._driver = cast("CudaDriver", joined.pool.driver)
        self._image = np.zeros(0, np.uint8)
        """The host's copy of the pack that is looked at."""

    def share(self, wanted: Iterable[Any], move: Callable[[Any, Any], bool]) -> None:
        """Give each of these a place in a mapping; ``move`` gets the tensor's bytes, the content, and its address.

        Waits for the device, since what is digested must have been written.
        """
        packs = packed(wanted, self._pool.region_bytes)
        if not packs or self.is_off:
            return
        self._driver.finish()

        def moved(pack: Any, content: Any) -> bool:  # noqa: ANN401 - a Pack and a Content
            placed = ((bytes_, Part(content, content.address + offset)) for offset, bytes_ in pack.parts)
            return sum(move(bytes_, part) for bytes_, part in placed) > 0  # all of them, not the first alone

        try:
            super().share(packs, moved)  # type: ignore[arg-type] # packs in the place of bytes
        finally:
            self._image = np.zeros(0, np.uint8)

    def own(self, content: Content) -> bool:
        """Let this process write a content from now on; false: the budget has no room for that now.

        Waits for the device, and for the budget up to ``WAIT_S``.
        """
        with self._lock:
            if content.held.is_own:
                return True
            if self._is_inside or self.is_alone:  # in a handler of signals
                return False
            self._is_inside = True
            try:
                return self._owned(content)
            except (ZicoError, OSError) as error:
                self._turn_off(error)
                return False
            finally:
                self._is_inside = False

    def _owned(self, content: Content) -> bool:
        key = f"{os.urandom(8).hex()}{content.size_bytes:016x}"
        end_s = time.monotonic() + WAIT_S
        while (answer := self._membership.ask(m.ShareRequest(key, content.size_bytes))[0]).found != "fill":
            if time.monotonic() > end_s:
                return False
            time.sleep(LOOK_S)
        self._mapped[key] += 1
        held, begun = content.held, False
        try:
            self._driver.finish()
            image = np.empty(content.size_bytes, np.uint8)
            self._driver.fetch(image.ctypes.data, content.address, content.size_bytes)
            begun = True
            self._map(held.window, answer.regions)
            self._put(content.address, image, held.window.size_bytes)
        except BaseException:  # Ctrl-C, too: the bytes are in the regions before
            try:
                if begun:
                    self._map(held.window, held.regions)
                    self._driver.make_read_only(held.window, 0, held.window.size_bytes)
            finally:
                self._let_go(key)
            raise
        before, held.key, held.regions, held.is_own = held.key, key, answer.regions, True
        try:
            self._is_sealed(key)
            self._let_go(before)
        except (ZicoError, OSError) as error:
            self._turn_off(error)
        return True

    def _digest(self, pack: Any) -> int:  # noqa: ANN401 - a Pack
        self._image = np.zeros(pack.size_bytes, np.uint8)
        for offset, bytes_ in pack.parts:
            self._driver.fetch(self._image.ctypes.data + offset, bytes_.address, bytes_.size_bytes)
        return digest(self._image.ctypes.data, pack.size_bytes)

    def _mapped_from(self, answer: m.Shared, _fds: list[int], pack: Any, key: str) -> Mapping | None:  # noqa: ANN401
        window = self._driver.reserve(len(answer.regions) * self._pool.region_bytes)
        try:
            self._map(window, answer.regions)
            if answer.found == "fill":
                self._put(window.handle, self._image, window.size_bytes)
            self._driver.make_read_only(window, 0, window.size_bytes)
            if answer.found == "fill" and not self._is_sealed(key):
                window.close()
                return None
        except BaseException:
            window.close()
            raise
        content = Content(_Held(window, key, answer.regions), pack.size_bytes, self, self._gone)
        self._mapped[key] += 1
        return cast("Mapping", content) if self._is_same(content) else None

    def _map(self, window: Owned, regions: Sequence[int]) -> None:
        size_bytes, wanted = self._pool.region_bytes, np.array(regions, np.int64)
        if not import_regions(self._heap.record[0], wanted, len(wanted)):
            raise DriverError("import of memory", 0, "the driver refuses a region that jobs have in common")
        for number, region in enumerate(regions):
            self._driver.map(window, number * size_bytes, self._pool.memory, region * size_bytes, size_bytes)

    def _put(self, address: int, image: Any, room_bytes: int) -> None:  # noqa: ANN401 - an array
        """Write a content, and zeros behind it: what was there is another job's."""
        self._driver.put(address, image.ctypes.data, len(image))
        rest = np.zeros(room_bytes - len(image), np.uint8)
        if len(rest):
            self._driver.put(address + len(image), rest.ctypes.data, len(rest))

    def _is_same(self, content: Content) -> bool:
        found = np.empty(min(_CHUNK_BYTES, content.size_bytes), np.uint8)
        for begin in range(0, content.size_bytes, _CHUNK_BYTES):
            size_bytes = min(_CHUNK_BYTES, content.size_bytes - begin)
            self._driver.fetch(found.ctypes.data, content.address + begin, size_bytes)
            if not np.array_equal(found[:size_bytes], self._image[begin : begin + size_bytes]):
                return False
        return True

    def _close(self, window: Owned) -> None:
        self._driver.finish()
        window.close()


class Part:
    """A tensor's memory in a content, as the CUDA array interface tells of it; keeps the content."""

    def __init__(self, content: Content, address: int) -> None:
        """Begin at an address inside the content."""
        self.content = content
        self.address = address

    def bytes_at(self, size_bytes: int) -> Any:  # noqa: ANN401 - what frameworks take for an array
        """Return so many bytes as an array of a GPU."""
        return _Array(self, size_bytes)


class _Array:
    def __init__(self, part: Part, size_bytes: int) -> None:
        self.part = part
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (part.address, False),
            "version": 3,
            "strides": None,
        }
