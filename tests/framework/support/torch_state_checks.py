"""What is true of an optimizer's state in a job that swaps; run by ``test_torch_state.py``."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
from typing import TYPE_CHECKING, Any

import torch
from checking import in_pool, record, run
from torch import nn

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
WIDTH = 256
STEPS = 5
BATCH = 2048
FULL_MIB = 64
"""More than anything here needs."""

Optimizer = torch.optim.Optimizer
Make = Any


def joined() -> session.Session:
    """Return this process's session."""
    found = session.current()
    assert found is not None
    return found


def heap() -> Any:  # noqa: ANN401 - a HEAP record
    """Return the record of the heap."""
    return joined().heap.record[0]


@contextlib.contextmanager
def limited(size_bytes: int) -> Iterator[None]:
    """Let this job hold so much and no more."""
    here = joined()
    here.pool.set_limit(here.membership.job, size_bytes // here.pool.region_bytes)
    try:
        yield
    finally:
        here.pool.set_limit(here.membership.job, 0)


def amsgrad(model: nn.Module) -> Optimizer:
    """Keep three times the weights."""
    return torch.optim.Adam(model.parameters(), amsgrad=True, foreach=False)


def momentum(model: nn.Module) -> Optimizer:
    """Keep as much as the weights."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)


class Training:
    """A model in training, the same from the same seed."""

    def __init__(self, make: Callable[[nn.Module], Optimizer] = amsgrad, layers: int = 6) -> None:
        """Make it, and go one step, so that there is a state."""
        torch.manual_seed(1)
        self.model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
        self.optimizer = make(self.model)
        self.inputs = torch.randn(BATCH, WIDTH)
        self.losses: list[str] = []
        self.step()

    def backward(self) -> None:
        """Go forwards and backwards."""
        self.optimizer.zero_grad()
        loss = self.model(self.inputs).square().mean()
        loss.backward()
        self.losses.append(loss.item().hex())

    def step(self) -> None:
        """Train on the batch."""
        self.backward()
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        """Return what the optimizer keeps, where it is in the pool."""
        kept = [tensor for of in self.optimizer.state.values() for tensor in of.values()]
        return [tensor for tensor in kept if isinstance(tensor, torch.Tensor) and in_pool(tensor.data_ptr())]

    def bits(self) -> str:
        """Return a hash of losses, weights and state."""
        found = hashlib.sha256(" ".join(self.losses).encode())
        for tensor in [*self.model.parameters(), *self.state()]:
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()


@contextlib.contextmanager
def away(training: Training) -> Iterator[list[torch.Tensor]]:
    """Let the state leave: a tensor takes all that the job may hold; gives a list that holds it."""
    held_bytes = int(record()["held"]) * joined().pool.region_bytes
    state_bytes = sum(tensor.nbytes for tensor in training.state())
    with limited(held_bytes):
        others = [torch.empty(state_bytes - MIB, dtype=torch.uint8)]
        assert heap()["optimizer"]["away"] > 0
        yield others


def trained(make: Callable[[nn.Module], Optimizer]) -> Training:
    """Train for some steps."""
    training = Training(make)
    for _ in range(STEPS):
        training.step()
    return training


def check_less_memory_gives_the_same_bits() -> None:
    """Invariants 1 and 6: losses, weights and state with the state away at the peak are those with all memory.

    The job never holds more than its limit, which is what a step needs, and nothing overflows.
    """
    for make, share in ((amsgrad, 0.6), (momentum, 0.8)):
        record()["peak_held"] = 0
        expected = trained(make)
        bits, peak = expected.bits(), int(record()["peak_held"])
        del expected
        before = {name: int(record()[name]) for name in ("out_bytes", "in_bytes", "spilled_bytes")}
        had_left = int(heap()["optimizer"]["left"])
        with limited(round(share * peak) * joined().pool.region_bytes):
            record()["peak_held"] = 0
            assert trained(make).bits() == bits
            assert record()["peak_held"] <= round(share * peak)
        assert heap()["optimizer"]["left"] > had_left
        assert record()["spilled_bytes"] == before["spilled_bytes"]
        assert min(int(record()[name]) - before[name] for name in ("out_bytes", "in_bytes")) > 0


def check_it_is_at_its_address_before_the_step() -> None:
    """Invariant 4: a step finds the state where it was, in the budget, and what is behind a step is not late."""
    training = Training()
    addresses = [tensor.data_ptr() for tensor in training.state()]
    training.backward()
    seen: list[int] = []
    training.optimizer.register_step_pre_hook(lambda *_: seen.append(int(heap()["optimizer"]["away"])))
    with away(training) as others:
        others.clear()
        training.optimizer.step()
    assert seen == [0]
    assert [tensor.data_ptr() for tensor in training.state()] == addresses
    assert record()["out_now_bytes"] == 0


def check_it_can_be_read_and_written_while_it_is_away() -> None:
    """A checkpoint has the right bits; what a program writes into the state is there in the next step."""
    training = Training()
    expected = [tensor.clone() for tensor in training.state()]
    with away(training):
        saved = io.BytesIO()
        torch.save(training.optimizer.state_dict(), saved)
        assert all(torch.equal(*pair) for pair in zip(training.state(), expected, strict=True))
        training.state()[0].fill_(0.25)
    saved.seek(0)
    kept = [tensor for of in torch.load(saved)["state"].values() for tensor in of.values()]
    large = [tensor for tensor in kept if tensor.nbytes >= expected[0].nbytes]
    assert all(torch.equal(*pair) for pair in zip(large, expected, strict=True))
    seen: list[float] = []
    training.optimizer.register_step_pre_hook(lambda *_: seen.append(training.state()[0].mean().item()))
    training.step()
    assert seen == [0.25]


def check_a_forked_child_has_it_while_it_is_away() -> None:
    """Invariant 10: the child sees the state, and its writes and steps are its own."""
    training = Training()
    expected = [tensor.clone() for tensor in training.state()]
    with away(training):
        child = os.fork()
        if child == 0:
            right = all(torch.equal(*pair) for pair in zip(training.state(), expected, strict=True))
            training.state()[0].fill_(7)
            training.step()
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(torch.equal(*pair) for pair in zip(training.state(), expected, strict=True))


def check_a_loaded_state_can_rest() -> None:
    """What ``load_state_dict`` makes lies where it can leave from, and is the state that was saved."""
    first, second = Training(), Training()
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.step()
    first.step()
    for one, other in zip(first.state(), second.state(), strict=True):
        assert torch.equal(one, other)
    del first
    with away(second) as others:
        assert others


def check_two_optimizers() -> None:
    """Each of two states is back before either steps, with some room for what is still being copied then."""
    training = Training(layers=3)
    other = Training(layers=3)
    had_left = int(heap()["optimizer"]["left"])
    with limited(int(record()["held"]) * joined().pool.region_bytes + 2 * MIB):
        for _ in range(STEPS):
            training.backward()
            other.backward()
            training.optimizer.step()
            assert heap()["optimizer"]["away"] == 0
            other.optimizer.step()
    assert heap()["optimizer"]["left"] > had_left
    assert training.bits() == other.bits()


def check_a_step_without_room_goes_on() -> None:
    """Invariant 7: a limit below what a step needs costs an overflow, which is counted, and no bit."""
    expected = trained(amsgrad).bits()
    training = Training()
    before = int(record()["spilled_bytes"])
    state_bytes = sum(tensor.nbytes for tensor in training.state())
    with limited(int(record()["held"]) * joined().pool.region_bytes - state_bytes // 2):
        for _ in range(STEPS):
            training.step()
        assert training.bits() == expected
    assert record()["spilled_bytes"] > before


def check_nothing_is_left() -> None:
    """When all is dead nothing is away, and the job holds nothing."""
    training = Training()
    with away(training):
        pass
    del training
    gc.collect()
    assert (int(heap()["optimizer"]["away"]), int(record()["live_bytes"])) == (0, 0)
    assert (int(record()["held"]), int(record()["evicted"])) == (0, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(globals())
