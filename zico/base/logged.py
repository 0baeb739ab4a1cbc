"""Numbers that a job logs: a line of its standard output, which ``zico run`` keeps for reports and tables of sweeps."""

from __future__ import annotations

import math
import os
import re
import sys

from zico.base.errors import ConfigError
from zico.base.settings import JOB_VARIABLE

_BEGIN = "zico.log "
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
MOST_BYTES = 1024
MOST_NAMES = 16
"""Of a job: columns of a table."""


def log(**values: float) -> None:
    """Log numbers of this job, such as ``loss=0.3``; the last of each name is in the report and a sweep's table.

    Prints one line to standard output. Outside ``zico run`` nothing happens.

    Raises:
        ConfigError: A value is no number.
    """
    if not os.environ.get(JOB_VARIABLE) or not values:
        return
    try:
        words = [f"{name}={float(value)!r}" for name, value in values.items()]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"zico.log: give numbers, such as loss=0.3 ({error})") from None
    sys.stdout.write(f"{_BEGIN}{' '.join(words)}\n")
    sys.stdout.flush()


def values_in(line: bytes) -> dict[str, float]:
    """Return the numbers that a line of a job's output logs; what is no such line, or no number, has none."""
    if not line.startswith(_BEGIN.encode()) or len(line) > MOST_BYTES:
        return {}
    found = {}
    for word in line.decode(errors="replace").removeprefix(_BEGIN).split():
        name, _, text = word.partition("=")
        try:
            value = float(text)
        except ValueError:
            continue
        if _NAME.fullmatch(name) and math.isfinite(value):  # JSON has no others
            found[name] = value
    return found
