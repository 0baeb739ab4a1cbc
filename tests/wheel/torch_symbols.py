"""Do PyTorch's wheels have the functions that the adapters look up? For any processor, and without a GPU.

``torch_symbols.py [--platform TAG] VERSION ...`` downloads each wheel, reads its libraries and removes
it. It ends with 1 if a wheel lacks what the adapters cannot do without.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.hash import GNUHashSection
from zico.adapters import torch_cpu, torch_cuda

LIBRARIES = ("libc10.so", "libc10_cuda.so", "libtorch_cuda.so")
C_ALLOCATOR = ("posix_memalign", "free")
OTHER_DOOR = (torch_cpu.SET, torch_cpu.GET, torch_cpu.REPORTER, torch_cpu.NOTE_NEW, torch_cpu.NOTE_DELETED)
NEEDED = {
    "libc10.so": (
        torch_cuda.CONSTRUCTOR,
        *(
            form.format(name)
            for form in (torch_cuda.TYPE_INFO, torch_cuda.TABLE)
            for name in (torch_cuda.OUT_OF_MEMORY_ERROR, torch_cuda.ERROR)
        ),
    ),
    "libc10_cuda.so": (torch_cuda.CURRENT_ALLOCATOR,),
}
"""Builds for CUDA have all of these. What ``libtorch_python.so`` lacks it finds in ``libc10.so``."""
USED = {"libtorch_cuda.so": (torch_cuda.ALLOCATOR_TABLE, torch_cuda.CACHE_INFO)}
"""Without these an error is told in other words."""


class Library:
    """The symbols of a library that it exports, and the names of those that it imports."""

    def __init__(self, content: bytes) -> None:
        """Read its tables."""
        file = ELFFile(io.BytesIO(content))
        self._exported = next(one for one in file.iter_sections() if isinstance(one, GNUHashSection))
        self._symbols = file.get_section_by_name(".dynsym")

    def exports(self, name: str) -> bool:
        """Tell whether it defines the symbol."""
        return self._exported.get_symbol(name) is not None

    def imports(self, names: tuple[str, ...]) -> bool:
        """Tell whether it leaves all of these to others."""
        return set(names) <= {one.name for one in self._symbols.iter_symbols() if one["st_shndx"] == "SHN_UNDEF"}


def libraries_of(version: str, platform: str) -> dict[str, Library]:
    """Download a wheel and return its libraries by name."""
    with tempfile.TemporaryDirectory() as directory:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory]
        only = ["--platform", platform, "--only-binary", ":all:"] if platform else []
        subprocess.run([*argv, *only, f"torch=={version}"], check=True)
        (path,) = Path(directory).iterdir()
        with zipfile.ZipFile(path) as wheel:
            paths = {name: f"torch/lib/{name}" for name in LIBRARIES}
            return {name: Library(wheel.read(at)) for name, at in paths.items() if at in wheel.namelist()}


def lacking(libraries: dict[str, Library], wanted: dict[str, tuple[str, ...]]) -> list[str]:
    """Return what a wheel's libraries do not export."""
    return [
        f"{library}: {name}"
        for library, names in wanted.items()
        if library in libraries
        for name in names
        if not libraries[library].exports(name)
    ]


def main() -> int:
    """Print a line for each wheel; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="", help="such as manylinux_2_28_aarch64; default: this machine's")
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    options = parser.parse_args()
    wrong = False
    for version in options.versions:
        libraries = libraries_of(version, options.platform)
        core = libraries["libc10.so"]
        door = "C library" if core.imports(C_ALLOCATOR) else "none"
        if door == "none" and all(map(core.exports, OTHER_DOOR)):
            door = "SetCPUAllocator"
        missing = lacking(libraries, NEEDED)
        wrong |= door == "none" or bool(missing)
        words = [f"host by {door}", *(f"lacks {one}" for one in missing)]
        words += [f"does without {one}" for one in lacking(libraries, USED)]
        cuda = libraries.get("libc10_cuda.so")
        if cuda is not None and not any(map(cuda.exports, torch_cuda.CHECKS)):
            words.append("tells of a lost GPU in other words")
        build = "processor" if cuda is None else "CUDA"
        sys.stdout.write(f"torch {version} ({build}): {', '.join(words)}\n")
        sys.stdout.flush()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
