"""Jobs whose regions leave for a tier and return."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from cpu.support.threads import DEADLINE_S, in_thread

from zico.base.compiled import array_at, compiled
from zico.heap import evicting

if TYPE_CHECKING:
    from cpu.support.members import Tenant

Record = Any
PAGE_BYTES = 4096
MOST_ROUNDS = 1 << 40
_I64 = np.dtype("i8")


def evict(tenant: Tenant, n: int) -> int:
    """Let a job evict; returns what is left of the wish."""
    tenant.job["evict"] = n
    evicting.evict(tenant.record[0], tenant.job)
    left = int(tenant.job["evict"])
    tenant.job["evict"] = 0
    return left


def take_back(tenant: Tenant) -> bool:
    """Let a job get back what it has evicted."""
    return bool(evicting.take_back(tenant.record[0], tenant.job))


@compiled
def _count_up(words: int, n_words: int, stride: int, shadow: int, stop: int) -> int:
    """Add one to words again and again and to their shadows, until told to stop; returns how often one was wrong."""
    wrong = 0
    halt = array_at(stop, 1, _I64)
    shadows = array_at(shadow, n_words, _I64)
    state = np.uint64(shadow)
    for _ in range(MOST_ROUNDS):
        for _ in range(256):
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            i = np.int64((state >> np.uint64(33)) % np.uint64(n_words))
            word = array_at(words + i * stride, 1, _I64)
            for _ in range(16):  # stays on the page for a while
                wrong += int(word[0] != shadows[i])
                word[0] += 1
                shadows[i] += 1
        if halt[0] != 0:
            break
    return wrong


def _read_into(words: int, n_words: int, stop: Record, found: list[int]) -> None:
    """Let the kernel write to one word of each page in turn, as when a file is read into a tensor."""
    reading, writing = os.pipe()
    wrong = value = 0
    last = {}
    while not stop[0]:
        value += 1
        at = words + value * 7919 % n_words * PAGE_BYTES
        wrong += ctypes.c_int64.from_address(at).value != last.get(at, 0)
        os.write(writing, value.to_bytes(8, "little"))
        wrong += os.readv(reading, [(ctypes.c_char * 8).from_address(at)]) != 8
        last[at] = value
    wrong += sum(ctypes.c_int64.from_address(at).value != value for at, value in last.items())
    os.close(reading)
    os.close(writing)
    found.append(wrong)


class Writers:
    """Threads that write to every page of a block, and know what should be there."""

    def __init__(self, address: int, n_words: int) -> None:
        """Start two that count, and one that lets the kernel write."""
        self.found: list[int] = []
        self._address, self._n_words = address, n_words
        self._stop = np.zeros(1, np.int64)
        self._shadows = np.zeros((2, n_words), np.int64)
        # Compiled before threads have a deadline: behind it the memory goes, under a thread that has only begun.
        stopped = np.ones(1, np.int64)
        _count_up(address, n_words, PAGE_BYTES, self._shadows[0].ctypes.data, stopped.ctypes.data)
        self._threads = [in_thread(functools.partial(self._count, i)) for i in range(2)]
        self._threads.append(in_thread(self._read))

    def _count(self, i: int) -> None:
        words, shadow = self._address + 8 * i, self._shadows[i].ctypes.data
        self.found.append(int(_count_up(words, self._n_words, PAGE_BYTES, shadow, self._stop.ctypes.data)))

    def _read(self) -> None:
        _read_into(self._address + 16, self._n_words, self._stop, self.found)

    def stop(self) -> None:
        """Stop them; every word is what its thread last wrote, and always was."""
        self._stop[0] = 1
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert self.found == [0, 0, 0]
        for i in range(2):
            buffer = (ctypes.c_int64 * (self._n_words * PAGE_BYTES // 8 - 2)).from_address(self._address + 8 * i)
            assert (np.frombuffer(buffer, np.int64)[:: PAGE_BYTES // 8] == self._shadows[i]).all()
