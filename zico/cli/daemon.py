"""The user's broker of a device, as ``zico run`` finds it and joins it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from zico.base.errors import ZicoError
from zico.base.rundir import socket_for
from zico.base.settings import HOST, OF_A_BROKER, OF_A_POOL, Setting, devices_of, kind_of, parse_metrics
from zico.base.units import format_bytes, parse_size
from zico.broker.client import BrokerClient
from zico.broker.notes import is_served, read_head
from zico.cli.options import described, given_in, settings_of_each
from zico.launch.brokers import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    import click

    from zico.base.settings import Given, Settings
    from zico.broker.protocol.messages import Status
    from zico.cli.display import Display
    from zico.launch.jobs import Command

_ORIGIN = "of the broker that runs"


@dataclasses.dataclass(frozen=True)
class Found:
    """What there is at the socket of the user's broker of a device."""

    socket: Path
    status: Status | None
    """Of the broker that is to be joined; ``None``: the run has a pool of its own."""
    told: str = ""
    """What the user should know of that."""

    @property
    def joins(self) -> Path | None:
        """Return the socket of the broker that is to be joined, if any."""
        return None if self.status is None else self.socket


def find_daemon(device: str, given: Given) -> Found:
    """Return the user's broker of a device; waits ``ANSWER_S`` for its answer.

    It is not joined where an option on the command line describes a pool.
    """
    socket = socket_for(device)
    head = read_head(socket)
    if head is None:
        return Found(socket, None)
    if not is_served(head, socket):
        if not head.living:
            return Found(socket, None)
        jobs = ", ".join(map(str, head.living))
        told = (
            f"the broker of {device} has ended, and {jobs} hold memory beside this run: zico broker start takes their "
            "pool over"
        )
        return Found(socket, None, told)
    origins = [given[name].origin for name in OF_A_POOL if name in given]
    options = [origin for origin in origins if origin.startswith("--")]
    if options:
        told = f"{options[0]}: this run has a pool of its own, beside that of the broker of {device} that runs"
        return Found(socket, None, told)
    try:
        with BrokerClient(socket, ANSWER_S) as client:
            return Found(socket, client.status())
    except ZicoError as error:
        return Found(socket, None, f"this run has a pool of its own: {error}")


def find_daemons(ctx: click.Context, n_jobs: int) -> tuple[list[Found], list[Settings]]:
    """Return the user's broker of each device of a command, and each device's settings with what its pool has.

    Raises:
        ConfigError: A setting cannot be used.
    """
    given = given_in(ctx)
    brokers = {device.value: find_daemon(device.value, given) for device in devices_of(given)}
    taken_bytes = {device: one.status.physical_bytes for device, one in brokers.items() if one.status is not None}
    found, devices = [], []
    for settings in settings_of_each(ctx, n_jobs, taken_bytes):
        one = brokers[settings.device.value]
        pool = one.status
        found.append(one if pool is None else dataclasses.replace(one, told=without_effect(settings, given, pool)))
        devices.append(settings if pool is None else settings_of(pool, settings))
    return found, devices


def told_to_script(ctx: click.Context, socket: Path) -> str:
    """Return ``without_effect`` for a script that joins the broker at a socket by itself; waits ``ANSWER_S`` at most.

    Options of the command are what the script gave ``zico.join``.

    Raises:
        BrokerError: The broker does not answer.
        ConfigError: A setting cannot be used.
    """
    with BrokerClient(socket, ANSWER_S) as client:
        pool = client.status()
    (settings,) = settings_of_each(ctx, taken_bytes={pool.device: pool.physical_bytes})
    given = {
        name: Setting(one.value, "zico.join") if one.origin.startswith("--") else one
        for name, one in given_in(ctx).items()
    }
    return without_effect(settings, given, pool, "this process")


