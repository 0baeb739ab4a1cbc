"""``zico fit SCRIPT:function --batch 8..512``: the largest batch of a job that a budget holds, before it runs.

The step is traced without computing (``zico.lab.cli.fake``), and the trace goes through the heap that
jobs have (``zico.lab.simulator.held``). What a job holds grows nearly in proportion to its batch, so
a few batches lead to the largest that fits. It and the next larger one are traced themselves.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from typing import TYPE_CHECKING

import click

from zico.base.errors import ConfigError
from zico.base.units import format_bytes
from zico.cli.options import told_as_json
from zico.lab.cli.fake import fake
from zico.lab.simulator.held import Held, held_by
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zico.lab.simulator.roofline import DeviceModel

SCHEMA = "zico.forecast.v1"
MARGIN = 0.05
"""A job may hold so much more than its forecast, of which kernels' own memory is the largest part."""
MARGIN_REGIONS = 2
"""Or so many regions: where tensors lie differs by when a plan is ready (benchmarks/results/forecast.md)."""
_ITERATIONS = 2
_PATIENCE = 3
"""After so many guesses by a line that did not halve the range, the next one does."""
_RANGE = re.compile(r"([0-9]{1,12})(?:\.\.([0-9]{1,12}))?")
_HOST_NOTE = "not in it: what kernels allocate for themselves, but for oneDNN's copies of images and its workspaces"
_CUDA_NOTE = "not in it: the process's context, workspaces of kernels, and what streams give back late"


@dataclasses.dataclass(frozen=True)
class Need:
    """What a job needs at one batch; ``--json`` has it for each that was traced."""

    batch: int | None
    """``None``: the function takes none."""
    held_bytes: int
    """The most regions that it holds, its first iterations included."""
    live_bytes: int
    """The most bytes of tensors in them."""
    needed_bytes: int
    """The regions with the margin: a budget of so much is enough."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What ``--json`` prints."""

    answer: str
    job: str
    device: str
    budget_bytes: int
    region_bytes: int
    fits: Need | None
    """The largest batch that fits."""
    too_large: Need | None
    """The next larger one, or the least of all; ``None`` where the largest of the range fits."""
    tried: tuple[Need, ...]
    seconds: float
    """How long it took to know."""
    note: str
    schema_version: str = SCHEMA


def run_forecast(
    target: str,
    batches: str | None,
    model: DeviceModel,
    budget_bytes: int,
    region_bytes: int,
    json_path: Path | None = None,
) -> bool:
    """Find the largest batch that fits, or whether a job fits that has no batch; print it and tell whether any fits.

    Raises:
        ConfigError: There is no such script, function or range of batches, or no PyTorch.
        TraceError: The script fails.
    """
    began_s = time.monotonic()
    tried: dict[int | None, Need] = {}

    def needs(batch: int | None) -> int:
        if sys.stderr.isatty():
            click.echo(f"zico: tracing {target}" + (f" at batch {batch}" if batch is not None else ""), err=True)
        tried[batch] = need(target, batch, model, region_bytes)
        return tried[batch].needed_bytes

    best: int | None = None
    following: int | None = None
    if batches is None:
        is_some = needs(None) <= budget_bytes
    else:
        least, most = range_of(batches)
        best = largest_that_fits(needs, budget_bytes, least, most)
        is_some = best is not None
        following = least if best is None else best + 1
    fits = tried[best] if is_some else None
    too_large = tried.get(following) if batches is not None or not is_some else None
    found = Forecast(
        *("fits" if is_some else "does not fit", target, model.name, budget_bytes, region_bytes, fits, too_large),
        tuple(sorted(tried.values(), key=lambda one: one.batch or 0)),
        time.monotonic() - began_s,
        _CUDA_NOTE if model.is_cuda else _HOST_NOTE,
    )
    if not told_as_json(found, json_path):
        _show(found)
    return is_some


