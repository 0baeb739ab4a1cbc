"""CuPy's and Numba's device arrays in a pool, without a GPU: their allocators' functions over a device of software.

Numba's classes are its own. CuPy's are its own where it is installed (the tests named ``real``);
else, and always, a fake with the same signatures. Which stream and device are current is always
told by the test.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.fake_cupy import Stream, stand_in
from cpu.support.hooked_place import BUDGET_BYTES, MIB, Place, put_in_place
from zico.adapters import cupy as cupy_adapter
from zico.adapters import numba as numba_adapter

from zico.base.errors import HookError
from zico.job.autoload import WATCHED
from zico.pool.layout import STREAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

ORDINAL, OTHER_ORDINAL = 0, 1
FIRST, SECOND = 11, 12
MOST_STREAMS = cupy_adapter.MOST_STREAMS


@pytest.fixture
def place() -> Iterator[Place]:
    """Give hooks that hardly wait for memory."""
    with put_in_place(wait_limit_s=0.01) as made:
        yield made


@pytest.fixture
def session(place: Place) -> SimpleNamespace:
    """Return what the adapters ask of a session on a GPU."""
    driver = SimpleNamespace(facts=SimpleNamespace(ordinal=ORDINAL))
    shared = place.pool
    pool = SimpleNamespace(
        driver=driver,
        region_bytes=shared.region_bytes,
        header=shared.header,
        free_and_total_bytes=place.heap.pool.free_and_total_bytes,
    )
    (job,) = (job for job in place.pool.jobs if job["pid"])
    return SimpleNamespace(heap=place.heap, pool=pool, record=job, lost_status=0)


@pytest.fixture
def lost(place: Place, session: SimpleNamespace) -> int:
    """Let the context be lost by an illegal address."""
    place.heap.record[0]["streams"]["lost"] = session.lost_status = 700
    return 700


@pytest.mark.parametrize("module", ["cupy", "numba.cuda"])
def test_importing_it_is_enough(module: str) -> None:
    """The adapter that is enabled on import exists, and does nothing in a process without a broker."""
    where, _, function = WATCHED[module].partition(":")
    assert getattr(importlib.import_module(where), function)() is None


# -- CuPy ------------------------------------------------------------------------------------------


class Cupy:
    """A CuPy whose memory is the pool's, and which stream and device are current in it."""

    def __init__(self, module: Any, patch: pytest.MonkeyPatch, joined: Any) -> None:  # noqa: ANN401 - a module, a session
        """Redirect the module."""
        self.module, self.stream, self.device = module, Stream(FIRST), ORDINAL
        patch.setattr(module.cuda, "get_current_stream", lambda: self.stream, raising=False)
        patch.setattr(module.cuda.runtime, "getDevice", lambda: self.device, raising=False)
        patch.setattr(module.cuda.runtime, "ipcGetMemHandle", lambda address: ("a handle", address))
        own = SimpleNamespace(malloc=lambda size_bytes: ("CuPy's own", size_bytes))
        patch.setattr(module, "get_default_memory_pool", lambda: own, raising=False)
        for name in ("Stream", "ExternalStream"):  # so that it is as before after the test
            kind = getattr(module.cuda, name)
            patch.setattr(kind, "begin_capture", kind.begin_capture)
        before = module.cuda.set_allocator
        patch.setattr(module.cuda, "set_allocator", before)
        patch.setattr(module.cuda.memory, "set_allocator", before, raising=False)
        cupy_adapter.redirect(joined, module)

    def alloc(self, size_bytes: int) -> Any:  # noqa: ANN401 - a pointer
        """Allocate as CuPy does."""
        return self.module.cuda.get_allocator()(size_bytes)


@pytest.fixture(params=["fake", "real"])
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, session: SimpleNamespace) -> Iterator[Cupy]:
    """Return CuPy, redirected."""
    if request.param == "fake":
        yield Cupy(stand_in(), monkeypatch, session)
        return
    module = pytest.importorskip(
        "cupy", reason="CuPy is not installed: only its fake is tested; make test-gpu where it is"
    )
    before = module.cuda.get_allocator()
    set_allocator = module.cuda.set_allocator
    yield Cupy(module, monkeypatch, session)
    set_allocator(before)


