"""The twin's managed memory: pages that are on the device or on the host, and move when touched or told to.

What a page holds is kept apart where it is: on the device at its address, on the host in a store,
and its address then holds rubbish. So whoever reads without the twin's knowledge, or moves what it
should not, is found out by the contents.

Stricter than the manual: more managed memory than the device has free is refused, since on a GPU it
may hang.

Known limitations
    The processor's own accesses are not seen, and a page has 64 KiB. One device's pages only.
"""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import abc
import ctypes
import dataclasses
from typing import TYPE_CHECKING

from twin.entry import Value, entry, number, real, refuse_unless
from twin.kernels import KernelFunctions
from twin.timeline import Operation

if TYPE_CHECKING:
    from zico.device.api import Memory, Owned

PAGE_BYTES = 1 << 16
_ALIGNMENT_BYTES = 1 << 21
_RUBBISH = 0xA5
_GLOBAL = int(real.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
_PREFERRED = int(real.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION)
_ACCESSED_BY = int(real.CUmem_advise.CU_MEM_ADVISE_SET_ACCESSED_BY)
_NOT_ACCESSED_BY = int(real.CUmem_advise.CU_MEM_ADVISE_UNSET_ACCESSED_BY)
_ON_DEVICE = int(real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
_ON_HOST = int(real.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST)
_NOWHERE = int(real.CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID)
_LAST_PREFETCH = int(real.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION)
_NUMBERS = {_ON_DEVICE: 0, _ON_HOST: -1}
"""Where a range was told to go last, as that attribute says it: a device's number, or the processor's."""
_INVALID_DEVICE = -2
_THERE = b""
"""Stored for a page on the host whose bytes are at its address: a kernel has used them over the bus."""


@dataclasses.dataclass
class Managed:
    """One allocation."""

    address: int
    size_bytes: int
    window: Owned
    memory: Memory
    stored: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """What the pages that are on the host hold, by page."""
    advised: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """Advice and kind of place that all of it has been given."""
    told: dict[int, int] = dataclasses.field(default_factory=dict)
    """The kind of place that a page was last told to go to."""

    def pages(self, start: int, size_bytes: int) -> range:
        """Return the pages of a range."""
        first = (start - self.address) // PAGE_BYTES
        return range(first, (start + size_bytes - 1 - self.address) // PAGE_BYTES + 1)


class ManagedFunctions(KernelFunctions, abc.ABC):
    """The functions of managed memory, and what a kernel's touch does."""

    def __init__(
        self, devices: int, total_bytes: int, granularity_bytes: int, wait_deadline_s: float, *, has_memory_ops: bool
    ) -> None:
        """Start without managed memory."""
        super().__init__(devices, total_bytes, granularity_bytes, wait_deadline_s, has_memory_ops=has_memory_ops)
        self._managed: dict[int, Managed] = {}
        self._resident: dict[tuple[int, int], None] = {}  # allocation and page, in the order of their coming
        self.managed_faults = 0
        """Pages that a kernel had to wait for."""
        self.remote_accesses = 0
        """Touches of pages that stayed on the host, since they are mapped on the device there."""
        self.moved_in_bytes = 0
        self.moved_out_bytes = 0

    # -- functions of the driver -------------------------------------------------------------------

    @entry(context=True)
    def cuMemAllocManaged(self, bytesize: int, flags: int) -> Value:
        """Allocate; nothing is resident yet."""
        with self.lock:
            refuse_unless(bytesize > 0 and flags == _GLOBAL)
            refuse_unless(self.attribute("MANAGED_MEMORY"), "NOT_SUPPORTED")
            lent_bytes = sum(one.size_bytes for one in self._managed.values())
            refuse_unless(lent_bytes + bytesize <= self.device_bytes - self.fixed_bytes, "OUT_OF_MEMORY")
            size_bytes = -(-bytesize // PAGE_BYTES) * PAGE_BYTES
            memory = self._from_host(lambda: self.host.create_memory(size_bytes, "twin-managed"))
            window = self._from_host(lambda: self.host.reserve(size_bytes + _ALIGNMENT_BYTES))
            address = -(-window.handle // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._from_host(lambda: self.host.map(window, address - window.handle, memory, 0, size_bytes))
            self._managed[address] = Managed(address, bytesize, window, memory)
            return real.CUdeviceptr(address)

    @entry(context=True, undo=True)
    def cuMemFree(self, dptr: Value) -> None:
        """Give managed memory back, once the device has done everything."""
        with self.lock:
            refuse_unless(number(dptr) in self._managed)
            every = [one for one in self._all_streams() if one.context == self.current_context()]
        for stream in every:
            stream.synchronize()
        with self.lock:
            self._forget(number(dptr))

    @entry(context=True)
    def cuMemAdvise(self, dev_ptr: Value, count: int, advice: Value, location: Value) -> None:
        """Note advice; only of a whole allocation does it mean anything here."""
        with self.lock:
            found = self._managed_at(number(dev_ptr), count)
            refuse_unless(int(advice) in (_PREFERRED, _ACCESSED_BY, _NOT_ACCESSED_BY))
            self._check_place(location)
            if count != found.size_bytes:
                return
            if int(advice) == _NOT_ACCESSED_BY:
                found.advised.discard((_ACCESSED_BY, int(location.type)))
            else:
                found.advised.add((int(advice), int(location.type)))

    @entry(context=True)
    def cuMemPrefetchAsync(self, dev_ptr: Value, count: int, location: Value, flags: int, stream: Value) -> None:
        """Move a range to a place when the stream gets there."""
        start = number(dev_ptr)
        with self.lock:
            one = self._managed_at(start, count)
            refuse_unless(flags == 0)
            to_device = self._check_place(location)
            one.told |= dict.fromkeys(one.pages(start, count), int(location.type))
        name = "prefetch in" if to_device else "prefetch out"
        self.stream(stream).put(Operation(name, lambda: self._move(start, count, to_device=to_device)))

    @entry(context=True)
    def cuMemRangeGetAttribute(self, data_size: int, attribute: Value, dev_ptr: Value, count: int) -> Value:
        """Return where all of a range was last told to go; nothing else is known."""
        with self.lock:
            one = self._managed_at(number(dev_ptr), count)
            refuse_unless((data_size, int(attribute)) == (4, _LAST_PREFETCH))
            places = {one.told.get(page, _NOWHERE) for page in one.pages(number(dev_ptr), count)}
            return _NUMBERS.get(places.pop(), _INVALID_DEVICE) if len(places) == 1 else _INVALID_DEVICE

    def _check_place(self, location: Value) -> bool:
        """Tell whether a place is the device."""
        place = int(location.type)
        refuse_unless(place in (_ON_DEVICE, _ON_HOST))
        if place == _ON_DEVICE:
            refuse_unless(0 <= int(location.id) < self.devices, "INVALID_DEVICE")
            refuse_unless(self.attribute("CONCURRENT_MANAGED_ACCESS"), "INVALID_DEVICE")
        return place == _ON_DEVICE

    def _managed_at(self, start: int, size_bytes: int) -> Managed:
        found = self._find(start, size_bytes)
        refuse_unless(found is not None)
        return found  # type: ignore[return-value]

    def _find(self, start: int, size_bytes: int) -> Managed | None:
        for address, one in self._managed.items():
            if address <= start and 0 < size_bytes <= address + one.size_bytes - start:
                return one
        return None

    def _forget(self, address: int) -> None:
        one = self._managed.pop(address)
        self._resident = {key: None for key in self._resident if key[0] != address}
        one.window.close()
        one.memory.close()

    # -- pages -------------------------------------------------------------------------------------

    def _move(self, start: int, size_bytes: int, *, to_device: bool) -> None:
        with self.lock:
            one = self._find(start, size_bytes)
            if one is None:
                return
            for page in one.pages(start, size_bytes):
                if to_device:
                    self._come(one, page)
                elif (one.address, page) in self._resident:
                    self._leave(one, page)

    def _come(self, one: Managed, page: int) -> None:
        """Bring a page to the device, in the place of the one that came longest ago if there is no room."""
        key = (one.address, page)
        if key in self._resident:
            return
        while self.used_bytes + PAGE_BYTES > self.device_bytes and self._resident:
            address, oldest = next(iter(self._resident))
            self._leave(self._managed[address], oldest)
        self._resident[key] = None
        if page in one.stored:
            self._put_there(one, page)
            del one.stored[page]
            self.moved_in_bytes += PAGE_BYTES

    def _leave(self, one: Managed, page: int) -> None:
        del self._resident[(one.address, page)]
        place = one.address + page * PAGE_BYTES
        one.stored[page] = ctypes.string_at(place, PAGE_BYTES)
        ctypes.memset(place, _RUBBISH, PAGE_BYTES)
        self.moved_out_bytes += PAGE_BYTES

    def _touch(self, one: Managed, start: int, size_bytes: int) -> None:
        """Do what a kernel's access does: pages come, unless they are on the host and mapped on the device there."""
        stays = (_ACCESSED_BY, _ON_DEVICE) in one.advised
        for page in one.pages(start, size_bytes):
            if (one.address, page) in self._resident:
                continue
            if stays and page in one.stored:
                self.remote_accesses += 1
                self._put_there(one, page)
            else:
                self.managed_faults += 1
                self._come(one, page)

    def _put_there(self, one: Managed, page: int) -> None:
        """Put what a page on the host holds at its address, where a kernel reads and writes it over the bus."""
        if one.stored[page] != _THERE:
            ctypes.memmove(one.address + page * PAGE_BYTES, one.stored[page], PAGE_BYTES)
            one.stored[page] = _THERE

    # -- what the other parts ask ------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the device that are held or resident."""
        return super().used_bytes + self.managed_resident_bytes

    @property
    def managed_resident_bytes(self) -> int:
        """Return the bytes of managed memory that are on the device."""
        return len(self._resident) * PAGE_BYTES

    def locate(self, address: int, size_bytes: int) -> int:
        """Return where the device's bytes are; touches the pages if the memory is managed."""
        one = self._find(address, size_bytes)
        if one is None:
            return super().locate(address, size_bytes)
        self._touch(one, address, size_bytes)
        return address

    def _refuse_unknown(self, address: Value, size_bytes: int) -> None:
        with self.lock:
            if self._find(number(address), size_bytes) is not None:
                return
        super()._refuse_unknown(address, size_bytes)

    def is_on_device(self, address: int, size_bytes: int) -> bool:
        """Tell whether all pages of a range are on the device."""
        one = self._managed_at(address, size_bytes)
        return all((one.address, page) in self._resident for page in one.pages(address, size_bytes))

    @abc.abstractmethod
    def attribute(self, name: str) -> int:
        """Return an attribute of the devices, without ``CU_DEVICE_ATTRIBUTE_``."""
