"""``zico plan SCRIPT:function``: what a function keeps between its passes, by policies that compute some of it again.

``function`` takes no argument and returns the function to differentiate, and its arguments::

    def build():
        return model, (batch,)      # PyTorch: what torch.compile would compile
        return loss, (params, x)    # JAX: what jax.grad would differentiate, by its first argument

Nothing is run: PyTorch traces on fake tensors, and JAX on shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zico.base.errors import ConfigError
from zico.base.units import format_bytes
from zico.cli.options import told_as_json
from zico.lab.cli.fake import defined, named, told_of
from zico.lab.cli.plan_save import limit_of
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zico.lab.cli.plan_save import SaveAsked, Work

    Build = Callable[[], tuple[Callable[..., Any], Sequence[Any]]]

SCHEMA = "zico.passes.v1"
KEPT, NOT_KEPT = 0, 1
"""Exit codes: whether something keeps the limit."""
_ENDS = ".py"
_KEPT_BYTES = "what is kept"
_GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class PassesRow:
    """What is kept between the passes in one way; the first row is the function as it is."""

    name: str
    saved_bytes: int
    again_flops: int


@dataclasses.dataclass(frozen=True)
class PassesReport:
    """What ``--json`` writes."""

    function: str
    framework: str
    flops: int
    """Of both passes, as they are."""
    limit_bytes: int | None
    rows: list[PassesRow]
    schema_version: str = SCHEMA


def is_function(file: Path) -> bool:
    """Tell whether this names a function of a script and no file."""
    return Path(str(file).rpartition(":")[0]).suffix == _ENDS and not file.exists()


def plan_function(asked: SaveAsked, work: Work) -> int:
    """Ask each policy, print and write; returns the exit code of ``zico plan``.

    Raises:
        ConfigError: An option has no meaning here, or the function returns something else.
        TraceError: The script raised.
    """
    refused = {
        "--bandwidth": asked.bandwidth,
        "--overhead": asked.overhead,
        "--bound": asked.bound,
        "--planner": work.planner,
        "--iteration": work.iteration is not None,
        "-o": work.plan_path,
        "--picture": work.picture,
    }
    for option, given in refused.items():
        if given:
            raise ConfigError(f"{option} needs a trace: write one by zico trace --fake, and give that file")
    path, function = named(str(work.file))
    with told_of(path, "check that it trains"):
        build = functools.partial(_built, path, function)
        ask = _torch if _is_torch(*build()) else _jax
        report = ask(build, f"{path.name}:{function}", asked, work)
    _show(report, work.json_path)
    limit_bytes = report.limit_bytes
    return KEPT if limit_bytes is None or any(row.saved_bytes <= limit_bytes for row in report.rows) else NOT_KEPT


def _built(path: Path, function: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    made = defined(path, function, "a function and its arguments")()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):  # noqa: PLR2004 - a pair
        raise ConfigError(
            f"{function!r} of {path} returned {made!r:.60}: return a function and a tuple of its arguments, "
            "or write a trace of a training step by zico trace --fake"
        )
    return made[0], made[1]


def _is_torch(function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
    """Tell whether the script uses PyTorch; what it returned has been made by what it imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return isinstance(function, torch.nn.Module) or any(isinstance(each, torch.Tensor) for each in arguments)


# -- PyTorch ---------------------------------------------------------------------------------------


def _torch(build: Build, name: str, asked: SaveAsked, work: Work) -> PassesReport:
    """Let torch.compile part the passes as it does alone, and for the limit by its own solver and by ours."""
    compiled = importlib.import_module("zico.lab.frameworks.torch_compiled")
    if asked.save is not None and asked.save not in compiled.PLANNERS:
        raise ConfigError(
            f"--save {asked.save} cannot plan compiled graphs: give one of {', '.join(compiled.PLANNERS)}"
        )
    if (asked.limit is None) is not (asked.save is None):
        raise ConfigError("compiled graphs are planned for a limit: give --save NAME and --limit SIZE, or neither")
    alone = compiled.passes_of(build)
    limit_bytes = limit_of(asked.limit, alone.saved_bytes, _KEPT_BYTES)
    rows = [PassesRow("torch.compile", alone.saved_bytes, alone.again_flops)]
    if limit_bytes is not None:
        budget = min(1.0, limit_bytes / max(alone.saved_bytes, 1))
        seconds = work.deadline_s or compiled.SECONDS
        planners = compiled.PLANNERS if work.compare else (asked.save or "",)
        solvers = {"dp (PyTorch)": "dp", **{each: compiled.Solver(each, seconds) for each in planners}}
        for each, solver in solvers.items():
            found = compiled.passes_of(build, budget, solver)
            rows.append(PassesRow(each, found.saved_bytes, found.again_flops))
    return PassesReport(name, "torch", alone.flops, limit_bytes, rows)


# -- JAX -------------------------------------------------------------------------------------------


def _jax(build: Build, name: str, asked: SaveAsked, _work: Work) -> PassesReport:
    """Say what each policy of jax.checkpoint around the whole function would do."""
    if asked.save is not None:
        raise ConfigError("--save plans for PyTorch, and policies of jax.checkpoint are the script's: leave out --save")
    try:
        policies = importlib.import_module("zico.lab.frameworks.jax_policies")
    except ImportError as error:
        raise ConfigError(
            f"{name} uses neither PyTorch nor JAX, which is not there ({error}): pip install jax"
        ) from error
    function, arguments = build()
    alone = policies.passes_of(function, arguments)
    rows = [PassesRow("(as it is)", alone.saved_bytes, 0)]
    for policy in policies.POLICIES:
        found = policies.passes_of(function, arguments, policy)
        rows.append(PassesRow(policy, found.saved_bytes, max(0, found.flops - alone.flops)))
    return PassesReport(name, "jax", alone.flops, limit_of(asked.limit, alone.saved_bytes, _KEPT_BYTES), rows)


# -- what it prints --------------------------------------------------------------------------------


def _show(report: PassesReport, json_path: Path | None) -> None:
    if told_as_json(report, json_path):
        return
    console = TextConsole()
    limit = "" if report.limit_bytes is None else f", limit {format_bytes(report.limit_bytes)}"
    line = f"{report.function}: {report.framework}, {report.flops / _GIGA:.3g} GFLOP in both passes{limit}"
    console.say(line)
    name = "policy" if report.framework == "jax" else "planner"
    table = console.table((name,), ("saved between the passes", "of before", "computed again", "of all"))
    before_bytes = max(report.rows[0].saved_bytes, 1)
    for row in report.rows:
        table.add_row(
            *(row.name, format_bytes(row.saved_bytes), f"{row.saved_bytes / before_bytes:.1%}"),
            *(f"{row.again_flops / _GIGA:.3f} GFLOP", f"{row.again_flops / max(report.flops, 1):.1%}"),
        )
    console.print(table)
