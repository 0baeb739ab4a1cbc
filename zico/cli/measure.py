"""``zico fit --measure``: does sharing pay for these jobs on this device? They run alone, then together."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from typing import TYPE_CHECKING

import click
import msgspec

from zico.base.errors import ConfigError
from zico.base.settings import HOST, Setting, kind_of
from zico.base.units import format_bytes
from zico.broker.saving import Wish, check_device
from zico.broker.trials import LEAST_WAITED
from zico.cli.options import settings_with, told_as_json
from zico.launch.jobs import split_commands
from zico.launch.measuring import measure
from zico.launch.pools import Target
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from zico.base.settings import Settings
    from zico.launch.jobs import Command
    from zico.launch.measuring import Speed

SCHEMA = "zico.fit.measured.v1"
PAYS, DOES_NOT_PAY = range(2)
LEAST_GAIN = 1.05
"""Sharing pays from this gain on: less is within what runs of some seconds differ by."""
SECONDS, DEADLINE_S = 10.0, 600.0
MOST_S = 86_400.0
SERIAL = "serial"


class Together(msgspec.Struct, frozen=True):
    """How fast the jobs ran together, by some options."""

    options: str
    """Of ``zico run``, beyond those that were given."""
    gain: float
    """What the jobs do together over one after the other."""
    iterations_per_s: list[float]
    waited: list[float]
    """Share of the time in which each job waited, for memory or for its turn."""
    shared_bytes: list[int]
    """Frozen memory that each job had in common with others."""


class Measured(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    device: str
    budget_bytes: int
    policy: str
    seconds: float
    jobs: list[str]
    alone_per_s: list[float]
    ways: list[Together]
    pays: bool
    advice: str
    schema_version: str = SCHEMA


def run_measured(
    texts: Sequence[str],
    words: Sequence[str],
    *,
    mps: bool,
    share_frozen: bool,
    seconds: float,
    deadline_s: float,
    json_path: Path | None,
) -> int:
    """Measure the commands, print the figures, and return the exit code.

    Args:
        texts: The commands.
        words: Options of a pool.
        mps: Measure under MPS as well.
        share_frozen: Let the jobs hold frozen memory once.
        seconds: How long iterations are counted in each run.
        deadline_s: How long each run may take.
        json_path: Where the figures go as JSON.

    Raises:
        ConfigError: There are fewer than two commands, or an option does not suit the device.
        CommandError: A job could not be measured.
    """
    commands = split_commands(texts, ())
    if len(commands) == 1:
        raise ConfigError("--measure: one command shares with nobody: give two or more, the same one twice if you like")
    settings = settings_with(words, n_jobs=len(commands))
    wish = Wish(share_frozen=share_frozen)
    origins = dict.fromkeys(("save", "share_frozen"), "--share-frozen")
    check_device(kind_of(settings.device.value), dict.fromkeys((one.name for one in commands), wish), origins)
    commands = tuple(dataclasses.replace(command, wish=wish) for command in commands)
    if mps and kind_of(settings.device.value) == HOST:
        raise ConfigError("--mps: jobs share the host without it: give --device cuda:0, or leave it out")
    settings = dataclasses.replace(settings, mps=Setting(value=False, origin="--measure"))
    found = _measured(commands, settings, mps=mps, seconds=seconds, deadline_s=deadline_s)
    if not told_as_json(found, json_path):
        _show(found)
    return PAYS if found.pays else DOES_NOT_PAY


def _measured(
    commands: Sequence[Command], settings: Settings, *, mps: bool, seconds: float, deadline_s: float
) -> Measured:
    """Run the jobs alone, then together in each way that may be best."""

    def speeds(which: Sequence[Command], how: str, chosen: Settings) -> dict[str, Speed]:
        _tell(f"{', '.join(command.name for command in which)} {how}")
        return measure(which, Target(chosen), seconds, deadline_s, _tell)

    alone: dict[str, Speed] = {}
    of_argv: dict[tuple[str, ...], Speed] = {}
    for command in commands:
        if command.argv not in of_argv:
            of_argv[command.argv] = speeds([command], "alone", settings)[command.name]
        alone[command.name] = of_argv[command.argv]
    ways = [_way("", speeds(commands, "together", settings), alone)]
    under_mps = dataclasses.replace(settings, mps=Setting(value=True, origin="--mps"))
    if mps:
        ways.append(_way("--mps", speeds(commands, "together under MPS", under_mps), alone))
    if _best(ways).gain < LEAST_GAIN and settings.policy.value != SERIAL:
        in_turn = dataclasses.replace(settings, policy=Setting(SERIAL, "--measure"))
        ways.append(_way(f"--policy {SERIAL}", speeds(commands, "together, one iteration at a time", in_turn), alone))
    best = _best(ways)
    return Measured(
        device=settings.device.value,
        budget_bytes=settings.budget_bytes.value,
        policy=settings.policy.value,
        seconds=seconds,
        jobs=[command.name for command in commands],
        alone_per_s=[alone[command.name].iterations_per_s for command in commands],
        ways=ways,
        pays=best.gain >= LEAST_GAIN,
        advice=advice(ways, settings.policy.value, on_gpu=kind_of(settings.device.value) != HOST, mps=mps),
    )


def _tell(text: str) -> None:
    click.echo(f"zico: {text}", err=True)


def _way(options: str, together: Mapping[str, Speed], alone: Mapping[str, Speed]) -> Together:
    return Together(
        options,
        sum(speed.iterations_per_s / alone[name].iterations_per_s for name, speed in together.items()),
        [speed.iterations_per_s for speed in together.values()],
        [speed.waited for speed in together.values()],
        [speed.shared_bytes for speed in together.values()],
    )


def _best(ways: Sequence[Together]) -> Together:
    return max(ways, key=lambda way: way.gain)


def advice(ways: Sequence[Together], policy: str, *, on_gpu: bool, mps: bool) -> str:
    """Return in a sentence or two what to do.

    Args:
        ways: In which the jobs ran together, the first one by the policy.
        policy: The policy.
        on_gpu: The device is one.
        mps: MPS was measured.
    """
    best, waited = _best(ways), 0.0 if policy == SERIAL else max(ways[0].waited)
    said = f"zico run {best.options}".strip()
    if best.gain >= LEAST_GAIN:
        text = (
            f"run them together ({said}): one alone leaves a part of the device idle, and together they do "
            f"{best.gain:.2f} times what one after the other does"
        )
    else:
        reason = "" if waited >= LEAST_WAITED else "one job keeps the device busy, and "
        text = (
            f"run them one after the other: {reason}the fastest way together ({said}) does {best.gain:.2f} times "
            "as much in the same time"
        )
    if waited >= LEAST_WAITED:
        text += f"; a job waited {waited:.0%} of the time, which a larger --budget may shorten"
    if on_gpu and not mps and has_mps():
        text += "; with --mps overlapping kernels are measured, too"
    return text


def has_mps() -> bool:
    """Tell whether ``--mps`` works here."""
    from zico.base.mps import CONTROL

    return shutil.which(CONTROL) is not None


def _show(found: Measured) -> None:
    console = TextConsole()
    titles = [f"together {way.options}".strip() for way in found.ways]
    table = console.table(("job",), ("alone", *titles), no_wrap=True)
    for number, (name, rate) in enumerate(zip(found.jobs, found.alone_per_s, strict=True)):
        table.add_row(name, f"{rate:.2f} it/s", *(_cell(way, number) for way in found.ways))
    table.add_row("over one after the other", "1.00", *(f"{way.gain:.2f}" for way in found.ways))
    console.print(table)
    console.say(f"device {found.device}, budget {format_bytes(found.budget_bytes)}, policy {found.policy}")
    console.say(found.advice)
    sys.stdout.flush()


def _cell(way: Together, number: int) -> str:
    waited, shared_bytes = way.waited[number], way.shared_bytes[number]
    said = [f"{way.iterations_per_s[number]:.2f} it/s"]
    said += [f"waits {waited:.0%}"] if waited >= LEAST_WAITED else []
    said += [f"shares {format_bytes(shared_bytes)}"] if shared_bytes else []
    return ", ".join(said)
