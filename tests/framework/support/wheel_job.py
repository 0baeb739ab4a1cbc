"""PyTorch's build for CUDA over the driver of software: ``wheel_job.py WAY CHECK...``; prints what it saw as JSON.

WAY is ``pool`` for a job of the pool that ``ZICO_SOCKET`` names, joined as ``zico run`` lets it:
by the import of PyTorch. ``plain`` is PyTorch alone. Each check says what happened, and its name
stands beside it. Kernels do nothing: what is compared has been copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import itertools
import json
import sys
import threading
import warnings
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import turns
from process.support.software_cuda import Driver

from zico import share, step
from zico.job import autoload, lookup, session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG_S = 200
MIB = 1 << 20
BUDGET_BYTES = 64 * MIB
ELEMENTS = MIB // 4
STEPS, ROWS, COLUMNS, RATE = 30, 64, 4096, 0.5
SMALL = (100, ELEMENTS // 8)
PAIRS = 1000
LOOKS = 8
CAPTURE_RELAXED = 2
ILLEGAL_ADDRESS = 700
LAYER_ELEMENTS = 4 * ELEMENTS
FROZEN_LAYERS = 4
FEW_LAYERS, MANY_LAYERS, MADE_LAYERS = 3, 8, 4
ITERATIONS, WRITTEN_ITERATIONS = 8, 3
WRITTEN = 77.0
PLAN_S = 120.0
"""The longest that a thread may take to make a plan: the first one compiles its planner."""
read_at: list[int] = []
"""Where saved tensors were when layers read them."""
NOT_ASKED = {
    "caching_allocator_alloc": "gives memory",
    "caching_allocator_delete": "takes it back",
    "change_current_allocator": "is refused once there are tensors",
    "CUDAPluggableAllocator": "a class",
    "MemPool": "a class",
    "use_mem_pool": "allocates from another pool",
    "list_gpu_processes": "asks for a package that is not installed here",
}
"""What the modules offer besides questions about memory."""
ASKED_WITH = {"set_per_process_memory_fraction": (0.5,), "caching_allocator_enable": (True,)}
PRIVATE = (
    ("_snapshot",),
    ("_dump_snapshot", "/dev/null"),
    ("_record_memory_history",),
    ("_record_memory_history", "state"),
    ("_record_memory_history", True),
    ("_record_memory_history", None),
    ("_set_memory_metadata", "text"),
    ("_get_memory_metadata",),
)
"""What trainers call all the same."""
OTHER_KEYS = {"num_oom_rejections"}
"""Not in every version."""
CROWD = 40
"""Tensors of 1 MiB, of the 64 MiB that the budget is."""
torch: Any = None
driver = Driver()


@contextlib.contextmanager
def held(stream: Any) -> Iterator[None]:  # noqa: ANN401 - a torch.cuda.Stream
    """Keep a stream from doing anything, until the block ends."""
    driver.hold(stream.cuda_stream)
    try:
        yield
    finally:
        driver.hold(0)


def raised(function: Callable[[], Any]) -> list[str]:
    """Return class and first line of what a function raises."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - which one is the question
        return [f"{type(error).__module__}.{type(error).__qualname__}", str(error).split("\n", 1)[0]]
    return ["nothing", ""]


def live_bytes() -> int:
    """Return what PyTorch says that tensors take."""
    return int(torch.cuda.memory_allocated())


# -- what programs do ------------------------------------------------------------------------------


def copies() -> dict[str, Any]:
    """Copy in, on the device, out, to pageable and to pinned memory; then free."""
    before = live_bytes()
    values = torch.arange(ELEMENTS, dtype=torch.float32)
    first = torch.empty(ELEMENTS, device="cuda")
    first.copy_(values)
    second = torch.empty_like(first)
    second.copy_(first)
    pinned = torch.empty(ELEMENTS, pin_memory=True)
    pinned.copy_(second, non_blocking=True)
    torch.cuda.synchronize()
    joined = session.current()
    found = {
        "is_equal": [bool((one == values).all()) for one in (second.cpu(), pinned)],
        "live_bytes": live_bytes() - before,
        "in_pool": joined is not None and 0 <= second.data_ptr() - joined.heap.base < joined.heap.window.size_bytes,
    }
    del first, second
    return found | {"left_bytes": live_bytes() - before}


def record_stream() -> dict[str, Any]:
    """Free a tensor that a side stream still reads; its memory is not used again until that stream is done."""
    side = torch.cuda.Stream()
    source = torch.empty(ELEMENTS, device="cuda")
    address = source.data_ptr()
    with held(side):
        with torch.cuda.stream(side):
            target = torch.empty(ELEMENTS, device="cuda")
            target.copy_(source)
        source.record_stream(side)
        del source
        while_held = [torch.empty(ELEMENTS, device="cuda") for _ in range(LOOKS)]
        is_kept = address not in {one.data_ptr() for one in while_held}
    torch.cuda.synchronize()
    del while_held
    afterwards = [torch.empty(ELEMENTS, device="cuda") for _ in range(2 * LOOKS)]
    return {"is_kept": is_kept, "is_used_again": address in {one.data_ptr() for one in afterwards}}


