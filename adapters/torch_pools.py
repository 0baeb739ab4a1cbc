"""PyTorch's named pools of GPU memory (``torch.cuda.MemPool``), and what is refused of sharing GPU memory.

PyTorch's own allocator keeps a pool's tensors apart from others, in segments that it does not give
back. Zico places tensors by their lifetimes and gives memory back. So a pool is a name here. Its
tensors lie in the heap as all others do, and a CUDA graph that is given the name has its memory
under it. A pool with an allocator of its own would take memory beside the budget, and is refused.

CUDA's IPC handles are of memory that ``cudaMalloc`` gave. The pool's is mapped, and has none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_ALLOCATOR = (
    "zico: a torch.cuda.MemPool with an allocator of its own takes GPU memory beside the budget, and is not served: "
    "make it without one, or train without Zico"
)
SHARED = (
    "zico: a tensor in GPU memory cannot be shared with another process here, since memory of the pool has no CUDA "
    "IPC handle: send a copy in host memory (tensor.cpu())"
)


def serve(torch: Any) -> None:  # noqa: ANN401 - the module
    """Put Zico's pools in the place of PyTorch's, and one sentence where GPU memory would be shared."""
    memory = torch.cuda.memory

    class MemPool:
        """A name for memory, as PyTorch's class of that name is."""

        allocator = None

        def __init__(self, allocator: object = None, *_args: object, **_options: object) -> None:
            """Take a name that no graph and no other pool has; how segments are split has no meaning here.

            Raises:
                RuntimeError: An allocator is given.
            """
            if allocator is not None:
                raise RuntimeError(OWN_ALLOCATOR)
            self.id: tuple[int, int] = torch.cuda.graph_pool_handle()

        def use_count(self) -> int:
            """Return how many use it: its owner, since tensors do not keep it."""
            return 1

        def snapshot(self, *_args: object, **_options: object) -> list[dict[str, Any]]:
            """Return the segments that are the pool's alone: none."""
            return []

    @contextlib.contextmanager
    def use_mem_pool(pool: MemPool, device: object = None) -> Iterator[None]:  # noqa: ARG001 - as PyTorch's
        """Do nothing: tensors lie where those of no pool would."""
        yield

    for module in (torch.cuda, memory):
        module.MemPool, module.use_mem_pool = MemPool, use_mem_pool
    torch.UntypedStorage._share_cuda_ = torch.UntypedStorage._new_shared_cuda = _refuse  # noqa: SLF001 - what reductions call


def _refuse(*_args: object, **_options: object) -> None:
    raise RuntimeError(SHARED)
