"""A tier whose file's calls may be cut short or fail, as a disk and a kernel may let them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.tiers.stack import TierStack

_LONG = ctypes.c_long
CALLS = {
    "pwrite": ctypes.CFUNCTYPE(_LONG, _LONG, _LONG, _LONG, _LONG),
    "pread": ctypes.CFUNCTYPE(_LONG, _LONG, _LONG, _LONG, _LONG),
    "fallocate": ctypes.CFUNCTYPE(_LONG, _LONG, _LONG, _LONG, _LONG),
}

_kept: list[Any] = []
"""Functions that compiled code calls by address: ctypes frees what nothing refers to, and a cycle at any collection."""


class FaultyTier:
    """A file tier below whose calls somebody sits: each may be cut short or fail."""

    def __init__(self, stack: TierStack, tier: int) -> None:
        """Take the real functions' places."""
        self.store = stack.record["tiers"][0][tier]
        self.errno = ctypes.c_int(0)
        self._put("errno_location", ctypes.CFUNCTYPE(_LONG)(lambda: ctypes.addressof(self.errno)))

    def _put(self, name: str, function: Any) -> None:  # noqa: ANN401 - a ctypes function of any prototype
        _kept.append(function)
        self.store[name] = ctypes.cast(function, ctypes.c_void_p).value

    def on(self, name: str, answer: Callable[[int, int], int]) -> None:
        """Let ``answer(n-th call, bytes asked)`` decide: bytes that are really moved, or a negative errno."""
        real = CALLS[name](int(self.store[name]))
        count = [0]

        def fake(descriptor: int, first: int, second: int, offset: int) -> int:
            count[0] += 1
            allowed = answer(count[0], second)
            if allowed < 0:
                self.errno.value = -allowed
                return -1
            return int(real(descriptor, first, allowed, offset))

        self._put(name, CALLS[name](fake))