def events() -> dict[str, Any]:
    """Record events on a stream that is held, ask them, and wait for them from another stream."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    source = torch.ones(ELEMENTS).pin_memory()
    with held(side):
        with torch.cuda.stream(side):
            first.record()
            tensor = torch.empty(ELEMENTS, device="cuda")
            tensor.copy_(source, non_blocking=True)
            last.record()
        other.wait_event(last)
        done = [last.query(), other.query()]
    last.synchronize()
    other.synchronize()
    done += [last.query(), other.query()]
    return {"done": done, "elapsed_ms": first.elapsed_time(last), "is_equal": bool((tensor.cpu() == 1).all())}


def out_of_memory() -> dict[str, Any]:
    """Ask for more than there is, and go on."""
    before = live_bytes()
    error = raised(lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda"))
    tensor = torch.empty(ELEMENTS, device="cuda")
    tensor.copy_(torch.ones(ELEMENTS))
    found = {"error": error, "goes_on": bool((tensor.cpu() == 1).all())}
    del tensor
    return found | {"left_bytes": live_bytes() - before}


def lost() -> dict[str, Any]:
    """Ask for memory when Zico knows that the context is lost, as after a kernel that faults."""
    joined = session.current()
    assert joined is not None
    tensor = torch.empty(ELEMENTS, device="cuda")
    joined.heap.record[0]["streams"]["lost"] = ILLEGAL_ADDRESS
    error = raised(lambda: torch.empty(ELEMENTS, device="cuda"))
    del tensor
    return {"error": error, "left_bytes": int(joined.record["live_bytes"]), "held": int(joined.record["held"])}


def cache_info() -> dict[str, Any]:
    """Ask for the largest workspace that cuDNN may try, as PyTorch's C++ does."""
    import torch_allocator

    function = torch_allocator.function(torch, torch_allocator.CACHE_INFO)
    largest = ctypes.c_size_t()
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p)(function)
    tensor = torch.empty(4 * ELEMENTS, device="cuda")
    call(torch_allocator.current(torch), 0, ctypes.addressof(largest))
    del tensor
    return {"largest_bytes": largest.value}


def questions() -> dict[str, Any]:
    """Ask all that ``torch.cuda`` and ``torch.accelerator`` answer about memory, with tensors of both sizes there."""
    cuda, accelerator = torch.cuda, torch.accelerator.memory
    before = live_bytes()
    cuda.reset_peak_memory_stats()
    kept = [torch.empty(size, device="cuda") for size in (100, ELEMENTS)]
    gone = torch.empty(8 * ELEMENTS, device="cuda")
    del gone
    errors = {}
    with contextlib.redirect_stderr(io.StringIO()) as told, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for view in (cuda.memory, accelerator):
            for name in set(view.__all__) - NOT_ASKED.keys():
                arguments = ASKED_WITH.get(name, ())
                error = raised(lambda view=view, name=name, arguments=arguments: getattr(view, name)(*arguments))
                errors |= {f"{view.__name__}.{name}": error} if error[0] != "nothing" else {}
        for name, *arguments in PRIVATE:
            error = raised(lambda name=name, arguments=arguments: getattr(cuda.memory, name)(*arguments))
            errors |= {name: error} if error[0] != "nothing" else {}
        for _ in range(2):
            cuda.memory._record_memory_history(max_entries=100)
    cuda.memory._record_memory_history(enabled=None)
    segments = cuda.memory_snapshot()
    blocks = [one for segment in segments for one in segment["blocks"] if one["state"] == "active_allocated"]
    stats, same = cuda.memory_stats(), accelerator.memory_stats()
    found = {
        "errors": errors,
        "told": told.getvalue().splitlines(),
        "live_bytes": live_bytes() - before,
        "of_blocks": sum(one["size"] for one in blocks) - before,
        "of_segments": sum(segment["total_size"] for segment in segments) - cuda.memory_reserved(),
        "known": sorted({one.data_ptr() for one in kept} - {one["address"] for one in blocks}),
        "segsum": bool(torch.cuda._memory_viz.segsum(cuda.memory._snapshot())),
        "keys": zlib.crc32(",".join(sorted(set(stats) - OTHER_KEYS)).encode()),
        "same": sorted(name for name, value in same.items() if value != stats[name]),
        "info": [cuda.mem_get_info(), accelerator.get_memory_info()],
        "no_device": [raised(lambda ask=ask: ask(7)) for ask in (cuda.memory_stats, cuda.mem_get_info)],
    }
    del kept
    cuda.reset_peak_memory_stats()
    return found | {"peak_bytes": cuda.max_memory_allocated() - before}


