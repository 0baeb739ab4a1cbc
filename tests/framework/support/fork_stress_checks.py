"""Forks at every moment of a job that plans, swaps or pages; run by ``test_fork.py`` in each of these modes."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from checking import in_pool, run
from fork_checks import DEADLINE_S, FLOATS, ended
from numba.core.compiler_lock import global_compiler_lock
from torch import nn
from torch.utils.data import DataLoader, Dataset

import zico
from zico.heap import hooks
from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

LIMIT_MIB = 16
"""Less than the model needs: feature maps leave where the job swaps, blocks where it pages."""
WIDTH, BATCH, SAMPLES, EPOCHS = 256, 256, 1024, 3
PACKAGE = str(Path(zico.__file__).parent)


def joined() -> session.Session:
    """Return this process's session."""
    found = session.current()
    assert found is not None
    return found


def trainer() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what takes one step of a new model and returns the loss."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def train(steps: int = 2) -> list[str]:
    """Return the bits of the losses of a few steps."""
    step = trainer()
    return [step(torch.ones(4 * BATCH, WIDTH)).item().hex() for _ in range(steps)]


def child_of(work: Callable[[], bool], end: Callable[[int], object] = os._exit) -> int:
    """Fork a child that does its work and ends, with 0 if it went well; returns its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 1
        except Exception:  # noqa: BLE001 - the top of a process
            traceback.print_exc()
        end(code)
    return child


def allocates() -> bool:
    """Tell whether memory is to be had, outside the pool."""
    tensor = torch.ones(FLOATS)
    return bool((tensor == 1).all()) and not in_pool(tensor.data_ptr())


def forks_again() -> bool:
    """Tell whether a child of this child can work."""
    return allocates() and ended(child_of(allocates)) == 0


@contextlib.contextmanager
def beside(work: Callable[[], None], threads: int = 1) -> Iterator[None]:
    """Let threads do something again and again until the block ends; what they raise is raised here."""
    stops = threading.Event()
    failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def churn() -> None:
        try:
            while not stops.is_set():
                work()
        except Exception as error:  # noqa: BLE001 - the top of a thread
            failed.put(error)

    started = [threading.Thread(target=churn, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        stops.set()
        for thread in started:
            thread.join(DEADLINE_S)
    if not failed.empty():
        raise failed.get()


def saves() -> bool:
    """Tell whether the job swaps or pages."""
    return joined().swapper is not None or joined().heap.paged is not None


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Hold a job that swaps or pages to less than it needs."""
    here = joined()
    if saves():
        here.pool.set_limit(here.membership.job, (LIMIT_MIB << 20) // here.pool.region_bytes)
    yield
    if saves():
        here.pool.set_limit(here.membership.job, 0)


def check_children_need_no_lock_of_numba() -> None:
    """While another thread compiles, children allocate, train, fork again and end, by ``_exit`` and ``sys.exit``."""
    expected = train(1)
    holds, done = threading.Event(), threading.Event()
    ended_in_time = []

    def compile_for_ever() -> None:
        with global_compiler_lock:
            holds.set()
            ended_in_time.append(done.wait(DEADLINE_S))

    thread = threading.Thread(target=compile_for_ever, daemon=True)
    thread.start()
    assert holds.wait(DEADLINE_S)
    try:
        for work in (allocates, lambda: train(1) == expected, forks_again):
            for end in (os._exit, sys.exit):
                assert ended(child_of(work, end)) == 0
    finally:
        done.set()
        thread.join(DEADLINE_S)
    assert ended_in_time == [True], "a fork has waited for the lock"


def check_threads_of_ours_do_not_compile() -> None:
    """Making and following plans, and moving tensors, takes Numba's lock in no thread of Zico's."""
    lock = type(global_compiler_lock)
    acquire, seen = lock.acquire, set()

    def noting(self: Any) -> None:  # noqa: ANN401 - Numba's lock
        seen.add(threading.current_thread().name)
        acquire(self)

    lock.acquire = noting
    try:
        end_s = time.monotonic() + DEADLINE_S
        plans = int(joined().heap.record[0]["planning"]["followed"])
        while int(joined().heap.record[0]["planning"]["followed"]) == plans:
            train(8)
            assert time.monotonic() < end_s, "no plan is made"
    finally:
        lock.acquire = acquire
    assert not [name for name in seen if name.startswith("zico")]


def check_a_fork_at_every_step_of_planning() -> None:
    """A child forked at any line of the planner's, when it runs first, allocates, trains, forks again and ends."""
    expected = train(1)
    planning = joined().heap.planning
    assert planning is not None
    asks: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    seen: set[tuple[CodeType, int]] = set()

    def at_each(frame: FrameType, _event: str, _value: object) -> Any:  # noqa: ANN401 - Python's protocol
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if (line := (frame.f_code, frame.f_lineno)) not in seen:
            seen.add(line)
            asks.put("stands")
            answers.get(timeout=DEADLINE_S)
        return at_each

    def plan_slowly() -> None:
        sys.settrace(at_each)
        try:
            planning.plan_handed()
        finally:
            sys.settrace(None)
            asks.put("ended")

    thread = threading.Thread(target=plan_slowly, daemon=True)
    thread.start()
    forks = 0
    while asks.get(timeout=DEADLINE_S) == "stands":
        work = (allocates, forks_again)[forks % 8 == 1] if forks % 32 else lambda: train(1) == expected
        assert ended(child_of(work)) == 0, f"step {forks}"
        forks += 1
        answers.put("go on")
    thread.join(DEADLINE_S)
    assert forks > 100


def check_forks_while_a_thread_keeps_the_global_lock() -> None:
    """A thread that allocates, and touches what may be out, with Python's lock held stands in no fork's way."""
    allocate = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 3)(hooks.posix_memalign.address)
    free = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(hooks.free.address)
    address = ctypes.c_int64()
    large = torch.zeros(LIMIT_MIB // 2 << 18 if joined().swapper else LIMIT_MIB * 2 << 18)

    def churn() -> None:
        assert allocate(ctypes.addressof(address), 64, 1 << 20) == 0
        for offset in range(0, large.nbytes, 1 << 20):
            ctypes.string_at(large.data_ptr() + offset, 8)
        free(address.value)

    with limited(), beside(churn):
        for _ in range(20):
            assert ended(child_of(allocates)) == 0


def check_a_child_goes_on_where_its_parent_was() -> None:
    """Forked between forward and backward pass, with memory away, a child has the gradient that its parent has."""
    with limited():
        train(6)
        leaf = torch.full((FLOATS,), 0.5, requires_grad=True)
        end = leaf
        for _ in range(24):
            end = end.tanh()
        reading, writing = os.pipe()

        def goes_back() -> bool:
            (gradient,) = torch.autograd.grad(end.sum(), leaf)
            return os.write(writing, float(gradient[-1]).hex().encode()) > 0

        children = [child_of(goes_back) for _ in range(3)]
        assert [ended(child) for child in children] == [0, 0, 0]
        os.close(writing)
        told = os.read(reading, 1000).decode()
        os.close(reading)
        (gradient,) = torch.autograd.grad(end.sum(), leaf)
        assert told == 3 * float(gradient[-1]).hex()


def check_writes_stay_with_their_process() -> None:
    """What parent and child write after a fork is seen by neither the other nor a second child, however it began."""
    kept = torch.full((LIMIT_MIB // 4 << 18,), 1.0)

    def spoils() -> bool:
        before = bool((kept == 1.0).all())
        kept.fill_(3.0)
        return before and bool((kept == 3.0).all())

    with limited(), beside(lambda: None if torch.ones(FLOATS).all() else 1):
        for start in (child_of, process_of):
            child = start(spoils)
            assert ended(child) == 0
            assert (kept == 1.0).all()
        done = subprocess.run(["true"], preexec_fn=lambda: kept.fill_(4.0), timeout=DEADLINE_S, check=True)
        assert done.returncode == 0
        assert (kept == 1.0).all()
        kept.fill_(2.0)
        assert ended(child_of(lambda: bool((kept == 2.0).all()))) == 0


def process_of(work: Callable[[], bool]) -> int:
    """Start ``multiprocessing``'s child, which exits with 0 if its work went well; returns its number."""
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if work() else 1))
    process.start()
    assert process.pid is not None
    return process.pid


def check_a_fork_with_many_open_files() -> None:
    """Numbers above 1024 are no hindrance to a parent whose memory is away, nor to the threads that move it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    with limited():
        leaf = torch.full((FLOATS,), 0.5, requires_grad=True)
        end = leaf
        for _ in range(24):
            end = end.tanh()
        with contextlib.ExitStack() as undo:
            for _ in range(1100):
                undo.callback(os.close, os.dup(0))
            child = child_of(lambda: bool(torch.isfinite(torch.autograd.grad(end.sum(), leaf)[0]).all()))
        assert ended(child) == 0
        (gradient,) = torch.autograd.grad(end.sum(), leaf)
        assert bool(torch.isfinite(gradient).all())


class Noise(Dataset):  # type: ignore[misc] # torch has no types
    """Samples cut from one tensor, which is in the pool when workers are forked."""

    def __init__(self) -> None:
        """Draw it."""
        self.samples = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a sample, computed with a tensor of its own that is over the threshold."""
        return self.samples[index] * torch.ones(FLOATS)[-1]


def epochs(method: str | None, workers: int = 2, *, persistent: bool = False) -> list[str]:
    """Return the bits of the losses of some epochs."""
    step = trainer()
    loader = DataLoader(
        Noise(),
        BATCH,
        num_workers=workers * (method is not None),
        multiprocessing_context=method,
        persistent_workers=persistent,
        timeout=DEADLINE_S * (method is not None),
    )
    return [step(batch).item().hex() for _ in range(EPOCHS) for batch in loader]


def check_loader_workers() -> None:
    """Workers of every kind, for one epoch or for all, feed a job as no workers do.

    Those that are not forked have nothing of what a job that saves memory has away: one mode shows
    what they do.
    """
    methods = ("fork",) if saves() else ("fork", "forkserver", "spawn")
    with limited():
        expected = epochs(None)
        for method in methods:  # those that are started import PyTorch: one of them shows what they do
            assert epochs(method, 2 if method == "fork" else 1, persistent=True) == expected, method
        assert epochs("fork") == expected


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a child that ends as Python ends walks what it has made, and not all of PyTorch
    sys.setswitchinterval(1e-4)  # threads take turns more often than usual: more moments to fork at
    run(dict(globals()))
