"""``zico top``: a running pool, refreshed in place, and keys that change it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import sys
import termios
import tty
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.live import Live

from zico.base.errors import CommandError, ConfigError
from zico.broker.client import BrokerClient
from zico.cli import limit, pause
from zico.cli.options import ANSWER_S, candidates, only_broker
from zico.cli.top_screen import Rates, Screen, frame, keys_in, pressed
from zico.report.table import PLAIN_WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.broker.protocol.messages import Change

INTERVAL_S = 1.0
_MOST_BYTES = 1024


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end; needs no terminal.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=INTERVAL_S,
    metavar="SECONDS",
    help=f"How often to look, 0.1 to 3600 (default: {INTERVAL_S:g}).",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The broker's socket (default: $ZICO_SOCKET, else the only broker that runs).",
)
def top(*, once: bool, interval: float, socket: Path | None) -> int:
    """Watch a running pool; keys change its budget and its jobs."""
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError("zico top needs a terminal: use zico status, or zico top --once")
    path, status = only_broker(candidates(socket))
    if once:
        console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
        console.print(frame(status, console.width))
        return 0
    with BrokerClient(path, ANSWER_S) as client:
        _watch(client, interval)
    return 0


def _watch(client: BrokerClient, interval_s: float) -> None:
    """Draw frames until ``q`` or the end of the input; a broker that ends raises ``BrokerError``."""
    screen, rates = Screen(), Rates()
    console = Console(highlight=False)
    with _keys_at_once(sys.stdin.fileno()), Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.ends:
            status = client.status()
            live.update(frame(status, console.width, screen, rates.noted(status)), refresh=True)
            if not select.select([sys.stdin], [], [], interval_s)[0]:
                continue
            data = os.read(sys.stdin.fileno(), _MOST_BYTES)
            if not data:
                return
            for key in keys_in(data):
                screen, change = pressed(screen, key, status)
                if change is not None:
                    screen = dataclasses.replace(screen, message=_made(client, change))
                    status = client.status()


def _made(client: BrokerClient, change: Change) -> str:
    """Make a change; returns what has come to be, or why it cannot."""
    before = client.status()
    try:
        client.change(change)
    except ConfigError as error:
        return str(error)
    job = None if change.job is msgspec.UNSET else change.job
    if job is not None and change.paused is not msgspec.UNSET:
        return pause.told(job, client.status())
    return limit.told(job, before, client.status())


@contextlib.contextmanager
def _keys_at_once(fd: int) -> Iterator[None]:
    """Let a terminal give each key when it is pressed, and show none; Ctrl-C stays Ctrl-C."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
