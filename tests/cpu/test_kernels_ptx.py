"""Device kernels become PTX that drivers accept, without a device."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from zico.kernels import compilation, digest, encode, progress, scrub, spin
from zico.kernels.compilation import Kernel
from zico.kernels.prepare import KERNELS

from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S = 120.0
INSTRUCTIONS = {
    progress.PROGRESS.name: {"st.release.sys.b64"},
    spin.SPIN.name: {"ld.acquire.sys.b64", "nanosleep.u32", "st.release.sys.b64"},
    scrub.SCRUB.name: {"st.v2.b64"},
    digest.DIGEST.name: {"ld.b64", "red.relaxed.gpu.add.u64"},
    digest.TELL.name: {"ld.b64", "st.release.sys.b64"},
    **{kernel.name: {"ld.b32", "st.b32"} for kernel in encode.KERNELS},
}
MEMORY = re.compile(r"^\s*(?:@\S+ )?((?:st|ld|atom|red|nanosleep|call|bar|membar|fence)\.\S+)", re.MULTILINE)

every_kernel = pytest.mark.parametrize(
    "kernel", [*KERNELS, *encode.KERNELS, *digest.KERNELS], ids=lambda kernel: kernel.name
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let each test have a cache of its own."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@every_kernel
def test_any_driver_accepts_the_version(kernel: Kernel) -> None:
    """PTX is of version 6.3, which came with CUDA 10.0, for sm_70 and all that came later."""
    text = compilation.ptx(kernel)
    assert re.findall(r"^\.version (\S+)$", text, re.MULTILINE) == ["6.3"]
    assert re.findall(r"^\.target (\S+)$", text, re.MULTILINE) == ["sm_70"]
    assert re.findall(r"^\.address_size (\S+)$", text, re.MULTILINE) == ["64"]


@every_kernel
def test_no_version_is_newer_than_cuda_13_0(kernel: Kernel) -> None:
    """The version is at most 9.0, the newest that a driver of CUDA 13.0 accepts."""
    (version,) = re.findall(r"^\.version (\d+)\.(\d+)$", compilation.ptx(kernel), re.MULTILINE)
    assert tuple(map(int, version)) <= compilation.NEWEST_PTX_VERSION == (9, 0)


def test_a_newer_version_is_refused_before_it_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX above the newest accepted version is refused in one sentence, and no image is written."""
    monkeypatch.setattr(compilation, "NEWEST_PTX_VERSION", (6, 2))
    with pytest.raises(ConfigError, match=r"llvmlite \S+ writes PTX 6.3, which the driver .* refuses: install"):
        compilation.image(progress.PROGRESS)
    assert not list(cache.rglob("*.ptx"))


@every_kernel
def test_the_entry_has_the_name_and_the_parameters(kernel: Kernel) -> None:
    """One entry, of the kernel's name, takes one 64-bit word for each parameter; nothing is left to be linked."""
    text = compilation.ptx(kernel)
    assert re.findall(r"\.entry (\w+)", text) == [kernel.name]
    assert len(re.findall(r"\.param \.[bu]64", text)) == kernel.parameters
    assert not {".extern", ".func", ".local", ".global"} & set(text.split())


@every_kernel
def test_a_kernel_touches_memory_by_its_instructions_alone(kernel: Kernel) -> None:
    """Loads and stores are those of system scope and order that the kernel asks for, parameters aside."""
    found = {name for name in MEMORY.findall(compilation.ptx(kernel)) if not name.startswith("ld.param")}
    same = {re.sub(r"^(ld|st)\.u(\d+)$", r"\1.b\2", name) for name in found}  # LLVM 20 writes u for b
    assert same == INSTRUCTIONS[kernel.name]


@pytest.mark.parametrize(
    ("instruction", "register"),
    [
        (compilation.thread, "%tid.x"),
        (compilation.threads, "%ntid.x"),
        (compilation.block, "%ctaid.x"),
        (compilation.blocks, "%nctaid.x"),
    ],
)
def test_a_thread_knows_its_place(instruction: Callable[[], int], register: str) -> None:
    """Numbers and counts of threads and blocks are those of the device's registers."""

    def place(address: int) -> int:
        return compilation.store_release(address, instruction())

    text = compilation.ptx(Kernel(place, lambda: None))
    assert set(re.findall(r"%n?c?ta?id\.\w", text)) == {register}


def test_an_image_is_compiled_once(cache: Path) -> None:
    """The first image is compiled, the next one comes from the cache."""
    first = compilation.image(progress.PROGRESS)
    assert first == compilation.ptx(progress.PROGRESS).encode()
    (path,) = (path for path in cache.rglob("*") if path.is_file())
    path.write_bytes(b"as cached")
    assert compilation.image(progress.PROGRESS) == b"as cached"


def test_a_cache_that_cannot_be_written_costs_time_only(cache: Path) -> None:
    """With a file where the cache should be, an image is compiled all the same."""
    cache.write_text("no folder")
    assert b".entry" in compilation.image(progress.PROGRESS)


def test_another_source_is_another_cache(tmp_path: Path) -> None:
    """Images of kernels whose source changed are not found."""
    before = shutil.copytree(Path(compilation.__file__).parent, tmp_path / "before")
    after = shutil.copytree(before, tmp_path / "after")
    (after / "progress.py").write_text((before / "progress.py").read_text().swapcase())  # of the same length
    assert compilation.cache_directory(before) == compilation.cache_directory()
    assert compilation.cache_directory(after) != compilation.cache_directory(before)


def test_compiling_loads_no_cuda_and_no_toolkit() -> None:
    """A process that makes an image has loaded neither CUDA's bindings nor Numba's CUDA target."""
    code = (
        "import sys\n"
        "from zico.kernels import compilation, progress\n"
        "compilation.image(progress.PROGRESS)\n"
        "print(*(name for name in sys.modules if name.startswith(('cuda', 'numba.cuda', 'numba_cuda'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert not done.stdout.split()


def test_a_missing_back_end_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An llvmlite without the back end is named with its version and what to do."""
    monkeypatch.setattr(compilation, "TRIPLE", "vax-dec-vms")
    with pytest.raises(ConfigError, match=r"llvmlite \S+ was built without .*: install"):
        compilation.ptx(progress.PROGRESS)
