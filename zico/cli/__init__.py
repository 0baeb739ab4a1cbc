"""The command line, one file for each command, imported when that command is given."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import resource
import sys
from typing import TYPE_CHECKING

import click

try:
    from zico import __version__
except ImportError:
    import zico

    # Python takes a folder without __init__.py for a package before it asks an editable install.
    if getattr(zico, "__file__", None) is None:
        hides = f"the folder {next(iter(zico.__path__))} hides Zico: change to a directory that has no folder zico"
        raise ImportError(hides) from None
    # The index has another distribution named zico, whose zico/__init__.py has no version.
    raise ImportError(
        "zico/__init__.py is another package's: pip uninstall zico, then "
        "pip install --force-reinstall --no-deps zico-memory"
    ) from None
from zico.base.errors import CommandError, ConfigError, ZicoError, sentence_of
from zico.base.interpreter import at_limit
from zico.base.units import format_bytes
from zico.cli.options import with_json_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoints

CONFIG_CODE = 2
ERROR_CODE = 1
INTERRUPTED_CODE = 130
MAX_REASON_CHARS = 200


COMMANDS = (
    *("attach", "broker", "doctor", "fit", "limit", "logs", "pause", "resume", "run", "status", "stop", "top", "trace"),
)
"""Each is a click command in the module of its name, or in the one of ``_MODULES``."""
_MODULES = {"resume": "pause", "attach": "detached", "logs": "detached", "stop": "detached"}
GROUP = "zico.commands"
"""Entry points that are commands, too: those of the laboratory."""


class LazyGroup(click.Group):
    """Imports a command when it is asked for: ``zico run`` starts without what simulates and draws."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """Return the names of all commands."""
        return sorted({*COMMANDS, *_added().names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Return the command of that name, or ``None``."""
        found: click.Command | None = None
        if cmd_name in COMMANDS:
            found = getattr(importlib.import_module(f"zico.cli.{_MODULES.get(cmd_name, cmd_name)}"), cmd_name)
        else:
            for point in _added().select(name=cmd_name):
                found = point.load()
        return found


def _added() -> EntryPoints:
    from importlib.metadata import entry_points  # milliseconds that zico run does without

    return entry_points(group=GROUP)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zico")
def command() -> None:
    """Train several jobs on one device inside one memory budget."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one line on stderr.

    Args:
        arguments: What follows ``zico``; those of this process by default.
    """
    _open_streams()
    try:
        words = with_json_words(sys.argv[1:] if arguments is None else arguments)
        code = int(command.main(args=words, prog_name="zico", standalone_mode=False) or 0)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED_CODE
    except (ZicoError, OSError, RuntimeError, MemoryError, ImportError) as error:
        sentence, code = _told(error)
        click.echo(f"zico: {sentence}", err=True)
    return code


def _told(error: Exception) -> tuple[str, int]:
    """Return what a command says that ends with an error, and its exit code.

    Raises:
        Exception: The error, if it is a fault of ours.
    """
    if at_its_limit := at_limit(error):
        return at_its_limit, ERROR_CODE
    match error:
        case CommandError():
            return str(error), error.exit_code
        case ZicoError():
            return str(error), CONFIG_CODE if isinstance(error, ConfigError) else ERROR_CODE
        case ImportError() | MemoryError() | OSError(errno=None):
            limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
            if limit_bytes == resource.RLIM_INFINITY:
                raise error
            why = " ".join(str(error).split())[:MAX_REASON_CHARS] or "no memory is left"
            few = f"{format_bytes(limit_bytes)} of addresses are too few: {why}"
            return f"{few}; raise the limit, as in ulimit -v unlimited", ERROR_CODE
        case OSError():
            _drop_output()
            return sentence_of(error), ERROR_CODE
        case RecursionError():
            return "what is to be read is nested too deeply: give a file that is flatter", CONFIG_CODE
        case _:
            raise error


def _open_streams() -> None:
    """Let there be streams, where a process was started without, that take any text."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr from the start


def _drop_output() -> None:
    """Let what is left of stdout go nowhere, if it could not be written: Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
