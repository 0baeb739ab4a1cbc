"""NVIDIA's own assembler, which is also in the driver, makes machine code of the kernels for old and new devices."""

from __future__ import annotations

import pytest
from zico.kernels.compilation import Kernel, ptx
from zico.kernels.prepare import KERNELS

nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink")
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")


@pytest.fixture(scope="module")
def version() -> tuple[int, int]:
    """Return the assembler's version; it comes in a package of its own (nvidia-nvjitlink)."""
    try:
        found: tuple[int, int] = nvjitlink.version()
    except Exception as error:  # noqa: BLE001 - cuda.bindings has several for a library that is not there
        pytest.skip(f"NVIDIA's assembler is not installed (pip install nvidia-nvjitlink): {error}")
    return found


def assembled(text: str, architecture: str) -> bytes:
    """Return the machine code for an architecture."""
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.usefixtures("version")
def test_the_assembler_takes_the_kernel(kernel: Kernel, architecture: str) -> None:
    """The PTX assembles, and the machine code has the entry."""
    code = assembled(ptx(kernel), architecture)
    assert code.startswith(b"\x7fELF")
    assert f".text.{kernel.name}\0".encode() in code


@pytest.mark.usefixtures("version")
def test_the_assembler_refuses_what_is_wrong() -> None:
    """It would notice an instruction that the version or the architecture does not have."""
    wrong = ptx(KERNELS[0]).replace("st.release.sys.b64", "st.release.universe.b64")
    with pytest.raises(nvjitlink.nvJitLinkError):
        assembled(wrong, "sm_90")
