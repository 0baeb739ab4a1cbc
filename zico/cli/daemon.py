"""The user's broker of a device, as ``zico run`` finds it and joins it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from zico.base.errors import ZicoError
from zico.base.rundir import socket_for
from zico.base.settings import Setting
from zico.broker.client import BrokerClient
from zico.broker.notes import read_head
from zico.cli.options import ANSWER_S, described

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from zico.base.settings import Settings
    from zico.broker.protocol.messages import Status
    from zico.cli.display import Display
    from zico.launch.jobs import Command

_OF_A_POOL = ("budget_bytes", "most_bytes", "reserve_bytes", "region_bytes", "policy", "isolate", "mps", "metrics")
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


def find_daemon(settings: Settings) -> Found:
    """Return the user's broker of the settings' device; waits ``ANSWER_S`` for its answer.

    It is not joined where an option on the command line describes a pool.
    """
    socket = socket_for(settings.device.value)
    head = read_head(socket)
    if head is None:
        return Found(socket, None)
    device = settings.device.value
    if not head.broker.is_alive:
        if not head.living:
            return Found(socket, None)
        jobs = ", ".join(map(str, head.living))
        told = (
            f"the broker of {device} has ended, and {jobs} hold memory beside this run: zico broker start takes their "
            "pool over"
        )
        return Found(socket, None, told)
    origins = [getattr(settings, name).origin for name in _OF_A_POOL]
    options = [origin for origin in origins if origin.startswith("--")]
    if options:
        told = f"{options[0]}: this run has a pool of its own, beside that of the broker of {device} that runs"
        return Found(socket, None, told)
    try:
        with BrokerClient(socket, ANSWER_S) as client:
            status = client.status()
    except ZicoError as error:
        return Found(socket, None, f"this run has a pool of its own: {error}")
    told = ""
    if settings.metrics.value and not status.metrics:
        told = (
            f"{settings.metrics.origin}: this run joins the pool of the broker of {device} that runs, which serves no "
            f"metrics: start that broker with --metrics {settings.metrics.value}"
        )
    return Found(socket, status, told)


def find_daemons(each: Sequence[Settings]) -> tuple[list[Found], list[Settings]]:
    """Return the user's broker of each device, and each device's settings with what its pool has."""
    found = [find_daemon(settings) for settings in each]
    return found, [
        settings if one.status is None else settings_of(one.status, settings)
        for one, settings in zip(found, each, strict=True)
    ]


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
        policy=Setting(status.policy, _ORIGIN),
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
