"""Copies between the device and the host on a stream of their own.

From and to memory that is registered (``CudaDriver.register_host``) the device copies by itself; other memory is
staged by the driver, and the call waits for it: slower, still right.

Known limitations
    Not seen on a real GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zico.driver.cuda.driver import CudaDriver

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class CopyStream:
    """A stream for copies in one direction, made one after the other."""

    def __init__(self, driver: CudaDriver) -> None:
        """Create the stream."""
        self._driver = driver
        self._stream = driver.create_stream()

    def follow(self, stream: int) -> None:
        """Let copies that the device has not begun wait, on the device, for all that is in another stream now."""
        with self._driver.context.current():
            event = self._driver.call("cuEventCreate", _NO_TIMING)
            try:
                self._driver.call("cuEventRecord", event, stream)
                self._driver.call("cuStreamWaitEvent", self._stream.handle, event, 0)
            finally:
                self._driver.call("cuEventDestroy", event)  # who waits for it already goes on waiting

    def to_host(self, target: int, source: int, size_bytes: int) -> None:
        """Ask for a copy from the device."""
        with self._driver.context.current():
            self._driver.call("cuMemcpyDtoHAsync", target, source, size_bytes, self._stream.handle)

    def to_device(self, target: int, source: int, size_bytes: int) -> None:
        """Ask for a copy to the device; the source must stay as it is until it is finished."""
        with self._driver.context.current():
            self._driver.call("cuMemcpyHtoDAsync", target, source, size_bytes, self._stream.handle)

    def finish(self) -> None:
        """Wait until all copies are made; the driver knows no deadline for it."""
        self._driver.synchronize(self._stream.handle)

    def close(self) -> None:
        """Destroy the stream once its copies are made."""
        self._stream.close()
