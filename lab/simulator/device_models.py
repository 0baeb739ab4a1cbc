"""The devices that can be simulated, by name.

A data sheet does not say how much of a device one job uses, so jobs do not slow each other unless
told. ``v100-32gb:utilisation=0.6`` is a device of which each job alone uses six tenths.
"""

from __future__ import annotations

import dataclasses

from zico.base.errors import ConfigError
from zico.base.units import KIB
from zico.lab.simulator.roofline import DEVICES
from zico.scheduler.device_model import DeviceModel
from zico.scheduler.parameters import Parameter, Unit, split, values

MOST_JOBS = 64
"""A table of slowdowns has a row for so many jobs that work together; more are slowed as these are."""


def shared(utilisation: float, most: int = MOST_JOBS) -> tuple[float, ...]:
    """Return the slowdowns of jobs each of which alone uses so large a share of the device.

    As many as fit run as fast as alone; more divide the device evenly. This is the roofline of the
    whole device, and knows no interference below it.
    """
    return tuple(max(1.0, jobs * utilisation) for jobs in range(most + 1))


PARAMETERS = (
    Parameter("utilisation", "0", Unit.SHARE, "the share of the device that one job alone uses; 0: as little as any"),
    Parameter("run-ahead", "0ms", Unit.TIME, "by how much earlier memory is taken than used"),
)

# Bytes per second that copies of pinned memory reach: three quarters of what 16 lanes carry.
# Published measurements of the third generation are about 12e9 (Capuchin, ASPLOS 2020).
_GENERATION_3, _GENERATION_4, _GENERATION_5 = 12e9, 24e9, 48e9
_COPY_BYTES_PER_S = {
    "v100-16gb": _GENERATION_3,
    "v100-32gb": _GENERATION_3,
    "titan-x": _GENERATION_3,
    "p100-16gb": _GENERATION_3,
    "gtx-1080-ti": _GENERATION_3,
    "rtx-2080-ti": _GENERATION_3,
    "t4": _GENERATION_3,
    "l4": _GENERATION_4 / 2,  # 8 lanes
    "rtx-4090": _GENERATION_4,
    "a100-40gb": _GENERATION_4,
    "a100-80gb": _GENERATION_4,
    "h100-sxm": _GENERATION_5,
    "h200": _GENERATION_5,
}

ANY_DEVICE = "any"
# A fault's 45 us are those of G10 (MICRO 2023); 64 KiB is the driver's smallest unit of migration
# (D. Ganguly et al., ISCA 2019). Together that is 1.5e9 bytes per second. Published totals of
# managed memory on a V100 are 110 s and 17.2e6 faults an iteration (DeepUM, ASPLOS 2023). That is
# 6.4 us for a page of 4 KiB, 0.6e9.
DEVICE_MODELS = {
    name: DeviceModel(name, copy_bytes_per_s=_COPY_BYTES_PER_S[name])
    for name, device in DEVICES.items()
    if device.is_cuda
} | {
    # The next tier of the host is a file. 1e9 bytes per second and 100 us for a read ahead of 8
    # pages are a common solid-state disk's. Nothing here was measured.
    "host": DeviceModel("host", copy_bytes_per_s=1e9, fault_ns=100_000, fault_bytes=32 * KIB)
}
"""The devices by name; none slows jobs that share it unless it is told how much of it they use."""


def device_model_named(text: str) -> DeviceModel:
    """Return the device of that name, told what the text says: ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``.

    No name: any device.

    Raises:
        ConfigError: There is no such device or parameter, or a value cannot be used; the message
            lists what there is.
    """
    if not text:
        return DeviceModel(ANY_DEVICE)
    name, told = split(text)
    if name not in DEVICE_MODELS:
        raise ConfigError(f"{name!r} is not a device model: give one of {', '.join(DEVICE_MODELS)}")
    utilisation, run_ahead_ns = values(name, PARAMETERS, told)
    model = DEVICE_MODELS[name]
    slowdown = shared(utilisation) if utilisation > 0 else model.slowdown
    return dataclasses.replace(model, slowdown=slowdown, run_ahead_ns=int(run_ahead_ns))
