"""What a machine with a GPU and no network would have to make first: ``carry.py DIR`` puts Zico's machine code there.

``DIR/code.tar.gz`` is what is in the cache of machine code for this version of Python and of Numba,
for any processor of this level, in any directory (``zico.base.programs``). ``DIR/commit`` says of
which commit the sources are, with their digest: a checkout without history asks it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # PYTHONSAFEPATH leaves it out

import common

CODE, COMMIT = "code.tar.gz", "commit"
SOURCES = ("zico", "kernels", "adapters", "lab", "benchmarks")
REHEARSED = (
    ("benchmarks/gpu/progress.py", "--smoke"),
    ("benchmarks/gpu/maps.py", "--twin", "--result", os.devnull),
    ("-m", "pytest", "--quiet", "tests/gpu", "--twin"),
)
"""What needs no framework, and calls functions that are in no program of jobs and brokers."""
SMOKE_S = 600.0


def folder() -> Path:
    """Return where what was carried for this Python is, if anything was."""
    return common.ROOT / "build" / "gpu-carry" / "{}.{}".format(*sys.version_info)


def unpack(carried: Path) -> int:
    """Put carried machine code into the cache, what is there already excepted; returns the number of files."""
    from zico.base.paths import code_directory

    archive = carried / CODE
    if not archive.exists():
        return 0
    code = code_directory()
    with tarfile.open(archive) as files:
        missing = [one for one in files if one.isfile() and not (code / one.name).exists()]
        files.extractall(code, missing, filter="data")
    return len(missing)


def commit(carried: Path) -> str:
    """Return the commit of these sources: the carried one, if the sources are still as they were then."""
    noted = carried / COMMIT
    name, _, digest = noted.read_text().strip().partition(" ") if noted.exists() else ("", "", "")
    return name if digest == _sources_digest() else common.commit()


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(file for name in SOURCES for file in (common.ROOT / name).rglob("*.py")):
        digest.update(f"{file.relative_to(common.ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _make() -> None:
    """Compile everything into the cache, and take out what is of other sources."""
    from zico.kernels import compilation

    from zico.base import programs, warming
    from zico.base.errors import ConfigError
    from zico.base.paths import code_directory

    kernels = importlib.import_module("zico.kernels")
    warming.compile_all(*warming.ALL)
    wanted = {programs.program(name).file for name in warming.ALL} | {compilation.cache_directory()}
    for module in pkgutil.iter_modules(kernels.__path__, "zico.kernels."):
        with contextlib.suppress(ConfigError):  # those in Triton, which compiles and keeps its own
            for one in vars(importlib.import_module(module.name)).values():
                if isinstance(one, compilation.Kernel):
                    compilation.image(one)
    for place in set(code_directory().iterdir()) - wanted:
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    for argv in REHEARSED:  # whatever they compile besides stays in the cache
        subprocess.run([sys.executable, *argv], cwd=common.ROOT, check=False, timeout=SMOKE_S)


def pack(carried: Path) -> None:
    """Make machine code and write what is to be carried."""
    from zico.base.paths import code_directory

    _make()
    carried.mkdir(parents=True, exist_ok=True)
    code = code_directory()
    with tarfile.open(carried / CODE, "w:gz") as files:
        for file in sorted(file for file in code.rglob("*") if file.is_file() and file.suffix != ".lock"):
            files.add(file, str(file.relative_to(code)))
    (carried / COMMIT).write_text(f"{common.commit()} {_sources_digest()}\n")
    mib = sum(file.stat().st_size for file in carried.rglob("*") if file.is_file()) / 2**20
    print(f"{carried}: {mib:.0f} MiB to carry")


if __name__ == "__main__":
    os.umask(0o077)
    pack(Path(sys.argv[1]))
