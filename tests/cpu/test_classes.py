"""Tensor classes learned from lifetimes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.heap import history
from zico.heap.layout import COUNT, COUNTS, HEAP, KEYS, Arena
from zico.pool.layout import JOB
from zico.trace.profile import UNPROFILED_SHIFT


class Memory:
    """The part of a heap that remembers classes, and a job with a profile of ``n_events``."""

    def __init__(self, n_events: int = 0) -> None:
        """Remember nothing; without ``n_events`` the profile is flat."""
        self._heap = np.zeros(1, HEAP)
        self._job = np.zeros(1, JOB)
        self._counts = np.zeros(COUNTS, COUNT)
        self._classes = np.zeros(KEYS, "u1")
        self.heap: Any = self._heap[0]
        self.heap["counts_address"] = self._counts.ctypes.data
        self.heap["region_shift"] = 22
        self.heap["classes_address"] = self._classes.ctypes.data
        self._job["profile"]["shift"] = 0 if n_events else UNPROFILED_SHIFT
        self._job["profile"]["n_events"] = n_events or 1 << UNPROFILED_SHIFT

    def key(self, iteration: int, size_bytes: int) -> int:
        """Return the key of the next tensor."""
        return int(history.class_of(history.key_of(self.heap, iteration, size_bytes)))

    def arena(self, key: int, size_bytes: int = 1 << 20) -> int:
        """Return where it goes."""
        return int(history.arena_for(self.heap, key, size_bytes))

    def dies(self, key: int, lived_events: int, *, same_iteration: bool = True) -> None:
        """Let a tensor die."""
        history.learn(self.heap, self._job[0], key, lived_events, same_iteration)


def test_what_has_never_died_goes_to_the_long_arena() -> None:
    """Nothing is known of a tensor that has not been seen to die, so it is not trusted to be a temporary."""
    memory = Memory()
    assert memory.arena(memory.key(0, 1 << 20)) == Arena.LONG


def test_small_tensors_of_which_nothing_is_known_keep_to_themselves() -> None:
    """Below a quarter of a region an unknown tensor goes where small ones are; once known, to its class's arena."""
    memory = Memory()
    key = memory.key(0, 1 << 19)
    assert memory.arena(key, (1 << 20) - 64) == Arena.EXTRA
    assert memory.arena(key, 1 << 20) == Arena.LONG
    memory.dies(key, 1000)
    assert memory.arena(key, (1 << 20) - 64) == Arena.LONG


@pytest.mark.parametrize(
    ("n_events", "lived", "same_iteration", "arena"),
    [
        (0, 8, True, Arena.SHORT),
        (0, 9, True, Arena.LONG),
        (0, 1 << 30, True, Arena.LONG),
        (100, 8, True, Arena.SHORT),
        (100, 9, True, Arena.LONG),
        (6400, 100, True, Arena.SHORT),
        (6400, 101, True, Arena.LONG),
        (0, 1, False, Arena.EXTRA),
        (6400, 1, False, Arena.EXTRA),
    ],
)
def test_a_lifetime_decides_the_class(n_events: int, lived: int, same_iteration: bool, arena: Arena) -> None:  # noqa: FBT001
    """Eight events or a 64th of the iteration are short, more is long, across a boundary is persistent."""
    memory = Memory(n_events)
    key = memory.key(3, 1 << 20)
    memory.dies(key, lived, same_iteration=same_iteration)
    assert memory.arena(key) == arena


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.sampled_from([1 << 16, 1 << 17, 3 << 16, 1 << 33]), max_size=40), st.integers(0, 1 << 20))
def test_the_same_tensor_has_the_same_key_in_every_iteration(sizes: list[int], iteration: int) -> None:
    """Keys depend on size and occurrence, so reordering tensors of different sizes changes no key."""
    memory = Memory()
    first = [(size, memory.key(iteration, size)) for size in sizes]
    other_order = sorted(sizes)
    second = [(size, memory.key(iteration + 1, size)) for size in other_order]
    assert sorted(first) == sorted(second)


def test_occurrences_of_one_size_are_told_apart() -> None:
    """A thousand tensors of one size have nearly a thousand keys, all inside the table."""
    memory = Memory()
    keys = [memory.key(5, 1 << 16) for _ in range(1000)]
    assert all(0 <= key < KEYS for key in keys)
    assert len(set(keys)) > 980


@settings(deadline=None)  # the first call compiles
@given(st.integers(1 << 16, 1 << 45), st.integers(0, (1 << 31) - 1))
def test_every_size_and_iteration_has_a_key_inside_the_table(size_bytes: int, iteration: int) -> None:
    """Whatever the size, the hash stays inside the tables."""
    assert 0 <= Memory().key(iteration, size_bytes) < KEYS


def test_a_new_life_replaces_the_old_class() -> None:
    """The last death counts, so a class that was wrong is corrected an iteration later."""
    memory = Memory()
    key = memory.key(0, 1 << 16)
    memory.dies(key, 2)
    memory.dies(key, 500)
    assert memory.arena(key) == Arena.LONG
