"""Where all that Zico prints with rich goes: text is text, whatever a job, a tensor or a file is called.

Guarantees:
    * Nothing in a text is taken for markup or for the name of an emoji.
    * What nobody would see, or what would turn the order of a line around, is written as an escape.
"""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from zico.broker.protocol.messages import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.text import Text

PLAIN_WIDTH = 160
"""Columns where there is no terminal to ask: wide enough that nothing is cut."""


class TextConsole(Console):
    """A console on a stream, this process's stdout by default."""

    def __init__(self, outfile: IO[str] | None = None) -> None:
        """Ask the terminal, if the stream is one, for its width."""
        found = outfile or sys.stdout
        width = None if found.isatty() else PLAIN_WIDTH
        super().__init__(file=outfile, width=width, markup=False, emoji=False, highlight=False)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a text that only the terminal wraps."""
        self.print(text, style=style, soft_wrap=True)

    def table(self, texts: Iterable[str], numbers: Iterable[str] = (), **how: Any) -> Table:  # noqa: ANN401 - rich's own
        """Return a table without rows yet, framed as suits this console, with columns of texts, then of numbers."""
        table = Table(box=box.SIMPLE_HEAD if self.is_terminal else box.ASCII2, pad_edge=False)
        for column in texts:
            table.add_column(column, **how)
        for column in numbers:
            table.add_column(column, justify="right", **how)
        return table

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401 - rich's own
        """Return the text as rich draws it, also in the cells of a table."""
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)
