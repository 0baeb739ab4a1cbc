"""One thought at a time, in a thread beside the broker's own work, and a rest after it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

RESTS = 50
"""After a thought it rests for so many times as long as that took: times that vary must not have it think all the time,
beside jobs that need the processor."""
MOST_REST_S = 10.0  # the first thought of a process loads code as well

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


class Thinking(Generic[Answer]):
    """Keeps the last answer; a thought that fails is logged and leaves none."""

    def __init__(self, name: str, now_s: Callable[[], float] = time.monotonic) -> None:
        """Know nothing; ``name`` is the thread's."""
        self.answer: Answer | None = None
        self._name = name
        self._now_s = now_s
        self._thread: threading.Thread | None = None
        self._rests_until_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Tell whether something is being thought of."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def rests(self) -> bool:
        """Tell whether the last thought is too fresh to have another without need."""
        return self._now_s() < self._rests_until_s

    def begin(self, think: Callable[[], Answer | None], about: str) -> None:
        """Think in a thread; ``about`` is what the log says if that fails."""
        self._thread = threading.Thread(target=self._think, args=(think, about), name=self._name, daemon=True)
        self._thread.start()

    def wait(self, within_s: float) -> bool:
        """Wait until nothing is being thought of; false if that takes longer."""
        if self._thread is not None:
            self._thread.join(within_s)
        return not self.is_busy

    def _think(self, think: Callable[[], Answer | None], about: str) -> None:
        began_s = self._now_s()
        try:
            self.answer = think()
        except Exception:  # noqa: BLE001 - the top of a thread, and jobs go on without an answer
            self.answer = None
            _log.exception("%s", about)
        ended_s = self._now_s()
        self._rests_until_s = ended_s + min(MOST_REST_S, RESTS * (ended_s - began_s))
