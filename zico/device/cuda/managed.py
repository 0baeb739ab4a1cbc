"""Memory that the driver manages: on the device or on the host, at the same addresses, as it is told.

Source: the driver's manual on ``cuMemAdvise`` and ``cuMemPrefetchAsync`` (CUDA 12.2 to 13). With
the device as its preferred place, memory is populated there. Memory is mapped for the device
wherever it is ("accessed by"). What is on the host is used over the bus and not brought in by the
touch, so that only orders move it.

Known limitations
    Eight of nine tests have passed on a GPU. No job of a framework has paged there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from zico.base.errors import DriverError
from zico.base.units import format_bytes
from zico.device.api import Owned
from zico.device.cuda.bindings import INVALID_VALUE, NO_DRIVER, NOT_SUPPORTED, OUT_OF_MEMORY
from zico.device.record import MANAGED_FUNCTIONS

if TYPE_CHECKING:
    from zico.device.cuda.driver import CudaDriver

_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: every stream may use it
_LOCATION_BITS = 32
_NEEDED = ("MANAGED_MEMORY", "CONCURRENT_MANAGED_ACCESS")
OLDEST_DRIVER = 12020
"""``cuDriverGetVersion`` of the oldest driver with these functions."""


class Managed(Owned):
    """Managed memory and the stream on which it moves; ``handle`` is its address."""

    def __init__(self, driver: CudaDriver, address: int, size_bytes: int, held: contextlib.ExitStack) -> None:
        super().__init__("managed memory", address, size_bytes, lambda _address, _size_bytes: held.close())
        self._driver = driver
        self.stream = 0

    def move(self, offset: int, size_bytes: int, *, to_device: bool) -> None:
        """Let a part move when the stream comes there.

        Raises:
            DriverError: The part is not inside, or the driver refuses.
        """
        if not 0 <= offset < offset + size_bytes <= self.size_bytes:
            detail = f"offset {offset}, size {size_bytes}: must be inside its {self.size_bytes} bytes"
            raise DriverError("a move of managed memory", INVALID_VALUE, detail)
        call = self._driver.call
        with self._driver.context.current():
            function = "cuMemPrefetchAsync_v2" if hasattr(call.api, "cuMemPrefetchAsync_v2") else "cuMemPrefetchAsync"
            call(function, self.handle + offset, size_bytes, _place(self._driver, on_device=to_device), 0, self.stream)

    def map_for_device(self, *, wanted: bool) -> None:
        """Let the device use what is out over the bus, as it does from the beginning, or fault and bring it in.

        Raises:
            DriverError: The driver refuses.
        """
        with self._driver.context.current():
            _advise(self._driver, self.handle, self.size_bytes, f"{'SET' if wanted else 'UNSET'}_ACCESSED_BY")

    def fill(self, record: Any, memory: Owned) -> None:  # noqa: ANN401 - one MOVER record
        """Fill a ``MOVER`` record, from which compiled code moves parts of it.

        Args:
            record: The record.
            memory: The pool's, whose device it is.

        Raises:
            DriverError: The driver has no such function.
        """
        self._driver.fill_device(record["context"], memory)
        record["stream"] = self.stream
        for name, on_device in (("to_device", True), ("to_host", False)):
            place = _place(self._driver, on_device=on_device)
            record[name] = int(place.type) | int(place.id) << _LOCATION_BITS
        for name, address in self._driver.call.addresses(MANAGED_FUNCTIONS).items():
            record[name] = address


def _place(driver: CudaDriver, *, on_device: bool) -> Any:  # noqa: ANN401 - a CUmemLocation
    kinds = driver.call.api.CUmemLocationType
    place = driver.call.api.CUmemLocation()
    place.type = kinds.CU_MEM_LOCATION_TYPE_DEVICE if on_device else kinds.CU_MEM_LOCATION_TYPE_HOST
    place.id = driver.ordinal if on_device else 0
    return place


def _refuse_device(driver: CudaDriver) -> None:
    """Refuse a device or a driver that cannot manage memory while kernels run."""
    if driver.facts.driver_version < OLDEST_DRIVER:
        detail = f"the driver knows CUDA {driver.facts.driver_text}, paging needs 12.2: update the NVIDIA driver"
        raise DriverError("check of the driver", NO_DRIVER, detail)
    attributes = driver.call.api.CUdevice_attribute
    for name in _NEEDED:
        attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        if not driver.call("cuDeviceGetAttribute", attribute, driver.device):
            detail = f"{driver.name} ({driver.facts.name}) lacks {name}: jobs can be paged on GPUs of 2016 (Pascal) or "
            raise DriverError("check of the device", NOT_SUPPORTED, f"{detail}later, on Linux outside WSL")


def allocate(driver: CudaDriver, size_bytes: int) -> Managed:
    """Allocate managed memory that prefers the device, at most as much as the device has free now.

    Nothing of it is resident before it is touched or moved.

    Raises:
        DriverError: The device or its driver cannot, or has less memory free; nothing is left
            behind.
    """
    _refuse_device(driver)
    free_bytes = driver.free_bytes() or 0
    if not 0 < size_bytes <= free_bytes:
        detail = (
            f"{format_bytes(size_bytes)} are asked for, and {driver.name} has {format_bytes(free_bytes)} free: more "
            "could hang the GPU, and no GPU has run it yet; lower ZICO_PAGED_BYTES or --budget"
        )
        raise DriverError("allocation of managed memory", OUT_OF_MEMORY, detail)
    with contextlib.ExitStack() as undo:
        with driver.context.current():
            address = int(driver.call("cuMemAllocManaged", size_bytes, _GLOBAL))
            undo.callback(_free, driver, address)
            for advice in ("SET_PREFERRED_LOCATION", "SET_ACCESSED_BY"):
                _advise(driver, address, size_bytes, advice)
        stream = undo.enter_context(driver.create_stream())
        managed = Managed(driver, address, size_bytes, undo.pop_all())
    managed.stream = stream.handle
    return managed


def _free(driver: CudaDriver, address: int) -> None:
    with driver.context.current():
        driver.call("cuMemFree", address)


def _advise(driver: CudaDriver, address: int, size_bytes: int, advice: str) -> None:
    call = driver.call
    function = "cuMemAdvise_v2" if hasattr(call.api, "cuMemAdvise_v2") else "cuMemAdvise"
    wanted = getattr(call.api.CUmem_advise, f"CU_MEM_ADVISE_{advice}")
    call(function, address, size_bytes, wanted, _place(driver, on_device=True))
