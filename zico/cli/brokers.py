"""Find the broker that a command is about, and say what its jobs get."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from zico.broker.client import BrokerClient
from zico.config import SOCKET_VARIABLE
from zico.errors import BrokerError, CommandError
from zico.launch.rundir import known_sockets

if TYPE_CHECKING:
    from zico.broker.messages import Share, Status

ANSWER_S = 5.0


def candidates(socket: Path | None) -> list[Path]:
    """Return where a broker may listen: what was named, or whatever this user has."""
    if socket is not None:
        return [socket]
    named = os.environ.get(SOCKET_VARIABLE)
    return [Path(named)] if named else known_sockets()


def only_broker(paths: list[Path]) -> tuple[Path, Status]:
    """Return the answer of the only broker that gives one.

    Raises:
        CommandError: None does, or several do.
    """
    answers, reasons = [], []
    for path in paths:
        try:
            with BrokerClient(path, ANSWER_S) as client:
                answers.append((path, client.status()))
        except BrokerError as error:
            reasons.append(str(error))
    if not answers:
        raise CommandError("no broker is running" + "".join(f"; {reason}" for reason in reasons), exit_code=1)
    if len(answers) > 1:
        choices = ", ".join(str(path) for path, _ in answers)
        raise CommandError(f"{len(answers)} brokers are running: choose one with --socket: {choices}")
    return answers[0]


def share_text(share: Share) -> str:
    """Return what a job gets beside the others."""
    parts = [f"weight {share.weight:g}"]
    if share.priority:
        parts.append(f"priority {share.priority}")
    if share.slo is not None:
        parts.append(f"at most {share.slo:.0%} slower")
    return ", ".join(parts)
