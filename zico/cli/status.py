"""``zico status``: what a running broker's pool looks like now."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from zico.broker.client import BrokerClient
from zico.config import SOCKET_VARIABLE
from zico.errors import BrokerError, CommandError
from zico.launch.rundir import known_sockets
from zico.report.model import waits_for
from zico.report.table import PLAIN_WIDTH, outside_lines
from zico.units import format_bytes

if TYPE_CHECKING:
    from zico.broker.messages import Status

ANSWER_S = 5.0


@click.command()
@click.option(
    "--socket", type=click.Path(path_type=Path), help="The broker's socket (default: $ZICO_SOCKET, else any)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(*, socket: Path | None, as_json: bool) -> int:
    """Show the jobs of a running broker."""
    path, found = _ask(_candidates(socket))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        _show(path, found)
    return 0


def _candidates(socket: Path | None) -> list[Path]:
    """Return where a broker may listen: what was named, or whatever this user has."""
    if socket is not None:
        return [socket]
    named = os.environ.get(SOCKET_VARIABLE)
    return [Path(named)] if named else known_sockets()


def _ask(paths: list[Path]) -> tuple[Path, Status]:
    """Return the answer of the only broker that gives one."""
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
        raise CommandError(f"{len(answers)} brokers are running: name one by --socket: {choices}")
    return answers[0]


def _show(path: Path, found: Status) -> None:
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    console.print(
        f"{path}: device {found.device}, policy {found.policy}, granted {format_bytes(found.granted_bytes)} of "
        f"{format_bytes(found.budget_bytes)} (peak {format_bytes(found.peak_granted_bytes)}), "
        f"physical {format_bytes(found.physical_bytes)}",
        markup=False,
        soft_wrap=True,
    )
    for line in outside_lines(found.context_bytes, found.foreign_bytes):
        console.print(line, markup=False)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2, pad_edge=False)
    for column in ("job", "pid", "framework", "state", "iterations", "it/s", "held", "peak", "waited", "waits for"):
        table.add_column(column, no_wrap=True)
    for job in found.jobs:
        table.add_row(
            job.name,
            str(job.pid),
            job.framework,
            job.state,
            str(job.iterations),
            f"{job.iterations_per_s:.2f}",
            format_bytes(job.held_bytes),
            format_bytes(job.peak_bytes),
            f"{job.waited_s:.1f} s",
            waits_for(job, found.jobs) if job.waiting_s else "",
        )
    console.print(table)
