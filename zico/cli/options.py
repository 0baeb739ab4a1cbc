"""Options that several commands share, and the settings made of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from zico.config import (
    DEFAULT_AVAILABLE_PERCENT,
    DEFAULT_CUDA_REGION_BYTES,
    DEFAULT_CUDA_RESERVE,
    DEFAULT_LOG_LEVEL,
    DEFAULT_POLICY,
    DEFAULT_REGION_BYTES,
    LOG_LEVELS,
    Flags,
    Settings,
    device_of,
    resolve,
)
from zico.errors import ConfigError
from zico.launch.devices import memory_of
from zico.launch.settings_file import read_settings
from zico.scheduler.policies import POLICIES, REAL, check_real
from zico.units import format_bytes

Function = TypeVar("Function", bound=Callable[..., Any])

_POOL_OPTIONS = (
    click.option(
        "--budget",
        metavar="SIZE",
        help="Memory that all jobs share: 20GiB, 512M, 50%, or none for all there is "
        f"(default: {DEFAULT_AVAILABLE_PERCENT} % of what is free).",
    ),
    click.option(
        "--reserve",
        metavar="SIZE",
        help="Memory kept free for each job's context and workspaces "
        f"(default: none; {DEFAULT_CUDA_RESERVE} on a GPU).",
    ),
    click.option("--device", metavar="DEVICE", help="host, cuda or cuda:N (default: host)."),
    click.option("--policy", metavar="NAME", help=f"The scheduler: {', '.join(REAL)} (default: {DEFAULT_POLICY})."),
    click.option(
        "--region",
        metavar="SIZE",
        help=f"Unit of memory, a power of two (default: {format_bytes(DEFAULT_REGION_BYTES)}; "
        f"{format_bytes(DEFAULT_CUDA_REGION_BYTES)} on a GPU).",
    ),
    click.option(
        "--isolate",
        flag_value="1",
        help="Clear memory before another job gets it, and unmap it from the job that returned it. Costs time.",
    ),
    click.option(
        "--most",
        metavar="SIZE",
        help="The highest budget that zico limit may set (default: the machine's memory; the budget on a GPU).",
    ),
    click.option(
        "--log-level",
        metavar="LEVEL",
        help=f"What the broker logs: {', '.join(LOG_LEVELS)} (default: {DEFAULT_LOG_LEVEL}).",
    ),
)


def pool_options(function: Function) -> Function:
    """Add the options that describe a pool."""
    for option in reversed(_POOL_OPTIONS):
        function = option(function)
    return function


def settings_from(flags: Flags, n_jobs: int | None = None) -> Settings:
    """Return the settings of these flags, this environment and this machine, for so many jobs if that is known.

    Raises:
        ConfigError: One of them cannot be used.
    """
    file = read_settings()
    memory = memory_of(device_of(flags, os.environ, file))
    settings = resolve(flags, os.environ, memory, POLICIES, file, n_jobs)
    try:
        check_real(settings.policy.value)
    except ConfigError as error:
        raise ConfigError(f"{settings.policy.origin}: {error}") from None
    return settings


def described(settings: Settings) -> str:
    """Return the settings with their origins, as one line."""
    parts = {
        "budget": (format_bytes(settings.budget_bytes.value), settings.budget_bytes.origin),
        "reserve": (f"{format_bytes(settings.reserve_bytes.value)} a job", settings.reserve_bytes.origin),
        "jobs": (str(settings.expected_jobs.value), settings.expected_jobs.origin),
        "device": (settings.device.value, settings.device.origin),
        "policy": (settings.policy.value, settings.policy.origin),
        "region": (format_bytes(settings.region_bytes.value), settings.region_bytes.origin),
    }
    if not settings.reserve_bytes.value:
        del parts["reserve"], parts["jobs"]
    if settings.isolate.value:
        parts["isolate"] = ("on", settings.isolate.origin)
    return ", ".join(f"{name} {value} ({origin})" for name, (value, origin) in parts.items())