def test_cupys_arrays_are_the_pools_while_they_live(cupy: Cupy, place: Place) -> None:
    """Bytes count from the allocation to the last reference, whose end frees without waiting for the device."""
    pointer = cupy.alloc(MIB)
    assert place.heap.base <= pointer.ptr < place.heap.base + int(place.heap.record[0]["window_bytes"])
    assert place.live_bytes == MIB
    del pointer
    gc.collect()
    assert (place.live_bytes, place.device.synchronized) == (0, 0)
    assert place.heap.record[0]["bad_frees"] == 0


def test_an_array_is_freed_on_the_stream_it_was_allocated_on(cupy: Cupy, place: Place) -> None:
    """Whatever stream is current when it goes, its memory is its own stream's to use again at once."""
    pointer = cupy.alloc(MIB)
    address = pointer.ptr
    cupy.stream = Stream(SECOND)
    del pointer
    gc.collect()
    other = cupy.alloc(MIB)
    cupy.stream = Stream(FIRST)
    again = cupy.alloc(MIB)
    assert (again.ptr, other.ptr != address, place.heap.record[0]["streams"]["n_deferred"]) == (address, True, 0)


def test_on_each_threads_default_stream_an_array_waits_for_the_device(cupy: Cupy, place: Place) -> None:
    """One handle stands for many streams, so nothing is left to do on the memory when it is given and given back."""
    cupy.stream = Stream(cupy_adapter.PER_THREAD_STREAM)
    pointer = cupy.alloc(MIB)
    assert place.device.synchronized == 1
    del pointer
    gc.collect()
    assert (place.device.synchronized, place.live_bytes) == (2, 0)


def test_streams_that_the_heap_knows_are_kept(cupy: Cupy, place: Place) -> None:
    """CuPy destroys no stream that the heap knows, which would void marks; further ones wait."""
    alive = []
    for handle in range(100, 100 + MOST_STREAMS + 2):
        cupy.stream = Stream(handle)
        alive.append(weakref.ref(cupy.stream))
        cupy.alloc(256)
        place.device.drain()
    cupy.stream = Stream(100)
    gc.collect()
    kept = [stream() is not None for stream in alive]
    assert int(place.heap.record[0]["streams"]["n"]) == STREAMS
    assert kept == [True] * MOST_STREAMS + [False] * 2
    assert place.device.synchronized == 2 * 2, "for what the further ones got, and its frees"


def test_another_device_is_left_alone(cupy: Cupy, place: Place) -> None:
    """On a device that is not the pool's CuPy's own pool serves."""
    cupy.device = OTHER_ORDINAL
    assert cupy.alloc(MIB) == ("CuPy's own", MIB)
    assert place.live_bytes == 0


def test_too_much_is_cupys_own_error_with_the_figures(cupy: Cupy) -> None:
    """What the budget can never hold raises CuPy's ``OutOfMemoryError``; no bytes are no error."""
    held = cupy.alloc(MIB)
    wanted = f"{2 * BUDGET_BYTES:,} bytes .*{MIB:,} bytes, limit.* {BUDGET_BYTES:,}"
    with pytest.raises(cupy.module.cuda.memory.OutOfMemoryError, match=wanted):
        cupy.alloc(2 * BUDGET_BYTES)
    assert (cupy.alloc(0).ptr, held.ptr != 0) == (0, True)


def test_in_a_lost_context_cupy_raises_its_own_error(cupy: Cupy, lost: int) -> None:
    """It is the driver's status, and says nothing of memory."""
    with pytest.raises(cupy.module.cuda.runtime.CUDARuntimeError) as caught:
        cupy.alloc(MIB)
    assert caught.value.status == lost


def test_a_program_may_choose_its_own_allocator(cupy: Cupy, capsys: pytest.CaptureFixture[str]) -> None:
    """It gets what it asked for, and one line says that its arrays are not in the pool."""

    def own(size_bytes: int) -> int:
        return size_bytes

    assert capsys.readouterr().err == ""
    cupy.module.cuda.set_allocator(own)
    assert cupy.module.cuda.get_allocator() is own
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zico: CuPy's arrays are no longer in the pool: the program has chosen")


