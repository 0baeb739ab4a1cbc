"""Imports of loaded libraries: where their slots are, replacing them, and putting them back."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zico.base.errors import HookError
from zico.job.elf import LoadedLibrary, find_loaded, import_slots, replace_imports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# NumPy computes np.hypot of float64 with libm's hypot, which it imports: a call that a test can
# make and see.
NUMPY = "_multiarray_umath."
HYPOT = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)

X86_64, AARCH64, I386 = 62, 183, 3
JUMP_SLOT, GLOB_DAT, ABSOLUTE, RELATIVE = 7, 6, 1, 8
BASE = 0x7F0000000000


@pytest.fixture
def numpy_library() -> LoadedLibrary:
    """The extension module that holds NumPy's loops."""
    return find_loaded(NUMPY)


@pytest.fixture
def hypot_seven(numpy_library: LoadedLibrary) -> Iterator[Callable[[float, float], float]]:
    """A hypot that answers 7, and a check that every test left NumPy's own in place."""
    function = HYPOT(lambda _x, _y: 7.0)
    before = contents(numpy_library, "hypot")
    yield function
    assert contents(numpy_library, "hypot") == before


def address_of(function: object) -> int:
    """Return the address of a ctypes callback's code."""
    value = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert value is not None
    return value


def contents(library: LoadedLibrary, name: str) -> list[int]:
    """Read the slots of a symbol."""
    return [ctypes.c_uint64.from_address(slot).value for slot in import_slots(library, [name])[name]]


