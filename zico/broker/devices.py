"""The devices of this machine by their names: ``host``, or ``cuda:N`` with N as the driver counts in this process.

``host:N`` is a pool of its own in the machine's memory: several of them stand for several devices.

Drivers are imported where they are opened: the command line needs names alone, and starts sooner.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zico.base.errors import DriverError
from zico.base.settings import HOST, kind_of

if TYPE_CHECKING:
    from zico.device.api import Driver
    from zico.device.cuda.facts import DeviceFacts as DeviceFacts  # noqa: PLC0414 - launch has it from here

_INVALID_DEVICE = 101  # CUDA_ERROR_INVALID_DEVICE


@dataclasses.dataclass(frozen=True)
class Device:
    """One device that a pool can be on."""

    name: str
    identity: str
    """Its UUID, which names it in every process; empty for the host."""

    @property
    def kind(self) -> str:
        """Return ``host`` or ``cuda``."""
        return kind_of(self.name)


HOST_DEVICE = Device(HOST, "")


def devices_here() -> list[DeviceFacts]:
    """Return what every CUDA device that this process sees is and can do, whether Zico can use it or not.

    Raises:
        DriverError: There is no driver, or no device.
    """
    from zico.device.cuda.facts import device_count, probe

    return [probe(ordinal) for ordinal in range(device_count())]


def has_usable_driver(facts: DeviceFacts) -> bool:
    """Tell whether the device's driver is new enough for Zico."""
    from zico.device.cuda.facts import OLDEST_DRIVER

    return facts.driver_version >= OLDEST_DRIVER


def facts_of(name: str) -> DeviceFacts:
    """Return what a CUDA device is and can do.

    Raises:
        ConfigError: There is no such device.
        DriverError: There is no driver, or the device lacks what Zico needs.
    """
    from zico.device.cuda.facts import require

    return require(int(name.removeprefix("cuda:")))


def open_device(name: str) -> tuple[Device, Driver]:
    """Return the device of that name, with a driver of it.

    Raises:
        ConfigError: There is no such device.
        DriverError: There is no driver, or the device lacks what Zico needs.
    """
    if kind_of(name) == HOST:
        from zico.device.host import HostDriver

        return Device(name, ""), HostDriver()
    from zico.device.cuda.driver import CudaDriver

    driver = CudaDriver(int(name.removeprefix("cuda:")))
    return Device(name, driver.facts.uuid), driver


def open_driver(device: Device) -> Driver:
    """Return a driver of the device that another process calls so.

    This process may see other devices than that one, or in another order (CUDA_VISIBLE_DEVICES), so
    a CUDA device is looked for by its identity.

    Raises:
        DriverError: This process does not see that device, or there is no driver.
    """
    if device.kind == HOST:
        from zico.device.host import HostDriver

        return HostDriver()
    from zico.device.cuda.driver import CudaDriver
    from zico.device.cuda.facts import device_uuids

    seen = device_uuids()
    if device.identity in seen:
        return CudaDriver(seen.index(device.identity))
    detail = f"this process does not see {device.name}, {device.identity}: CUDA_VISIBLE_DEVICES must name it"
    raise DriverError("search for the pool's device", _INVALID_DEVICE, detail)
