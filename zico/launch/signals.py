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
def forwarded_to(heard: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``heard`` in the running loop for each signal; those that are ignored stay so (``nohup``)."""
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

    before = {signum: signal.getsignal(signum) for signum in FORWARDED}
    installed = [signum for signum, handler in before.items() if handler is not signal.SIG_IGN]
    for signum in installed:
        signal.signal(signum, caught)
    try:
        yield
    finally:
        for signum in installed:
            signal.signal(signum, before[signum])
