"""What people and the operating system say, checked: whole numbers, texts that files can hold, reasons."""

from __future__ import annotations

import re

_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
"""A number of at most 18 digits. Longer ones are beyond every range, and ``int`` refuses thousands."""


def parse_whole(text: str, least: int, most: int) -> int | None:
    """Return the whole number that a text is, ``None`` if it is none from ``least`` to ``most``."""
    if _WHOLE.fullmatch(text) is None:
        return None
    number = int(text)
    return number if least <= number <= most else None


def is_utf8(text: str) -> bool:
    """Tell whether a text can be written as UTF-8: words of a command line are any bytes."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def sentence_of(error: OSError) -> str:
    """Return an error of the operating system as one line says it: which file, and what is wrong with it."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"
