"""The pager of one member: a thread that serves its faults until its process is dead.

The thread runs compiled code without the GIL, so neither the broker's own work nor other pagers
stand in its way. If it cannot begin, or the broker ends, the job is told to be its own pager.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from zico.device.host import HostDriver

if TYPE_CHECKING:
    from collections.abc import Sequence

END_S = 0.5
"""How long the end of a thread is waited for: it has one block in hand at most."""

STAT_BLOCK_BYTES = 512  # st_blocks counts these (stat(2))

_log = logging.getLogger(__name__)


class Paging:
    """Serve one member's faults. Owns what came with it; ``end`` or ``let_go`` once."""

    def __init__(self, descriptors: Sequence[int], member: Any, wait_limit_s: float, *, pid: int) -> None:  # noqa: ANN401 - a MEMBER record
        """Take over the descriptors and begin.

        Raises:
            ConfigError: They are none of a paged job, or of another version of Zico.
            DriverError: The kernel refuses to map them.
            OSError: Too many descriptors are open.
        """
        from zico.paging.pager import Pager

        self._pager = Pager(descriptors, member, wait_limit_s, pid=pid)
        try:
            self._memory_fd = os.dup(self._pager.memory_fd)
        except OSError:
            self._pager.close()
            raise
        self._closing = threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="zico-pager", daemon=True).start()

    def _run(self) -> None:
        try:
            self._pager.run()
        except Exception:  # noqa: BLE001 - the job must not wait for ever, whatever is wrong with us
            _log.exception("a pager has failed")
        finally:
            with self._closing:
                self._pager.let_go()
                self._is_over.set()
                self._pager.close()

    def physical_bytes(self) -> int:
        """Return what the kernel says that the job's pages take."""
        return os.fstat(self._memory_fd).st_blocks * STAT_BLOCK_BYTES

    def let_go(self) -> None:
        """End, so that the job goes on as its own pager; waits ``END_S`` at most."""
        with self._closing:
            if not self._is_over.is_set():
                self._pager.stop()
        self._is_over.wait(END_S)

    def end(self) -> None:
        """End because the job is dead, and give its memory to the kernel, before its regions are another's."""
        self.let_go()
        with HostDriver().import_memory(self._memory_fd) as memory:
            HostDriver().discard(memory, 0, memory.size_bytes)
