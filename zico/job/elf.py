"""Replace functions that a loaded shared library imports, by writing addresses into its GOT.

Theory of operation
    A library calls an imported function through a pointer, its *slot*, which the dynamic linker
    filled in when the library was loaded. The relocation tables say where each symbol's slots are.
    Writing another address there redirects the calls of that one library and of nobody else; calls
    that are already running are not disturbed. Prior art: bloomberg/memray,
    ``src/memray/_memray/elf_shenanigans.cpp``.

Guarantees
    * Nothing is written unless every requested symbol has at least one slot and all slots can be
      written.
    * Each slot changes by one aligned 8-byte store: a thread that calls through it meanwhile
      reaches the old function or the new one. Protections are as before afterwards.
    * No table is trusted: a damaged file raises ``HookError``, whatever its bytes.
    * Only program headers are used, so that libraries without section headers work.

Known limitations
    * Linux, x86-64 and aarch64.
    * Calls inside the library that defines the function, and addresses looked up with ``dlsym``, do
      not go through a slot of the importing library.
    * Addresses that the library copied elsewhere before the replacement keep pointing at the old
      function.

The tables are read from the file, not from memory: glibc relocates the pointers in a mapped
``PT_DYNAMIC`` on some machines and musl on none. The list of mappings is ``/proc/self/maps``, not
``dl_iterate_phdr``. That one runs its callback under the linker's lock. A Python callback may give
up the GIL there to a thread whose ``import`` holds the GIL while it waits for that very lock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

# Layouts and numbers below: System V gABI, chapters 4 and 5
# (https://www.sco.com/developers/gabi/latest/contents.html).
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = np.dtype(
    [
        ("type", "<u4"),
        ("flags", "<u4"),
        ("offset", "<u8"),
        ("vaddr", "<u8"),
        ("paddr", "<u8"),
        ("filesz", "<u8"),
        ("memsz", "<u8"),
        ("align", "<u8"),
    ]
)
_DYN = np.dtype([("tag", "<i8"), ("value", "<u8")])
_SYM = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("shndx", "<u2"), ("value", "<u8"), ("size", "<u8")])
# r_info is one 64-bit word, symbol << 32 | type; little-endian, that is the type first.
_RELA = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])

_PT_LOAD, _PT_DYNAMIC = 1, 2
_PF_X = 1
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_STRSZ = 0, 2, 5, 6, 7, 8, 10
_DT_JMPREL, _DT_RELACOUNT = 23, 0x6FFFFFF9
_SHN_UNDEF = 0
_PROTECTION_LETTERS = {b"r": mmap.PROT_READ, b"w": mmap.PROT_WRITE, b"x": mmap.PROT_EXEC}

# e_machine -> relocation types that fill a slot with a symbol's address: JUMP_SLOT, GLOB_DAT, plain 64 bit.
# x86-64: psABI 1.0, table 4.9. aarch64: "ELF for the Arm 64-bit Architecture", dynamic relocations.
_SLOT_TYPES = {62: (7, 6, 1), 183: (1026, 1025, 257)}

_REMEDY = "run the job without zico"

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mprotect.restype = ctypes.c_int

# Two patches of one page at a time would take the write permission from each other.
_PATCHING = threading.Lock()


@dataclass(frozen=True)
class LoadedLibrary:
    """A shared library that is mapped into this process."""

    path: Path  # as /proc/self/maps names it
    base: int  # load bias: what to add to an address in the file to get the address in memory


@dataclass(frozen=True)
class _Mapping:
    """One line of ``/proc/self/maps``."""

    start: int
    stop: int
    protection: int  # PROT_* bits
    offset: int  # into the file, bytes
    path: str


class Hooked:
    """A set of replaced imports, and the way back.

    The caller keeps the code at the replacement addresses alive until ``undo`` has returned. It
    does so for as long as a thread may still be inside that code.
    """

    def __init__(self, originals: Mapping[str, int], cells: Mapping[int, tuple[int, int]]) -> None:
        """Keep what each slot held: ``cells`` is slot -> (previous contents, replacement)."""
        self.originals: dict[str, int] = dict(originals)
        self._cells = dict(cells)

    def undo(self) -> None:
        """Write the previous addresses back; a second call does nothing.

        A slot that somebody replaced since then is left alone: their hook stays and may still call
        ours.

        Raises:
            HookError: The slots cannot be made writable; they are unchanged and ``undo`` may be
                called again.
        """
        with _PATCHING, _writable(self._cells):
            for slot, (previous, replacement) in self._cells.items():
                if _load(slot) == replacement:
                    _store(slot, previous)
            self._cells = {}


def find_loaded(name_prefix: str) -> LoadedLibrary:
    """Find the one loaded library whose file name starts with a prefix.

    Raises:
        HookError: None or several are loaded, or the file was replaced on disk since it was loaded.
    """
    first_code: dict[str, _Mapping] = {}
    for mapping in _mappings():
        name = mapping.path.rpartition("/")[2]
        executable = mapping.protection & mmap.PROT_EXEC
        if executable and mapping.path.startswith("/") and name.startswith(name_prefix):
            first_code.setdefault(mapping.path, mapping)
    if not first_code:
        raise HookError(f"no library named {name_prefix}* is loaded: import its framework first")
    if len(first_code) > 1:
        found = ", ".join(sorted(first_code))
        raise HookError(f"several loaded libraries are named {name_prefix}*: give more of the name ({found})")
    path, code = next(iter(first_code.items()))
    if path.endswith(" (deleted)"):
        raise HookError(f"{path[: -len(' (deleted)')]} was replaced on disk while in use: restart the process")
    return LoadedLibrary(Path(path), _bias(Path(path), code))


def import_slots(library: LoadedLibrary, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Find where a library keeps the addresses of functions that it imports.

    Reads the file only; ``library.base`` is merely added to the result.

    Args:
        library: From ``find_loaded``.
        names: Symbols, without version.

    Returns:
        For every name the addresses of its slots in this process, those for calls (``JUMP_SLOT``)
        first; empty if the library does not import that name.

    Raises:
        HookError: The file is missing, damaged, or made for another kind of machine.
    """
    image = _Image(library.path)
    calls, data = image.relocations()
    slots: dict[str, tuple[int, ...]] = {}
    for name, symbols in image.undefined_symbols(names, (calls, data)).items():
        offsets = np.concatenate([image.slots_of(symbols, table) for table in (calls, data)])
        slots[name] = tuple(dict.fromkeys(library.base + int(offset) for offset in offsets))
    return slots


