"""What a job's forked children see and leave; run by ``test_fork.py`` in a pool and, in part, without Zico."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import torch
from checking import in_pool, record, run
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

FLOATS = 1 << 18
DEADLINE_S = 60
SAMPLES, BATCH, FEATURES = 256, 32, 1024


class Noise(Dataset):
    """Samples cut from one tensor, which is in the pool when the workers are forked."""

    def __init__(self) -> None:
        """Draw it."""
        self.samples = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sample, computed with a tensor of its own that is over the threshold, and spoil the source."""
        large = torch.ones(FLOATS) * self.samples[index, 0]
        sample = self.samples[index] + large[-1]
        if torch.utils.data.get_worker_info() is not None:
            self.samples[index] = -1.0
        return sample


def train(workers: int) -> list[str]:
    """Return the bits of the losses of a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = "fork" if workers else None
    losses = []
    for batch in DataLoader(
        Noise(), BATCH, num_workers=workers, multiprocessing_context=context, timeout=DEADLINE_S * (workers > 0)
    ):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def check_losses_with_workers() -> list[str]:
    """Return the losses with two workers, which are those without."""
    with_workers = train(2)
    assert with_workers == train(0)
    return with_workers


@contextlib.contextmanager
def paused_child(work: Callable[[], bool]) -> object:
    """Fork a child that does its work when the block ends, and assert that it went well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0 if work() else 1)
    os.close(reading)
    try:
        yield child
    finally:
        os.close(writing)
        assert ended(child) == 0, "the child saw something else"


def ended(child: int) -> int:
    """Wait for a child, within the deadline, and return how it ended."""
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], DEADLINE_S)[0]:
            os.kill(child, signal.SIGUSR2)  # it says on stderr where it hangs, if it has asked for that
            select.select([descriptor], [], [], 1)
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_a_child_sees_what_was() -> None:
    """A child reads its parent's tensor as it was at the fork, although the parent has overwritten and freed it."""
    tensor = torch.full((FLOATS,), 7.0)
    assert in_pool(tensor.data_ptr())
    with paused_child(lambda: bool((tensor == 7.0).all())):
        tensor.fill_(9.0)
        tensor.set_()
        everything = [torch.full((FLOATS,), 8.0) for _ in range(28)]  # of 32 MiB: what was freed is used again
        assert all(in_pool(other.data_ptr()) for other in everything)


def check_a_childs_writes_stay_its_own() -> None:
    """What a child writes into its parent's tensors is seen by nobody else, and by itself."""
    tensor = torch.zeros(FLOATS)

    def work() -> bool:
        tensor.fill_(5.0)
        return bool((tensor == 5.0).all())

    with paused_child(work):
        pass
    assert (tensor == 0.0).all()


def check_a_child_allocates_privately() -> None:
    """A child's tensors are not in the pool, nor is what it holds there counted."""
    kept = torch.ones(FLOATS)
    before = int(record()["held"]), int(record()["live_bytes"]), int(record()["allocations"])

    def work() -> bool:
        mine = [torch.ones(8 * FLOATS) for _ in range(8)]
        outside = not any(in_pool(tensor.data_ptr()) for tensor in mine)
        now = int(record()["held"]), int(record()["live_bytes"]), int(record()["allocations"])
        return outside and now == before and bool((kept == 1).all())

    with paused_child(work):
        pass
    assert (int(record()["held"]), int(record()["live_bytes"]), int(record()["allocations"])) == before


def check_a_killed_child_leaves_the_pool_as_it_was() -> None:
    """SIGKILL in a child costs the parent nothing: it keeps its place, its tensors and its heap."""
    tensor = torch.ones(FLOATS)
    before = int(record()["held"])
    child = os.fork()
    if child == 0:
        while True:
            torch.ones(FLOATS)
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    assert int(record()["held"]) == before
    assert (tensor == 1).all()
    assert in_pool(torch.ones(FLOATS).data_ptr())


def check_a_child_of_a_child() -> None:
    """A grandchild sees what its parent saw, with the parent's own changes."""
    tensor = torch.full((FLOATS,), 2.0)

    def work() -> bool:
        tensor.add_(1.0)
        grandchild = os.fork()
        if grandchild == 0:
            large = torch.ones(FLOATS)
            os._exit(0 if bool((tensor == 3.0).all() and (large == 1).all()) else 1)
        tensor.add_(1.0)
        return ended(grandchild) == 0 and bool((tensor == 4.0).all())

    with paused_child(work):
        pass
    assert (tensor == 2.0).all()


def check_forks_while_threads_allocate() -> None:
    """A fork in the middle of other threads' allocations leaves heap and tensors whole on both sides."""
    stops = threading.Event()
    wrong: list[int] = []

    def churn(number: int) -> None:
        while not stops.is_set():
            tensors = [torch.full((FLOATS,), float(number)) for _ in range(3)]
            if not all(bool((tensor == number).all()) for tensor in tensors):
                wrong.append(number)

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    tensor = torch.full((FLOATS,), 6.0)
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0 if bool((tensor == 6.0).all()) and not in_pool(torch.ones(FLOATS).data_ptr()) else 1)
            assert ended(child) == 0
    finally:
        stops.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert not wrong


def check_a_subprocess_is_no_member() -> None:
    """A program that a job starts runs, and its own PyTorch is in no pool."""
    code = "import torch; from zico.job import session; print(session.current(), float(torch.ones(1 << 18).sum()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == f"None {float(FLOATS)}\n"
    assert session.current() is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    if session.current() is None:
        run({"check_losses_with_workers": check_losses_with_workers})
    else:
        run(dict(globals()))
