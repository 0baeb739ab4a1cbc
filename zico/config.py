"""Settings of a run, each with its origin, checked before anything is started.

Precedence: command-line flag, environment variable, default. This module measures nothing: the caller gives the
environment and the device's memory, so every rule here is testable as a function.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

from zico.errors import ConfigError
from zico.units import KIB, MIB, format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

Value = TypeVar("Value")

DEFAULT_DEVICE = "host"
DEFAULT_POLICY = "zico"
DEFAULT_LOG_LEVEL = "warning"
DEFAULT_GRACE_S = 5.0
DEFAULT_REGION_BYTES = 4 * MIB
DEFAULT_AVAILABLE_PERCENT = 80
"""Share of the memory available now that a run takes when no budget is given.

On the host device the same memory also holds interpreters, libraries and data sets, which the budget does not count.
"""

LOG_LEVELS = ("debug", "info", "warning", "error")
MIN_REGION_BYTES = 64 * KIB
"""Smaller tensors than this never reach the pool, so a smaller region would only cost mappings."""
MAX_GRACE_S = 3600.0

SOCKET_VARIABLE = "ZICO_SOCKET"
"""Where a job, or ``zico status``, finds its broker."""


@dataclasses.dataclass(frozen=True)
class Setting(Generic[Value]):
    """One checked value and where it came from."""

    value: Value
    origin: str
    """The flag, the environment variable, or what the default was derived from."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    total_bytes: int
    available_bytes: int
    """What could be used now without taking it from others."""


@dataclasses.dataclass(frozen=True)
class Flags:
    """What the command line gave, as text; ``None`` where it gave nothing."""

    budget: str | None = None
    device: str | None = None
    policy: str | None = None
    region: str | None = None
    grace: str | None = None
    log_level: str | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that a run needs to know before it starts."""

    device: Setting[str]
    policy: Setting[str]
    region_bytes: Setting[int]
    budget_bytes: Setting[int]
    grace_s: Setting[float]
    """How long an ending job may take after each signal."""
    log_level: Setting[str]


def resolve(flags: Flags, environ: Mapping[str, str], memory: DeviceMemory, policies: Collection[str]) -> Settings:
    """Return the settings of a run. Starts and changes nothing.

    Args:
        flags: From the command line.
        environ: This process's environment.
        memory: Of the host device.
        policies: The names that are accepted.

    Raises:
        ConfigError: A value is not acceptable; the message names it, its origin and what would be accepted.
    """
    device = _chosen(flags.device, "device", environ, DEFAULT_DEVICE)
    _check(device, _check_device)
    region = _region(_chosen(flags.region, "region", environ, None), memory)
    return Settings(
        device=device,
        policy=_one_of(_chosen(flags.policy, "policy", environ, DEFAULT_POLICY), policies, "policy"),
        region_bytes=region,
        budget_bytes=_budget(_chosen(flags.budget, "budget", environ, None), region.value, memory),
        grace_s=_parsed(_chosen(flags.grace, "grace", environ, str(DEFAULT_GRACE_S)), _parse_grace),
        log_level=_one_of(_chosen(flags.log_level, "log-level", environ, DEFAULT_LOG_LEVEL), LOG_LEVELS, "log level"),
    )


def _chosen(flag: str | None, name: str, environ: Mapping[str, str], default: str | None) -> Setting[str]:
    """Return the text with the highest precedence; an empty text stands for "nothing given"."""
    variable = "ZICO_" + name.upper().replace("-", "_")
    if flag is not None:
        return Setting(flag, f"--{name}")
    if environ.get(variable):
        return Setting(environ[variable], variable)
    return Setting(default or "", "default")


def _check(setting: Setting[str], check: Callable[[str], None]) -> None:
    _parsed(setting, check)


def _parsed(setting: Setting[str], parse: Callable[[str], Value]) -> Setting[Value]:
    """Return the parsed setting; an error gains the setting's origin."""
    try:
        return Setting(parse(setting.value), setting.origin)
    except ConfigError as error:
        raise ConfigError(f"{setting.origin}: {error}") from None


def _check_device(device: str) -> None:
    if device == "cuda" or device.startswith("cuda:"):
        raise ConfigError(f"{device!r}: the CUDA device is not built in this version; use --device host")
    if device != DEFAULT_DEVICE:
        raise ConfigError(f"{device!r} is no device: the only one in this version is host")


def _one_of(setting: Setting[str], accepted: Collection[str], what: str) -> Setting[str]:
    if setting.value not in accepted:
        choices = ", ".join(accepted)
        raise ConfigError(f"{setting.origin}: {setting.value!r} is no {what}: give one of {choices}")
    return setting


def _parse_grace(text: str) -> float:
    try:
        grace_s = float(text)
    except ValueError:
        grace_s = -1.0
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise ConfigError(f"{text!r} is no grace period: give seconds from 0 to {MAX_GRACE_S:.0f}")
    return grace_s


def _region(chosen: Setting[str], memory: DeviceMemory) -> Setting[int]:
    if not chosen.value:
        return Setting(DEFAULT_REGION_BYTES, chosen.origin)

    def parse(text: str) -> int:
        region_bytes = parse_size(text, whole_bytes=memory.total_bytes)
        if region_bytes < MIN_REGION_BYTES or region_bytes.bit_count() != 1:
            raise ConfigError(
                f"a region of {text} is {region_bytes} bytes: give a power of two from "
                f"{format_bytes(MIN_REGION_BYTES)}, such as {format_bytes(DEFAULT_REGION_BYTES).replace(' ', '')}"
            )
        return region_bytes

    return _parsed(chosen, parse)


def _budget(chosen: Setting[str], region_bytes: int, memory: DeviceMemory) -> Setting[int]:
    """Return the budget in whole regions, rounded down so that it is never exceeded."""

    def parse(text: str) -> int:
        wanted_bytes = parse_size(text, whole_bytes=memory.total_bytes)
        budget_bytes = wanted_bytes // region_bytes * region_bytes
        if budget_bytes == 0:
            raise ConfigError(
                f"a budget of {text} is {format_bytes(wanted_bytes)}, less than one region of "
                f"{format_bytes(region_bytes)}: give a larger --budget or a smaller --region"
            )
        return budget_bytes

    if chosen.value:
        return _parsed(chosen, parse)
    origin = f"default: {DEFAULT_AVAILABLE_PERCENT} % of the {format_bytes(memory.available_bytes)} available"
    default_bytes = memory.available_bytes * DEFAULT_AVAILABLE_PERCENT // 100
    return _parsed(Setting(f"{default_bytes}B", origin), parse)
