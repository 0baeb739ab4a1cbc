"""The mark and the digest in Triton, which PyTorch's builds for CUDA bring: another form of the same meanings.

No job uses them. ``benchmarks/gpu/progress.py`` measures both forms, so that a run on a GPU says
which is better in what. Until then Numba's stay. One image of theirs serves all architectures and
takes no launch with shared memory, and a job need not import Triton, which takes a second.

The mark is an exchange, since a store of Triton's has no order. On a device an exchange of system
scope on the host's memory crosses the bus as one transaction each way. The counter has one writer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from zico.kernels.digest import DIGEST, FIRST, LANES, PLACE, SECOND, SHIFT
from zico.kernels.progress import PROGRESS

from zico.base.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError("Triton is not installed: pip install triton (one gigabyte)") from error

if TYPE_CHECKING:
    from zico.kernels.compilation import Kernel

PTX_VERSION = 87
"""CUDA 12.8's: the oldest that cuda-python has, and the oldest for all architectures up to sm_120."""
BLOCK = 1024
"""Words that an instance of the digest reads at a time."""

_LANES = tl.constexpr(LANES)
_PLACE, _FIRST, _SECOND, _SHIFT = (tl.constexpr(int(one)) for one in (PLACE, FIRST, SECOND, SHIFT))


@triton.jit
def progress(counter, value) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - Triton compiles annotations
    """Set the counter at an address. One instance."""
    tl.atomic_xchg(counter, value, sem="release", scope="sys")


@triton.jit
def digest(source, n, target, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, N803
    """Add ``n`` words at an address, mixed, to ``LANES`` words. Any number of instances."""
    total = tl.zeros((BLOCK // _LANES, _LANES), tl.uint64)
    lanes = tl.arange(0, _LANES)
    own = tl.arange(0, BLOCK // _LANES)[:, None] * _LANES + lanes[None, :]
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, n, step):
        place = start + own
        word = tl.load(source + place, mask=place < n, other=0) ^ (place.to(tl.uint64) * _PLACE)
        word = (word ^ (word >> _SHIFT)) * _FIRST
        word = (word ^ (word >> _SHIFT)) * _SECOND
        total += tl.where(place < n, word ^ (word >> _SHIFT), 0)
    tl.atomic_add(target + lanes, tl.sum(total, 0).to(tl.int64), sem="relaxed", scope="gpu")


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel in Triton."""

    function: Any
    of: Kernel
    """Whose meaning it has."""
    signature: dict[str, str]
    constants: dict[str, int]
    warps: int

    def launched_with(self, arguments: tuple[int, ...]) -> tuple[int, ...]:
        """Return a launch's arguments: behind the function's own two addresses of memory that it does not use."""
        return (*arguments, 0, 0)


MARK = Form(progress, PROGRESS, {"counter": "*i64", "value": "i64"}, {}, 1)
DIGESTS = Form(
    digest, DIGEST, {"source": "*u64", "n": "i64", "target": "*i64", "BLOCK": "constexpr"}, {"BLOCK": BLOCK}, 8
)
FORMS = (MARK, DIGESTS)


@dataclasses.dataclass(frozen=True)
class Image:
    """A form for an architecture."""

    ptx: bytes
    name: str
    threads: int
    """Of a block."""
    shared_bytes: int
    """That a launch has to give each block."""


def image(form: Form, capability: tuple[int, int]) -> Image:
    """Compile a form for a compute capability; no device is needed, and Triton keeps the result in its own cache.

    Raises:
        ConfigError: This Triton compiles in another way.
    """
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(form.function, signature=form.signature, constexprs=form.constants)
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        options = {
            "num_warps": form.warps,
            "ptx_version": PTX_VERSION,
            "enable_fp_fusion": False,
        }  # there are no floats
        made = triton.compile(source, target=target, options=options)
        ptx, shared_bytes, name = made.asm["ptx"], int(made.metadata.shared), str(made.metadata.name)
    except (ImportError, AttributeError, TypeError) as error:
        message = f"Triton {triton.__version__} does not compile as Zico asks: {error}"
        raise ConfigError(message) from error
    return Image(ptx.encode(), name, 32 * form.warps, shared_bytes)
