"""Exit codes that answer a question, and errors that must not be taken for an answer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from zico.errors import CommandError, ZicoError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def errors_end_with(exit_code: int) -> Iterator[None]:
    """Let every error inside end the command with this code."""
    try:
        yield
    except ZicoError as error:
        raise CommandError(str(error), exit_code=exit_code) from error
