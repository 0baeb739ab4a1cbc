"""From a kernel in Python to PTX that every supported driver loads.

Theory of operation
    Numba compiles the function as it compiles any other, for this processor, and gives LLVM's
    language. That is merged with the device's instructions (``zico.kernels.compilation``) and an
    entry point, and the back end for NVIDIA's devices that comes within llvmlite writes PTX.

Guarantees
    * No CUDA toolkit, no package besides Numba and no device is needed.
    * The PTX is of the oldest version and for the oldest architecture that have the instructions. A
      driver accepts PTX of its own version and all before, and compiles it for any later
      architecture: so one image serves all devices. PTX that is newer than ``NEWEST_PTX_VERSION``
      is refused here, before a driver refuses it in a job.
    * What was compiled once is read from the cache; two processes that compile at once write the
      same bytes.
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

from zico.base.errors import ConfigError
from zico.base.libc import libc_address
from zico.base.paths import code_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# -- the instructions that kernels need and Python has no words for --------------------------------
#
# A kernel calls them as C functions. For a device, ``DEFINITIONS`` says what each one is. On a
# processor they are functions that a test binds. So the code that Numba made of a kernel runs there
# too, one thread at a time.
#
# All addresses are generic ones: device memory, or host memory as the device sees it. What has
# nothing to return returns
# 0: Numba's ``void`` is a pointer to LLVM, and callers and callees must agree on it.

store_release = types.ExternalFunction("zico_store_release", types.int64(types.int64, types.int64))
"""Store (address, value), 64 bit, seen by the whole system only after all that this thread has seen or written."""

load_acquire = types.ExternalFunction("zico_load_acquire", types.int64(types.int64))
"""Load the 64 bit at an address; what its writer released before is seen from here on."""

store_zeros = types.ExternalFunction("zico_store_zeros", types.int64(types.int64))
"""Zero the 16 bytes at an aligned address."""

load_word = types.ExternalFunction("zico_load_word", types.int64(types.int64))
"""Load the 32 bit at an address, as a number that is not negative, in no order."""

store_word = types.ExternalFunction("zico_store_word", types.int64(types.int64, types.int64))
"""Store the lower 32 bit of (address, value), in no order."""

load_long = types.ExternalFunction("zico_load_long", types.int64(types.int64))
"""Load the 64 bit at an address, in no order."""

add_long = types.ExternalFunction("zico_add_long", types.int64(types.int64, types.int64))
"""Add to the 64 bit at (address, value), whole among all threads of the device, in no order."""

rest = types.ExternalFunction("zico_rest", types.int64(types.int64))
"""Give the multiprocessor to others for about so many nanoseconds."""

thread = types.ExternalFunction("zico_thread", types.int64())
"""Return this thread's number within its block."""

threads = types.ExternalFunction("zico_threads", types.int64())
"""Return how many threads a block has."""

block = types.ExternalFunction("zico_block", types.int64())
"""Return this thread's block's number within the launch."""

blocks = types.ExternalFunction("zico_blocks", types.int64())
"""Return how many blocks the launch has."""

_REGISTERS = {"zico_thread": "tid", "zico_threads": "ntid", "zico_block": "ctaid", "zico_blocks": "nctaid"}

NAMES = (
    *("zico_store_release", "zico_load_acquire", "zico_store_zeros", "zico_load_word", "zico_store_word"),
    *("zico_load_long", "zico_add_long", "zico_rest"),
    *_REGISTERS,
)

# st.release is a fence.acq_rel of the same scope and a relaxed store behind it. .sys is the scope
# of every thread of every device and processor. Both and nanosleep need sm_70.
# Source: PTX ISA, the memory consistency model, and the instructions st and ld.
_MEMORY = """
define i64 @zico_store_release(i64 %address, i64 %value) alwaysinline nounwind {
  call void asm sideeffect "st.release.sys.b64 [$0], $1;", "l,l,~{memory}"(i64 %address, i64 %value)
  ret i64 0
}
define i64 @zico_load_acquire(i64 %address) alwaysinline nounwind {
  %value = call i64 asm sideeffect "ld.acquire.sys.b64 $0, [$1];", "=l,l,~{memory}"(i64 %address)
  ret i64 %value
}
define i64 @zico_store_zeros(i64 %address) alwaysinline nounwind {
  call void asm sideeffect "st.v2.b64 [$0], {$1, $1};", "l,l,~{memory}"(i64 %address, i64 0)
  ret i64 0
}
define i64 @zico_load_word(i64 %address) alwaysinline nounwind {
  %pointer = inttoptr i64 %address to i32*
  %narrow = load i32, i32* %pointer, align 4
  %value = zext i32 %narrow to i64
  ret i64 %value
}
define i64 @zico_store_word(i64 %address, i64 %value) alwaysinline nounwind {
  %pointer = inttoptr i64 %address to i32*
  %narrow = trunc i64 %value to i32
  store i32 %narrow, i32* %pointer, align 4
  ret i64 0
}
define i64 @zico_load_long(i64 %address) alwaysinline nounwind {
  %pointer = inttoptr i64 %address to i64*
  %value = load i64, i64* %pointer, align 8
  ret i64 %value
}
define i64 @zico_add_long(i64 %address, i64 %value) alwaysinline nounwind {
  call void asm sideeffect "red.relaxed.gpu.add.u64 [$0], $1;", "l,l,~{memory}"(i64 %address, i64 %value)
  ret i64 0
}
define i64 @zico_rest(i64 %ns) alwaysinline nounwind {
  %short = trunc i64 %ns to i32
  call void asm sideeffect "nanosleep.u32 $0;", "r"(i32 %short)
  ret i64 0
}
"""

_REGISTER = """
declare i32 @llvm.nvvm.read.ptx.sreg.{register}.x()
define i64 @{name}() alwaysinline nounwind {{
  %narrow = call i32 @llvm.nvvm.read.ptx.sreg.{register}.x()
  %wide = zext i32 %narrow to i64
  ret i64 %wide
}}
"""

DEFINITIONS = _MEMORY + "".join(_REGISTER.format(name=name, register=register) for name, register in _REGISTERS.items())
"""What each instruction is on a device, as LLVM's language that is merged into a kernel's."""


def bind(addresses: Mapping[str, int]) -> None:
    """Let kernels that are compiled for this processor from here on use these C functions, by name."""
    for name, address in addresses.items():
        binding.add_symbol(name, address)


def bind_missing() -> None:
    """Bind what nobody has bound, so that a kernel can be compiled here: it must not run."""
    bind({name: libc_address("abort") for name in NAMES if binding.address_of_symbol(name) is None})


# --------------------------------------------------------------------------------------------------

TRIPLE = "nvptx64-nvidia-cuda"
COMPUTE_CAPABILITY = (7, 0)
"""The oldest with all instructions: ordered loads and stores, and ``nanosleep``."""
PTX_VERSION = (6, 3)
"""The oldest with all instructions; CUDA 10.0 brought it.

Source: PTX ISA, "Release Notes",
https://docs.nvidia.com/cuda/parallel-thread-execution/#release-notes """
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
        ConfigError: The installed llvmlite has no back end for NVIDIA's devices, or one that writes
            too new a version.
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
    # Numba lets a C callback's entry call its body: on a device, where a call costs a stack, they
    # must become one.
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
