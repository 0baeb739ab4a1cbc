"""What a run shows: the jobs' output line by line, and Zico's own words and progress on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zico.launch.listener import Stream
from zico.report.progress import colour_of, live_table, plain_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from zico.report.model import Snapshot

LIVE_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 10.0


class Display:
    """A listener that writes to this process's streams. Enter it before the run, leave it afterwards.

    The jobs' bytes are passed on as they are, with the job's name before each line. On a terminal a live table stands
    below them: it is taken away while lines are written and drawn again after them.
    """

    def __init__(self, names: Sequence[str], *, quiet: bool) -> None:
        """Show the jobs called ``names``; ``quiet`` leaves messages and progress out."""
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._table = Table()
        self._is_live = self._console.is_terminal and not quiet
        self.interval_s = LIVE_INTERVAL_S if self._is_live else PLAIN_INTERVAL_S
        self._shown_s = time.monotonic()
        self._files = {stream: cast("TextIO", getattr(sys, stream.value)) for stream in Stream}
        self._prefixes = {
            (name, stream): _prefix(name, number, max(map(len, names)), file)
            for number, name in enumerate(names)
            for stream, file in self._files.items()
        }

    def __enter__(self) -> Self:
        """Show nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the live table away and give the cursor back."""
        self._hide()

    def output(self, name: str, stream: Stream, lines: list[bytes]) -> None:
        """Write a job's lines to the same stream of ours."""
        prefix = self._prefixes[name, stream]
        with self._above_the_table():
            file = self._files[stream]
            file.flush()
            file.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
            file.buffer.flush()

    def message(self, text: str) -> None:
        """Write a line of our own unless quiet."""
        if not self._quiet:
            self.problem(text)

    def problem(self, text: str) -> None:
        """Write a line of our own."""
        # Without a reader of our words the jobs go on.
        with contextlib.suppress(BrokenPipeError), self._above_the_table():
            self._console.print(f"zico: {text}", markup=False, soft_wrap=True)

    def progress(self, snapshot: Snapshot) -> None:
        """Draw the table again on a terminal; elsewhere write a line per job every ``PLAIN_INTERVAL_S``."""
        if self._is_live:
            self._table = live_table(snapshot)
            if self._live is None:
                self._show()
            else:
                self._live.update(self._table, refresh=True)
        elif time.monotonic() - self._shown_s >= PLAIN_INTERVAL_S:
            self._shown_s = time.monotonic()
            for line in plain_lines(snapshot):
                self.message(line)

    @contextlib.contextmanager
    def _above_the_table(self) -> Iterator[None]:
        """Take the table away for as long as something else is written."""
        shown = self._live is not None
        self._hide()
        try:
            yield
        finally:
            if shown:
                self._show()

    def _show(self) -> None:
        # A new one each time: a stopped one would erase as many lines as it once had, whatever stands there now.
        self._live = Live(
            self._table,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _prefix(name: str, number: int, width: int, file: TextIO) -> bytes:
    """Return what stands before each line, coloured where the stream takes colours."""
    console = Console(file=file, highlight=False)
    with console.capture() as captured:
        console.print(Text.assemble((f"{name:{width}}", colour_of(number)), " | "), end="", soft_wrap=True)
    return captured.get().encode()
