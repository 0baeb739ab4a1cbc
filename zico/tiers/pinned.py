"""Tiers of a GPU: pinned memory of the host first, then whatever is below it.

Theory of operation
    The memory tier at the top of the stack is registered with the driver as a whole: its capacity is what is pinned, at
    once. A payload goes in pieces of a block; the device copies each into its block by itself, on a stream of its own
    for each direction. Pieces that have no room there come over a pinned piece and go to the tiers below. Where the
    driver refuses to pin, all is the same but slower, and ``pageable`` says so in one sentence.

Guarantees
    ``put`` and ``get`` return when the device has finished. A payload is there as a whole, or nothing of it.

Known limitations
    Not seen on a real GPU yet. Tickets are this process's own, nobody can take over. Rates begin with those of the
    processor's copies.
"""

from __future__ import annotations

import contextlib
import errno
import time
from typing import TYPE_CHECKING

from zico.driver.cuda.copies import CopyStream
from zico.driver.host import HostDriver
from zico.errors import ConfigError, DriverError
from zico.tiers import stores
from zico.tiers.layout import FAILED, MEMORY, TIER_MASK
from zico.tiers.rates import IN, OUT, note
from zico.units import format_bytes

if TYPE_CHECKING:
    from zico.driver.cuda.driver import CudaDriver
    from zico.tiers.stack import TierStack

_PINNED = 0


class PinnedStack:
    """A stack whose payloads are on a GPU; ``zico.tiers.transfers.Transfers`` copies to it as to any other.

    It owns the stack; close it after the transfers. One ``put`` and one ``get`` at a time, ``drop`` by any thread.
    """

    def __init__(self, stack: TierStack, driver: CudaDriver) -> None:
        """Pin the first tier, make the streams.

        Raises:
            ConfigError: The first tier is not memory.
            DriverError: There is no stream to be had. The stack is closed.
        """
        self._stack = stack
        self._driver = driver
        self._payloads: dict[int, list[int]] = {}
        self._last = 0
        self._error = ""
        self.pageable = ""
        """Why memory is not pinned; empty where it is."""
        self._piece_bytes = int(stack.shared[_PINNED]["block_bytes"])
        with contextlib.ExitStack() as undo:
            undo.callback(stack.close)
            if stack.shared[_PINNED]["kind"] != MEMORY:
                raise ConfigError("a GPU's memory goes to the tier memory first: name it first")
            stack.shared[_PINNED]["pinned"] = 1
            self._staging = [self._make_staging(undo) for _ in (OUT, IN)]
            whole_bytes = int(stack.shared[_PINNED]["n_blocks"]) * self._piece_bytes
            self._pin(undo, int(stack.record["tiers"][0][_PINNED]["map_address"]), whole_bytes)
            self._streams: list[CopyStream] = []
            for _ in (OUT, IN):
                self._streams.append(CopyStream(driver))
                undo.callback(self._streams[-1].close)
            self._undo = undo.pop_all()

    def _make_staging(self, undo: contextlib.ExitStack) -> int:
        host = HostDriver()
        with host.create_memory(self._piece_bytes, "staging") as memory:
            window = undo.enter_context(host.reserve(self._piece_bytes))
            host.map(window, 0, memory, 0, self._piece_bytes)
        self._pin(undo, window.handle, self._piece_bytes)
        return window.handle

    def _pin(self, undo: contextlib.ExitStack, address: int, size_bytes: int) -> None:
        try:
            undo.enter_context(self._driver.register_host(address, size_bytes))
        except DriverError as error:
            self.pageable = f"{format_bytes(size_bytes)} of memory could not be pinned, copies are slower: {error}"

    def follow(self, stream: int) -> None:
        """Let copies that the device has not begun wait, on the device, for all that is in a stream now.

        Ask for a copy after this: then what the stream writes to the source is in it, and what it reads from the target
        is read before.
        """
        for copies in self._streams:
            copies.follow(stream)

    def put(self, address: int, size_bytes: int) -> int:
        """Copy memory of the device to the tiers, as ``zico.tiers.stores.put``."""
        start = time.monotonic_ns()
        pieces: list[int] = []
        try:
            for offset in range(0, size_bytes, self._piece_bytes):
                pieces.append(self._put_piece(address + offset, min(self._piece_bytes, size_bytes - offset)))
                if pieces[-1] < 0:
                    return self._give_up(pieces)
            self._streams[OUT].finish()
        except DriverError as error:
            self._error = str(error)
            return self._give_up([*pieces, FAILED])
        self._note(OUT, pieces, size_bytes, time.monotonic_ns() - start)
        self._last += 1
        self._payloads[self._last] = pieces
        return self._last

    def _give_up(self, pieces: list[int]) -> int:
        with contextlib.suppress(DriverError):  # then nothing is copied any more
            self._streams[OUT].finish()
        for piece in pieces[:-1]:
            stores.drop(self._stack.record[0], piece)
        return pieces[-1]

    def _put_piece(self, address: int, size_bytes: int) -> int:
        record = self._stack.record[0]
        piece = int(stores.reserve(record, _PINNED, size_bytes))
        if piece >= 0:
            try:
                self._streams[OUT].to_host(int(stores.where(record, piece)), address, size_bytes)
            except DriverError:
                stores.drop(record, piece)
                raise
            return piece
        staging = self._staging[OUT]
        self._streams[OUT].to_host(staging, address, size_bytes)
        self._streams[OUT].finish()
        return int(stores.put(record, staging, size_bytes))

    def get(self, ticket: int, address: int, size_bytes: int) -> int:
        """Copy a payload to memory of the device, as ``zico.tiers.stores.get``."""
        start = time.monotonic_ns()
        pieces = self._payloads.get(ticket, [])
        if len(pieces) * self._piece_bytes < size_bytes:
            return errno.EINVAL
        try:
            for n, offset in enumerate(range(0, size_bytes, self._piece_bytes)):
                length = min(self._piece_bytes, size_bytes - offset)
                status = self._get_piece(pieces[n], address + offset, length)
                if status != 0:
                    return status
            self._streams[IN].finish()
        except DriverError as error:
            self._error = str(error)
            return errno.EIO
        self._note(IN, pieces, size_bytes, time.monotonic_ns() - start)
        return 0

    def _get_piece(self, piece: int, address: int, size_bytes: int) -> int:
        record = self._stack.record[0]
        if piece & TIER_MASK == _PINNED:
            self._streams[IN].to_device(address, int(stores.where(record, piece)), size_bytes)
            return 0
        staging = self._staging[IN]
        self._streams[IN].finish()  # the piece before may still be on its way
        status = int(stores.get(record, piece, staging, size_bytes))
        if status == 0:
            self._streams[IN].to_device(address, staging, size_bytes)
        return status

    def _note(self, direction: int, pieces: list[int], size_bytes: int, ns: int) -> None:
        if not any(piece & TIER_MASK for piece in pieces):  # else it is the other tiers that took the time
            note(self._stack.shared[_PINNED], direction, size_bytes, ns)

    def drop(self, ticket: int) -> None:
        """Forget a payload, as ``zico.tiers.stores.drop``."""
        for piece in self._payloads.pop(ticket, []):
            stores.drop(self._stack.record[0], piece)

    def why(self, result: int) -> str:
        """Return a sentence on why ``put`` gave no ticket."""
        device = f"; the device: {self._error}" if self._error and result == FAILED else ""
        return self._stack.why(result) + device

    def close(self) -> None:
        """Give everything back, the stack, too; the device must have finished."""
        self._undo.close()
