"""The options that say which running broker a command is about (``zico.launch.brokers``)."""

from __future__ import annotations

import click

from zico.cli.options import SOCKET, Function

JOB_HELP = "NAME means every process of that name, such as the ranks of one job; NAME/PID one of them."


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
