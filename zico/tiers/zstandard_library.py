"""Zstandard's C library, whose functions compiled code calls by address.

The package ``zstandard`` has it, too, but shows only Python what it does. ``libzstd.so.1`` is on every Linux that has
``dpkg``, ``rpm`` or ``systemd``; its functions are the same since version 1.0.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import TYPE_CHECKING

from zico.errors import ConfigError

if TYPE_CHECKING:
    import contextlib

NAME = "libzstd.so.1"
_FUNCTIONS = ("ZSTD_compressCCtx", "ZSTD_decompressDCtx")


@dataclasses.dataclass(frozen=True, slots=True)
class Contexts:
    """What one process compresses and expands with, one at a time each: two contexts and two functions' addresses."""

    compressor: int
    expander: int
    compress: int
    expand: int


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(NAME)
    for name in ("ZSTD_createCCtx", "ZSTD_createDCtx"):
        getattr(library, name).restype = ctypes.c_void_p
        getattr(library, name).argtypes = ()
    for name in ("ZSTD_freeCCtx", "ZSTD_freeDCtx"):
        getattr(library, name).restype = ctypes.c_size_t
        getattr(library, name).argtypes = (ctypes.c_void_p,)
    return library


def open_contexts(undo: contextlib.ExitStack) -> Contexts:
    """Return new contexts, freed by ``undo``.

    Raises:
        ConfigError: The library is not there, or has no memory.
    """
    try:
        library = _library()
    except OSError as error:
        raise ConfigError(f"a compressed tier needs {NAME}: install libzstd1 or libzstd, or leave it out") from error
    compressor = library.ZSTD_createCCtx()
    expander = library.ZSTD_createDCtx()
    undo.callback(library.ZSTD_freeCCtx, compressor)
    undo.callback(library.ZSTD_freeDCtx, expander)
    if not compressor or not expander:
        raise ConfigError("a compressed tier has no memory to begin with: leave it out")
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    return Contexts(compressor, expander, *(address or 0 for address in addresses))
