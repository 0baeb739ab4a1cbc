"""A paused job that has moved its memory off the GPU puts its CUDA contexts aside, too (``ZICO_MOVE_CONTEXT=on``).

Theory of operation
    The driver does it (``cuCheckpointProcess*``, in the manual of the driver's API from CUDA 12.8 on). It
    locks the process's calls, copies what is on the GPU to memory of its own on the host, and lets the
    GPU go. Addresses, streams and modules are as before when they are taken up. A process may do this
    to itself.

    Calls of the job's other threads wait meanwhile, and one may hold Python's global lock. So from
    the first call to the last one this thread runs no Python. A signal has the contexts taken up
    before its handler runs.

Known limitations
    It has run on no GPU. A driver before 610 refuses processes that use memory of another one
    (NVIDIA/cuda-checkpoint, issue 56), as every job of a pool does. MPS, and aarch64 so far, are refused.
    Only jobs whose iterations are marked come here.
    Signals wait while the GPU has no room for the contexts. A signal that comes while they are copied
    is seen with the next one, or when the pause ends.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import call, entry
from zico.base.libc import sleep_for
from zico.base.records import I8, Record, dtype_of
from zico.base.saying import inform
from zico.device.cuda.bindings import OUT_OF_MEMORY, Calls, check
from zico.device.mapping import status
from zico.pool import boundaries
from zico.pool.layout import MEMBER, JobState, Paused

if TYPE_CHECKING:
    from zico.job.session import Session
    from zico.pool.layout import Member

_STEPS = ("lock", "checkpoint", "restore", "unlock")
FUNCTIONS = tuple(f"cuCheckpointProcess{step.capitalize()}" for step in _STEPS)
_LOCK_MS = 10_000
"""The driver waits so long for calls that are under way."""
_LOCK_WORDS = 8  # CUcheckpointLockArgs: a timeout in milliseconds, and what must be zero
_AGAIN_NS = 1_000_000_000


class AsideRecord(Record):
    """The driver's functions by address, and what they are told."""

    pid: I8
    lock_arguments: I8
    lock: I8
    checkpoint: I8
    restore: I8
    unlock: I8


ASIDE = dtype_of(AsideRecord)


@entry(MEMBER, ASIDE)
def stay_aside(pool: Member, aside: AsideRecord) -> int:
    """Put this process's contexts aside while its job is paused at its boundary, or until a signal comes.

    Waits for work that is under way, for the copies, and in the end until the GPU has room.

    Returns:
        0: they were aside, and are taken up. Above: the driver's status by which they cannot be.
        Below: that by which they are lost, negated.
    """
    found = status(call(aside.lock, (aside.pid, aside.lock_arguments)))
    if found != 0:
        return found
    found = status(call(aside.checkpoint, (aside.pid, 0)))
    if found == 0:
        while boundaries.rest(pool):
            pass
        found = status(call(aside.restore, (aside.pid, 0)))
        while found == OUT_OF_MEMORY:
            sleep_for(_AGAIN_NS)
            found = status(call(aside.restore, (aside.pid, 0)))
        found = -found
    call(aside.unlock, (aside.pid, 0))
    return found


class ContextAside:
    """The contexts of a session's process."""

    def __init__(self, session: Session, calls: Calls | None = None) -> None:
        """Act for a session.

        Args:
            session: The job's.
            calls: The driver; ``None``: the one that the process uses.

        Raises:
            DriverError: The driver's library is too old to have the functions.
        """
        self._session = session
        self._is_refused = False
        self._lock = np.zeros(_LOCK_WORDS, "u8")
        self._lock[0] = _LOCK_MS
        self._record: Any = np.zeros(1, ASIDE)
        self._record[0]["pid"] = os.getpid()
        self._record[0]["lock_arguments"] = self._lock.ctypes.data
        self._calls = calls or Calls()
        addresses = self._calls.addresses(FUNCTIONS)
        for step, function in zip(_STEPS, FUNCTIONS, strict=True):
            self._record[0][step] = addresses[function]

    def rest(self) -> None:
        """Put the contexts aside while the job is paused and all that it keeps is away; else return at once.

        Raises:
            DriverError: The driver has lost them.
        """
        record = self._session.record
        is_away = record["paused"] == Paused.MOVES and record["state"] == JobState.BOUNDARY and record["held"] == 0
        if not is_away or self._is_refused:
            return
        found = int(stay_aside(self._session.pool.member[0], self._record[0]))
        if found < 0:
            check("cuCheckpointProcessRestore", (self._calls.api.CUresult(-found),))
        if found > 0:
            self._is_refused = True
            why = self._calls.api.CUresult(found).name
            inform(f"{self._session.settings.name}: its CUDA context stays on the GPU while it is paused: {why}")
