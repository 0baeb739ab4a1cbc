"""NVIDIA's own assemblers make machine code of the kernels for old and new devices, in the order that they ask for.

``ptxas`` of CUDA 12.9 is the one for all architectures: 13 has no sm_70 any more, 12.6 and before
no sm_100. Above it, nvJitLink of CUDA 13 stands for the assembler in newer drivers.
"""

from __future__ import annotations

import functools
import re
import subprocess
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
from zico.kernels import compilation, digest, encode
from zico.kernels.prepare import KERNELS
from zico.kernels.progress import PROGRESS
from zico.kernels.scrub import SCRUB
from zico.kernels.spin import SPIN

if TYPE_CHECKING:
    from pathlib import Path

    from zico.kernels.compilation import Kernel

nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink")
DEADLINE_S = 60.0
OLD = ("sm_70", "sm_75")
"""What the disassembler of CUDA 13 does not know."""
ARCHITECTURES = (*OLD, "sm_80", "sm_90", "sm_100", "sm_120")
PTXAS = ("nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/bin/ptxas")
NVDISASM = ("nvidia-cuda-nvdisasm", "nvidia/cu13/bin/nvdisasm")

# A release is a fence of system scope and behind it a store of system scope. An acquire is a load
# of system scope, and behind it what drops the lines of the multiprocessor's own cache. A rest
# stands between two looks.
RELEASE = "MEMBAR.ALL.SYS ST.E.64.STRONG.SYS"
ACQUIRE = "LD.E.64.STRONG.SYS CCTL.IVALL"
ORDERS = {
    PROGRESS.name: RELEASE,
    SPIN.name: f"{ACQUIRE} {ACQUIRE} NANOSLEEP {ACQUIRE} {RELEASE}",
    SCRUB.name: "ST.E.128",
}
MEMORY = re.compile(r"\b(?:LD|ST|ATOM|RED|MEMBAR|FENCE|CCTL|NANOSLEEP)\b[.\w]*")
"""Instructions that touch, order or wait for memory; parameters are read by others (``LDC``)."""

ptx = functools.cache(compilation.ptx)
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@pytest.fixture(scope="module")
def version() -> tuple[int, int]:
    """Return nvJitLink's version; it comes in a package of its own (nvidia-nvjitlink)."""
    try:
        found: tuple[int, int] = nvjitlink.version()
    except Exception as error:  # noqa: BLE001 - cuda.bindings has several for a library that is not there
        pytest.skip(f"NVIDIA's assembler is not installed (pip install nvidia-nvjitlink): {error}")
    return found


def run(tool: tuple[str, str], *arguments: str) -> str:
    """Run a program of a package; returns what it printed."""
    package, path = tool
    program = str(metadata.distribution(package).locate_file(path))
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def machine_code(text: str, architecture: str, directory: Path) -> Path:
    """Assemble PTX by ``ptxas``; returns the file with the machine code."""
    source, code = directory / "kernel.ptx", directory / "kernel.cubin"
    source.write_text(text)
    run(PTXAS, f"-arch={architecture}", str(source), "--output-file", str(code))
    return code


def order(text: str, architecture: str, directory: Path) -> str:
    """Return the instructions on memory of the machine code of a kernel, as they follow each other."""
    return " ".join(MEMORY.findall(run(NVDISASM, "--print-code", str(machine_code(text, architecture, directory)))))


def linked(text: str, architecture: str) -> bytes:
    """Assemble PTX by nvJitLink; returns the machine code."""
    handle = nvjitlink.create(1, [f"-arch={architecture}"])
    try:
        image = text.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, image, len(image), "kernel")
        nvjitlink.complete(handle)
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
    finally:
        nvjitlink.destroy(handle)
    return bytes(code)


@pytest.mark.parametrize("architecture", OLD)
@every_kernel
def test_the_assembler_takes_the_kernel(kernel: Kernel, architecture: str, tmp_path: Path) -> None:
    """The PTX assembles for architectures from Volta on, and the machine code has the entry; newer ones: below."""
    code = machine_code(ptx(kernel), architecture, tmp_path).read_bytes()
    assert code.startswith(b"\x7fELF")
    assert f".text.{kernel.name}\0".encode() in code


@pytest.mark.parametrize("kernel", [*encode.KERNELS, *digest.KERNELS], ids=lambda kernel: kernel.name)
def test_the_assembler_takes_what_orders_nothing(kernel: Kernel, tmp_path: Path) -> None:
    """The PTX assembles for the oldest and the newest architecture."""
    for architecture in (ARCHITECTURES[0], ARCHITECTURES[-1]):
        assert f".text.{kernel.name}\0".encode() in machine_code(ptx(kernel), architecture, tmp_path).read_bytes()


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in OLD])
@every_kernel
def test_the_machine_code_keeps_order_and_scope(kernel: Kernel, architecture: str, tmp_path: Path) -> None:
    """The PTX assembles; stores and loads of counters, and the fence before a store, are of system scope."""
    assert order(ptx(kernel), architecture, tmp_path) == ORDERS[kernel.name]


@pytest.mark.parametrize(
    ("kernel", "meant", "weaker"),
    [
        (PROGRESS, "st.release.sys", "st.release.gpu"),
        (PROGRESS, "st.release.sys", "st.relaxed.sys"),
        (PROGRESS, "st.release.sys", "st.weak"),
        (SPIN, "ld.acquire.sys", "ld.acquire.gpu"),
        (SPIN, "ld.acquire.sys", "ld.relaxed.sys"),
        (SPIN, "ld.acquire.sys", "ld.volatile"),
    ],
)
def test_a_weaker_kernel_is_another_order(kernel: Kernel, meant: str, weaker: str, tmp_path: Path) -> None:
    """A kernel of less scope or without a fence has machine code that the test above refuses."""
    text = ptx(kernel)
    assert meant in text
    assert order(text.replace(meant, weaker), "sm_90", tmp_path) != ORDERS[kernel.name]


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
@every_kernel
@pytest.mark.usefixtures("version")
def test_the_linker_of_cuda_13_takes_the_kernel(kernel: Kernel, architecture: str) -> None:
    """The PTX assembles, and the machine code has the entry."""
    code = linked(ptx(kernel), architecture)
    assert code.startswith(b"\x7fELF")
    assert f".text.{kernel.name}\0".encode() in code


@pytest.mark.usefixtures("version")
def test_the_linker_refuses_what_is_wrong() -> None:
    """It would notice an instruction that the version or the architecture does not have."""
    wrong = ptx(KERNELS[0]).replace("st.release.sys.b64", "st.release.universe.b64")
    with pytest.raises(nvjitlink.nvJitLinkError):
        linked(wrong, "sm_90")


def test_the_assembler_refuses_what_is_wrong(tmp_path: Path) -> None:
    """It would notice an instruction that does not exist, and PTX that is newer than itself."""
    text = ptx(KERNELS[0])
    for wrong in (
        text.replace("st.release.sys.b64", "st.release.universe.b64"),
        text.replace(".version 6.3", ".version 9.0"),
    ):
        assert wrong != text
        with pytest.raises(AssertionError, match="ptxas"):
            machine_code(wrong, "sm_90", tmp_path)
