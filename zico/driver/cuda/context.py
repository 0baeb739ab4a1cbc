"""The primary context of a device: retained once, current in every thread that calls, given back once.

It is the context that frameworks use, so their memory and ours are in one address space. A thread is left as it was
found: with another's context, or with none.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.driver.cuda.bindings import Calls


class PrimaryContext:
    """A device's primary context; nothing is retained until somebody needs it."""

    def __init__(self, call: Calls, device: Any) -> None:  # noqa: ANN401 - a CUdevice
        """Prepare to retain the context of ``device``."""
        self._call = call
        self._device = device
        self._lock = threading.Lock()
        self._handle = 0

    @property
    def retained(self) -> bool:
        """Tell whether the context is held."""
        return self._handle != 0

    def retain(self) -> int:
        """Return the context's handle; it stays alive until ``close``."""
        with self._lock:
            if self._handle == 0:
                self._handle = int(self._call("cuDevicePrimaryCtxRetain", self._device))
            return self._handle

    @contextlib.contextmanager
    def current(self) -> Iterator[int]:
        """Make the context current in this thread for as long as the caller needs it."""
        own = self.retain()
        before = int(self._call("cuCtxGetCurrent"))
        self._call("cuCtxSetCurrent", own)
        try:
            yield own
        finally:
            self._call("cuCtxSetCurrent", before)

    def close(self) -> None:
        """Give the context back; a second call does nothing. Once it has ended it is not current here any more."""
        with self._lock:
            handle, self._handle = self._handle, 0
        if handle == 0:
            return
        self._call("cuDevicePrimaryCtxRelease", self._device)
        _, is_active = self._call("cuDevicePrimaryCtxGetState", self._device)
        if not is_active and int(self._call("cuCtxGetCurrent")) == handle:
            self._call("cuCtxSetCurrent", 0)
