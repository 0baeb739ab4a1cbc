"""``zico trace``: record what a program's iterations do to memory, and show it."""

from __future__ import annotations

from pathlib import Path

import click

from zico.cli.dashes import AFTER_DASHES, DashesCommand
from zico.cli.trace_show import show

RECORD = "record"


class _RecordByDefault(click.Group):
    """A group in which ``zico trace -o FILE ...`` means ``zico trace record -o FILE ...``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command's name in where none stands."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [RECORD, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RecordByDefault, subcommand_metavar="[record] -o FILE ... | show FILE")
def trace() -> None:
    """Record what a program's iterations do to memory, or show a recording."""


@trace.command(RECORD, cls=DashesCommand, options_metavar="-o FILE [OPTIONS]")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The trace to write.")
@click.option("--fake", is_flag=True, help="Trace a PyTorch training step without computing: SCRIPT:function.")
@click.option(
    "--device-model",
    metavar="NAME",
    default="A100-40GB",
    show_default=True,
    help="With --fake: the device whose speed and memory to assume.",
)
@click.option("--iterations", type=click.IntRange(min=1), metavar="N", help="Record only the first N iterations.")
@click.option(
    "--ops", is_flag=True, help="PyTorch: record the operations of some iterations, too. Costs at most 5 % of the time."
)
@click.option("--quiet", is_flag=True, help="Show only the program's output and problems.")
@click.argument("target", metavar="[SCRIPT:function | -- CMD ARG ...]", required=False)
@click.pass_context
def record(  # noqa: PLR0913 - one parameter per option
    ctx: click.Context,
    *,
    output: Path,
    fake: bool,
    device_model: str,
    iterations: int | None,
    ops: bool,
    quiet: bool,
    target: str | None,
) -> int:
    """Record the memory of a program: zico trace -o FILE -- python train.py."""
    words = ctx.meta.get(AFTER_DASHES)
    if fake and target is not None and not words:
        from zico.cli.trace_fake import run_fake

        return run_fake(target, output, device_model)
    if fake or target is not None or not words:
        raise click.UsageError("give -- CMD ARG ... to record a program, or --fake SCRIPT:function")
    from zico.cli.trace_record import run_recorded

    return run_recorded(words, output, iterations=iterations, ops=ops, quiet=quiet)


trace.add_command(show)
