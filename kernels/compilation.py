"""From a kernel in Python to PTX that every supported driver loads.

Theory of operation
    Numba compiles the function as it compiles any other, for this processor, and gives LLVM's language. That is merged
    with the device's instructions (``zico.kernels.instructions``) and an entry point, and the back end for NVIDIA's
    devices that comes within llvmlite writes PTX.

Guarantees
    * No CUDA toolkit, no package besides Numba and no device is needed.
    * The PTX is of the oldest version and for the oldest architecture that have the instructions. A driver accepts PTX
      of its own version and all before, and compiles it for any later architecture: so one image serves all devices.
      PTX that is newer than ``NEWEST_PTX_VERSION`` is refused here, before a driver refuses it in a job.
    * What was compiled once is read from the cache; two processes that compile at once write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite
import numba
from llvmlite import binding
from numba import cfunc, types
from zico.kernels.instructions import DEFINITIONS, bind_missing

from zico.errors import ConfigError
from zico.paths import code_directory

if TYPE_CHECKING:
    from collections.abc import Callable

TRIPLE = "nvptx64-nvidia-cuda"
COMPUTE_CAPABILITY = (7, 0)
"""The oldest with all instructions: ordered loads and stores, and ``nanosleep``."""
PTX_VERSION = (6, 3)
"""The oldest with all instructions; CUDA 10.0 brought it.

Source: PTX ISA, "Release Notes", https://docs.nvidia.com/cuda/parallel-thread-execution/#release-notes
"""
NEWEST_PTX_VERSION = (9, 0)
"""CUDA 13.0's. LLVM ignores a version that it does not know and writes one of its own choice: so the text is asked."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and what it means."""

    function: Callable[..., int]
    """What Numba compiles. Every parameter is a 64-bit integer, a value or an address; it returns 0."""
    meaning: Callable[..., Any]
    """The same in NumPy, with arrays where the kernel has addresses."""

    @property
    def name(self) -> str:
        """Return the name that the device knows it by."""
        return f"zico_{self.function.__name__}"

    @property
    def parameters(self) -> int:
        """Return how many there are."""
        return self.function.__code__.co_argcount


def image(kernel: Kernel) -> bytes:
    """Return a kernel's PTX as the driver loads it (``load_kernel``), from the cache if it is there."""
    path = cache_directory() / f"{kernel.name}.ptx"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    made = ptx(kernel).encode()
    _write(path, made)
    return made


def ptx(kernel: Kernel) -> str:
    """Compile a kernel to PTX with one entry, ``kernel.name``.

    Raises:
        ConfigError: The installed llvmlite has no back end for NVIDIA's devices, or one that writes too new a version.
    """
    machine = _machine()
    module = _merged(kernel)
    module.triple = TRIPLE
    module.data_layout = str(machine.target_data)
    for symbol in (*module.functions, *module.global_variables):
        if not symbol.is_declaration and symbol.name != kernel.name:
            symbol.linkage = "internal"
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options())
    passes.getModulePassManager().run(module, passes)
    text = str(machine.emit_assembly(module))
    assert ".extern" not in text, f"kernel {kernel.name} does what no instruction is for: {text}"  # noqa: S101
    version = tuple(map(int, re.findall(r"^\.version (\d+)\.(\d+)$", text, re.MULTILINE)[0]))
    if version > NEWEST_PTX_VERSION:
        message = (
            f"the installed llvmlite {llvmlite.__version__} writes PTX {version[0]}.{version[1]}, which the driver of "
            f"CUDA 13.0 refuses: install a version of llvmlite that writes PTX {PTX_VERSION[0]}.{PTX_VERSION[1]}"
        )
        raise ConfigError(message)
    return text


def for_processor(kernel: Kernel) -> Any:  # noqa: ANN401 - a Numba CFunc
    """Compile a kernel for this processor, with the instructions that are bound at this moment."""
    bind_missing()
    signature = types.int64(*[types.int64] * kernel.parameters)
    return cfunc(signature, nopython=True, error_model="numpy")(kernel.function)


def _merged(kernel: Kernel) -> Any:  # noqa: ANN401 - an LLVM module
    """Return the kernel, its entry point and the device's instructions in one module."""
    compiled = for_processor(kernel)
    # Numba lets a C callback's entry call its body: on a device, where a call costs a stack, they must become one.
    module = binding.parse_assembly(compiled.inspect_llvm().replace("noinline", "nounwind"))
    arguments = ", ".join(f"i64 %a{i}" for i in range(kernel.parameters))
    entry = (
        f'declare i64 @"{compiled.native_name}"({", ".join(["i64"] * kernel.parameters)})\n'
        f"define ptx_kernel void @{kernel.name}({arguments}) {{\n"
        f'  call i64 @"{compiled.native_name}"({arguments})\n'
        "  ret void\n"
        "}\n"
    )
    module.link_in(binding.parse_assembly(DEFINITIONS + entry))
    return module


def _machine() -> Any:  # noqa: ANN401 - an LLVM target machine
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(TRIPLE)
    except RuntimeError as error:
        message = (
            f"the installed llvmlite {llvmlite.__version__} was built without LLVM's NVPTX back end, which makes "
            f"Zico's device kernels: install the wheel of PyPI (pip install --force-reinstall llvmlite=="
            f"{llvmlite.__version__}), or copy {cache_directory()} from a machine that has it"
        )
        raise ConfigError(message) from error
    architecture, version = (f"{kind}{a}{b}" for kind, (a, b) in (("sm_", COMPUTE_CAPABILITY), ("ptx", PTX_VERSION)))
    return target.create_target_machine(architecture, f"+{version}", codemodel="default")


def cache_directory(sources: Path = Path(__file__).parent) -> Path:
    """Return where images are kept, as long as nothing they are made of changes."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in sorted(sources.glob("*.py")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return code_directory() / f"kernels-{digest.hexdigest()[:16]}"


def _write(path: Path, data: bytes) -> None:
    """Write a file that is whole whenever it is there; where the cache cannot be written it is compiled each time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
