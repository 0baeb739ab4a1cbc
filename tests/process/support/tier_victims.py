"""Processes killed at chosen instructions while they move payloads to tiers (``single_steps.py``).

What a victim leaves is taken over by this process, which knows the tickets that the victim had
written down.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from typing import Any

import numpy as np
from process.support import single_steps
from process.support.single_steps import stop_here

from zico.base.compiled import entry
from zico.tiers import stores
from zico.tiers.destinations import TierWish
from zico.tiers.encodings import ZEROS
from zico.tiers.layout import STACK
from zico.tiers.stack import TierStack

Record = Any
BLOCK = 4096
DEADLINE_S = 600
N_BLOCKS = 8
SIZE = 2 * BLOCK + 100
NONE = -1


# Each operation between two signals that stop the process, or none if ``stop`` is 0. ``slot`` is
# the shared word in which the ticket is written down; a dropper forgets it first.


@entry(STACK, [np.int64], int, int)
def put(stack: Record, slot: Record, address: int, stop: int) -> None:
    """Put a payload."""
    stop_here(stop)
    slot[0] = stores.put(stack, address, SIZE, ZEROS)
    stop_here(stop)


@entry(STACK, [np.int64], int, int)
def drop(stack: Record, slot: Record, _address: int, stop: int) -> None:
    """Drop a payload."""
    stop_here(stop)
    ticket = slot[0]
    slot[0] = NONE
    stores.drop(stack, ticket)
    stop_here(stop)


@entry(STACK, [np.int64], int, int)
def trim(stack: Record, _slot: Record, _address: int, stop: int) -> None:
    """Give physical memory back."""
    stop_here(stop)
    stores.trim(stack)
    stop_here(stop)


@entry(STACK, [np.int64], int, int)
def recover(stack: Record, slot: Record, _address: int, stop: int) -> None:
    """Take over from somebody else, who had written down one ticket."""
    stop_here(stop)
    stores.keep_only(stack, slot)
    stop_here(stop)


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


class Trial(single_steps.Trial):
    """A stack with payloads between which blocks are free, and a victim that does one operation."""

    def __init__(self, operation: str) -> None:
        """Make it."""
        super().__init__()
        self.operation = OPERATIONS[operation]
        first = "compressed" if operation == "put_compressed" else "memory"
        wishes = (TierWish(first, N_BLOCKS * BLOCK), TierWish("file", N_BLOCKS * BLOCK))
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.tiers = self.stack.enter_context(TierStack.create(wishes, block_bytes=BLOCK, directory=directory))
        shared = mmap.mmap(-1, mmap.PAGESIZE)  # a forked child's writes are seen here
        self.slot = np.frombuffer(shared, np.int64, 1)
        self.slot[0] = NONE
        self.data = [np.random.default_rng(n).integers(0, 256, SIZE, dtype=np.uint8) for n in range(3)]
        for data in self.data:
            data.view(np.uint32)[::2] = 0  # so that it gets smaller where it is compressed
        ones = [self._put(self.data[0][:BLOCK]) for _ in range(N_BLOCKS)]
        for one in ones[1 : 6 if operation == "put_to_file" else 7 : 2]:
            self.tiers.drop(one)
        self.held = dict.fromkeys(ones[::2], self.data[0][:BLOCK])
        if operation == "put_to_file":
            self.held[self._put(self.data[1][: 2 * BLOCK])] = self.data[1][: 2 * BLOCK]
        if operation in ("drop", "recover"):
            self.slot[0] = self._put(self.data[1])
        if operation == "recover":  # these were another's, of whom nothing is known
            self.held = {}
        if operation == "trim":
            self.tiers.trim()

    def _put(self, data: np.ndarray) -> int:
        ticket = self.tiers.put(data.ctypes.data, data.nbytes)
        assert ticket >= 0
        return ticket

    def run(self, stop: int) -> None:
        """Do the operation."""
        self.operation(self.tiers.record[0], self.slot, self.data[1].ctypes.data, stop)

    def check(self) -> None:
        """Take over: what is written down can be read, everything else is free, and all of it can be used."""
        if self.slot[0] != NONE:
            self.held[int(self.slot[0])] = self.data[1]
        with TierStack(self.tiers.export()) as successor:
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


if __name__ == "__main__":
    single_steps.main(Trial, OPERATIONS, DEADLINE_S, LONGER)
