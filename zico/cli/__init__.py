"""The command line, one file for each command, imported when that command is given."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import click

from zico import __version__
from zico.base.errors import CommandError, ConfigError, ZicoError
from zico.base.interpreter import at_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG_CODE = 2
ERROR_CODE = 1
INTERRUPTED_CODE = 130


COMMANDS = (
    *("broker", "doctor", "fit", "limit", "pause", "plan", "resume", "run", "simulate", "status", "top", "trace"),
)
"""Each is a click command in the module of its name, or in the one of ``_MODULES``."""
_MODULES = {"resume": "pause"}


class LazyGroup(click.Group):
    """Imports a command when it is asked for: ``zico run`` starts without what simulates and draws."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Return the command of that name, or ``None``."""
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(
            importlib.import_module(f"zico.cli.{_MODULES.get(cmd_name, cmd_name)}"), cmd_name
        )
        return found


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zico")
def command() -> None:
    """Train several jobs on one device inside one memory budget."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one line on stderr.

    Args:
        arguments: What follows ``zico``; those of this process by default.
    """
    try:
        code = command.main(args=arguments, prog_name="zico", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED_CODE
    except CommandError as error:
        return _fail(error, error.exit_code)
    except ZicoError as error:
        return _fail(error, CONFIG_CODE if isinstance(error, ConfigError) else ERROR_CODE)
    except (OSError, RuntimeError) as error:
        if not (told := at_limit(error)):
            raise
        return _fail(ZicoError(told), ERROR_CODE)
    return int(code or 0)


def _fail(error: ZicoError, code: int) -> int:
    click.echo(f"zico: {error}", file=sys.stderr)
    return code
