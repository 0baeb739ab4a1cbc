"""What a supervisor tells the one who started it. The library prints nothing itself."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zico.report.model import Snapshot


class Stream(enum.Enum):
    """Which of a job's output streams."""

    STDOUT = "stdout"
    STDERR = "stderr"


class Listener(Protocol):
    """Whoever shows the run. Calls come one at a time, from the thread that runs the supervisor."""

    interval_s: float
    """How often to be told of the progress."""

    def output(self, name: str, stream: Stream, lines: list[bytes]) -> None:
        """Pass on complete lines, without their ends, of the job called ``name``.

        Raises:
            BrokenPipeError: Nobody reads any more; the run then ends as on SIGTERM.
        """

    def message(self, text: str) -> None:
        """Say one line about the run itself that a quiet run can do without."""

    def problem(self, text: str) -> None:
        """Say one line that the user must see."""

    def progress(self, snapshot: Snapshot) -> None:
        """Show how far the run is."""
