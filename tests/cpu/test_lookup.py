"""Standing in for a library's ``dlsym``; ctypes' extension module is the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("support") / "lookup_checks.py"


def test_a_library_finds_our_functions_and_everything_else_as_before() -> None:
    """Named functions are ours, the real ones are kept, missing ones stay missing, refusals change nothing."""
    done = subprocess.run((sys.executable, str(CHECKS)), capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [
        "no library named no_such_library* is loaded: import its framework first",
        "0",
        "7",
        "True",
        "True",
        "True",
        "False",
        "(8, 7)",
        "getppid already means another function of ours: one process, one meaning",
        f"the name {'x' * 64!r} cannot be looked up: give 1 to 63 bytes",
        "19 functions to look up are more than the 16 that there is room for",
        "(8, 7, True)",
    ]
