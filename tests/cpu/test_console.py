"""What is printed with rich: every text as it is, and nothing in it acts."""

from __future__ import annotations

import io

from hypothesis import example, given
from hypothesis import strategies as st
from rich.table import Table

from zico.broker.protocol.messages import visible
from zico.report.console import PLAIN_WIDTH, TextConsole

names = st.text(min_size=1, max_size=12).filter(lambda text: text == text.strip() and visible(text).isascii())


@given(names)
@example("[/]")
@example("[red]x[/red]")
@example(":smile:")
@example("\u202eevil\u2066")
@example("a\x1b[2Jb")
@example("\ud800")
@example("two\nlines")
def test_any_text_is_printed_as_it_is(name: str) -> None:
    """A text is neither markup nor emoji, what cannot be seen is an escape, and a line's end stays one."""
    lines = [visible(line).strip() for line in name.split("\n") if line.strip()]
    for printed in (name, _table(name)):
        outfile = io.StringIO()
        TextConsole(outfile).print(printed)
        assert [line.strip() for line in outfile.getvalue().splitlines() if line.strip()] == lines


def _table(name: str) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_row(name)
    return table


def test_where_there_is_no_terminal_lines_are_wide() -> None:
    """No line is cut where nobody tells a width."""
    assert TextConsole(io.StringIO()).width == PLAIN_WIDTH
