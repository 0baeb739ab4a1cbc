"""Tell the broker that this process is outside its pool, and why.

A run reports that, also where nobody reads what the process writes to its standard error.

Guarantees: the standard library is enough, since one of the reasons is that this Python has none of
what Zico needs. A broker that does not listen costs ``DEADLINE_S`` at most, one that is gone
nothing. Only a ``ZICO_STARTING`` that is no number of seconds raises an error (``ConfigError``).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from zico.base.settings import RUN_VARIABLE, job_name
from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Mapping

DEADLINE_S = 2.0
MAX_NAME_CHARS = 48
MAX_REASON_CHARS = 300
"""Both as in ``zico.broker.protocol.messages``, which needs more than the standard library."""

_MAP, _STRING, _NUMBER = 0x80, 0xDA, 0xCE
"""First bytes of msgpack's map of up to 15 entries, its string of 16 bits' length, and its number of 32 bits."""


def tell(framework: str, reason: str) -> None:
    """Say that this process shares no memory of a framework; waits until the broker has taken that in.

    A broker that is starting is awaited, as by a process that joins.
    """
    import socket

    path = session.socket_to_join()
    if path is None:
        return
    frame = outside_frame(framework, reason)
    end_s = time.monotonic() + DEADLINE_S
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(str(path))
        connection.sendall(frame)
        while time.monotonic() < end_s and connection.recv(4096):  # the broker hangs up when it has noted it
            pass


def outside_frame(framework: str, reason: str) -> bytes:
    """Return the frame of an ``Outside`` message of this process (``zico.broker.protocol.messages``)."""
    run = os.environ.get(RUN_VARIABLE, "")
    fields: dict[str, str | int] = {
        "type": "outside",
        "name": _printable(job_name(os.environ, sys.argv[0]), MAX_NAME_CHARS),
        "pid": os.getpid(),
        "framework": _printable(framework, MAX_NAME_CHARS),
        "reason": _printable(reason, MAX_REASON_CHARS),
        "run": run,
    }
    body = _packed(fields)
    return len(body).to_bytes(4, "big") + body


def _printable(text: str, most: int) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)[:most]


def _packed(fields: Mapping[str, str | int]) -> bytes:
    parts = [bytes([_MAP | len(fields)])]
    for name, value in fields.items():
        parts.append(_packed_string(name))
        number = isinstance(value, int)
        parts.append(_NUMBER.to_bytes(1, "big") + value.to_bytes(4, "big") if number else _packed_string(value))  # type: ignore[arg-type, union-attr]
    return b"".join(parts)


def _packed_string(text: str) -> bytes:
    encoded = text.encode()
    return _STRING.to_bytes(1, "big") + len(encoded).to_bytes(2, "big") + encoded
