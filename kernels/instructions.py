"""The instructions that kernels need and Python has no words for.

A kernel calls them as C functions. For a device, ``DEFINITIONS`` says what each one is; on a processor they are
functions that a test binds, and so the code that Numba made of a kernel runs there too, one thread at a time.

All addresses are generic ones: device memory, or host memory as the device sees it. What has nothing to return returns
0: Numba's ``void`` is a pointer to LLVM, and callers and callees must agree on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import binding
from numba import types

from zico.libc import libc_address

if TYPE_CHECKING:
    from collections.abc import Mapping

store_release = types.ExternalFunction("zico_store_release", types.int64(types.int64, types.int64))
"""Store (address, value), 64 bit, seen by the whole system only after all that this thread has seen or written."""

load_acquire = types.ExternalFunction("zico_load_acquire", types.int64(types.int64))
"""Load the 64 bit at an address; what its writer released before is seen from here on."""

store_zeros = types.ExternalFunction("zico_store_zeros", types.int64(types.int64))
"""Zero the 16 bytes at an aligned address."""

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

NAMES = ("zico_store_release", "zico_load_acquire", "zico_store_zeros", "zico_rest", *_REGISTERS)

# st.release is a fence.acq_rel of the same scope and a relaxed store behind it; .sys is the scope of every thread of
# every device and processor. Both and nanosleep need sm_70.
# Source: PTX ISA, "Memory Consistency Model" and "Data Movement and Conversion Instructions: st, ld"
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