def replace_imports(library: LoadedLibrary, replacements: Mapping[str, int]) -> Hooked:
    """Redirect a library's calls of imported functions to other addresses.

    Args:
        library: From ``find_loaded``.
        replacements: Symbol -> address of a function with the same C signature.

    Returns:
        The previous addresses by name, and the way back.

    Raises:
        HookError: A symbol is not imported or not bound yet, or memory cannot be made writable.
            Nothing has changed.
    """
    slots = import_slots(library, replacements)
    for name, address in replacements.items():
        if not slots[name]:
            raise HookError(f"no import of {name} in {library.path}: {_REMEDY} or with a tested version of it")
        if not address:
            raise HookError(f"the replacement of {name} is a null pointer: pass a function's address")
    with _PATCHING, _writable([slot for found in slots.values() for slot in found]):
        cells = {slot: (_load(slot), replacements[name]) for name, found in slots.items() for slot in found}
        originals = {name: cells[found[0]][0] for name, found in slots.items()}
        _refuse_unbound(library, originals)
        for slot, (_, replacement) in cells.items():
            _store(slot, replacement)
    return Hooked(originals, cells)


class _Image:
    """A library's file, read through its program headers; every access is checked against its length."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Mapped, not read: of the 788 MB of libtensorflow_cc.so.2 we look at 40. Plain arrays,
            # since each operation on a subclass costs extra.
            self._bytes = np.memmap(path, np.uint8, "r").view(np.ndarray)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise HookError(f"cannot read {path}: {error}") from error
        machine, headers_offset, header_size, header_count = self._read_header()
        if header_size != _PHDR.itemsize:
            raise self._damaged(f"its program headers have {header_size} bytes instead of {_PHDR.itemsize}")
        self._slot_types = _SLOT_TYPES[machine]
        self._segments = self._slice(headers_offset, header_count * header_size, _PHDR)
        self._dynamic = self._read_dynamic()

    def load_segments(self) -> NDArray[Any]:
        """Return the program headers of the parts that are mapped."""
        segments: NDArray[Any] = self._segments[self._segments["type"] == _PT_LOAD]
        return segments

    def relocations(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the relocations for calls and all others, without those that concern no symbol."""
        calls = self._table(_DT_JMPREL, _DT_PLTRELSZ, _RELA)
        data = self._table(_DT_RELA, _DT_RELASZ, _RELA)
        # The linker sorts RELATIVE relocations first and counts them: half of TensorFlow's are not
        # even read.
        return calls, data[self._dynamic.get(_DT_RELACOUNT, 0) :]

    def undefined_symbols(self, names: Collection[str], tables: Iterable[NDArray[Any]]) -> dict[str, NDArray[np.intp]]:
        """Return for each name the indices of the undefined symbols called so (one per version)."""
        # PT_DYNAMIC does not say how many symbols there are, but those beyond the last one that a
        # relocation uses have no slots.
        count = max((int(table["symbol"].max()) + 1 for table in tables if len(table)), default=0)
        symbols = self._at(self._tag(_DT_SYMTAB), count * _SYM.itemsize, _SYM)
        strings = self._table(_DT_STRTAB, _DT_STRSZ, np.dtype(np.uint8))
        undefined = np.flatnonzero(symbols["shndx"] == _SHN_UNDEF)
        starts = symbols["name"][undefined].astype(np.intp)
        return {name: undefined[_starts_of(strings, starts, name.encode())] for name in names}

    def slots_of(self, symbols: NDArray[np.intp], table: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the file addresses of the slots in one table that hold one of the symbols' addresses.

        Raises:
            HookError: One of them is not aligned, so that it could not be written in one store.
        """
        used = table[np.isin(table["symbol"], symbols)]
        # A pointer *into* a function (addend not 0) is no pointer to it.
        used = used[np.isin(used["type"], self._slot_types) & (used["addend"] == 0)]
        offsets: NDArray[np.uint64] = used["offset"]
        if np.any(offsets % 8):
            raise self._damaged("a slot is not aligned to 8 bytes")
        return offsets

    def _read_header(self) -> tuple[int, int, int, int]:
        """Return machine type and the program headers' offset, size of one, and count."""
        header = self._slice(0, _EHDR.size, np.dtype(np.uint8)).tobytes()
        ident, _, machine, _, _, offset, _, _, _, size, count, *_ = _EHDR.unpack(header)
        if ident[:4] != b"\x7fELF":
            raise self._damaged("it is not an ELF file")
        is_64_bit_little_endian = ident[4:6] == b"\x02\x01"
        if not is_64_bit_little_endian or machine not in _SLOT_TYPES:
            raise HookError(f"{self._path} is for another machine: zico hooks 64-bit x86-64 and aarch64 only")
        return machine, offset, size, count

    def _read_dynamic(self) -> dict[int, int]:
        """Return the entries of ``PT_DYNAMIC`` before the first null entry, by tag."""
        found = self._segments[self._segments["type"] == _PT_DYNAMIC]
        if not len(found):
            raise self._damaged("it has no dynamic section, so nothing in it is imported")
        entries = self._slice(int(found["offset"][0]), int(found["filesz"][0]), _DYN)
        ends = np.flatnonzero(entries["tag"] == _DT_NULL)
        used = entries[: ends[0]] if len(ends) else entries
        return dict(zip(used["tag"].tolist(), used["value"].tolist(), strict=True))

    def _tag(self, tag: int) -> int:
        """Return a required entry of the dynamic section."""
        if tag not in self._dynamic:
            raise self._damaged(f"its dynamic section has no entry {tag}")
        return self._dynamic[tag]

    def _table(self, address_tag: int, size_tag: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a table that the dynamic section gives address and size of; empty if it has none."""
        if address_tag not in self._dynamic:
            return np.empty(0, dtype)
        return self._at(self._dynamic[address_tag], self._tag(size_tag), dtype)

    def _at(self, address: int, size_bytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return what the file maps at an address, as an array of ``dtype``."""
        for segment in self.load_segments():
            within = address - int(segment["vaddr"])
            if within >= 0 and within + size_bytes <= int(segment["filesz"]):
                return self._slice(int(segment["offset"]) + within, size_bytes, dtype)
        raise self._damaged(f"no segment holds the table of {size_bytes} bytes at {address:#x}")

    def _slice(self, offset: int, size_bytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a checked piece of the file as an array of ``dtype``."""
        if offset + size_bytes > len(self._bytes):
            raise self._damaged(f"it ends before offset {offset + size_bytes}")
        if size_bytes % dtype.itemsize:
            raise self._damaged(f"a table of {size_bytes} bytes is not made of entries of {dtype.itemsize}")
        return self._bytes[offset : offset + size_bytes].view(dtype)

    def _damaged(self, reason: str) -> HookError:
        """Build the error for a file that does not hold what a loaded library must hold."""
        return HookError(f"{self._path} cannot be hooked: {reason}; reinstall the package that it belongs to")


def _starts_of(strings: NDArray[np.uint8], starts: NDArray[np.intp], wanted: bytes) -> NDArray[np.intp]:
    """Return which of the ``starts`` in a string table begin the string ``wanted``.

    Compares character by character over all candidates at once; after the second hardly any is
    left. Looking for the string in the table instead would miss names that the linker stored as the
    tail of a longer one ("free" in "xfree").
    """
    terminated = wanted + b"\0"
    left: NDArray[np.intp] = np.flatnonzero(starts + len(terminated) <= len(strings))
    for position, character in enumerate(terminated):
        left = left[strings[starts[left] + position] == character]
    return left


def _bias(path: Path, code: _Mapping) -> int:
    """Return the load bias of a library, from the first of its mappings that is executable.

    That one, since nobody maps a file executable to read it, whereas others do map whole libraries.
    """
    for segment in _Image(path).load_segments():
        if segment["flags"] & _PF_X and _page(int(segment["offset"])) == code.offset:
            return code.start - _page(int(segment["vaddr"]))
    raise HookError(f"{path} is not mapped as its headers say, something remapped it: {_REMEDY}")


def _mappings() -> list[_Mapping]:
    """Return the mappings of this process, by ascending address."""
    found = []
    # Paths are bytes; fsdecode is how pathlib and os take them.
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        extent, permissions, offset, _, _, *path = line.split(maxsplit=5)
        start, _, stop = extent.partition(b"-")
        protection = sum(bit for letter, bit in _PROTECTION_LETTERS.items() if letter in permissions)
        name = os.fsdecode(path[0]) if path else ""
        found.append(_Mapping(int(start, 16), int(stop, 16), protection, int(offset, 16), name))
    return found


def _refuse_unbound(library: LoadedLibrary, originals: Mapping[str, int]) -> None:
    """Refuse symbols that the linker would bind at their first call.

    Until then the slot holds an address in the library's own code. Calling that as "the original"
    makes the linker write the true address into the slot, over our replacement. Libraries that
    ``import`` loads are bound at once.
    """
    code = [m for m in _mappings() if m.path == str(library.path) and m.protection & mmap.PROT_EXEC]
    for name, original in originals.items():
        if any(mapping.start <= original < mapping.stop for mapping in code):
            raise HookError(f"{library.path.name} has not bound {name} yet: start the job with LD_BIND_NOW=1")


@contextmanager
def _writable(slots: Iterable[int]) -> Iterator[None]:
    """Make the pages of some slots writable for the duration, then restore their protection.

    Raises:
        HookError: A slot is not mapped or its page cannot be made writable; protections are as
            before.
    """
    protections = _page_protections({_page(slot) for slot in slots})
    with ExitStack() as undo:
        for page, protection in protections.items():
            if not protection & mmap.PROT_WRITE:
                if _mprotect(page, protection | mmap.PROT_WRITE):
                    reason = os.strerror(ctypes.get_errno())
                    raise HookError(f"cannot write the function table at {page:#x} ({reason}): {_REMEDY}")
                # The result is not looked at: a page that stays writable is less hardened, not
                # wrong.
                undo.callback(_mprotect, page, protection)
        yield


def _page_protections(pages: Collection[int]) -> dict[int, int]:
    found = {}
    for mapping in _mappings():
        found.update({page: mapping.protection for page in pages if mapping.start <= page < mapping.stop})
    for page in set(pages) - set(found):
        raise HookError(f"no library is loaded at {page:#x}: it was unloaded, call find_loaded again")
    return found


def _mprotect(page: int, protection: int) -> int:
    """Set the protection of one page; returns 0, or -1 with ``errno`` set."""
    return int(_LIBC.mprotect(page, mmap.PAGESIZE, protection))


def _page(address: int) -> int:
    return address & -mmap.PAGESIZE


def _load(slot: int) -> int:
    return ctypes.c_uint64.from_address(slot).value


def _store(slot: int, value: int) -> None:
    """Write an aligned slot; ctypes copies 8 bytes of a known size, which compiles to one store."""
    ctypes.c_uint64.from_address(slot).value = value
