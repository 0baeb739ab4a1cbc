"""A job on the twin that joins as an adapter does: ``session.attach``, the heap, kernels on a stream of its own.

Orders come line by line on stdin, an answer to each goes to stdout.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from zico.base.errors import HookError
from zico.device.cuda import bindings
from zico.heap.cuda import on_stream
from zico.job import session


class Trainer:
    """One job with one stream."""

    def __init__(self) -> None:
        """Join the pool, and make a stream that can be held up."""
        self.twin = bindings.default_api()
        joined = session.attach("trainer", kind="cuda")
        assert joined is not None
        self.session = joined
        self._heap = joined.heap.record[0]
        self._use_context()
        self._stream = int(self._done(self.twin.cuStreamCreate(1))[0])
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._gate = np.frombuffer(self._page, np.int64)
        self._done(self.twin.cuMemHostRegister(self._gate.ctypes.data, mmap.PAGESIZE, 3))
        self._gate_on_device = int(self._done(self.twin.cuMemHostGetDevicePointer(self._gate.ctypes.data, 0))[0])
        self._held: list[tuple[int, int]] = []
        if path := os.environ.get("DEVICE_FILE"):  # a named pipe, for what the driver's files are on a real GPU
            bindings.DEVICE_FILES = (path,)
            os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if path := os.environ.get("MAPPED_FILE"):  # an ordinary file, for the mappings of the driver's files
            bindings.DEVICE_FILES = (*bindings.DEVICE_FILES, path)
            with Path(path).open("r+b") as file:
                self._mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def _use_context(self) -> None:
        """Make the context current, as a framework does in its own threads."""
        self._done(self.twin.cuCtxSetCurrent(self._done(self.twin.cuDevicePrimaryCtxRetain(0))[0]))

    @staticmethod
    def _done(result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what a call gave."""
        assert int(result[0]) == 0, result
        return result[1:]

    def alloc(self, n_regions: int, value: int) -> str:
        """Take a tensor and let a kernel fill it."""
        size_bytes = n_regions * self.session.pool.region_bytes
        address = int(on_stream.allocate_on(self._heap, size_bytes, self._stream))
        if address <= 0:
            return "refused"
        self._held.append((address, size_bytes))
        self._done(self.twin.cuMemsetD8Async(address, value, size_bytes, self._stream))
        return "allocated"

    def free(self) -> str:
        """Free the last tensor; what its kernels do may still be to come."""
        on_stream.free_on(self._heap, self._held.pop()[0], self._stream)
        return "freed"

    def hold(self) -> str:
        """Let the stream go no further until ``let_go``."""
        self._done(self.twin.cuStreamWaitValue64(self._stream, self._gate_on_device, 1, 0))
        return "held"

    def let_go(self) -> str:
        """Let it."""
        self._gate[0] = 1
        return "let go"

    def is_done(self) -> str:
        """Say whether the stream has done everything."""
        return str(int(self.twin.cuStreamQuery(self._stream)[0]) == 0)

    def look(self) -> str:
        """Say which values lie in the last tensor, first and last byte."""
        address, size_bytes = self._held[-1]
        return f"{self.twin.read(address, 1)[0]} {self.twin.read(address + size_bytes - 1, 1)[0]}"

    def step(self) -> str:
        """End the iteration."""
        session.step()
        return "stepped"

    def status(self) -> str:
        """Say where this job is and what it holds."""
        found = session.status()
        assert found is not None
        return f"{found['device']} {found['held_bytes']} {found['tensor_bytes']}"

    def queue(self, value: int, after_ms: int) -> str:
        """Let the device write into the last tensor after a while, even if this process is dead by then.

        The device is a process. It drops the work, as a driver does, when nobody has its file open
        any more.
        """
        path = os.environ["DEVICE_FILE"]
        reading, writing = os.pipe()
        if os.fork() == 0:
            held = select.poll()
            held.register(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 0)
            os.write(writing, b"ready")
            has_ended = held.poll(after_ms)
            if not has_ended:
                ctypes.memset(self._held[-1][0], value, 1)
            os.close(os.open(f"{path}-{'dropped' if has_ended else 'written'}", os.O_CREAT | os.O_WRONLY))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as said:
            said.read(len("ready"))
        return "queued"

    def fork_worker(self, by_c_code: int) -> str:
        """Fork a child that lives on, by Python or as C code does, which Python does not see; say its number."""
        pid = ctypes.CDLL(None).fork() if by_c_code else os.fork()
        if pid == 0:
            os.closerange(0, 3)
            signal.pause()
            os._exit(0)
        return str(pid)

    def marks(self) -> str:
        """Say how many marks the heap has put on streams."""
        return str(self._heap["streams"]["marks"])

    def crash(self) -> str:
        """Lose the context, as by a kernel that faults."""
        self.twin.poison(int(self.twin.cuCtxGetCurrent()[1]), "ILLEGAL_ADDRESS")
        return "crashed"

    def lost(self) -> str:
        """Say by which status Zico knows the context to be lost."""
        return str(self.session.lost_status)

    def place(self) -> str:
        """Say which place in the pool this job has."""
        return str(self.session.membership.job)

    def fork(self) -> str:
        """Let a forked child ask to join, and say what it is told."""
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                session.attach("trainer", kind="cuda")
            except HookError as error:
                os.write(writing, str(error).encode())
            session.step()
            os.write(writing, b", connected" if self.session.membership.connection.fileno() >= 0 else b", alone")
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as said:
            return said.read()


def main() -> None:
    """Serve until there are no more orders."""
    trainer = Trainer()
    answer = "joined"
    while True:
        os.write(1, f"{answer}\n".encode())
        order = sys.stdin.readline().split()
        if not order:
            return
        answer = getattr(trainer, order[0])(*map(int, order[1:]))


if __name__ == "__main__":
    main()
