"""A process of its own that kills its children at chosen instructions while they move payloads to tiers.

Run as a script: ``tier_victims.py TRIALS [OPERATION ...]``, as ``pool_victims.py``. What a victim leaves is taken over
by this process, which knows the tickets that the victim had written down. Prints a line of JSON for each operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import sys
import tempfile
import traceback
from typing import Any

import numpy as np
from pool_victims import DEADLINE_S, NO_PTRACE, PTRACE_TRACEME, _kill, _libc, _raise, step

from zico.compiled import compiled
from zico.tiers import stores
from zico.tiers.stack import TierStack
from zico.tiers.wishes import TierWish

Record = Any
BLOCK = 4096
N_BLOCKS = 8
SIZE = 2 * BLOCK + 100
NONE = -1


# Each operation between two signals that stop the process, or none if ``stop`` is 0. ``slot`` is the shared word in
# which the ticket is written down; a dropper forgets it first.


@compiled
def put(stack: Record, slot: Record, address: int, stop: int) -> None:
    """Put a payload."""
    _raise(stop)
    slot[0] = stores.put(stack, address, SIZE)
    _raise(stop)


@compiled
def drop(stack: Record, slot: Record, _address: int, stop: int) -> None:
    """Drop a payload."""
    _raise(stop)
    ticket = slot[0]
    slot[0] = NONE
    stores.drop(stack, ticket)
    _raise(stop)


@compiled
def trim(stack: Record, _slot: Record, _address: int, stop: int) -> None:
    """Give physical memory back."""
    _raise(stop)
    stores.trim(stack)
    _raise(stop)


@compiled
def recover(stack: Record, slot: Record, _address: int, stop: int) -> None:
    """Take over from somebody else, who had written down one ticket."""
    _raise(stop)
    stores.keep_only(stack, slot)
    _raise(stop)


OPERATIONS = {"put": put, "put_to_file": put, "put_compressed": put, "drop": drop, "trim": trim, "recover": recover}


def blocks_of(stack: TierStack, ticket: int) -> int:
    """Count a payload's blocks as ``zico.tiers.layout`` describes them."""
    store = stack.record["tiers"][0][ticket & 3]
    words = (ctypes.c_int32 * N_BLOCKS).from_address(int(store["words_address"]))
    n, block = 0, ticket >> 2
    while block >= 0:
        n, block = n + 1, (words[block] >> 1) - 2
    return n


LONGER = {"put_compressed": 4}
"""By how much fewer trials an operation gets that takes so many times the instructions and more."""


class Trial:
    """A stack with payloads between which blocks are free, and a victim that does one operation."""

    def __init__(self, operation: str) -> None:
        """Make it."""
        self.operation = OPERATIONS[operation]
        self.undo = contextlib.ExitStack()
        first = "compressed" if operation == "put_compressed" else "memory"
        wishes = (TierWish(first, N_BLOCKS * BLOCK), TierWish("file", N_BLOCKS * BLOCK))
        directory = self.undo.enter_context(tempfile.TemporaryDirectory())
        self.stack = self.undo.enter_context(TierStack.create(wishes, block_bytes=BLOCK, directory=directory))
        shared = mmap.mmap(-1, mmap.PAGESIZE)  # a forked child's writes are seen here
        self.slot = np.frombuffer(shared, np.int64, 1)
        self.slot[0] = NONE
        self.data = [np.random.default_rng(n).integers(0, 256, SIZE, dtype=np.uint8) for n in range(3)]
        for data in self.data:
            data[::4] = 0  # so that it gets smaller where it is compressed
        ones = [self._put(self.data[0][:BLOCK]) for _ in range(N_BLOCKS)]
        for one in ones[1 : 6 if operation == "put_to_file" else 7 : 2]:
            self.stack.drop(one)
        self.held = dict.fromkeys(ones[::2], self.data[0][:BLOCK])
        if operation == "put_to_file":
            self.held[self._put(self.data[1][: 2 * BLOCK])] = self.data[1][: 2 * BLOCK]
        if operation in ("drop", "recover"):
            self.slot[0] = self._put(self.data[1])
        if operation == "recover":  # these were another's, of whom nothing is known
            self.held = {}
        if operation == "trim":
            self.stack.trim()

    def _put(self, data: np.ndarray) -> int:
        ticket = self.stack.put(data.ctypes.data, data.nbytes)
        assert ticket >= 0
        return ticket

    def run(self, stop: int) -> None:
        """Do the operation."""
        self.operation(self.stack.record[0], self.slot, self.data[1].ctypes.data, stop)

    def start(self) -> int:
        """Fork a victim that stops right before the operation."""
        pid = os.fork()
        if pid == 0:
            if _libc.ptrace(PTRACE_TRACEME, 0, None, None) == 0:
                self.run(signal.SIGSTOP)
            os._exit(3)
        return pid

    def check(self) -> None:
        """Take over: what is written down can be read, everything else is free, and all of it can be used."""
        if self.slot[0] != NONE:
            self.held[int(self.slot[0])] = self.data[1]
        with TierStack(self.stack.export()) as successor:
            successor.keep_only(list(self.held))
            for ticket, data in self.held.items():
                self._check_read(successor, ticket, data)
            needed = sum(blocks_of(successor, ticket) for ticket in self.held)
            assert sum(use.used_bytes for use in successor.usage()) == needed * BLOCK
            filler = self.data[2][:BLOCK]
            new = [successor.put(filler.ctypes.data, BLOCK) for _ in range(2 * N_BLOCKS - needed)]
            assert min(new) >= 0
            assert len({*new, *self.held}) == len(new) + len(self.held)
            assert successor.put(filler.ctypes.data, 1) < 0
            for ticket, data in {**self.held, **dict.fromkeys(new, filler)}.items():
                self._check_read(successor, ticket, data)

    def _check_read(self, stack: TierStack, ticket: int, data: np.ndarray) -> None:
        back = np.zeros_like(data)
        assert stack.get(ticket, back.ctypes.data, data.nbytes) == 0
        assert np.array_equal(back, data)


def length_of(operation: str, status: Record) -> int:
    """Return how many instructions the operation takes."""
    trial = Trial(operation)
    with trial.undo:
        pid = trial.start()
        _, stopped = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(stopped):
            raise SystemExit(NO_PTRACE)
        n = int(step(pid, 1 << 20, status))
        _kill(pid)
        if n < 0:
            raise SystemExit(NO_PTRACE)
        trial.check()
        return n


def kill_all_along(operation: str, trials: int) -> dict[str, Any]:
    """Kill as many victims; returns what was done, or the fault that was found."""
    warm = Trial(operation)
    with warm.undo:
        warm.run(0)
        warm.check()
    status = np.zeros(1, "i4")
    step(0, 0, status)
    length = length_of(operation, status)
    for at in np.unique(np.linspace(0, length - 1, trials).astype(int)).tolist():
        trial = Trial(operation)
        with trial.undo:
            pid = trial.start()
            os.waitpid(pid, 0)
            step(pid, at, status)
            _kill(pid)
            try:
                trial.check()
            except (AssertionError, OSError):
                return {"fault": f"killed after {at} of {length} instructions: {traceback.format_exc()}"}
    return {"fault": None, "instructions": length}


def main(trials: int, names: list[str]) -> None:
    """Do the named operations, or all."""
    signal.alarm(DEADLINE_S)
    for name in names or OPERATIONS:
        n = max(trials // LONGER.get(name, 1), 2)
        print(json.dumps({"operation": name, **kill_all_along(name, n)}), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
