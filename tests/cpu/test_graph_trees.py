"""What CUDA graph trees ask of PyTorch's allocator, on the driver's twin, with storages of words and without PyTorch.

``make test-cuda-wheel`` lets PyTorch's own trees ask the same.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.graph_jobs import KIB, POOL, Grapher, two_jobs
from cpu.support.twin_device import MIB
from zico.adapters import torch_graphs
from zico.adapters.torch_graphs import Trees

from zico.base.errors import HookError
from zico.heap.cuda import captures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DELETER, NO_DELETER = 77, 78
PLACE = 2


class Storage:
    """Stands in for PyTorch's: a class, two counts, an address, its deleter, what that is given, a device."""

    device = "cpu"

    def __init__(self, address: int, deleter: int = NO_DELETER) -> None:
        """Own an address, or nothing without a deleter."""
        self.words = np.array([1, 2, address, deleter, address if deleter == DELETER else 0, 3, 4, 5], np.uint64)
        self._cdata = self.words.ctypes.data

    def data_ptr(self) -> int:
        """Return the address."""
        return int(self.words[PLACE])

    def untyped_storage(self) -> Storage:
        """Be a tensor, too."""
        return self

    @property
    def owned(self) -> tuple[int, int]:
        """Return deleter, and what that is given."""
        return int(self.words[PLACE + 1]), int(self.words[PLACE + 2])


class PyTorch:
    """Stands in for PyTorch: its allocator asks the hooks, and knows what it has been given."""

    def __init__(self, job: Grapher) -> None:
        """Allocate for a job."""
        self.job = job
        self.known: dict[int, int] = {}
        self.__version__ = "2.0"
        self.uint8 = None
        self.cuda = SimpleNamespace(device=lambda _device: contextlib.nullcontext())
        names = dict.fromkeys(("endAllocateToPool", "releasePool", "getCheckpointState", "setCheckpointPoolState"))
        functions: dict[str, Any] = {
            **names,
            "checkPoolLiveAllocations": None,
            "beginAllocateCurrentThreadToPool": lambda _device, pool: captures.begin(job.heap, *pool),
            "cudaCachingAllocator_raw_alloc": self.allocate,
            "cudaCachingAllocator_raw_delete": self.delete,
        }
        self._C = SimpleNamespace(
            **{f"_cuda_{name}": function for name, function in functions.items()},
            _construct_storage_from_data_pointer=lambda address, _device, _size: Storage(address),
        )

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return a new tensor's address, which is known from now on."""
        address = self.job.allocate(size_bytes, stream)
        assert address not in self.known, "it has an owner"
        self.known[address] = stream
        return address

    def delete(self, address: int) -> None:
        """Free a tensor that is known."""
        self.job.free(address, self.known.pop(address))

    def empty(self, size: int, **_kwargs: Any) -> Storage:  # noqa: ANN401 - as PyTorch's
        """Return a tensor that owns an address."""
        return Storage(0x1000 + size, DELETER)


@pytest.fixture
def grapher() -> Iterator[Grapher]:
    """Give a job that captures, beside another one."""
    with two_jobs() as (job, _):
        yield job


@pytest.fixture
def trees(grapher: Grapher) -> Iterator[Trees]:
    """Give what answers trees for a job whose pool has a graph."""
    with grapher.capture():
        pass
    made = Trees(SimpleNamespace(heap=grapher.made), PyTorch(grapher))  # type: ignore[arg-type]
    made.install()
    yield made
    grapher.release()
    assert grapher.held() == 0


@contextlib.contextmanager
def served(trees: Trees) -> Iterator[PyTorch]:
    """Let the pool serve this thread as trees do; gives PyTorch, which allocates."""
    torch: PyTorch = trees._torch
    trees.begin(0, POOL)
    yield torch
    captures.end(torch.job.heap, *POOL)
    torch.job.release()


def test_going_back_gives_storages_their_memory(trees: Trees) -> None:
    """What lives has an owner again, once, with PyTorch's deleter; what has died since is freed without one."""
    with served(trees) as torch:
        kept, died, shared = (torch.allocate(size, torch.job.stream) for size in (MIB, KIB, MIB // 2))
    state = trees.checkpoint(0, POOL)
    assert trees.check(0, POOL, {kept, died, shared})
    for address in (kept, died, shared):
        torch.delete(address)
    storages = [Storage(kept), Storage(shared), Storage(0x5000), Storage(died, DELETER)]
    trees.go_back(0, state, [], [each._cdata for each in (*storages, storages[0])])
    assert trees.check(0, POOL, {kept, died, shared})
    assert [each.owned for each in storages] == [(DELETER, kept), (DELETER, shared), (NO_DELETER, 0), (DELETER, died)]
    assert torch.known == dict.fromkeys((kept, shared), torch.job.stream)
    trees.raw_delete(died)
    assert trees.check(0, POOL, {kept, shared})
    for address in (kept, shared):
        trees.raw_delete(address)  # PyTorch's, which knows these
    assert trees.check(0, POOL, set())
    assert torch.known == {}


def test_a_pool_that_trees_do_not_know_is_told(trees: Trees) -> None:
    """A tensor too much or too little ends in one sentence with its address, and garbage is collected first."""
    with served(trees) as torch:
        address = torch.allocate(MIB, torch.job.stream)
    for expected, text in ((set(), f"not known to trees: {address:#x}"), ({address, 16}, "not in the pool: 0x10")):
        with pytest.raises(RuntimeError, match=f"^zico: .*{text}"):
            trees.check(0, POOL, expected)
    cycle: list[Any] = [Freed(lambda: torch.delete(address))]
    cycle.append(cycle)
    del cycle
    assert trees.check(0, POOL, set())


class Freed:
    """Calls something when it dies."""

    def __init__(self, then: Callable[[], None]) -> None:
        """Take what to call."""
        self._then = then

    def __del__(self) -> None:
        """Call it."""
        self._then()


def test_going_back_is_refused_over_younger_tensors_and_beside_a_capture(trees: Trees) -> None:
    """One sentence each; the pool is as it was, and a graph of the other capture keeps its memory."""
    state = trees.checkpoint(0, POOL)
    with served(trees) as torch:
        address = torch.allocate(MIB, torch.job.stream)
    with pytest.raises(RuntimeError, match=r"^zico: CUDA graph trees go back .* younger"):
        trees.go_back(0, state, [])
    assert trees.check(0, POOL, {address})
    torch.delete(address)
    with torch.job.capture(), pytest.raises(RuntimeError, match=r"^zico: .* one capture at a time"):
        trees.go_back(0, state, [])
    torch.job.release()
    trees.go_back(0, state, [])


def test_other_storages_and_lacking_functions_are_no_trees(grapher: Grapher) -> None:
    """The sentence names PyTorch's version and what is lacking."""
    torch = PyTorch(grapher)
    torch._C._construct_storage_from_data_pointer = lambda address, _device, _size: Storage(address + 1)
    with pytest.raises(HookError, match=r"PyTorch 2\.0 lays storages out"):
        torch_graphs.place_in_storage(torch)
    del torch._C._cuda_releasePool
    with pytest.raises(HookError, match=r"PyTorch 2\.0 has no torch\._C\._cuda_releasePool"):
        Trees(SimpleNamespace(heap=None), torch)  # type: ignore[arg-type]
