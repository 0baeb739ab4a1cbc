"""Signals as events of the running loop, put back as they were afterwards."""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_UNHEARD = 2
"""More signals than this while the loop does not run (a blocked terminal, say) break it by ``KeyboardInterrupt``."""


@contextmanager
def held_back() -> Iterator[set[int]]:
    """Hold signals back while the loop begins or ends, which they would break; gives the mask from before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def forwarded_to(heard: Callable[[signal.Signals], None], mask: set[int]) -> Iterator[None]:
    """Call ``heard`` in the running loop for each signal; those that are ignored stay so (``nohup``).

    ``mask`` holds meanwhile: signals that were held back come now.
    SIGCHLD gets its default, for jobs, too: whoever ignores it cannot wait for children.
    """
    loop = asyncio.get_running_loop()
    unheard = 0

    def deliver(signum: signal.Signals) -> None:
        nonlocal unheard
        unheard -= 1
        heard(signum)

    def caught(number: int, _frame: FrameType | None) -> None:
        nonlocal unheard
        unheard += 1
        if unheard > MAX_UNHEARD:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(deliver, signal.Signals(number))

    heeded = [signum for signum in FORWARDED if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, caught) for signum in heeded}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    held = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for signum, handler in before.items():
            signal.signal(signum, handler)
