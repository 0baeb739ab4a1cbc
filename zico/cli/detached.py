"""``zico logs``, ``attach`` and ``stop``: runs that ``zico run --detach`` has started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from zico.launch.detached import DIRECTORY_VARIABLE, Run, known, named, note_begun
from zico.report.console import TextConsole
from zico.report.files import write_atomically

COLUMNS = ("run", "state", "for", "command")
TAIL_BYTES = 4096
"""What ``zico attach`` shows first of what has been said."""


def runs_begun(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Return the names of runs that begin so, for a shell that completes words."""
    return [run.name for run in known() if run.name.startswith(begun)]


@click.command()
@click.argument("name", required=False, shell_complete=runs_begun)
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
def logs(*, name: str | None, follow: bool) -> int:
    """Print what a detached run has said; without NAME, list the runs."""
    if name is None:
        _list()
    else:
        _print(named(name), follow=follow)
    return 0


@click.command()
@click.argument("name", shell_complete=runs_begun)
def attach(*, name: str) -> int:
    """Show what a detached run says until it ends, with its exit code. Ctrl-C leaves it to itself."""
    run = named(name)
    _print(run, from_byte=max(0, run.log.stat().st_size - TAIL_BYTES), follow=True)
    return _code_of(run)


@click.command()
@click.argument("name", shell_complete=runs_begun)
def stop(*, name: str) -> int:
    """End a detached run and its jobs as a signal does, and wait until it has ended."""
    run = named(name)
    click.echo(f"zico: {name} has ended" if run.end() else f"zico: {name} had ended before", err=True)
    return 0


def wait_for(name: str) -> None:
    """Wait until a detached run has ended, with a line before that says so."""
    run = named(name)
    if run.lives:
        note_begun()
        click.echo(f"zico: waits until {name} has ended", err=True)
        run.wait()


def _print(run: Run, *, from_byte: int = 0, follow: bool = False) -> None:
    for chunk in run.said(from_byte=from_byte, follow=follow):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _code_of(run: Run) -> int:
    code = run.exit_code
    if code is None:
        click.echo(f"zico: {run.name} was killed", err=True)
        return 1
    return code


def _list() -> None:
    console = TextConsole()
    table = console.table(COLUMNS, no_wrap=True)
    for run in known():
        code = run.exit_code
        ended = "was killed" if code is None else f"ended with {code}"
        table.add_row(run.name, "runs" if run.lives else ended, _ago(time.time() - run.began_s), " ".join(run.words))
    console.print(table)


def _ago(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60:02} min" if hours else f"{rest // 60} min {rest % 60:02} s"


def main() -> int:
    """Be the process of a run: ``DIRECTORY WORDS...``."""
    from zico.cli import main as command

    directory, *words = sys.argv[1:]
    os.environ[DIRECTORY_VARIABLE] = directory
    code = command(["run", *words])
    write_atomically(Path(directory, "exit"), str(code).encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
