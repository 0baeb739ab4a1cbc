"""A CUDA driver over the software twin, for tests."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from twin.entry import Refused
from twin.twin import Twin

from zico.device.cuda.driver import CudaDriver

if TYPE_CHECKING:
    from types import TracebackType

MIB = 1 << 20
DEADLINE_S = 20.0
"""For what happens at once unless something is broken."""


class TwinDevice:
    """A twin, the driver over it, and the device's own eyes and hands; at its end nothing may be held."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - the twin's
        """Build both."""
        self.twin = Twin(**settings)
        self.driver = CudaDriver(0, self.twin)

    def read(self, address: int, size_bytes: int) -> bytes:
        """Read as the device reads."""
        return self.twin.read(address, size_bytes)

    def write(self, address: int, data: bytes) -> None:
        """Write as the device writes."""
        self.twin.write(address, data)

    def is_open(self, address: int) -> bool:
        """Tell whether the device could read there."""
        with contextlib.suppress(Refused):
            self.twin.read(address, 1)
            return True
        return False

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close both; a test that passed must have given everything back."""
        try:
            self.driver.close()
            assert kind is not None or self.twin.leaks() == {}
        finally:
            self.twin.close()