def _train(make: Callable[[Any], Any]) -> tuple[Any, list[float]]:
    """Fit a matrix by gradient descent; it and its gradients are where ``make`` puts them, what is computed is not."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, COLUMNS, generator=generator)
    targets = inputs @ torch.randn(COLUMNS, ROWS, generator=generator)
    weights = make(torch.zeros(COLUMNS, ROWS))
    losses = []
    for _ in range(STEPS):
        batch = make(inputs)
        error = batch.cpu() @ weights.cpu() - targets
        gradient = make(batch.cpu().T @ error / COLUMNS)
        weights.copy_(weights.cpu() - RATE * gradient.cpu())
        losses.append(float(error.square().mean()))
        step()
    return weights.cpu(), losses


def sgd() -> dict[str, Any]:
    """Train by hand with copies: what is on the device has the bytes that it would have on the host."""
    expected, _ = _train(lambda tensor: tensor.clone())
    found, losses = _train(lambda tensor: tensor.to("cuda"))
    status = session.status()
    return {
        "is_equal": bool(torch.equal(found, expected)),
        "losses": [losses[0], losses[-1]],
        "iterations": status and status["iterations"],
    }


def take_turns() -> dict[str, Any]:
    """Fill most of the budget with values, read them back and give them up, again and again."""
    return turns.take(lambda values: torch.from_numpy(values).to("cuda"), lambda tensor: tensor.cpu().numpy())


def _copied(source: Any) -> Any:  # noqa: ANN401 - tensors
    """Copy a tensor by way of temporaries that come and go; the copy has its bytes."""
    first = torch.empty_like(source)
    first.copy_(source)
    second = torch.empty_like(source)
    second.copy_(first)
    del first
    third = torch.empty_like(source)
    third.copy_(second)
    return third


def _captured(source: Any, pool: Any = None) -> tuple[Any, Any]:  # noqa: ANN401 - tensors, what PyTorch calls a pool
    """Capture that; returns the graph and the copy."""
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, pool=pool):
        copy = _copied(source)
    return made, copy


def _replayed(source: Any, *graphs: tuple[Any, Any]) -> list[bool]:  # noqa: ANN401 - tensors
    """Tell for two values whether a replay of all graphs ends with their copies equal to the source."""
    is_equal = []
    for value in (1.0, 2.0):
        source.copy_(torch.full((ELEMENTS,), value))
        for made, _ in graphs:
            made.replay()
        torch.cuda.synchronize()
        is_equal += [bool((copy.cpu() == value).all()) for _, copy in graphs]
    return is_equal


def graph() -> dict[str, Any]:
    """Capture copies in two graphs of one pool, replay them with as many tensors beside as there is room for."""
    before = live_bytes()
    source = torch.empty(ELEMENTS, device="cuda")
    one = _captured(source)
    two = _captured(source, one[0].pool())
    found: dict[str, Any] = {"is_equal": _replayed(source, one, two), "apart": one[1].data_ptr() != two[1].data_ptr()}
    graphs_bytes = live_bytes() - before
    crowd = [torch.full((ELEMENTS,), 7.0).to("cuda") for _ in range(CROWD)]
    found["is_equal"] += _replayed(source, one, two)
    found["is_kept"] = all(bool((tensor.cpu() == 7.0).all()) for tensor in crowd)
    crowd.clear()
    kept = one[1]
    del one, two
    found["outlives"] = bool((kept.cpu() == 2.0).all())
    del kept, source
    step()
    return found | {
        "graphs_bytes": graphs_bytes,
        "left_bytes": live_bytes() - before,
        "nodes": driver.counter("nodes_launched").value,
    }


def graphed_callable() -> dict[str, Any]:
    """Let PyTorch capture a function and its gradient, and call it for two inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an empty graph and of other streams at replay: PyTorch alone warns as well
        sample = torch.empty(ELEMENTS, device="cuda", requires_grad=True)
        graphed = torch.cuda.make_graphed_callables(_copied, (sample,))
        is_equal = []
        for value in (3.0, 4.0):
            inputs = torch.full((ELEMENTS,), value).to("cuda").requires_grad_()
            outputs = graphed(inputs)
            outputs.backward(torch.full((ELEMENTS,), 10 * value).to("cuda"))
            is_equal += [bool((outputs.detach().cpu() == value).all()), bool((inputs.grad.cpu() == 10 * value).all())]
    return {"is_equal": is_equal}


def steady() -> dict[str, Any]:
    """Count the driver's calls in pairs of allocation and free, of tensors beside others and of whole regions."""
    beside = [torch.empty(size, device="cuda") for size in SMALL for _ in range(2)]
    found = {"beside": _calls_in_pairs(SMALL)}
    del beside
    return found | {"regions": _calls_in_pairs((2 * ELEMENTS,))}


def _calls_in_pairs(sizes: tuple[int, ...]) -> dict[str, float]:
    """Return how often each of the driver's functions is called in a pair, where it is."""
    for size in sizes:
        torch.empty(size, device="cuda")
    before = driver.calls()
    for _ in range(PAIRS):
        for size in sizes:
            torch.empty(size, device="cuda")
    after = driver.calls()
    counts = {name: (n - before.get(name, 0)) / PAIRS / len(sizes) for name, n in after.items()}
    return {name: n for name, n in counts.items() if n > 0}


