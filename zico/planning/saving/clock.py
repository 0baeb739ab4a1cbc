"""The clock by which planners end: the wall's where somebody has set a deadline, else the processor time of the thread.

Without a deadline of the user's, a planner gets an amount of work. On a busy machine its thread's
processor time passes more slowly than the wall's clock, so the planner finds what it finds alone.

Known limitations
    * A faster processor does more work in a second, and two runs on one machine differ a little.
    * SciPy's programs have a limit by the wall's clock.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_clock: contextvars.ContextVar[Callable[[], float]] = contextvars.ContextVar("clock", default=time.monotonic)


def now_s() -> float:
    """Return the time in seconds, by the clock that is in force here."""
    return _clock.get()()


@contextlib.contextmanager
def ended_by(is_over: Callable[[], bool]) -> Iterator[None]:
    """Let planners that are asked inside the block find that no time is left, once something is over."""
    now = _clock.get()
    before = _clock.set(lambda: math.inf if is_over() else now())
    try:
        yield
    finally:
        _clock.reset(before)


@contextlib.contextmanager
def by_processor_time() -> Iterator[None]:
    """Let planners that are asked inside the block count the processor time of their thread."""
    before = _clock.set(time.thread_time)
    try:
        yield
    finally:
        _clock.reset(before)
