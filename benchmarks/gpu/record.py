"""The results of a run on a GPU: a file of JSON lines, each appended at once by whoever found it.

A line has ``part``, ``name`` and ``round``, which say what was measured; ``status``, ``figures``,
``seconds`` and ``at``. The newest line of a part, name and round counts. A line is written whole by
one call, so that several processes may append and a run that is killed leaves no half of one but at
its end.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser

DONE, FAILED, KILLED, CUT = "done", "failed", "killed", "cut"
"""Killed: it did not end in time, and is not tried again. Cut: the whole run's time was over first."""
PEAKS = "peaks"
"""The part whose lines later configurations read: what a job holds at most."""

Line = dict[str, Any]


def add_options(parser: ArgumentParser, *, required: bool = True) -> None:
    """Offer what the runner gives to each command."""
    parser.add_argument("--result", type=Path, required=required, metavar="FILE", help="append lines here")
    parser.add_argument("--round", type=int, default=1, metavar="N", help="which repeat this is, from 1 on")


def append(
    file: Path, part: str, name: str, figures: dict[str, Any], *, seconds: float, turn: int = 1, status: str = DONE
) -> None:
    """Append one line, whole or not at all; ``turn`` is which repeat it is."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    line = {"part": part, "name": name, "round": turn, "status": status, "seconds": round(seconds, 2), "at": now}
    data = (json.dumps(line | {"figures": figures}) + "\n").encode()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def close_line(file: Path) -> None:
    """End a last line that was cut off, when the file was copied for example, so that the next one stands alone."""
    if file.exists() and (data := file.read_bytes()) and not data.endswith(b"\n"):
        file.write_bytes(data + b"\n")


def lines(file: Path) -> list[Line]:
    """Return all lines in order; a last one that was cut off is left out, and so is a missing file."""
    if not file.exists():
        return []
    found = []
    for text in file.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def newest(file: Path, part: str, name: str) -> dict[str, Any] | None:
    """Return the figures of the newest line that was done, or nothing; for example the peaks of a job."""
    done = [line for line in lines(file) if (line["part"], line["name"], line["status"]) == (part, name, DONE)]
    return done[-1]["figures"] if done else None
