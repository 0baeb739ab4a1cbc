"""Compile the C source of the tests of XLA on a GPU: what looks the driver's functions up."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
BUILD_S = 60

HAS_COMPILER = shutil.which("cc") is not None
WITHOUT_COMPILER = "no C compiler (cc) is installed"


def build_lookups(library: Path, driver: Path) -> Path:
    """Build a library that finds a driver's functions as XLA does."""
    command = ["cc", "-shared", "-fPIC", "-O1", f'-DDRIVER="{driver}"', "-o", str(library), str(HERE / "xla_lookups.c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stderr
    return library
