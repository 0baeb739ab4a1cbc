"""Checks of ``zico.job.lookup``, in a process of their own: the hook stays. Prints a line for each thing seen."""

from __future__ import annotations

import ctypes
import os
import sys

from zico.base.errors import HookError
from zico.job import lookup

SEVEN = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7)
EIGHT = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 8)


def address_of(function: object) -> int:
    """Return the address of a callback's code."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]


def say(what: object) -> None:
    """Print a line."""
    sys.stdout.write(f"{what}\n")


def refused(replacements: dict[str, int], library: str = "_ctypes.") -> str:
    """Return the sentence with which a substitution is refused."""
    try:
        lookup.substitute(library, replacements)
    except HookError as error:
        return str(error)
    return "not refused"


def main() -> None:
    """Look functions up with ctypes, whose extension module imports ``dlsym``."""
    say(refused({"getppid": address_of(SEVEN)}, "no_such_library"))
    kept = ctypes.c_int64()
    replacements = {"getppid": address_of(SEVEN), "no_such_function": address_of(SEVEN)}
    lookup.substitute("_ctypes.", replacements, {"getppid": ctypes.addressof(kept)})
    say(kept.value)
    libc = ctypes.CDLL(None)
    say(libc.getppid())
    say(ctypes.CFUNCTYPE(ctypes.c_int)(lookup.original("getppid"))() == os.getppid())
    say(kept.value == lookup.original("getppid"))
    say(libc.getpid() == os.getpid())
    say(hasattr(ctypes.CDLL(None), "no_such_function"))
    lookup.substitute("_ctypes.", {"getppid": address_of(SEVEN), "getpgrp": address_of(EIGHT)})
    say((ctypes.CDLL(None).getpgrp(), ctypes.CDLL(None).getppid()))
    say(refused({"getppid": address_of(EIGHT)}))
    say(refused({"x" * lookup.NAME_BYTES: 1}))
    say(refused({f"name{i}": 1 for i in range(lookup.MOST)}))
    say((ctypes.CDLL(None).getpgrp(), ctypes.CDLL(None).getppid(), ctypes.CDLL(None).getpid() == os.getpid()))


if __name__ == "__main__":
    main()
