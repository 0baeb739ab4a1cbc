"""A command that knows whether ``--`` was given: click alone cannot tell its arguments from those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.cli.options import PoolCommand

if TYPE_CHECKING:
    import click

AFTER_DASHES = "zico.after_dashes"
"""Key in ``click.Context.meta``; absent without ``--``."""


class DashesCommand(PoolCommand):
    """All that follows the first ``--`` is one command of the user's, kept apart from our options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before ``--`` and keep the rest."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[AFTER_DASHES] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)
