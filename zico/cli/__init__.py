"""The command line, one file for each command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from zico import __version__
from zico.base.errors import CommandError, ConfigError, ZicoError
from zico.cli.broker import broker
from zico.cli.doctor import doctor
from zico.cli.fit import fit
from zico.cli.limit import limit
from zico.cli.plan import plan
from zico.cli.run import run
from zico.cli.simulate import simulate
from zico.cli.status import status
from zico.cli.trace import trace

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG_CODE = 2
ERROR_CODE = 1
INTERRUPTED_CODE = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zico")
def command() -> None:
    """Train several jobs on one device inside one memory budget."""


for _subcommand in (run, plan, fit, simulate, doctor, status, limit, broker, trace):
    command.add_command(_subcommand)


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
    except ConfigError as error:
        return _fail(error, CONFIG_CODE)
    except ZicoError as error:
        return _fail(error, ERROR_CODE)
    return int(code or 0)


def _fail(error: ZicoError, code: int) -> int:
    click.echo(f"zico: {error}", file=sys.stderr)
    return code