# -- saved tensors that leave and come back --------------------------------------------------------


def _layer(sources: list[Any], targets: list[Any], beside: Any) -> Any:  # noqa: ANN401 - a class
    """Return an operation that saves its input; forwards it makes a numbered tensor, backwards it reads what it saved.

    Nothing in it waits for the device. Tensors are allocated for the stream ``beside``, if one is given.
    """

    class Layer(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, tensor: Any, number: int) -> Any:  # noqa: ANN401 - PyTorch's
            ctx.save_for_backward(tensor)
            ctx.number = number
            with torch.cuda.stream(beside):
                made = torch.empty_like(tensor)
            made.copy_(sources[number + 1], non_blocking=True)
            return made

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ANN401 - PyTorch's
            (tensor,) = ctx.saved_tensors
            read_at.append(tensor.data_ptr())
            targets[ctx.number].copy_(tensor, non_blocking=True)
            given = torch.empty_like(gradient)
            given.copy_(tensor, non_blocking=True)
            return given, None

    return Layer


def _pass(
    layers: int,
    sources: list[Any],
    targets: list[Any],
    between: Callable[[], None],
    beside: Any = None,  # noqa: ANN401 - a stream
) -> list[bool]:
    """Go forward and back through layers; returns whether each has read back what it saved, and the gradient."""
    first = torch.empty(LAYER_ELEMENTS, device="cuda", requires_grad=True)
    with torch.no_grad():
        first.copy_(sources[0], non_blocking=True)
    layer, tensor = _layer(sources, targets, beside), first
    for number in range(layers):
        tensor = layer.apply(tensor, number)
    gradient = torch.empty_like(tensor)
    between()
    tensor.backward(gradient)
    driver.hold(0)
    torch.cuda.synchronize()
    found = [bool((target == number + 1).all()) for number, target in enumerate(targets)]
    return [*found, bool((first.grad.cpu() == 1).all())]


def _pinned(layers: int) -> tuple[list[Any], list[Any]]:
    """Return what layers copy from and to."""
    sources = [torch.full((LAYER_ELEMENTS,), float(number + 1)).pin_memory() for number in range(layers + 1)]
    return sources, [torch.empty(LAYER_ELEMENTS, pin_memory=True) for _ in range(layers)]


def swap_queued() -> dict[str, Any]:
    """Let all that is saved leave and come back while the main stream is held: nothing waits on the processor.

    Tensors are allocated for another stream than the one that writes and saves them.
    """
    joined = session.current()
    assert joined is not None
    swapper, main = joined.swapper, torch.cuda.Stream()
    sources, targets = _pinned(FEW_LAYERS)
    seen: dict[str, Any] = {}

    def leave() -> None:
        swapper.make_room(1 << 40)
        seen["settled"] = swapper.settle(LONG_S)
        seen["out_bytes"] = swapper.figures.out_bytes
        seen["queued"] = not main.query()

    driver.hold(main.cuda_stream)
    with torch.cuda.stream(main):
        seen["is_equal"] = _pass(FEW_LAYERS, sources, targets, leave, torch.cuda.Stream())
    return {**seen, "in_bytes": swapper.figures.in_bytes, "away_bytes": swapper.figures.away_bytes}


def _step_with_plan(swapper: Any) -> None:  # noqa: ANN401 - the job's
    """End the iteration, and wait for its planner: until that answers, what is idle longest leaves."""
    step()
    planning = swapper._learner.planning
    if planning is not None:
        planning.join(PLAN_S)
        assert not planning.is_alive(), "a plan takes too long"


def swap_planned() -> dict[str, Any]:
    """Train with less than the peak, at last by a plan."""
    joined = session.current()
    assert joined is not None
    sources, targets = _pinned(MANY_LAYERS)
    is_equal: list[bool] = []
    for _ in range(ITERATIONS):
        is_equal += _pass(MANY_LAYERS, sources, targets, lambda: None)
        _step_with_plan(joined.swapper)
    status = session.status()
    assert status is not None
    heap = joined.heap.record[0]
    begin, end = (joined.heap.base + int(heap[name]) for name in ("side_offset", "spill_offset"))
    return {
        "is_equal": all(is_equal),
        "beside_bytes": 4 * LAYER_ELEMENTS * sum(begin <= address < end for address in read_at),
        "planned": joined.swapper.planned_iterations,
        "planner": status["planner"],
        "moved_bytes": [status["moved_out_bytes"], status["moved_in_bytes"]],
        "peak_bytes": status["peak_bytes"],
        "failures": int(joined.heap.record[0]["streams"]["failures"]),
    }


