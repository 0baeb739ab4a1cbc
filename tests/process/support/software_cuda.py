"""A CUDA driver of software for real programs: ``software_cuda.py COMMAND...`` runs one with it, without a GPU.

The libraries are built from ``cuda_driver.c`` and, where a framework's build for CUDA 13 is
installed, from ``cuda_runtime.c`` with the headers that come with it. A program finds them by
``LD_LIBRARY_PATH``. PyTorch's own libraries name a folder for the runtime, so ``LD_PRELOAD`` loads
this one before them. TensorFlow's build is for CUDA 12: ``build_for_tensorflow``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BUILD_S = 60
DRIVERS = ("libcuda.so.1", "libnvidia-ml.so.1")
RUNTIME, TENSORFLOW_RUNTIME = "libcudart.so.13", "libcudart.so.12"
HEADERS = (Path("nvidia/cu13/include"), Path("triton/backends/nvidia/include"))
TENSORFLOW_HEADERS = (Path("tensorflow/include/third_party/gpus/cuda/include"),)
NEEDED_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")
EMPTY = ("cublas.so.12", "cublasLt.so.12", "cudnn.so.9", "cufft.so.11", "cusolver.so.11", "cusparse.so.12")
"""Libraries without which TensorFlow uses no GPU. It opens them first, and looks functions up when it calls them."""
OPTIONS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
COUNTS = ("-finstrument-functions", "-Wl,-Bsymbolic")
"""Every function of the driver counts its calls, by the driver's own counter and not the C library's."""


def build(folder: Path, options: tuple[str, ...] = COUNTS) -> dict[str, str]:
    """Build the driver in a folder, and the runtime where its headers are; returns what programs need to find them.

    Args:
        folder: Where.
        options: Of the driver; without ``COUNTS`` no call is counted, and none takes time for it.

    Raises:
        RuntimeError: The compiler refuses, with what it wrote.
    """
    for name in DRIVERS:
        _compile("cuda_driver.c", folder / name, *options)
    environ = {"LD_LIBRARY_PATH": str(folder)}
    headers = _headers(HEADERS)
    if headers:
        environ["LD_PRELOAD"] = str(_compile_runtime(folder / RUNTIME, folder, headers))
    return environ


def build_for_tensorflow(folder: Path) -> dict[str, str]:
    """Build what TensorFlow's build for CUDA 12 opens besides the driver; returns what its programs need to find both.

    Its libraries lie in a folder of their own: PyTorch would find the empty ones by the same name.

    Args:
        folder: Where ``build`` has built the driver.

    Raises:
        RuntimeError: The compiler refuses, with what it wrote.
    """
    own = folder / "tensorflow"
    own.mkdir()
    _compile_runtime(own / TENSORFLOW_RUNTIME, folder, _headers(TENSORFLOW_HEADERS))
    (own / "empty.c").touch()
    for name in EMPTY:
        _compile(own / "empty.c", own / f"lib{name}")
    return {"LD_LIBRARY_PATH": f"{own}:{folder}"}


def _compile_runtime(library: Path, folder: Path, headers: list[Path]) -> Path:
    """Compile CUDA's runtime over the driver in a folder."""
    versions = library.with_suffix(".versions")
    versions.write_text(f"{library.name} {{ global: cuda*; __cuda*; local: *; }};\n")
    found = (*(f"-I{one}" for one in headers), f"-Wl,--version-script={versions}", str(folder / DRIVERS[0]))
    _compile("cuda_runtime.c", library, *found)
    return library


def _headers(inner: tuple[Path, ...]) -> list[Path]:
    """Return where CUDA's headers are, in the packages that builds of frameworks bring or require."""
    packages = [Path(one) for one in sys.path if one.endswith("-packages")]
    folders = [package / one for package in packages for one in inner if (package / one).is_dir()]
    have = [(folder / needed).exists() for needed in NEEDED_HEADERS for folder in folders]
    return folders if any(have[: len(folders)]) and any(have[len(folders) :]) else []


def _compile(source: str | Path, library: Path, *options: str) -> None:
    name = f"-Wl,-soname,{library.name}"
    command = ["cc", *OPTIONS, name, "-o", str(library), str(HERE / source), *options, "-lpthread", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


class Driver:
    """The driver of this process, seen and steered from outside its functions."""

    def __init__(self, library: str = DRIVERS[0]) -> None:
        """Open the library that the program uses, or will use."""
        self.functions = ctypes.CDLL(library)
        self.functions.driver_function.restype = ctypes.c_char_p

    def counter(self, name: str) -> ctypes.c_uint64:
        """Return one of its variables, which can be read and written."""
        return ctypes.c_uint64.in_dll(self.functions, name)

    def enter(self) -> None:
        """Make the first device's primary context current in this thread."""
        context = ctypes.c_void_p()
        self.functions.cuInit(0)
        self.functions.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self.functions.cuCtxSetCurrent(context)

    def hold(self, stream: int) -> None:
        """Let a stream do nothing of what it is given from now on; 0: let all go on."""
        self.counter("held").value = stream

    def calls(self) -> dict[str, int]:
        """Return how often each function was called so far."""
        found = {}
        calls = ctypes.c_uint64()
        slot = 0
        while (name := self.functions.driver_function(slot, ctypes.byref(calls))) != b"":
            if name:
                found[name.decode()] = calls.value
            slot += 1
        return found


def main() -> None:
    """Build into a folder of its own, and run a command, whose calls are not counted."""
    with tempfile.TemporaryDirectory(prefix="software-cuda-") as folder:
        environ = os.environ | {"SOFTWARE_BYTES": str(4 << 30)} | build(Path(folder), ())
        sys.exit(subprocess.run(sys.argv[1:], env=environ, check=False).returncode)


if __name__ == "__main__":
    main()