def need(target: str, batch: int | None, model: DeviceModel, region_bytes: int) -> Need:
    """Return what a job of ``SCRIPT:function`` holds at a batch; ``None``: the function takes none.

    Raises:
        ConfigError, TraceError: As ``fake``.
    """
    marks: list[int] = []
    arguments = {} if batch is None else {"batch": batch}
    at = "" if batch is None else f"at batch {batch} the script fails: "
    remedy = f"{at}check that it trains for real"
    trace = fake(target, model, arguments, remedy, iterations=_ITERATIONS, marks=marks, copies=True)
    held = held_by(trace, region_bytes, marks)
    held_bytes = held.held_bytes + _small_bytes(held, model, region_bytes)
    return Need(batch, held_bytes, held.live_bytes, with_margin(held_bytes, region_bytes))


def with_margin(held_bytes: int, region_bytes: int) -> int:
    """Return the budget that is enough for a job whose forecast is so many bytes of regions."""
    share = -(-round(held_bytes * MARGIN) // region_bytes) * region_bytes
    return held_bytes + max(share, MARGIN_REGIONS * region_bytes)


def _small_bytes(held: Held, model: DeviceModel, region_bytes: int) -> int:
    """Return what small tensors hold, which on a GPU share regions of their own."""
    return -(-held.small_bytes // region_bytes) * region_bytes if model.is_cuda else 0


# -- the largest batch -----------------------------------------------------------------------------


def range_of(text: str) -> tuple[int, int]:
    """Return the least and the largest batch of ``8..512``, or of one batch.

    Raises:
        ConfigError: It is not such a range.
    """
    found = _RANGE.fullmatch(text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--batch {text!r} is no range of batches: give the least and the largest, as in 8..512")
    return least, most


def largest_that_fits(needs: Callable[[int], int], budget_bytes: int, least: int, most: int) -> int | None:
    """Return the largest batch whose need is within the budget; ``None``: not even the least one's.

    It has been asked for the answer, and for the next larger one if that is in the range. Where needs
    do not rise with the batch, the answer still fits and the next one does not.

    Args:
        needs: Bytes by batch. Asked for about four batches if it is a line, for four times the
            logarithm of the range at most.
        budget_bytes: What must hold them.
        least: The smallest batch.
        most: The largest.
    """
    low, high = (least, needs(least)), (most + 1, 0)
    if low[1] > budget_bytes:
        return None
    if least < most:
        top = needs(most)
        if top <= budget_bytes:
            return most
        high = (most, top)
    slow = 0
    while (width := high[0] - low[0]) > 1:
        on_line = low[0] + (budget_bytes - low[1]) * width // max(high[1] - low[1], 1)
        guess = (low[0] + high[0]) // 2 if slow == _PATIENCE else min(max(on_line, low[0] + 1), high[0] - 1)
        found = (guess, needs(guess))
        low, high = (found, high) if found[1] <= budget_bytes else (low, found)
        slow = 0 if 2 * (high[0] - low[0]) <= width else slow + 1
    return low[0]


# -- what is shown ---------------------------------------------------------------------------------


def _show(found: Forecast) -> None:
    console = TextConsole()
    table = console.table((), ("batch", "tensors", "regions", "with the margin", "in the budget"))
    for one in found.tried:
        fits = "fits" if one.needed_bytes <= found.budget_bytes else "too large"
        sizes = map(format_bytes, (one.live_bytes, one.held_bytes, one.needed_bytes))
        table.add_row("-" if one.batch is None else str(one.batch), *sizes, fits)
    console.print(table)
    console.say(found.note)
    console.say(f"{_sentence(found)}; known after {found.seconds:.1f} s")


def _sentence(found: Forecast) -> str:
    budget = format_bytes(found.budget_bytes)
    if found.fits is None:
        least = found.too_large
        what = "it" if least is None or least.batch is None else f"batch {least.batch}"
        needs = "" if least is None else f" needs {format_bytes(least.needed_bytes)}"
        return f"does not fit: {what}{needs}, and the budget is {budget}"
    needs = f"needs {format_bytes(found.fits.needed_bytes)} of {budget}"
    if found.fits.batch is None:
        return f"fits: it {needs}"
    if found.too_large is None:
        return f"fits: batch {found.fits.batch}, the largest of the range, {needs}"
    more = format_bytes(found.too_large.needed_bytes - found.budget_bytes)
    return f"fits: batch {found.fits.batch} {needs}, and batch {found.too_large.batch} {more} too much"
