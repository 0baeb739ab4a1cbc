"""The options that say which running broker a command is about (``zico.launch.brokers``)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from zico.base.errors import ZicoError
from zico.cli.options import SOCKET, Function
from zico.launch.brokers import Brokers

JOB_HELP = "NAME means every process of that name, such as the ranks of one job; NAME/PID one of them."


def jobs_begun(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Return the names of jobs in pools that begin so, for a shell that completes words; none if nobody answers."""
    socket = context.params.get("socket")
    with (
        contextlib.suppress(ZicoError, OSError),
        Brokers(socket and Path(socket), context.params.get("device")) as found,
    ):
        names = {job.name for _, status in found.look() for job in status.jobs}
        return sorted(name for name in names if name.startswith(begun))
    return []


def broker_options(function: Function) -> Function:
    """Add the options that say which broker a command is about."""
    for option in (
        click.option(
            "--device",
            metavar="DEVICE",
            help="The broker of this device: host, host:N or cuda:N (default: of any device).",
        ),
        click.option(
            "--socket",
            type=SOCKET,
            metavar="PATH",
            help="The broker's socket (default: $ZICO_SOCKET, else whichever brokers run).",
        ),
    ):
        function = option(function)
    return function