def permissions_at(address: int) -> str:
    """Return what /proc/self/maps says of an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[1]
    return "not mapped"


class Elf:
    """A small library, written from the specification: a header, two program headers, and the tables.

    One segment maps the whole file at VADDR; there are no section headers.
    """

    VADDR = 0x10000

    def __init__(self) -> None:
        """Start with no symbols and no relocations."""
        self.machine = X86_64
        self.ident = b"\x7fELF\x02\x01\x01"
        self.symbols = [struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)]
        self.strings = b"\0"
        self.calls = b""
        self.data = b""
        self.relative_count = 0

    def symbol(self, name: str, section: int = 0) -> int:
        """Add a symbol (section 0: undefined) and return its index."""
        self.symbols.append(struct.pack("<IBBHQQ", len(self.strings), 0x12, 0, section, 0, 0))
        self.strings += name.encode() + b"\0"
        return len(self.symbols) - 1

    def write(self, path: Path) -> LoadedLibrary:
        """Write the file and pretend that it is loaded at BASE."""
        head, tables, dynamic = 64 + 2 * 56, b"", b""
        pieces = [
            (6, None, b"".join(self.symbols)),
            (5, 10, self.strings),
            (23, 2, self.calls),
            (7, 8, self.data),
        ]
        for address_tag, size_tag, piece in pieces:
            dynamic += struct.pack("<qQ", address_tag, self.VADDR + head + len(tables))
            dynamic += b"" if size_tag is None else struct.pack("<qQ", size_tag, len(piece))
            tables += piece.ljust(-(-len(piece) // 8) * 8, b"\0")
        dynamic += struct.pack("<qQqQ", 0x6FFFFFF9, self.relative_count, 0, 0)
        size = head + len(tables) + len(dynamic)
        load = struct.pack("<IIQQQQQQ", 1, 5, 0, self.VADDR, self.VADDR, size, size, 4096)
        at = head + len(tables)
        where = struct.pack("<IIQQQQQQ", 2, 4, at, self.VADDR + at, 0, len(dynamic), len(dynamic), 8)
        header = struct.pack("<16sHHIQQQIHHHHHH", self.ident, 3, self.machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
        path.write_bytes(header + load + where + tables + dynamic)
        return LoadedLibrary(path, BASE)


def rela(offset: int, symbol: int, kind: int, addend: int = 0) -> bytes:
    """Encode a relocation."""
    return struct.pack("<QQq", offset, symbol << 32 | kind, addend)


def small_library() -> Elf:
    """Build a library that calls malloc and free, and keeps a pointer to free."""
    elf = Elf()
    malloc, free = elf.symbol("malloc"), elf.symbol("free")
    elf.calls = rela(0x100, malloc, JUMP_SLOT) + rela(0x108, free, JUMP_SLOT)
    elf.data = rela(0x200, 0, RELATIVE, 5) + rela(0x208, free, GLOB_DAT)
    elf.relative_count = 1
    return elf


def test_calls_arrive_at_the_replacement_until_undone(
    numpy_library: LoadedLibrary, hypot_seven: Callable[[float, float], float]
) -> None:
    """A replaced import changes what the library computes, and undo changes it back."""
    hooked = replace_imports(numpy_library, {"hypot": address_of(hypot_seven)})
    during = np.hypot(3.0, 4.0)
    hooked.undo()
    assert (during, np.hypot(3.0, 4.0)) == (7.0, 5.0)


def test_a_second_undo_does_nothing(numpy_library: LoadedLibrary, hypot_seven: Callable[[float, float], float]) -> None:
    """An undo that is spent does not remove a newer hook, not even one with the same function."""
    spent = replace_imports(numpy_library, {"hypot": address_of(hypot_seven)})
    spent.undo()
    newer = replace_imports(numpy_library, {"hypot": address_of(hypot_seven)})
    spent.undo()
    during = np.hypot(3.0, 4.0)
    newer.undo()
    assert (during, np.hypot(3.0, 4.0)) == (7.0, 5.0)


def test_the_original_can_be_called_from_the_replacement(numpy_library: LoadedLibrary) -> None:
    """The address in originals is the function that the library would have called."""
    calls: list[tuple[float, float]] = []

    def counting(x: float, y: float) -> float:
        calls.append((x, y))
        return float(original(x, y))

    callback = HYPOT(counting)
    hooked = replace_imports(numpy_library, {"hypot": address_of(callback)})
    original = HYPOT(hooked.originals["hypot"])
    try:
        assert np.hypot([3.0, 5.0], [4.0, 12.0]).tolist() == [5.0, 13.0]
    finally:
        hooked.undo()
    assert calls == [(3.0, 4.0), (5.0, 12.0)]


def test_undo_leaves_a_later_hook_in_place(
    numpy_library: LoadedLibrary, hypot_seven: Callable[[float, float], float]
) -> None:
    """A hook that somebody else put over ours survives our undo, and its own undo brings ours back."""
    eight = HYPOT(lambda _x, _y: 8.0)
    ours = replace_imports(numpy_library, {"hypot": address_of(hypot_seven)})
    theirs = replace_imports(numpy_library, {"hypot": address_of(eight)})
    ours.undo()
    assert np.hypot(3.0, 4.0) == 8.0
    theirs.undo()
    assert np.hypot(3.0, 4.0) == 7.0
    # What is left is ours again; put the true one back by hand, as its undo is spent.
    replace_imports(numpy_library, {"hypot": ours.originals["hypot"]})
    assert np.hypot(3.0, 4.0) == 5.0


def test_protections_are_restored(numpy_library: LoadedLibrary, hypot_seven: Callable[[float, float], float]) -> None:
    """Replacing and undoing leave each page as writable as it was, also where it was read-only."""
    (slot, *_) = import_slots(numpy_library, ["hypot"])["hypot"]
    libc = ctypes.CDLL(None)
    page = ctypes.c_void_p(slot & -mmap.PAGESIZE)
    before = permissions_at(slot)
    assert libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ) == 0  # as after relocation with RELRO
    try:
        hooked = replace_imports(numpy_library, {"hypot": address_of(hypot_seven)})
        during = permissions_at(slot)
        hooked.undo()
        after = permissions_at(slot)
    finally:
        libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | (mmap.PROT_WRITE if "w" in before else 0))
    assert (during, after) == ("r--p", "r--p")


def test_one_missing_symbol_leaves_all_as_it_was(
    numpy_library: LoadedLibrary, hypot_seven: Callable[[float, float], float]
) -> None:
    """If one of several symbols is not imported, none is replaced and the error names it and the library."""
    wanted = {"hypot": address_of(hypot_seven), "no_such_function": address_of(hypot_seven)}
    with pytest.raises(HookError, match=r"no_such_function.*_multiarray_umath"):
        replace_imports(numpy_library, wanted)
    assert np.hypot(3.0, 4.0) == 5.0


def test_a_null_replacement_is_refused(numpy_library: LoadedLibrary) -> None:
    """A null pointer as a replacement is an error, not a crash at the next call."""
    with pytest.raises(HookError, match="hypot is a null pointer"):
        replace_imports(numpy_library, {"hypot": 0})


def test_defined_symbols_have_no_slots(numpy_library: LoadedLibrary) -> None:
    """What a library defines itself is no import of it."""
    assert import_slots(numpy_library, ["PyInit__multiarray_umath"]) == {"PyInit__multiarray_umath": ()}


def test_a_library_that_is_not_loaded_is_not_found() -> None:
    """Looking for a library that is not loaded says so, with the name that was looked for."""
    with pytest.raises(HookError, match=r"libno_such_library\.so"):
        find_loaded("libno_such_library.so")


def test_an_ambiguous_prefix_is_refused() -> None:
    """A prefix that fits several libraries is refused rather than guessed about."""
    with pytest.raises(HookError, match="several loaded libraries are named lib"):
        find_loaded("lib")


def test_reading_a_library_does_not_confuse_the_search(numpy_library: LoadedLibrary) -> None:
    """A library that somebody also maps as a file to read is still found where its code is."""
    whole = (0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    with numpy_library.path.open("rb") as file, mmap.mmap(file.fileno(), *whole):
        assert find_loaded(NUMPY) == numpy_library


def test_a_library_that_is_not_mapped_is_refused(tmp_path: Path) -> None:
    """Replacing at an address where nothing is mapped raises instead of crashing."""
    elf = small_library()
    elf.write(tmp_path / "lib.so")
    with pytest.raises(HookError, match="no library is loaded at"):
        replace_imports(LoadedLibrary(tmp_path / "lib.so", 0), {"free": 1})


def test_a_replaced_file_is_refused(tmp_path: Path, numpy_library: LoadedLibrary) -> None:
    """A library whose file was deleted since it was loaded is refused: its tables are gone with it."""
    copy = tmp_path / "zico_deleted.so"
    shutil.copy(next(numpy_library.path.parent.glob("_operand_flag_tests*.so")), copy)
    ctypes.CDLL(str(copy))
    copy.unlink()
    with pytest.raises(HookError, match="replaced on disk"):
        find_loaded("zico_deleted.so")


def test_an_import_that_is_not_bound_yet_is_refused(tmp_path: Path, numpy_library: LoadedLibrary) -> None:
    """A slot that the linker will fill in at the first call, over ours, is refused with the way out."""
    copy = tmp_path / "zico_lazy.so"
    shutil.copy(next(numpy_library.path.parent.glob("_operand_flag_tests*.so")), copy)
    dlopen = ctypes.CDLL(None).dlopen  # ctypes.CDLL itself always binds at once
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    assert dlopen(bytes(copy), os.RTLD_LAZY | os.RTLD_LOCAL)
    folder = numpy_library.path.parent.name  # ``core`` before NumPy 2
    importlib.import_module(f"numpy.{folder}._operand_flag_tests")  # the same library, bound at once
    library = find_loaded("zico_lazy.so")
    before = contents(library, "PyModule_Create2")
    if contents(find_loaded("_operand_flag_tests."), "PyModule_Create2") == before:
        pytest.skip("this build of NumPy or LD_BIND_NOW has all imports bound at once")
    with pytest.raises(HookError, match="not bound PyModule_Create2 yet: start the job with LD_BIND_NOW=1"):
        replace_imports(library, {"PyModule_Create2": 1})
    assert contents(library, "PyModule_Create2") == before


def test_slots_of_all_kinds_are_found(tmp_path: Path) -> None:
    """Slots for calls come first, then data slots; pointers into functions and other symbols do not count."""
    elf = small_library()
    defined, free = elf.symbol("free", section=7), elf.symbol("free")  # the same name, another version
    elf.data += rela(0x210, free, ABSOLUTE) + rela(0x218, free, ABSOLUTE, addend=4) + rela(0x220, free, 99)
    elf.data += rela(0x228, defined, GLOB_DAT)
    library = elf.write(tmp_path / "lib.so")
    assert import_slots(library, {"free", "malloc", "xfree", "fre", ""}) == {
        "free": (BASE + 0x108, BASE + 0x208, BASE + 0x210),
        "malloc": (BASE + 0x100,),
        "xfree": (),
        "fre": (),
        "": (),
    }


def test_a_name_stored_as_the_tail_of_another_is_found(tmp_path: Path) -> None:
    """Linkers store "free" inside "xfree"; both are found, each by its own name."""
    elf = Elf()
    whole = elf.symbol("xfree")
    elf.symbols.append(struct.pack("<IBBHQQ", 2, 0x12, 0, 0, 0, 0))
    elf.calls = rela(0x100, whole, JUMP_SLOT) + rela(0x108, whole + 1, JUMP_SLOT)
    library = elf.write(tmp_path / "lib.so")
    assert import_slots(library, ["free", "xfree"]) == {"free": (BASE + 0x108,), "xfree": (BASE + 0x100,)}


def test_the_numbers_of_aarch64_are_known(tmp_path: Path) -> None:
    """On aarch64 the three relocation types that hold an address have their own numbers."""
    elf = Elf()
    elf.machine = AARCH64
    free = elf.symbol("free")
    elf.calls = rela(0x100, free, 1026)
    elf.data = rela(0x108, free, 1025) + rela(0x110, free, 257) + rela(0x118, free, JUMP_SLOT)
    library = elf.write(tmp_path / "lib.so")
    assert import_slots(library, ["free"]) == {"free": (BASE + 0x100, BASE + 0x108, BASE + 0x110)}


def test_a_library_without_relocations_has_no_slots(tmp_path: Path) -> None:
    """A library that imports nothing is no error."""
    assert import_slots(Elf().write(tmp_path / "lib.so"), ["free"]) == {"free": ()}


@pytest.mark.parametrize(
    ("ident", "machine"),
    [(b"\x7fELF\x01\x01\x01", I386), (b"\x7fELF\x02\x02\x01", AARCH64), (b"\x7fELF\x02\x01\x01", 243)],
)
def test_other_machines_are_refused(tmp_path: Path, ident: bytes, machine: int) -> None:
    """32-bit, big-endian and unknown machines are refused in a sentence that says what can be hooked."""
    elf = small_library()
    elf.ident, elf.machine = ident, machine
    with pytest.raises(HookError, match="another machine: zico hooks 64-bit x86-64 and aarch64 only"):
        import_slots(elf.write(tmp_path / "lib.so"), ["free"])


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\0" * 4096])
def test_what_is_no_library_is_refused(tmp_path: Path, content: bytes) -> None:
    """An empty, short or foreign file raises an error that names the file."""
    (tmp_path / "lib.so").write_bytes(content)
    with pytest.raises(HookError, match=r"lib\.so"):
        import_slots(LoadedLibrary(tmp_path / "lib.so", BASE), ["free"])


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there raises an error that names it."""
    with pytest.raises(HookError, match=r"lib\.so"):
        import_slots(LoadedLibrary(tmp_path / "lib.so", BASE), ["free"])


def test_an_unaligned_slot_is_refused(tmp_path: Path) -> None:
    """A slot that no single store could write is refused."""
    elf = small_library()
    elf.calls = rela(0x104, 2, JUMP_SLOT)
    with pytest.raises(HookError, match="not aligned"):
        import_slots(elf.write(tmp_path / "lib.so"), ["free"])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """A library cut off anywhere raises HookError and nothing else."""
    library = small_library().write(tmp_path / "lib.so")
    whole = library.path.read_bytes()
    for length in range(len(whole)):
        library.path.write_bytes(whole[:length])
        with pytest.raises(HookError):
            import_slots(library, ["free"])


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damage_raises_hook_error_or_nothing(tmp_path: Path, damage: list[tuple[int, int]]) -> None:
    """Whatever bytes of a library are changed, the only error is HookError."""
    library = small_library().write(tmp_path / "lib.so")
    content = bytearray(library.path.read_bytes())
    for position, value in damage:
        content[position % len(content)] = value
    library.path.write_bytes(content)
    try:
        slots = import_slots(library, ["free", "malloc"])
    except HookError:
        return
    assert set(slots) == {"free", "malloc"}
    assert all(isinstance(slot, int) for found in slots.values() for slot in found)
