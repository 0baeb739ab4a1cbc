"""What a run must know of its device before it starts, and what its jobs must be told of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from zico.base.errors import ConfigError, DriverError
from zico.base.settings import HOST, DeviceMemory, kind_of
from zico.broker.devices import facts_of
from zico.broker.notes import PROC, shown_budgets_bytes
from zico.broker.outside import use_now

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.base.settings import Setting, Settings


# --------------------------------------------------------------------------------------------------
# How much memory the host device has: the machine's, or the control group's limit where that is
# lower.
#
# Of what is available, pools of others may yet take what their budgets promise. Every user can read
# the budgets, but not what a pool has taken. That is shared memory, which the kernel counts for the
# machine as a whole. Where other programs have some, too, pools seem to have taken more than they
# have.

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")
# (limit, use) of version 2, then of version 1; "max" and huge numbers mean that there is no limit.
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
LEAST_LEFT = 10
"""A tenth of what is available is taken to be left, whatever others promise: promises are seldom kept in full."""


def host_memory(
    cgroup_root: Path = CGROUP_ROOT, cgroup_of_self: Path = CGROUP_OF_SELF, proc: Path = PROC
) -> DeviceMemory:
    """Return the host's memory in bytes, lowered to the tightest control group this process is in."""
    machine = psutil.virtual_memory()
    total_bytes, available_bytes = machine.total, machine.available
    promised_bytes = max(0, shown_budgets_bytes(proc) - machine.shared)
    left_bytes = max(available_bytes - promised_bytes, available_bytes // LEAST_LEFT)
    for directory in cgroup_directories(cgroup_root, cgroup_of_self, "memory"):
        for limit_file, use_file in _CGROUP_FILES:
            limit_bytes = _read_bytes(directory / limit_file)
            if limit_bytes is None or limit_bytes >= machine.total:
                continue
            used_bytes = _read_bytes(directory / use_file) or 0
            total_bytes = min(total_bytes, limit_bytes)
            available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
    return DeviceMemory(total_bytes, available_bytes, promised_bytes=max(0, available_bytes - left_bytes))


def cgroup_directories(root: Path, of_self: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's groups up to the root: a limit applies to all below it.

    Args:
        root: Where control groups are mounted.
        of_self: What says which groups this process is in.
        controller: Of version 1 the groups of this one, such as ``memory``; version 2 has one tree.
    """
    try:
        lines = of_self.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        group = base / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(base))


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


# --------------------------------------------------------------------------------------------------

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Which GPUs a process sees: numbers, or the UUIDs that name them whatever their order."""


def memory_of(device: Setting[str], shared_by: int = 1) -> DeviceMemory:
    """Return the memory of a device.

    Args:
        device: Its name.
        shared_by: How many pools of a run are on the host: each may take its part of the machine's.

    Raises:
        ConfigError: The device cannot be used; the message says why and where its name came from.
    """
    if kind_of(device.value) == HOST:
        machine = host_memory()
        return DeviceMemory(
            machine.total_bytes // shared_by,
            machine.available_bytes // shared_by,
            promised_bytes=machine.promised_bytes // shared_by,
        )
    try:
        facts = facts_of(device.value)
        use = use_now(facts)
    except (ConfigError, DriverError) as error:
        reason = error.detail if isinstance(error, DriverError) else error
        raise ConfigError(f"{device.origin}: {reason}") from None
    return DeviceMemory(
        total_bytes=facts.total_bytes,
        available_bytes=use.free_bytes,
        granularity_bytes=facts.granularity_bytes,
        is_taken_at_once=True,
        held_by=use.holders,
        identity=facts.uuid if facts.count > 1 else "",
    )


def device_variables(settings: Settings) -> dict[str, str]:
    """Return the variables by which a job sees the run's device, and only that, as its first one.

    Scripts say ``cuda``, which is the first device that they see. Where there is only one, the
    user's own setting stands. It may name a part of a device (MIG) that the driver does not tell
    apart.
    """
    return {VISIBLE_VARIABLE: settings.device_identity} if settings.device_identity else {}
