"""``zico status``: what a running broker's pool looks like now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from zico.base.units import format_bytes
from zico.cli.brokers import broker_options
from zico.cli.options import json_option, share_text, told_as_json
from zico.launch.brokers import Brokers
from zico.report.console import TextConsole
from zico.report.model import waits_for
from zico.report.table import outside_lines, shared_text

if TYPE_CHECKING:
    from pathlib import Path

    from zico.broker.protocol.messages import Status


COLUMNS = (
    *("job", "pid", "framework", "state", "iterations", "it/s"),
    *("held", "peak", "limit", "share", "waited", "waits for"),
)


@click.command()
@broker_options
@json_option
def status(*, socket: Path | None, device: str | None, json_path: Path | None) -> int:
    """Show the running brokers and their jobs. With several, --json prints a list."""
    with Brokers(socket, device) as brokers:
        found = brokers.look()
    if not told_as_json([status for _, status in found] if len(found) > 1 else found[0][1], json_path):
        for path, status in found:
            _show(path, status)
    return 0


def _show(path: Path, found: Status) -> None:
    console = TextConsole()
    console.say(
        f"{path}: device {found.device}, policy {found.policy}, granted {format_bytes(found.granted_bytes)} of "
        f"{format_bytes(found.budget_bytes)} (peak {format_bytes(found.peak_granted_bytes)})"
        f"{shared_text(found.shared_bytes)}, physical {format_bytes(found.physical_bytes)}{_about(found)}"
    )
    if found.fault:
        console.say(found.fault)
    for line in outside_lines(found.context_bytes, found.foreign_bytes):
        console.print(line)
    table = console.table(COLUMNS, no_wrap=True)
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
            format_bytes(job.limit_bytes) if job.limit_bytes else "",
            share_text(job.share),
            f"{job.waited_s:.1f} s",
            waits_for(job, found.jobs) if job.waiting_s else "",
        )
    console.print(table)


def _about(found: Status) -> str:
    """Return what else is to be known of the budget."""
    parts = []
    if found.budget_bytes != found.first_budget_bytes:
        parts.append(f"first budget {format_bytes(found.first_budget_bytes)}")
    if found.most_bytes > found.budget_bytes:
        parts.append(f"can be raised to {format_bytes(found.most_bytes)}")
    if found.isolated:
        parts.append("isolated")
    return "".join(f", {part}" for part in parts)
