"""``zico trace -o FILE -- CMD``: run an unmodified program and record what its iterations do to memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zico.cli.display import Display
from zico.cli.options import settings_with
from zico.config import OPS_VARIABLE
from zico.errors import TraceError
from zico.launch.commands import name_commands
from zico.launch.recording import Recording
from zico.launch.rundir import run_directory
from zico.launch.supervisor import supervise

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_recorded(words: Sequence[str], output: Path, *, iterations: int | None, ops: bool, quiet: bool) -> int:
    """Run a command to its end with its memory recorded, write the trace, and return the command's exit code.

    Args:
        words: The command.
        output: The trace; it appears when the command has ended, whether it failed or not.
        iterations: How many to record; the command goes on after them. ``None``: all.
        ops: Record operations and what they read and write, too (PyTorch): of the first iterations, then of two now and
            then, so that it costs 5 % of the time at most in the long run.
        quiet: Show the command's output and problems only.

    Raises:
        TraceError: The file cannot be written, or no process of the command has joined: nothing is written.
    """
    (command,) = name_commands([tuple(words)], ())
    settings = settings_with(["--budget", "none"], n_jobs=1)
    with run_directory() as directory, Display([command.name], quiet=quiet) as display:
        with Recording(output, directory, command.name, iterations=iterations) as recording:
            environ = {**os.environ, **recording.environment, **({OPS_VARIABLE: "1"} if ops else {})}
            outcome = supervise([command], settings, display, environ=environ)
        if not recording.has_begun:
            what = "nothing was recorded: no process of the command imported PyTorch or TensorFlow; see zico doctor"
            raise TraceError(str(output), 0, what)
        if recording.n_dropped:
            display.problem(f"{recording.n_dropped} events are missing: the recorder could not keep up")
        display.message(f"{recording.n_events} events in {output}; zico trace show {output}")
    return outcome.exit_code