def swap_made() -> dict[str, Any]:
    """Train with less than the peak, at last by a plan that makes copies again, which this driver does.

    In the iterations after those one of the copies is written to, and PyTorch is not told.
    """
    from zico.adapters.torch_rebuilding import replace
    from zico.adapters.torch_recipes import Made, Rule

    joined = session.current()
    assert joined is not None
    pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003 - by position
    rebuilding = pack.__self__.on_saved.__self__
    with_cudnn = set()

    def again(tensor: Any) -> Any:  # noqa: ANN401 - a tensor
        with_cudnn.add(torch.backends.cudnn.enabled)
        return torch.ops.aten.clone(tensor)

    rule = Rule(("torch:clone",), lambda tensor: Made(again, (tensor,)), torch.clone)
    replace("torch:clone", functools.partial(rebuilding._ruled, rule))
    torch.equal = lambda one, other: bool((one.cpu() == other.cpu()).all())  # kernels compare nothing here
    sources, targets = _pinned(2 * MADE_LAYERS)
    other = torch.full((LAYER_ELEMENTS,), WRITTEN).pin_memory()
    figures, dropped_bytes = joined.swapper.figures, []
    is_equal: list[list[bool]] = []
    for number in range(ITERATIONS + WRITTEN_ITERATIONS):
        before_bytes = figures.dropped_bytes
        is_equal.append(_pass_made(sources, targets, other if number >= ITERATIONS else None))
        dropped_bytes.append(figures.dropped_bytes - before_bytes)
        _step_with_plan(joined.swapper)
    heap, status = joined.heap.record[0], session.status()
    assert status is not None
    return {
        "planner": status["planner"],
        "is_equal": is_equal,
        "dropped_bytes": [dropped_bytes[ITERATIONS - 1], dropped_bytes[-1]],
        "with_cudnn": [*with_cudnn],
        "timed_on": _timed_on(pack.__self__),
        "away_bytes": figures.away_bytes,
        "failures": int(heap["streams"]["failures"]),
    }


def _pass_made(sources: list[Any], targets: list[Any], other: Any) -> list[bool]:  # noqa: ANN401 - a tensor
    """Go forward and back through layers that save their result, and a copy of the one before, which has a recipe.

    By their name results are a convolution's, which planners take for dear: those move, and copies
    are made again.
    With ``other`` the copy of the second layer holds that instead, and no version tells of it.

    Returns:
        Whether each has read back what it saved.
    """

    class Convolution(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, copy: Any, number: int) -> Any:  # noqa: ANN401 - PyTorch's
            made = torch.empty_like(copy)
            made.copy_(sources[number + 1], non_blocking=True)
            ctx.save_for_backward(copy, made)
            ctx.number = number
            return made

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ANN401 - PyTorch's
            for place, tensor in enumerate(ctx.saved_tensors):
                targets[2 * ctx.number + place].copy_(tensor, non_blocking=True)
            return torch.empty_like(gradient), None

    tensor = torch.empty(LAYER_ELEMENTS, device="cuda", requires_grad=True)
    with torch.no_grad():
        tensor.copy_(sources[0], non_blocking=True)
    wanted: list[float] = []
    for number in range(MADE_LAYERS):
        copy = torch.clone(tensor)
        is_written = other is not None and number == 1
        if is_written:
            copy.data.copy_(other, non_blocking=True)
        tensor = Convolution.apply(copy, number)
        wanted += [WRITTEN if is_written else number + 1.0, number + 2.0]
    del copy
    gradient = torch.empty_like(tensor)
    with torch.backends.cudnn.flags(enabled=False):  # which is another batch norm
        tensor.backward(gradient)
        is_off = not torch.backends.cudnn.enabled
    torch.cuda.synchronize()
    return [is_off, *(bool((target == value).all()) for target, value in zip(targets, wanted, strict=True))]


def _timed_on(saving: Any) -> list[int]:  # noqa: ANN401 - the hooks
    """Return on which devices it is measured how long something takes, while the thread's current one is the second."""
    events, make = [], torch.cuda.Event

    def noted(**options: Any) -> Any:  # noqa: ANN401 - torch's
        events.append(make(**options))
        return events[-1]

    torch.cuda.Event = noted
    try:
        with torch.cuda.device(1), saving.timed():
            pass
    finally:
        torch.cuda.Event = make
    return [event.device.index for event in events]


# -- what programs should not do -------------------------------------------------------------------


def _is_whole() -> dict[str, Any]:
    """Tell whether tensors still come and go, keep their bytes, and whether nothing is left."""
    torch.cuda.synchronize()
    gc.collect()
    before = live_bytes()
    tensor = torch.empty(ELEMENTS, device="cuda")
    tensor.copy_(torch.ones(ELEMENTS))
    found = {"goes_on": bool((tensor.cpu() == 1).all())}
    del tensor
    return found | {"left_bytes": live_bytes() - before}


