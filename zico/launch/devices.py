"""What a run must know of its device before it starts, and what its jobs must be told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.broker.devices import HOST, facts_of
from zico.broker.outside import use_now
from zico.config import DeviceMemory
from zico.errors import ConfigError, DriverError
from zico.launch.memory import host_memory

if TYPE_CHECKING:
    from zico.config import Setting, Settings

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Which GPUs a process sees: numbers, or the UUIDs that name them whatever their order."""


def memory_of(device: Setting[str]) -> DeviceMemory:
    """Return the memory of a device.

    Raises:
        ConfigError: The device cannot be used; the message says why and where its name came from.
    """
    if device.value == HOST:
        return host_memory()
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

    Scripts say ``cuda``, which is the first device that they see. Where there is only one, the user's own setting
    stands: it may name a part of a device (MIG) that the driver does not tell apart.
    """
    return {VISIBLE_VARIABLE: settings.device_identity} if settings.device_identity else {}
