"""``zico doctor``: whether Zico is active for each framework found and, if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.text import Text

from zico.base.errors import ConfigError
from zico.cli.options import AFTER_DASHES, DashesCommand, json_option, settings_with, told_as_json
from zico.launch.doctor import Diagnosis, Finding, diagnose
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from pathlib import Path

TRIAL_BUDGET = "256MiB"


@click.command(cls=DashesCommand, epilog="A command may follow --, and runs to its end: zico doctor -- python train.py")
@json_option
@click.option("--budget", metavar="SIZE", default=TRIAL_BUDGET, help=f"Memory for the trial (default: {TRIAL_BUDGET}).")
@click.pass_context
def doctor(ctx: click.Context, *, json_path: Path | None, budget: str) -> int:
    """Check whether Zico works here, and say why if it does not.

    It tries each installed framework, or the command after --. The exit code is 0 if Zico is active
    for all of them, else 1.
    """
    argv = ctx.meta.get(AFTER_DASHES, ())
    if argv == () and AFTER_DASHES in ctx.meta:
        raise ConfigError("no command after --: give a program and its arguments")
    found = diagnose(settings_with(["--budget", budget], n_jobs=1), argv)
    if not told_as_json(found, json_path):
        _show(found)
    return 0 if found.active else 1


def _show(found: Diagnosis) -> None:
    console = TextConsole()
    table = console.table(("check", "", "detail"), overflow="fold")
    for check in found.checks:
        verdict = "-" if check.passed is None else _verdict(check.passed, "ok", "not ok")
        table.add_row(check.name, verdict, check.detail)
    for finding in found.frameworks:
        name = f"{finding.name} {finding.version}".strip()
        table.add_row(name, _verdict(finding.active, "active", "not active"), _detail(finding))
    console.print(table)
    if not found.frameworks:
        console.print("no framework is installed here: pip install 'zico-memory[torch]' or 'zico-memory[tensorflow]'")


def _verdict(good: bool, yes: str, no: str) -> Text:  # noqa: FBT001 - it chooses between two words
    return Text(yes, "green") if good else Text(no, "red")


def _detail(finding: Finding) -> str:
    if finding.reason:
        return finding.reason
    detail = f"{finding.pool_fraction:.1%} of the tensors' bytes in the pool"
    if not finding.tested_version:
        return detail
    is_tested = any(finding.version.startswith(f"{version}.") for version in finding.tested_version.split(", "))
    return f"{detail}, {'a tested version' if is_tested else f'not a tested version ({finding.tested_version})'}"