@contextlib.contextmanager
def _copying_all_along(target: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - a tensor
    """Let a thread copy other values to a tensor again and again, for which it needs no memory of the GPU.

    At the end it says what was raised, and whether the last values are there.
    """
    has_ended = threading.Event()
    found: dict[str, Any] = {}
    source = torch.zeros(target.shape)

    def copy() -> None:
        while not has_ended.is_set():
            source.add_(1)
            target.copy_(source)

    thread = threading.Thread(target=lambda: found.update(raised=raised(copy)))
    thread.start()
    try:
        yield found
    finally:
        has_ended.set()
        thread.join()
        found["is_last"] = torch.equal(target.cpu(), source)


def moves_out() -> dict[str, Any]:
    """Keep tensors, in a graph's memory and beside it, over an iteration's end at which they leave and come back."""
    kept = [torch.full((elements,), float(elements)).cuda() for elements in (8 * ELEMENTS, ELEMENTS, 100)]
    source = torch.empty(ELEMENTS, device="cuda")
    graphs = [_captured(source)]
    addresses = [one.data_ptr() for one in kept]
    step()
    with _copying_all_along(torch.empty(ELEMENTS, device="cuda")) as copied:
        turns.say(turns.READY)
        sys.stdin.readline()
        step()
    is_equal = [bool((one.cpu() == one.numel()).all()) for one in kept] + _replayed(source, *graphs)
    status = session.status()
    found = {
        "is_equal": is_equal,
        "is_where_it_was": addresses == [one.data_ptr() for one in kept],
        "evicted_bytes": status["evicted_bytes"] if status else 0,
        "put_aside": driver.counter("put_aside").value,
        "raised": copied["raised"],
        "is_last": copied["is_last"],
    }
    del kept, source, graphs
    gc.collect()
    return found | _is_whole()


def frozen() -> dict[str, Any]:
    """Share frozen layers, and write one when told to; a copy is what changes bytes here."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(FROZEN_LAYERS)))
    expected = [one.clone() for one in layers.requires_grad_(requires_grad=False).parameters()]
    weights = [*layers.cuda().parameters()]
    share(layers)
    gc.collect()
    step()
    kinds = [type(one).__name__ for one in weights]
    addresses = [one.data_ptr() for one in weights]
    held = status_of("held_bytes")
    turns.say(turns.READY)
    sys.stdin.readline()
    with torch.no_grad():
        weights[0][1].copy_(torch.ones(1024))
    expected[0][1] = 1
    torch.relu(weights[0] + weights[1])  # no matrices: the driver has no cuBLAS
    found = {
        "kinds": kinds,
        "held_bytes": held,
        "is_equal": [torch.equal(one.cpu(), there) for one, there in zip(weights, expected, strict=True)],
        "is_where_it_was": addresses == [one.data_ptr() for one in weights],
    }
    step()
    found["kinds_then"] = [type(one).__name__ for one in weights]
    return found


def status_of(name: str) -> int:
    """Return a figure of this job."""
    found = session.status()
    return int(found[name]) if found else 0


def named_pools() -> dict[str, Any]:
    """Allocate in two pools of PyTorch's, one in the other, and capture a graph that has one's name."""
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(outer):
        first = torch.ones(ELEMENTS).cuda()
        with torch.cuda.use_mem_pool(inner, device="cuda:0"):
            second = torch.empty_like(first).copy_(first)
    source = torch.ones(ELEMENTS).cuda()
    graphs = [_captured(source, outer.id) for _ in range(2)]
    found = {
        "is_equal": [bool((one.cpu() == 1).all()) for one in (first, second)] + _replayed(source, *graphs),
        "apart": outer.id != inner.id,
        "own_allocator": raised(lambda: torch.cuda.MemPool(torch.cuda.memory._get_current_allocator().allocator())),
    }
    del first, second, source, graphs
    gc.collect()
    return found | {"left_bytes": live_bytes()}


def shared_with_processes() -> dict[str, Any]:
    """Send a tensor to another process, and open one that another process has sent."""
    from torch.multiprocessing import reductions

    tensor = torch.empty(ELEMENTS, device="cuda")
    return {
        "errors": [
            raised(lambda: reductions.reduce_tensor(tensor)),
            raised(lambda: torch.UntypedStorage._new_shared_cuda(0, b"", 0, 0, b"", 0, b"", False)),  # noqa: FBT003
        ]
    }


def other_device() -> dict[str, Any]:
    """Ask for tensors on a GPU that there is and on one that there is not."""
    errors = [raised(lambda name=name: torch.empty(ELEMENTS, device=name)) for name in ("cuda:1", "cuda:7")]
    return {"errors": errors} | _is_whole()


def foreign_capture() -> dict[str, Any]:
    """Let C code capture a stream on which a tensor from before is freed, and another comes and goes."""
    side = torch.cuda.Stream()
    handle = ctypes.c_void_p(side.cuda_stream)
    with torch.cuda.stream(side):
        before = torch.empty(ELEMENTS, device="cuda")
        large = torch.empty(8 * ELEMENTS, device="cuda")
        status = [driver.functions.cuStreamBeginCapture_v2(handle, CAPTURE_RELAXED)]
        del before, large
        inside = torch.empty(2 * ELEMENTS, device="cuda")
        del inside
        graph = ctypes.c_void_p()
        status.append(driver.functions.cuStreamEndCapture(handle, ctypes.byref(graph)))
    nodes = ctypes.c_uint64()
    if graph.value:
        driver.functions.cuGraphGetNodes(graph, None, ctypes.byref(nodes))
    return {"status": status, "nodes": nodes.value} | _is_whole()


def second_capture() -> dict[str, Any]:
    """Begin a second capture during one, in both ways, and end the first."""
    source = torch.empty(ELEMENTS, device="cuda")
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        first = _copied(source)
        errors = [raised(lambda: _captured(source)), raised(torch.cuda.CUDAGraph().capture_begin)]
        second = _copied(first)
    is_equal = _replayed(source, (made, first), (made, second))
    del made, first, second
    return {"errors": errors, "is_equal": is_equal} | _is_whole()


def failed_capture() -> dict[str, Any]:
    """Spoil a capture by waiting in it, begin one on a stream that C code captures, and make a good one."""
    source = torch.empty(ELEMENTS, device="cuda")
    usual, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def graph_that_stays() -> Any:  # noqa: ANN401 - a torch.cuda.CUDAGraph
        made = torch.cuda.CUDAGraph()
        lookup.keep(made)  # PyTorch 2.11 ends the process when it destroys a graph whose capture failed
        return made

    def spoil() -> None:
        with torch.cuda.graph(graph_that_stays()):
            kept.append(torch.empty(ELEMENTS, device="cuda"))
            torch.cuda.synchronize()

    def begin_twice() -> None:
        driver.functions.cuStreamBeginCapture_v2(ctypes.c_void_p(side.cuda_stream), CAPTURE_RELAXED)
        with torch.cuda.stream(side):
            graph_that_stays().capture_begin()

    kept: list[Any] = []
    errors = [raised(spoil)]
    torch.cuda.set_stream(usual)  # PyTorch leaves the other one current
    errors.append(raised(begin_twice))
    driver.functions.cuStreamEndCapture(ctypes.c_void_p(side.cuda_stream), ctypes.byref(ctypes.c_void_p()))
    good = _captured(source)
    is_equal = _replayed(source, good)
    kept.clear()
    del good, source
    return {"errors": errors, "is_equal": is_equal} | _is_whole()


def freed_in_capture() -> dict[str, Any]:
    """Free in a capture what was allocated before it, on the stream that captures and on another."""
    side = torch.cuda.Stream()
    source = torch.empty(ELEMENTS, device="cuda")
    with torch.cuda.stream(side):
        before = [torch.empty(size, device="cuda") for size in (100, ELEMENTS, 8 * ELEMENTS)]
    before += [torch.empty(size, device="cuda") for size in (100, ELEMENTS, 8 * ELEMENTS)]
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, stream=side):
        before.clear()
        copy = _copied(source)
    is_equal = _replayed(source, (made, copy))
    del made, copy, source
    return {"is_equal": is_equal} | _is_whole()


def _boxed(inputs: list[Any]) -> list[Any]:
    """Do as compiled code does: a function that empties the list of its inputs. Copies the first one by three steps."""
    source = inputs[0]
    inputs.clear()
    return [_copied(source), None]


def _copy_each(to: list[Any], sources: list[Any]) -> None:
    """Copy inputs to where a graph reads them without PyTorch's kernel, which does nothing here."""
    for one, source in zip(to, sources, strict=True):
        one.copy_(source)


class _Trees:
    """What ``torch.compile(mode="reduce-overhead")`` does with compiled code, here with functions of copies."""

    def __init__(self) -> None:
        """Take three functions, of which none is captured yet."""
        from torch._inductor import config, cudagraph_trees

        config.triton.fast_path_cudagraph_asserts = True
        torch._foreach_copy_ = _copy_each
        self._trees = cudagraph_trees
        kwargs = {"device_index": 0, "is_backward": False, "is_inference": True, "stack_traces": [None, None]}
        self.functions = [cudagraph_trees.cudagraphify_impl(_boxed, [], (), **kwargs) for _ in range(3)]

    def iteration(self, value: float, order: tuple[int, ...], *, keeps: bool) -> list[bool]:
        """Let each function take what the one before returned; tells whether values are right at the end.

        Args:
            value: Of the input.
            order: Which functions run.
            keeps: All results live to the end; else each lives until the next one is there.
        """
        torch.compiler.cudagraph_mark_step_begin()
        results = [torch.full((ELEMENTS,), value).to("cuda")]
        for index in order:
            results.append(self.functions[index]([results[-1]])[0])
            if not keeps:
                del results[:-1]
        torch.cuda.synchronize()
        return [bool((result.cpu() == value).all()) for result in results[int(keeps) :]]

    def manager(self) -> Any:  # noqa: ANN401 - PyTorch's
        """Return what has the graphs."""
        return self._trees.get_manager(0)

    def end(self) -> None:
        """Let all graphs die."""
        self.functions.clear()
        self._trees.reset_cudagraph_trees()
        gc.collect()


def trees() -> dict[str, Any]:
    """Let graphs follow each other in two orders, so that launches are followed by captures; then all of it dies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _Trees()
        is_right: list[bool] = []
        launched = []
        for value in range(1, 5):
            is_right += made.iteration(value, (0, 1), keeps=value % 2 == 0)
            launched.append(driver.counter("nodes_launched").value)
        is_right += made.iteration(5, (0, 1, 2), keeps=True)  # the third one first runs, and behind launches
        for value in (6, 7, 8):
            is_right += made.iteration(value, (0, 2, 1), keeps=True)
            is_right += made.iteration(value, (0, 1, 2), keeps=False)
        manager = made.manager()
        found = {
            "is_right": all(is_right),
            "results": len(is_right),
            "launched": [after - before for before, after in itertools.pairwise(launched)],
            "ways_back": manager.debug_checkpointing_counter,
            "captures": next(manager.graph_counter),
        }
        del manager
        made.end()
    return found | _is_whole()


def compiled_trees() -> dict[str, Any]:
    """Train a compiled model with ``reduce-overhead``; its kernels do nothing, so that no value is looked at."""
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = [torch.empty(ROWS, ROWS, device="cuda", requires_grad=True) for _ in range(2)]
        layers = torch.compile(lambda x: (x * weights[0]).relu() * weights[1], mode="reduce-overhead")
        optimizer = torch.optim.SGD(weights, lr=RATE)
        for _ in range(5):
            layers(torch.empty(ROWS, ROWS, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
        captures = None if manager is None else next(manager.graph_counter)
        del manager
    return {"captures": captures, "skips": counters["inductor"]["cudagraph_skips"]}


def compiled_without() -> dict[str, Any]:
    """Do the same where graph trees cannot run, as in a job that pages."""
    from zico.adapters import torch_graphs

    torch_graphs.serve(SimpleNamespace(heap=SimpleNamespace(managed=True)), torch)  # type: ignore[arg-type]
    return compiled_trees()


def destroyed_stream() -> dict[str, Any]:
    """Destroy a stream with work on it, free what was allocated on it, and fill the budget from the first stream."""
    handle = ctypes.c_void_p()
    source = torch.full((ELEMENTS,), 7.0).to("cuda")
    driver.functions.cuStreamCreate(ctypes.byref(handle), 1)
    stream = torch.cuda.ExternalStream(handle.value)
    bad = driver.counter("bad_calls")
    before = bad.value
    with held(stream):
        with torch.cuda.stream(stream):
            tensors = [torch.empty(size, device="cuda") for size in (100, ELEMENTS, 8 * ELEMENTS)]
            tensors[1].copy_(source)
        status = driver.functions.cuStreamDestroy_v2(handle)
        tensors.clear()
        refused = bad.value - before
    step()
    filled = torch.empty((BUDGET_BYTES - 2 * MIB) // 4, device="cuda")
    joined = session.current()
    spilled = None if joined is None else int(joined.record["spilled_bytes"])
    in_pool = None if joined is None else 0 <= filled.data_ptr() - joined.heap.base < joined.heap.window.size_bytes
    found = {"status": status, "refused": refused, "in_pool": in_pool, "spilled_bytes": spilled}
    del filled, source
    return found | _is_whole()


def captured_before() -> dict[str, Any]:
    """Capture a graph before joining, join, and replay it."""
    source = torch.empty(ELEMENTS, device="cuda")
    found: dict[str, Any] = {"is_equal": _replayed(source, _captured(source))}
    found["join"] = raised(_join_late)
    source = torch.ones(ELEMENTS, device="cpu").to("cuda")
    return found | {"after": bool((source.cpu() == 1).all()), "joined": session.current() is not None}


def _join_late() -> None:
    from zico.adapters.torch import enable

    enable()


def leave() -> dict[str, Any]:
    """Leave tensors, streams and events to the end of the process."""
    globals()["_left"] = [torch.empty(size, device="cuda") for size in (100, ELEMENTS, 8 * ELEMENTS)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        globals()["_left_beside"] = (side, torch.empty(ELEMENTS, device="cuda"), torch.cuda.Event())
    return {"live_bytes": live_bytes()}


CHECKS = {
    one.__name__: one
    for one in (
        *(copies, record_stream, events, out_of_memory, cache_info, questions, sgd, take_turns, graph, steady),
        *(graphed_callable, second_capture, failed_capture, freed_in_capture, trees, compiled_trees),
        compiled_without,
        *(
            lost,
            moves_out,
            frozen,
            swap_queued,
            swap_planned,
            swap_made,
            named_pools,
            shared_with_processes,
            other_device,
            foreign_capture,
            destroyed_stream,
            captured_before,
            leave,
        ),
    )
}


def main() -> None:
    """Join or not, do what is asked, tell."""
    global torch  # noqa: PLW0603 - its import is what joins
    faulthandler.dump_traceback_later(LONG_S, exit=True)
    way, *names = sys.argv[1:]
    if way == "pool":
        autoload.install({"torch": autoload.WATCHED["torch"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch as imported

    torch = imported
    found: dict[str, Any] = {name: CHECKS[name]() for name in names}
    found["calls"] = driver.calls()
    found["bad_calls"] = driver.counter("bad_calls").value
    found["kernels"] = driver.counter("kernels_launched").value
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
