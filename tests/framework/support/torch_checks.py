"""What is true of PyTorch in a job; run by ``test_torch.py``. The last check ends the adapter's own marks for good."""

from __future__ import annotations

import io
import pickle
import threading
from typing import TYPE_CHECKING

import torch
from checking import assert_iterations, in_pool, marks, record, run
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zico

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
THRESHOLD = 64 * 1024
FLOATS = MIB // 4


def tensor_bytes() -> int:
    """Return the live bytes of this job in the pool."""
    return int(record()["live_bytes"])


def iterations() -> int:
    """Return the iterations that this job has completed."""
    return int(record()["iteration"])


def marks_of(work: Callable[[], object]) -> int:
    """Return how many marks there are while ``work`` runs: phases between them are iterations, too."""
    before = marks()
    work()
    return marks() - before


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Return a small network whose feature maps are over the threshold, and a batch."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(16 if layers else 3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)), torch.randn(8, 3, 32, 32)


def check_counter() -> None:
    """A tensor is counted from its birth to its death."""
    assert tensor_bytes() == 0
    tensor = torch.ones(FLOATS)
    assert tensor_bytes() >= MIB
    assert in_pool(tensor.data_ptr())
    assert zico.status()["tensor_bytes"] == tensor_bytes()
    del tensor
    assert tensor_bytes() == 0
    assert record()["held"] == 0


def check_alignment() -> None:
    """Every tensor in the pool lies at a multiple of 64 bytes, whatever its size."""
    tensors = [torch.empty(size, dtype=torch.uint8) for size in range(THRESHOLD, 12 * THRESHOLD, 9999)]
    assert all(in_pool(tensor.data_ptr()) for tensor in tensors)
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}
    assert not in_pool(torch.empty(THRESHOLD - 64, dtype=torch.uint8).data_ptr())


def allocations_of(profiled: profile) -> Iterator[tuple[int, int]]:
    """Return address and size of each allocation that PyTorch's own profiler saw."""
    todo = list(profiled.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == torch._C._profiler._EventType.Allocation and event.extra_fields.alloc_size > 0:
            yield event.extra_fields.ptr, event.extra_fields.alloc_size


def check_share_in_pool() -> None:
    """Nearly all bytes over the threshold are in the pool, by PyTorch's count of allocations and their addresses."""
    model, images = convolutions()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        for _ in range(2):
            model(images).sum().backward()
    large = [(address, size) for address, size in allocations_of(profiled) if size >= THRESHOLD]
    assert len(large) > 20
    pooled = sum(size for address, size in large if in_pool(address))
    total = sum(size for _, size in large)
    assert pooled >= 0.95 * total, f"{pooled} of {total} bytes"


def check_an_optimizer_step_is_an_iteration() -> None:
    """Each step of the optimizer ends one iteration, and gradient accumulation makes no more of them."""
    model, images = convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def accumulate() -> None:
        for _ in range(4):
            model(images).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert marks_of(accumulate) == 1
    assert marks_of(lambda: [accumulate() for _ in range(3)]) == 3
    assert marks_of(lambda: model(images).sum().backward()) == 0


def check_two_optimizers_are_one_iteration() -> None:
    """Where a generator and a discriminator step in turn, a pair of steps is one iteration."""
    sides = [nn.Linear(256, 256) for _ in range(2)]
    optimizers = [torch.optim.SGD(side.parameters(), lr=0.1) for side in sides]

    def both() -> None:
        for side, optimizer in zip(sides, optimizers, strict=True):
            side(torch.ones(64, 256)).sum().backward()
            optimizer.step()

    both()
    assert marks_of(lambda: [both() for _ in range(10)]) == 10


def check_rollouts_and_evaluations_are_no_iterations() -> None:
    """An update is one, however many passes without gradients come before it, and whatever repeats in them."""
    policy, images = convolutions()
    optimizer = torch.optim.Adam(policy.parameters())

    def learn() -> None:
        for _ in range(5):
            with torch.no_grad():
                for _ in range(50):
                    policy(images)
            for _ in range(4):
                policy(images[:4]).sum().backward()
                optimizer.step()

    assert_iterations(20, learn)


def check_an_optimizer_that_takes_over_is_the_main_one() -> None:
    """Where one steps many times and then another does, each step is an iteration."""
    sides = [nn.Linear(256, 256) for _ in range(2)]
    optimizers = [torch.optim.SGD(side.parameters(), lr=0.1) for side in sides]

    def learn() -> None:
        for side, optimizer in zip(sides, optimizers, strict=True):
            for _ in range(20):
                side(torch.ones(64, 256)).sum().backward()
                optimizer.step()

    assert_iterations(80, lambda: [learn() for _ in range(2)])


def check_a_numpy_view_keeps_the_memory() -> None:
    """An array that shares a dead tensor's memory keeps contents and place."""
    array = torch.full((FLOATS,), 3.0).numpy()
    assert tensor_bytes() >= MIB
    others = [torch.zeros(FLOATS) for _ in range(4)]
    assert (array == 3.0).all()
    del array, others
    assert tensor_bytes() == 0


def check_pickling_saving_and_loading() -> None:
    """Tensors survive pickle, torch.save and torch.load, and what is loaded is in the pool."""
    tensor = torch.randn(FLOATS)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)  # noqa: S301 - our own
    buffer = io.BytesIO()
    torch.save({"weights": tensor}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["weights"]
    assert torch.equal(loaded, tensor)
    assert in_pool(loaded.data_ptr())


def check_views_and_work_in_place() -> None:
    """Views and in-place operations see the same memory, which does not move; growing a storage keeps its contents."""
    base = torch.arange(FLOATS, dtype=torch.float32)
    address = base.data_ptr()
    view = base.view(-1, 64)[1:, ::2].t()
    base.mul_(2).add_(1)
    assert base.data_ptr() == address
    assert view[0, 0] == 2 * 64 + 1
    base.resize_(4 * FLOATS)
    assert base[FLOATS - 1] == 2 * (FLOATS - 1) + 1


def check_threads() -> None:
    """Backward passes in several threads, and tensors freed by another thread than made them, leave nothing behind."""
    before = tensor_bytes()
    handed: list[torch.Tensor] = []
    wrong: list[float] = []

    def work(number: int) -> None:
        for _ in range(20):
            weight = torch.full((FLOATS // 4,), float(number), requires_grad=True)
            (weight * weight).sum().backward()
            if not bool((weight.grad == 2 * number).all()):
                wrong.append(number)
            handed.append(weight.detach())
            if len(handed) > 8:
                handed.pop(0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    handed.clear()
    assert tensor_bytes() == before


def check_explicit_marks_win() -> None:
    """Once the script marks its iterations itself, optimizer steps do not count any more."""
    model, images = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(images).sum().backward()
        optimizer.step()

    assert marks_of(step) == 1
    assert marks_of(zico.step) == 1
    assert marks_of(step) == 0

    def body() -> None:
        with zico.iteration():
            step()
            step()

    assert marks_of(body) == 1


if __name__ == "__main__":
    run(dict(globals()))
    alive_at_exit = [torch.ones(FLOATS) for _ in range(3)]
