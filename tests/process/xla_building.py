"""Compile the C sources of the tests of XLA on a GPU: what stands in for the driver, and what looks functions up."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
BUILD_S = 60
STANDS_IN_FOR = ("libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1")
"""The libraries that XLA looks for, by the names that it opens."""

HAS_COMPILER = shutil.which("cc") is not None
WITHOUT_COMPILER = "no C compiler (cc) is installed"


def build(source: str, library: Path, *options: str) -> Path:
    """Compile a source beside this file into a shared library."""
    command = ["cc", "-shared", "-fPIC", "-O1", *options, "-o", str(library), str(HERE / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stderr
    return library


def build_driver(library: Path) -> Path:
    """Build what stands in for the driver; a library of that name that is opened later is this one, once it is open."""
    return build("xla_driver.c", library, f"-Wl,-soname,{library.name}")


def build_lookups(library: Path, driver: Path) -> Path:
    """Build a library that finds a driver's functions as XLA does."""
    return build("xla_lookups.c", library, f'-DDRIVER="{driver}"')
