"""``zico top``: the running pools, refreshed in place, and keys that change them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import sys
import termios
import tty
from typing import TYPE_CHECKING

import click
import msgspec
from rich.live import Live

from zico.base.errors import BrokerError, CommandError, ConfigError
from zico.cli import limit, pause
from zico.cli.brokers import broker_options
from zico.cli.top_screen import Rates, Screen, frame, keys_in, pressed
from zico.launch.brokers import Brokers, Meant
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zico.broker.protocol.messages import Change, Status

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
@broker_options
def top(*, once: bool, interval: float, socket: Path | None, device: str | None) -> int:
    """Watch the running pools, one below another; keys change their budgets and their jobs."""
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError("zico top needs a terminal: use zico status, or zico top --once")
    with Brokers(socket, device) as brokers:
        if once:
            console = TextConsole()
            console.print(frame(brokers.look(), console.width))
        else:
            _watch(brokers, interval)
    return 0


def _watch(brokers: Brokers, interval_s: float) -> None:
    """Draw frames until ``q`` or the end of the input; when the last broker ends, ``CommandError`` is raised."""
    screen = Screen()
    rates: collections.defaultdict[Path, Rates] = collections.defaultdict(Rates)
    console = TextConsole()
    pools = brokers.look()
    with _keys_at_once(sys.stdin.fileno()), Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.ends:
            noted = {path: rates[path].noted(status) for path, status in pools}
            live.update(frame(pools, console.width, screen, noted), refresh=True)
            if select.select([sys.stdin], [], [], interval_s)[0]:
                data = os.read(sys.stdin.fileno(), _MOST_BYTES)
                if not data:
                    return
                for key in keys_in(data):
                    screen, wanted = pressed(screen, key, pools)
                    if wanted is not None:
                        screen = dataclasses.replace(screen, message=_made(brokers, *wanted, dict(pools)))
                        pools = brokers.look()
            pools = brokers.look()


def _made(brokers: Brokers, path: Path, change: Change, before: dict[Path, Status]) -> str:
    """Make a change; returns what has come to be, or why it cannot."""
    try:
        after, processes = brokers.change(path, change)
    except (BrokerError, ConfigError) as error:
        return str(error)
    job = None if change.job is msgspec.UNSET else Meant(change.job)
    if job is not None and change.paused is not msgspec.UNSET:
        return pause.told(job, processes, after)
    return limit.told(job, processes, before[path], after)


@contextlib.contextmanager
def _keys_at_once(fd: int) -> Iterator[None]:
    """Let a terminal give each key when it is pressed, and show none; Ctrl-C stays Ctrl-C."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
