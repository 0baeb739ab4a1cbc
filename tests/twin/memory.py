"""The twin's virtual memory: handles, reservations and mappings, checked as strictly as the manual words it.

A handle is a memfd, its exported descriptor a duplicate of it, so two processes with twins share
memory truly. Device addresses are host addresses; without access set, the pages fault. Host memory
that was registered has another address on the device, so that mixing the two up shows.
"""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from twin.entry import Core, Refused, Value, entry, number, real, refuse_unless
from zico.base.errors import DriverError
from zico.device.host import HostDriver

if TYPE_CHECKING:
    from zico.device.api import Memory, Owned

ALIAS = 1 << 47
"""Device address of registered host memory minus its host address: beyond what a process can address."""

_LABEL = "twin"
_LINK = f"/memfd:zico-{_LABEL}"
_FILE_DESCRIPTOR = int(real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
_PINNED = int(real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
_ON_DEVICE = int(real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
_ON_HOST = int(real.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST)
_ON_NODE = int(real.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA)
_READ_WRITE = int(real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
_READ_ONLY = int(real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
_NO_ACCESS = int(real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE)
_REGISTER_FLAGS = 0x3  # PORTABLE | DEVICEMAP
_libc = ctypes.CDLL(None)


@dataclasses.dataclass
class Handle:
    """Physical memory: it goes when it is released and mapped nowhere."""

    memory: Memory
    exportable: bool
    inode: int
    on_host: bool = False
    for_rdma: bool = False
    released: bool = False
    mappings: int = 0


@dataclasses.dataclass
class Mapping:
    """A handle at an address; not readable before access is set."""

    size_bytes: int
    handle: int
    accessible: bool = False
    """By the device."""
    by_processor: bool = False
    """By the processor, which only memory of the host can be."""
    read_only: bool = False
    """The device may not write it."""


class MemoryFunctions(Core):
    """The functions named ``cuMem*`` that Zico uses."""

    def __init__(self, devices: int, total_bytes: int, granularity_bytes: int) -> None:
        """Start with all memory free."""
        super().__init__()
        self.host = HostDriver()
        self.devices = devices
        self.device_bytes = total_bytes
        self.granularity_bytes = granularity_bytes
        self.host_bytes = 0
        """Pinned memory of the host that can be had; 0: the driver knows no such memory, as one before CUDA 12.2."""
        self.host_granularity_bytes = granularity_bytes
        self.host_node = 0
        self._next_handle = 0x5A000001  # so that a handle is taken for nothing else
        self._handles: dict[int, Handle] = {}
        self.serves_rdma = False
        """Whether memory can be registered for RDMA."""
        self._others: dict[int, int] = {}  # inode of another process's memory, which is on this device, too -> bytes
        self._created: dict[int, int] = {}  # inode of memory that was created here -> bytes
        self.context_bytes = 0
        """What a context takes of the device."""
        self._workspaces: dict[int, int] = {}  # context -> bytes
        self.is_aside = False
        """Whether the contexts are put aside (``cuCheckpointProcessCheckpoint``)."""
        self._windows: dict[int, tuple[int, Owned]] = {}  # address -> bytes, what was reserved
        self._mappings: dict[int, Mapping] = {}
        self._registered: dict[int, int] = {}  # host address -> bytes

    # -- physical memory ---------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the device that are held."""
        return self.fixed_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of the device that handles, mappings, contexts and workspaces hold, and others' memory."""
        outside_bytes = len(self._contexts) * self.context_bytes + sum(self._workspaces.values())
        return self._held_bytes(on_host=False) + (0 if self.is_aside else outside_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Return the host's bytes that a handle or mapping here still holds."""
        return self._held_bytes(on_host=True)

    def _held_bytes(self, *, on_host: bool) -> int:
        held = {one.inode: one.memory.size_bytes for one in self._handles.values() if one.on_host == on_host}
        if on_host:
            return sum(held.values())
        if self._created.keys() - held.keys():
            self._forget_what_nobody_holds(held)
        return sum((self._others | self._created | held).values())

    def _forget_what_nobody_holds(self, held: dict[int, int]) -> None:
        """Keep of what was created here what has a handle, or a descriptor by which it can be imported."""
        kept = held.keys() | _open_here().keys()
        self._created = {inode: size for inode, size in self._created.items() if inode in kept}

    def _notice_others(self) -> None:
        """Note what another process's twin has created, as far as a descriptor of it is open here."""
        found = _open_here()
        self._others |= {inode: found[inode] for inode in found.keys() - self._created.keys()}

    @entry()
    def cuMemGetAllocationGranularity(self, prop: Value, _option: Value) -> int:
        """Return the granularity."""
        return self._granularity(on_host=self._check_properties(prop))

    def _granularity(self, *, on_host: bool) -> int:
        return self.host_granularity_bytes if on_host else self.granularity_bytes

    @entry(virtual=True)
    def cuMemCreate(self, size: int, prop: Value, flags: int) -> Value:
        """Create a handle."""
        with self.lock:
            on_host = self._check_properties(prop)
            refuse_unless(size > 0 and size % self._granularity(on_host=on_host) == 0 and flags == 0)
            free_bytes = self.host_bytes - self.pinned_bytes if on_host else self.device_bytes - self.fixed_bytes
            refuse_unless(size <= free_bytes, "OUT_OF_MEMORY")
            memory = self._from_host(lambda: self.host.create_memory(size, _LABEL))
            for_rdma = bool(prop.allocFlags.gpuDirectRDMACapable)
            refuse_unless(self.serves_rdma or not for_rdma, "NOT_SUPPORTED")
            if not on_host:
                self._created[_inode(memory)] = size
            return self._add(memory, int(prop.requestedHandleTypes), on_host=on_host, for_rdma=for_rdma)

    @entry(virtual=True)
    def cuMemExportToShareableHandle(self, handle: Value, kind: Value, flags: int) -> int:
        """Return a descriptor."""
        with self.lock:
            refuse_unless(int(kind) == _FILE_DESCRIPTOR and flags == 0)
            found = self._handle(handle)
            refuse_unless(found.exportable)
            return int(self._from_host(lambda: self.host.export_pieces(found.memory)[0]))

    @entry(virtual=True)
    def cuMemImportFromShareableHandle(self, descriptor: Value, kind: Value) -> Value:
        """Return a handle for a descriptor of a twin; the descriptor stays the caller's."""
        with self.lock:
            refuse_unless(int(kind) == _FILE_DESCRIPTOR)
            try:
                link = os.readlink(f"/proc/self/fd/{int(descriptor)}")  # noqa: PTH115 - a name, not a path
            except OSError:
                link = ""
            refuse_unless(link.startswith(_LINK))
            memory = self._from_host(lambda: self.host.import_memory(os.dup(int(descriptor))))
            if _inode(memory) not in {*self._others, *(one.inode for one in self._handles.values())}:
                self._notice_others()
            return self._add(memory, _FILE_DESCRIPTOR)

    @entry(virtual=True, undo=True)
    def cuMemRelease(self, handle: Value) -> None:
        """Release a handle; the memory stays as long as it is mapped."""
        with self.lock:
            self._handle(handle).released = True
            self._collect(number(handle))

    @entry(virtual=True)
    def cuMemGetAllocationPropertiesFromHandle(self, handle: Value) -> Value:
        """Return what was asked for when memory was created here."""
        with self.lock:
            found = self._handle(handle)
            prop = real.CUmemAllocationProp()
            prop.type = real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            prop.allocFlags.gpuDirectRDMACapable = int(found.for_rdma)
            return prop

    def _check_properties(self, prop: Value) -> bool:
        """Tell whether memory of the host is asked for.

        The manual: ``HOST`` is not exported, ``HOST_NUMA`` names a node, ``HOST_NUMA_CURRENT`` is
        no place to create.
        """
        refuse_unless(prop is not None and int(prop.type) == _PINNED)
        place, kind = int(prop.location.type), int(prop.requestedHandleTypes)
        if place == _ON_DEVICE:
            refuse_unless(0 <= int(prop.location.id) < self.devices, "INVALID_DEVICE")
        else:
            refuse_unless(self.host_bytes > 0 and place in (_ON_HOST, _ON_NODE))
            refuse_unless(kind == 0 if place == _ON_HOST else int(prop.location.id) == self.host_node)
        refuse_unless(kind in (0, _FILE_DESCRIPTOR), "NOT_SUPPORTED")
        return place != _ON_DEVICE

    def _add(self, memory: Memory, kind: int, *, on_host: bool = False, for_rdma: bool = False) -> Value:
        self._handles[self._next_handle] = Handle(memory, kind == _FILE_DESCRIPTOR, _inode(memory), on_host, for_rdma)
        self._next_handle += 1
        return real.CUmemGenericAllocationHandle(self._next_handle - 1)

    def _handle(self, handle: Value) -> Handle:
        found = self._handles.get(number(handle))
        refuse_unless(found is not None and not found.released)
        return found  # type: ignore[return-value]

    def _collect(self, handle: int) -> None:
        if self._handles[handle].released and self._handles[handle].mappings == 0:
            self._handles.pop(handle).memory.close()

    def _from_host(self, do: Value) -> Value:
        """Do something on the host device; what the kernel refuses, the driver reports as the system's fault."""
        try:
            return do()
        except (DriverError, OSError) as error:
            raise Refused("OPERATING_SYSTEM") from error

    # -- addresses ---------------------------------------------------------------------------------

    @entry(virtual=True)
    def cuMemAddressReserve(self, size: int, alignment: int, _address: Value, flags: int) -> Value:
        """Reserve addresses that fault."""
        with self.lock:
            unit = max(self.granularity_bytes, alignment)
            refuse_unless(size > 0 and size % mmap.PAGESIZE == 0 and flags == 0 and unit & (unit - 1) == 0)
            window = self._from_host(lambda: self.host.reserve(size + unit))
            address = -(-window.handle // unit) * unit
            self._windows[address] = (size, window)
            return real.CUdeviceptr(address)

    @entry(virtual=True, undo=True)
    def cuMemAddressFree(self, ptr: Value, size: int) -> None:
        """Give addresses back, all of a reservation and with nothing mapped there."""
        with self.lock:
            start = number(ptr)
            refuse_unless(start in self._windows and self._windows[start][0] == size)
            refuse_unless(not any(start <= address < start + size for address in self._mappings))
            self._windows.pop(start)[1].close()

    @entry(virtual=True)
    def cuMemMap(self, ptr: Value, size: int, offset: int, handle: Value, flags: int) -> None:
        """Map a whole handle inside one reservation where nothing is mapped; nobody may touch it yet."""
        with self.lock:
            start = number(ptr)
            found = self._handle(handle)
            refuse_unless(start % self._granularity(on_host=found.on_host) == 0 and offset == 0 and flags == 0)
            refuse_unless(size == found.memory.size_bytes)
            self._window_of(start, size)
            refuse_unless(not self._overlapping(start, size))
            self._mappings[start] = Mapping(size, number(handle))
            found.mappings += 1

    @entry(virtual=True)
    def cuMemSetAccess(self, ptr: Value, size: int, desc: Value, count: int) -> None:
        """Open or shut a range that whole mappings cover without a hole, for the device and the processor."""
        with self.lock:
            start = number(ptr)
            refuse_unless(count == len(desc) > 0 and size > 0)
            refuse_unless(self._covered(start, size, whole=True))
            touched = self._overlapping(start, size)
            for access in desc:
                self._check_access(access, touched)
            for access in desc:
                is_open = int(access.flags) != _NO_ACCESS
                for address in touched:
                    if int(access.location.type) == _ON_DEVICE:
                        self._mappings[address].read_only = int(access.flags) == _READ_ONLY
                    self._open(address, is_open, by_processor=int(access.location.type) != _ON_DEVICE)

    def _check_access(self, access: Value, touched: list[int]) -> None:
        """Refuse an access that cannot be; the processor has none to the device's memory."""
        refuse_unless(int(access.flags) in (_READ_WRITE, _READ_ONLY, _NO_ACCESS))
        place = int(access.location.type)
        if place == _ON_DEVICE:
            refuse_unless(0 <= int(access.location.id) < self.devices)
        else:
            refuse_unless(place in (_ON_HOST, _ON_NODE))
            refuse_unless(all(self._handles[self._mappings[address].handle].on_host for address in touched))

    @entry(virtual=True, undo=True)
    def cuMemUnmap(self, ptr: Value, size: int) -> None:
        """Unmap exactly one mapping."""
        with self.lock:
            start = number(ptr)
            refuse_unless(start in self._mappings and self._mappings[start].size_bytes == size)
            for by_processor in (False, True):
                self._open(start, accessible=False, by_processor=by_processor)
            handle = self._mappings.pop(start).handle
            self._handles[handle].mappings -= 1
            self._collect(handle)

    def _open(self, address: int, accessible: bool, *, by_processor: bool = False) -> None:  # noqa: FBT001 - the state wanted
        """Open or shut a mapping; its pages are there as long as anybody may touch it."""
        mapping = self._mappings[address]
        was_open = mapping.accessible or mapping.by_processor
        _, window = self._window_of(address, mapping.size_bytes)
        offset = address - window.handle
        is_open = accessible or (mapping.accessible if by_processor else mapping.by_processor)
        if is_open and not was_open:
            memory = self._handles[mapping.handle].memory
            self._from_host(lambda: self.host.map(window, offset, memory, 0, mapping.size_bytes))
        elif was_open and not is_open:
            self._from_host(lambda: self.host.unmap(window, offset, mapping.size_bytes))
        if by_processor:
            mapping.by_processor = accessible
        else:
            mapping.accessible = accessible

    def _window_of(self, start: int, size_bytes: int) -> tuple[int, Owned]:
        for address, (length, window) in self._windows.items():
            if address <= start < start + size_bytes <= address + length:
                return address, window
        raise Refused("INVALID_VALUE")

    def _overlapping(self, start: int, size_bytes: int) -> list[int]:
        end = start + size_bytes
        return sorted(at for at, one in self._mappings.items() if at < end and at + one.size_bytes > start)

    def _covered(self, start: int, size_bytes: int, *, whole: bool = False) -> bool:
        """Tell whether mappings cover a range without a hole; ``whole``: no mapping reaches beyond it."""
        reached = start
        for address in self._overlapping(start, size_bytes):
            end = address + self._mappings[address].size_bytes
            if address > reached or (whole and (address < start or end > start + size_bytes)):
                return False
            reached = end
        return reached >= start + size_bytes

    # -- host memory -------------------------------------------------------------------------------

    @entry(context=True)
    def cuMemHostRegister(self, p: Value, bytesize: int, flags: int) -> None:
        """Map host memory into the device."""
        with self.lock:
            start = number(p)
            refuse_unless(start and bytesize > 0 and flags & ~_REGISTER_FLAGS == 0)
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            pages = -(-(start + bytesize - first) // mmap.PAGESIZE)
            residence = (ctypes.c_ubyte * pages)()
            there = _libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), residence) == 0
            refuse_unless(there)
            taken = any(start < at + length and at < start + bytesize for at, length in self._registered.items())
            refuse_unless(not taken, "HOST_MEMORY_ALREADY_REGISTERED")
            self._registered[start] = bytesize

    @entry(context=True)
    def cuMemHostGetDevicePointer(self, p: Value, flags: int) -> Value:
        """Return the device's address of registered memory."""
        with self.lock:
            refuse_unless(flags == 0 and self._registration(number(p), 1))
            return real.CUdeviceptr(number(p) + ALIAS)

    @entry(context=True, undo=True)
    def cuMemHostUnregister(self, p: Value) -> None:
        """Take registered memory away from the device."""
        with self.lock:
            refuse_unless(number(p) in self._registered, "HOST_MEMORY_NOT_REGISTERED")
            del self._registered[number(p)]

    def _registration(self, start: int, size_bytes: int) -> bool:
        return any(at <= start and start + size_bytes <= at + length for at, length in self._registered.items())

    # -- what runs on the device -------------------------------------------------------------------

    def locate(self, address: int, size_bytes: int) -> int:
        """Return where in this process the device's bytes are, once it is certain that they may be touched.

        Raises:
            Refused: ``ILLEGAL_ADDRESS``: they are not mapped, or access was not set.
        """
        if address >= ALIAS:
            refuse_unless(self._registration(address - ALIAS, size_bytes), "ILLEGAL_ADDRESS")
            return address - ALIAS
        touched = self._overlapping(address, size_bytes)
        opened = touched and all(self._mappings[at].accessible for at in touched)
        refuse_unless(opened and self._covered(address, size_bytes), "ILLEGAL_ADDRESS")
        return address

    def is_open_to_processor(self, address: int, size_bytes: int) -> bool:
        """Tell whether the processor may touch a range of the window."""
        touched = self._overlapping(address, size_bytes)
        opened = bool(touched) and all(self._mappings[at].by_processor for at in touched)
        return opened and self._covered(address, size_bytes)

    def mappings_open_to_processor(self, address: int, size_bytes: int) -> int:
        """Count mappings in a range that the processor may touch."""
        return sum(self._mappings[at].by_processor for at in self._overlapping(address, size_bytes))

    def read(self, address: int, size_bytes: int) -> bytes:
        """Read as the device reads; for kernels and tests."""
        with self.lock:
            return ctypes.string_at(self.locate(address, size_bytes), size_bytes)

    def write(self, address: int, data: bytes) -> None:
        """Write as the device writes; for kernels and tests."""
        with self.lock:
            self._refuse_read_only(address, len(data))
            ctypes.memmove(self.locate(address, len(data)), data, len(data))

    def _refuse_read_only(self, address: int, size_bytes: int) -> None:
        touched = (self._mappings[one] for one in self._overlapping(address, size_bytes))
        refuse_unless(not any(mapping.read_only for mapping in touched), "ILLEGAL_ADDRESS")

    def load(self, address: int) -> int:
        """Read a signed 64-bit word in one piece."""
        refuse_unless(address % 8 == 0, "MISALIGNED_ADDRESS")
        with self.lock:
            return ctypes.c_int64.from_address(self.locate(address, 8)).value

    def store(self, address: int, value: int) -> None:
        """Write a 64-bit word in one piece."""
        refuse_unless(address % 8 == 0, "MISALIGNED_ADDRESS")
        with self.lock:
            self._refuse_read_only(address, 8)
            ctypes.c_int64.from_address(self.locate(address, 8)).value = value

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        """Write one byte everywhere in a range."""
        with self.lock:
            self._refuse_read_only(address, size_bytes)
            ctypes.memset(self.locate(address, size_bytes), byte, size_bytes)


def _open_here() -> dict[int, int]:
    """Return the memory of twins of which this process has a descriptor: its inode and bytes."""
    found: dict[int, int] = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which the directory is read
            if str(descriptor.readlink()).startswith(_LINK):
                stat = descriptor.stat()
                found[stat.st_ino] = stat.st_size
    return found


def _inode(memory: Memory) -> int:
    return os.fstat(memory.handle).st_ino