def test_capturing_a_graph_is_refused(cupy: Cupy) -> None:
    """A captured mark would be repeated with each replay."""
    for kind in (cupy.module.cuda.Stream, cupy.module.cuda.ExternalStream):
        with pytest.raises(RuntimeError, match="not with Zico's allocator: CUDA graphs"):
            kind.begin_capture(cupy.stream)


def test_an_array_of_the_pool_is_not_shared_with_processes(cupy: Cupy) -> None:
    """The pool's memory has no IPC handle, and one sentence says what to send; other memory's handle is CuPy's."""
    pointer = cupy.alloc(MIB)
    get_handle = cupy.module.cuda.runtime.ipcGetMemHandle
    with pytest.raises(RuntimeError, match=r"IPC handles of arrays; send a copy in host memory \(cupy.asnumpy\)"):
        get_handle(pointer.ptr)
    assert get_handle(1) == ("a handle", 1)


def test_cupys_limit_is_said_to_do_nothing(
    session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is the limit."""
    monkeypatch.setenv(cupy_adapter.LIMIT_VARIABLE, "50%")
    Cupy(stand_in(), monkeypatch, session)
    assert capsys.readouterr().err.startswith("zico: CUPY_GPU_MEMORY_LIMIT has no effect: the budget is")


@pytest.mark.parametrize("lacks", ["CFunctionAllocatorMemory", "set_allocator"])
def test_a_cupy_that_lacks_something_is_refused(
    session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """The sentence names version and what is missing."""
    module = stand_in()
    module.cuda.get_current_stream, module.cuda.runtime.getDevice = Stream, int
    module.get_default_memory_pool = lambda: SimpleNamespace(malloc=None)
    monkeypatch.delattr(module.cuda.memory if hasattr(module.cuda.memory, lacks) else module.cuda, lacks)
    with pytest.raises(HookError, match=f"CuPy 0 does not take Zico's allocator: .*{lacks}"):
        cupy_adapter.redirect(session, module)


# -- Numba -----------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - Numba's module
    """Return Numba's driver module, with no memory manager chosen yet."""
    module = importlib.import_module("numba.cuda.cudadrv.driver")
    monkeypatch.setattr(module, "_memory_manager", None)
    return module


@pytest.fixture
def context(driver: Any, session: SimpleNamespace) -> Any:  # noqa: ANN401 - Numba's
    """Return a context of Numba's on the pool's device, with the manager it was told to use."""
    numba_adapter.redirect(session)
    return driver.Context(SimpleNamespace(id=ORDINAL), None)


def test_numbas_arrays_are_the_pools_while_they_live(context: Any, place: Place) -> None:  # noqa: ANN401
    """Bytes count from the allocation to the last reference; nothing is left to do on the memory at both its ends."""
    done = []
    place.device.launch(SECOND, lambda: done.append("before"))
    array = context.memalloc(MIB)
    assert (place.live_bytes, done) == (MIB, ["before"])
    assert place.heap.base <= array.device_pointer_value < place.heap.base + int(place.heap.record[0]["window_bytes"])
    part = array.view(256, 512)
    del array
    assert place.live_bytes == MIB
    place.device.launch(SECOND, lambda: done.append("use"))
    del part
    assert (place.live_bytes, done) == (0, ["before", "use"])
    assert len(context.memory_manager.allocations) == 0


def test_nothing_is_freed_while_cleanup_is_deferred(context: Any, place: Place) -> None:  # noqa: ANN401
    """Inside ``defer_cleanup`` nobody waits for the device, and the outermost block's end frees."""
    arrays = [context.memalloc(MIB) for _ in range(2)]
    before = place.device.synchronized
    with context.defer_cleanup():
        with context.defer_cleanup():
            arrays.pop()
        arrays.pop()
        assert (place.live_bytes, place.device.synchronized) == (2 * MIB, before)
    assert place.live_bytes == 0


def test_a_reset_context_gives_everything_back(context: Any, place: Place) -> None:  # noqa: ANN401
    """What still has references is freed, too, once."""
    array = context.memalloc(MIB)
    context.memory_manager.reset()
    assert place.live_bytes == 0
    with contextlib.suppress(ReferenceError):  # Numba's pointer may say that its memory is gone
        del array
    assert place.heap.record[0]["bad_frees"] == 0


def test_too_much_is_numbas_own_error_with_the_figures(context: Any, driver: Any) -> None:  # noqa: ANN401
    """What the budget can never hold is CUDA's out-of-memory error, with the budget."""
    with pytest.raises(driver.CudaAPIError, match=f"{2 * BUDGET_BYTES} bytes.*hold {BUDGET_BYTES} bytes") as caught:
        context.memalloc(2 * BUDGET_BYTES)
    assert caught.value.code == 2


def test_in_a_lost_context_numba_raises_its_own_error(context: Any, driver: Any, lost: int) -> None:  # noqa: ANN401
    """It is the driver's status, and says nothing of a budget."""
    with pytest.raises(driver.CudaAPIError, match="the context is lost") as caught:
        context.memalloc(MIB)
    assert caught.value.code == lost


def test_free_memory_is_the_budgets(context: Any) -> None:  # noqa: ANN401
    """Free is what the job may still take, total the budget."""
    array = context.memalloc(MIB)
    assert tuple(context.get_memory_info()) == (BUDGET_BYTES - MIB, BUDGET_BYTES)
    del array


def test_handles_for_other_processes_are_refused(context: Any) -> None:  # noqa: ANN401
    """CUDA has none for such memory; the sentence says what to do."""
    array = context.memalloc(MIB)
    with pytest.raises(RuntimeError, match=r"not with Zico's memory manager: IPC handles.*; copy"):
        context.get_ipc_handle(array)


@pytest.mark.parametrize(("ordinal", "size_bytes"), [(OTHER_ORDINAL, MIB), (ORDINAL, 0)])
def test_what_is_not_the_pools_is_numbas_own(
    session: SimpleNamespace,
    driver: Any,  # noqa: ANN401 - Numba's module
    monkeypatch: pytest.MonkeyPatch,
    ordinal: int,
    size_bytes: int,
) -> None:
    """Another device's memory, and no memory at all, is asked of Numba's manager."""
    monkeypatch.setattr(driver.NumbaCUDAMemoryManager, "memalloc", lambda _self, size: ("Numba's own", size))
    numba_adapter.redirect(session)
    context = driver.Context(SimpleNamespace(id=ordinal), None)
    assert context.memalloc(size_bytes) == ("Numba's own", size_bytes)


def test_an_unknown_interface_is_refused(
    session: SimpleNamespace,
    driver: Any,  # noqa: ANN401 - Numba's module
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Numba that wants another version of memory managers keeps its own, and the sentence has both versions."""
    monkeypatch.setattr(driver, "_SUPPORTED_EMM_INTERFACE_VERSION", 2)
    with pytest.raises(HookError, match=r"Numba .* does not take Zico's memory manager: .*version 1 - version 2"):
        numba_adapter.redirect(session)
    assert driver._memory_manager is None


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("CUDA_MEMORY_MANAGER", "rmm.allocators.numba", "NUMBA_CUDA_MEMORY_MANAGER=rmm.allocators.numba .* unset it"),
        ("ENABLE_CUDASIM", 1, "Numba simulates CUDA .* unset it"),
    ],
)
def test_settings_that_leave_no_room_are_refused(
    session: SimpleNamespace,
    driver: Any,  # noqa: ANN401 - Numba's module
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: object,
    says: str,
) -> None:
    """Another manager, or a simulated device: one sentence."""
    monkeypatch.setattr(driver.config, setting, value)
    with pytest.raises(HookError, match=says):
        numba_adapter.redirect(session)


def test_a_device_in_use_is_refused(
    session: SimpleNamespace,
    driver: Any,  # noqa: ANN401 - Numba's module
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context has chosen its manager for good."""
    monkeypatch.setitem(driver.driver.devices, 7, SimpleNamespace(primary_context=object()))
    with pytest.raises(HookError, match="uses a CUDA device already"):
        numba_adapter.redirect(session)
