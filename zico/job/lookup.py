"""Answer a loaded library's ``dlsym`` for some names with functions of ours.

Libraries that find the driver's functions at run time (TensorFlow, XLA) import ``dlsym`` itself. So
its slot in their import table is the one place to stand in (``zico.job.elf``). A function that the
driver lacks stays missing.

Known limitation: ``RTLD_NEXT`` asks for the library after the caller's own, and the caller would be
ours. The C library refuses it, as from any code that no library holds. Neither of the two uses it.

A library may look functions up while it is unloaded, when the interpreter is gone: what answers it
is never freed.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Annotated, Any

import llvmlite.binding
import numpy as np
from numba import types

from zico.base.compiled import array_at, call, callback, record_at, symbol_address
from zico.base.errors import HookError
from zico.base.libc import libc_address
from zico.base.records import I8, Numbers, Record, Records, dtype_of
from zico.job import elf

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST = 16
NAME_BYTES = 64


class Entry(Record):
    """A name and what is answered for it."""

    name: Annotated[Numbers, "u1", (NAME_BYTES,)]  # zero-terminated
    replacement: I8  # what is answered
    original: I8  # what the C library answered last, 0 before anybody asked
    keep_address: I8  # where else that is written, 0 for nowhere


class Table(Record):
    """All names that are looked up here."""

    dlsym: I8
    n: I8
    entries: Annotated[Records[Entry], Entry, (MOST,)]


TABLE = dtype_of(Table)

SYMBOL = "zico_lookup_table"
_TABLE = np.zeros(1, TABLE)
_TABLE[0]["dlsym"] = libc_address("dlsym")
llvmlite.binding.add_symbol(SYMBOL, _TABLE.ctypes.data)  # before what refers to it is compiled
_table_address = symbol_address(SYMBOL)
_BYTE = np.dtype("u1")
_I64 = np.dtype("i8")


@callback(types.int64(types.int64, types.int64))
def dlsym(handle: int, name_address: int) -> int:
    """Stand in for ``dlsym(3)``."""
    table = record_at(_table_address(), TABLE)
    found = call(table.dlsym, (handle, name_address))
    if found == 0:
        return 0
    name = array_at(name_address, NAME_BYTES, _BYTE)
    for i in range(table.n):
        entry = table.entries[i]
        k = 0
        while k < NAME_BYTES - 1 and name[k] == entry.name[k] and name[k] != 0:
            k += 1
        if name[k] == 0 and entry.name[k] == 0:
            entry.original = found
            if entry.keep_address != 0:
                array_at(entry.keep_address, 1, _I64)[0] = found
            return int(entry.replacement)
    return found


def substitute(
    library_prefix: str, replacements: Mapping[str, int], originals: Mapping[str, int] | None = None
) -> None:
    """Let a loaded library find our functions by these names; other names, and other libraries, see no change.

    Several libraries share one table: a name means the same function in all of them.

    Args:
        library_prefix: How the library's file name begins.
        replacements: Name to address; the functions must live as long as the process.
        originals: Name to where the replacement looks for the function that it replaces: 8 bytes,
            filled in before the replacement can be called.

    Raises:
        HookError: The library is not loaded or imports no ``dlsym``, or there are too many names or
            too long ones; nothing has been changed.
    """
    keep(_TABLE, dlsym)
    table = _TABLE[0]
    before = int(table["n"])
    known = {bytes(entry["name"]).rstrip(b"\0").decode(): entry for entry in table["entries"][:before]}
    fresh = [name for name in replacements if name not in known]
    _refuse(replacements, known, len(fresh))
    library = elf.find_loaded(library_prefix)
    for name in fresh:
        entry = table["entries"][int(table["n"])]
        entry["name"] = 0
        entry["name"][: len(name.encode())] = np.frombuffer(name.encode(), np.uint8)
        entry["replacement"] = replacements[name]
        entry["original"] = 0
        entry["keep_address"] = (originals or {}).get(name, 0)
        table["n"] += 1  # last: compiled code looks at so many
    try:
        elf.replace_imports(library, {"dlsym": int(dlsym.address)})
    except HookError:
        table["n"] = before
        raise


def keep(*things: object) -> None:
    """Let objects live as long as the process, longer than the interpreter."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _refuse(replacements: Mapping[str, int], known: Mapping[str, Any], n_fresh: int) -> None:
    """Refuse names that do not fit the table."""
    for name, address in replacements.items():
        if not 0 < len(name.encode()) < NAME_BYTES or "\0" in name:
            message = f"the name {name!r} cannot be looked up: give 1 to {NAME_BYTES - 1} bytes"
            raise HookError(message)
        if name in known and int(known[name]["replacement"]) != address:
            message = f"{name} already means another function of ours: one process, one meaning"
            raise HookError(message)
    if len(known) + n_fresh > MOST:
        message = f"{len(known) + n_fresh} functions to look up are more than the {MOST} that there is room for"
        raise HookError(message)


def original(name: str) -> int:
    """Return the address that the C library last answered for a name, 0 if nobody has asked."""
    for entry in _TABLE[0]["entries"][: int(_TABLE[0]["n"])]:
        if bytes(entry["name"]).rstrip(b"\0").decode() == name:
            return int(entry["original"])
    return 0
