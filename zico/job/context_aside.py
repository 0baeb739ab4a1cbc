"""A paused job that has moved its memory off the GPU puts its CUDA context aside, too (``ZICO_MOVE_CONTEXT=on``).

The thread that stands at the boundary does it, and takes the context up before it goes on, also for an
exception. Other threads of the job that call the driver wait meanwhile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zico.base.errors import DriverError
from zico.base.saying import inform
from zico.device.cuda import checkpoint
from zico.device.cuda.bindings import OUT_OF_MEMORY, Calls
from zico.pool import boundaries
from zico.pool.layout import JobState, Paused

if TYPE_CHECKING:
    from zico.job.session import Session

_AGAIN_S = 1.0


class ContextAside:
    """The context of a session's process."""

    def __init__(self, session: Session, call: Calls | None = None) -> None:
        """Act for a session; ``call``: the driver, of which the process uses the default one."""
        self._session = session
        self._call = call or Calls()
        self._is_refused = False

    def rest(self) -> None:
        """Put the context aside while the job is paused and all that it keeps is away; else return at once."""
        record = self._session.record
        is_away = record["paused"] == Paused.MOVES and record["state"] == JobState.BOUNDARY and record["held"] == 0
        if not is_away or self._is_refused:
            return
        try:
            checkpoint.put_aside(self._call)
        except DriverError as error:
            self._is_refused = True
            inform(f"{self._session.settings.name}: its CUDA context stays on the GPU while it is paused: {error}")
            return
        try:
            while boundaries.rest(self._session.pool.member[0]):  # signals' handlers run here
                pass
        finally:
            self._take_up()

    def _take_up(self) -> None:
        """Wait until the GPU has room for the context."""
        is_told = False
        while True:
            try:
                checkpoint.take_up(self._call)
            except DriverError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                if not is_told:
                    inform(f"{self._session.settings.name} waits until the GPU has room for its CUDA context")
                is_told = True
                time.sleep(_AGAIN_S)
            else:
                return