def without_effect(settings: Settings, given: Given, pool: Status, who: str = "this run") -> str:
    """Return a sentence that names each setting that was given and that the pool to join has otherwise, or nothing.

    A share of a GPU's memory is not compared: it was one of what was free when the broker started.
    """
    sizes = (
        ("budget", settings.budget_bytes, pool.budget_bytes),
        ("most", settings.most_bytes, pool.most_bytes),
        ("region", settings.region_bytes, pool.region_bytes),
        ("reserve", settings.reserve_bytes, pool.reserve_bytes),
    )
    step = max(settings.region_bytes.value, pool.region_bytes)  # budgets are in whole regions
    found = [
        (name, *_texts(chosen.value, has))
        for name, chosen, has in sizes
        if abs(chosen.value - has) >= (step if name in {"budget", "most"} else 1)
    ]
    others = (
        ("policy", settings.policy.value, _policy(pool)),
        ("isolate", _switch(settings.isolate.value), _switch(pool.isolated)),
        ("mps", "on", "on" if pool.mps or not settings.mps.value else "off"),
        ("log-level", settings.log_level.value, pool.log_level),
    )
    found += [one for one in others if one[1] != one[2]]
    if settings.metrics.value and not _serves(settings.metrics.value, pool.metrics):
        found.append(("metrics", settings.metrics.value, pool.metrics or "none"))
    texts = {name.replace("_", "-"): setting for name, setting in given.items()}
    if kind_of(pool.device) != HOST:
        texts = {name: one for name, one in texts.items() if name not in {"budget", "most"} or not _is_share(one.value)}
    told = {
        name: f"{name} {has} and not {wanted} ({texts[name].origin})" for name, wanted, has in found if name in texts
    }
    if not told:
        return ""
    remedy = _remedy(set(told), settings, pool)
    return f"{who} joins the broker of {pool.device}, which has {', '.join(told.values())}: {remedy}"


def _remedy(names: set[str], settings: Settings, pool: Status) -> str:
    """Return what to do about settings of these names that the pool has otherwise."""
    ways = []
    if "budget" in names and pool.region_bytes <= settings.budget_bytes.value <= pool.most_bytes:
        size = _typed(settings.budget_bytes.value)
        ways.append(f"change the budget by zico limit {size} --device {pool.device}")
        names = names - {"budget"}
    if "mps" in names:
        ways.append("end the broker, start nvidia-cuda-mps-control -d, and start the broker again")
    if names - {"mps"}:
        those = ", ".join(f"--{name}" for name in OF_A_BROKER if name in names)
        ways.append(f"zico broker stop once its jobs have ended, and start it again with {those}")
    return ", or ".join(["leave that out", *ways])


def _texts(wanted_bytes: int, has_bytes: int) -> tuple[str, str]:
    """Return two sizes for people, in bytes where they would look the same."""
    texts = format_bytes(wanted_bytes), format_bytes(has_bytes)
    return texts if texts[0] != texts[1] else (f"{wanted_bytes} B", f"{has_bytes} B")


def _typed(size_bytes: int) -> str:
    text = format_bytes(size_bytes).replace(" ", "")
    return text if parse_size(text, whole_bytes=2 * size_bytes) == size_bytes else f"{size_bytes}B"


def _policy(pool: Status) -> str:
    return f"{pool.policy}:{pool.parameters}" if pool.parameters else pool.policy


def _switch(value: bool) -> str:  # noqa: FBT001 - what it is about
    return "on" if value else "off"


def _serves(wanted: str, url: str) -> bool:
    """Tell whether metrics are served where they are wanted: at a port or a Unix socket, anywhere for port 0."""
    place = parse_metrics(wanted)
    if isinstance(place, int):
        return " at " not in url and f":{place}/" in url if place else bool(url)
    return url.endswith(f" {place}")


def _is_share(text: str) -> bool:
    return text.strip().endswith("%") or text.strip().lower() == "none"


def tell_settings(display: Display, found: Sequence[Found], devices: Sequence[Settings]) -> None:
    """Say which budget and policy each device has and where they are from, and what the user should know of that."""
    for one, settings in zip(found, devices, strict=True):
        if one.told:
            display.problem(one.told)
        display.message(described(settings))
        if settings.metrics.value and one.status is not None and one.status.metrics:
            display.message(f"metrics: {one.status.metrics} ({_ORIGIN})")
        if settings.warning and one.status is None:
            display.problem(settings.warning)


def settings_of(status: Status, settings: Settings) -> Settings:
    """Return the settings with what the broker's pool has."""
    return dataclasses.replace(
        settings,
        budget_bytes=Setting(status.budget_bytes, _ORIGIN),
        most_bytes=Setting(status.most_bytes, _ORIGIN),
        region_bytes=Setting(status.region_bytes, _ORIGIN),
        reserve_bytes=Setting(status.reserve_bytes, _ORIGIN),
        policy=Setting(_policy(status), _ORIGIN),
        isolate=Setting(status.isolated, _ORIGIN),
    )


def renamed(commands: Sequence[Command], taken: Collection[str]) -> tuple[Command, ...]:
    """Return the commands under names that are not taken: where one is, it gets a number."""
    used = {*taken, *(command.name for command in commands if command.name not in taken)}
    unique = []
    for command in commands:
        name = command.name
        if name in taken:
            name = next(f"{name}-{n}" for n in itertools.count(2) if f"{name}-{n}" not in used)
            used.add(name)
        unique.append(dataclasses.replace(command, name=name))
    return tuple(unique)
