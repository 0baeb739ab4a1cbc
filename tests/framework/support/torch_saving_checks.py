"""What is true of saved tensors in a job that swaps; run by ``test_torch_saving.py``."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checking import record, run
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
FLOATS = 2 * MIB // 4
DEADLINE_S = 300.0


def joined() -> session.Session:
    """Return this process's session."""
    found = session.current()
    assert found is not None
    assert found.swapper is not None
    return found


def limited(mib: int) -> None:
    """Let this job hold so much and no more."""
    here = joined()
    here.pool.set_limit(here.membership.job, mib * MIB // here.pool.region_bytes)


def moved() -> tuple[int, int]:
    """Return the bytes that have gone out and come back so far."""
    return int(record()["out_bytes"]), int(record()["in_bytes"])


def chain(n: int, start: torch.Tensor) -> torch.Tensor:
    """Return the end of a row of operations that save 2 MiB each."""
    for _ in range(n):
        start = start.tanh()
    return start


def push_out(tensors: int = 12) -> torch.Tensor:
    """Save more than there is room for; returns the end of the graph, whose first tensors are away."""
    out_before, _ = moved()
    end = chain(tensors, torch.full((FLOATS,), 0.5, requires_grad=True))
    assert moved()[0] > out_before
    return end


def raises(work: Callable[[], object], words: str) -> None:
    """Assert that work raises PyTorch's error with these words."""
    with pytest.raises(RuntimeError, match=words):
        work()


def nothing_is_left_but(*tensors: torch.Tensor) -> None:
    """Assert that the tier holds nothing, and the pool nothing else, as soon as nobody has anything in hand."""
    gc.collect()
    here = joined()
    end_s = time.monotonic() + DEADLINE_S
    while True:
        here.swapper.settle(DEADLINE_S)
        if record()["out_now_bytes"] == 0 or time.monotonic() > end_s:
            break
    assert record()["live_bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert record()["out_now_bytes"] == 0
    assert [use.used_bytes for use in here.swapper.tier.usage()] == [0]


def check_they_come_back_with_the_same_bits() -> None:
    """A gradient through tensors that have been away is that of a graph that was here all along."""
    leaf = torch.linspace(-2, 2, FLOATS, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        (expected,) = torch.autograd.grad(chain(3, leaf).sum(), leaf)
    limited(16)
    out_before, in_before = moved()
    (got,) = torch.autograd.grad(chain(12, leaf).sum(), leaf)
    assert moved()[0] > out_before
    assert moved()[1] > in_before
    (again,) = torch.autograd.grad(chain(3, leaf).sum(), leaf)
    assert torch.equal(again, expected)
    assert not torch.equal(got, expected)
    assert record()["spilled_bytes"] == 0


def check_a_graph_that_is_dropped_leaves_nothing() -> None:
    """Without a backward pass all that was saved is gone with the graph, from the pool and from the tier."""
    limited(16)
    end = push_out()
    assert record()["out_now_bytes"] > 0
    del end
    nothing_is_left_but()


def check_who_holds_the_global_lock_waits_for_no_copy() -> None:
    """A tensor of a list is allocated with that lock, which those who copy need: it goes to the next tier at once."""
    numbers = [0.5] * (4 * FLOATS)
    limited(16)
    end = chain(6, torch.full((FLOATS,), 0.5, requires_grad=True))
    joined().heap.record[0]["wait"]["limit_ns"] = int(DEADLINE_S * 1e9)
    began_s = time.monotonic()
    tensor = torch.tensor(numbers)
    assert time.monotonic() - began_s < DEADLINE_S / 4
    assert bool((tensor == 0.5).all())
    assert record()["spilled_bytes"] >= tensor.nbytes
    end.sum().backward()
    record()["spilled_bytes"] = 0  # the checks behind this one look at their own


def check_what_is_held_stays() -> None:
    """A tensor that the program, a view of it or an array still refers to does not leave."""
    limited(64)
    leaf = torch.ones(FLOATS, requires_grad=True)
    held = leaf.tanh()
    end = held.tanh()
    array = chain(1, leaf).detach().numpy()
    here = joined()
    out_before, _ = moved()
    here.swapper.make_room(64 * MIB)
    here.swapper.settle(DEADLINE_S)
    assert moved()[0] == out_before
    del held
    here.swapper.make_room(64 * MIB)
    here.swapper.settle(DEADLINE_S)
    assert moved()[0] - out_before >= FLOATS * 4
    end.sum().backward()
    assert array[0] == torch.ones(1).tanh().item()


def check_what_came_back_and_was_not_used_leaves_again() -> None:
    """What is brought back ahead of its use can be sent away, and the tier's copy of it is still good."""
    limited(32)
    here = joined()
    end = push_out(24)
    limited(64)
    _, in_before = moved()
    here.swapper._fetch_before(here.swapper._numbers - 8)  # as after a use
    until_s = time.monotonic() + DEADLINE_S
    while moved()[1] == in_before:
        assert here.swapper.settle(DEADLINE_S)
        assert time.monotonic() < until_s
    away = int(record()["out_now_bytes"])
    here.swapper.make_room(64 * MIB)
    assert here.swapper.settle(DEADLINE_S)
    assert record()["out_now_bytes"] > away
    end.sum().backward()


def check_a_change_after_saving_raises() -> None:
    """Changing in place what has been saved raises in the backward pass, small or large, as without Zico."""
    limited(64)
    for n in (FLOATS, 16):
        leaf = torch.ones(n, requires_grad=True)
        middle = leaf.tanh()
        end = middle.exp().sum() + (middle * middle).sum()
        with torch.no_grad():
            middle.add_(1)
        raises(end.backward, "has been modified by an inplace operation")


def check_a_graph_can_be_used_twice() -> None:
    """With ``retain_graph`` the second backward pass finds what the first one found, though memory is short."""
    limited(16)
    leaf = torch.full((FLOATS,), 0.5, requires_grad=True)
    end = chain(12, leaf).sum()
    (first,) = torch.autograd.grad(end, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(end, leaf)
    assert torch.equal(first, second)
    raises(lambda: torch.autograd.grad(end, leaf), "second time")


def check_nothing_happens_without_gradients() -> None:
    """Inference saves nothing, so nothing is moved."""
    limited(64)
    before = moved()
    with torch.no_grad():
        chain(12, torch.ones(FLOATS))
    assert moved() == before


def check_a_users_hooks_come_first() -> None:
    """Inside a user's own hooks, ``save_on_cpu`` and checkpoints, theirs are used and ours are not."""
    limited(64)
    seen: list[int] = []
    leaf = torch.ones(FLOATS, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: seen.append(tensor.numel()) or tensor.detach(), lambda tensor: tensor):
        chain(3, leaf).sum().backward()
    assert FLOATS in seen
    with save_on_cpu():
        chain(3, leaf).sum().backward()
    checkpoint(lambda tensor: chain(3, tensor), leaf, use_reentrant=False).sum().backward()
    assert leaf.grad is not None


def check_the_hooks_go_while_nothing_has_to_leave() -> None:
    """They come again when something has to, and what was saved by them before is used all the same."""
    limited(16)
    pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003 - by position
    saving = pack.__self__
    before = push_out()
    saving.swapper.stands_by = lambda: True
    saving.at_boundary()
    assert not saving.is_in_force()
    told: list[object] = []
    saving.on_saved = lambda saved, _tensor: told.append(saved)
    chain(3, torch.ones(FLOATS, requires_grad=True)).sum().backward()
    assert told == [], "nobody tells of what is saved"
    before.sum().backward()
    with save_on_cpu():
        saving.swapper.stands_by = lambda: False
        saving.at_boundary()
        assert not saving.is_in_force(), "a user's own are there"
    saving.at_boundary()
    assert saving.is_in_force()
    with save_on_cpu():
        saving.swapper.stands_by = lambda: True
        saving.at_boundary()
    assert saving.is_in_force(), "a user's own were there"
    del saving.swapper.stands_by
    push_out().sum().backward()
    assert told
    saving.on_saved = None


def check_where_pytorch_wants_no_hooks_there_are_none() -> None:
    """``torch.func`` transforms work, and afterwards tensors are saved by our hooks again."""
    limited(16)
    assert torch.func.grad(lambda x: (x * x).sum())(torch.ones(3)).tolist() == [2.0] * 3
    rows = torch.func.vmap(torch.func.grad(lambda x: x.tanh().sum()))(torch.ones(4, 8))
    assert rows.shape == (4, 8)
    nested = torch.func.jacrev(torch.func.grad(lambda x: (x * x * x).sum()))(torch.ones(3))
    assert nested.diagonal().tolist() == [6.0] * 3
    push_out().sum().backward()


def check_another_thread_saves_too() -> None:
    """A thread that is started later swaps like the first one."""
    limited(16)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            push_out().sum().backward()
        except BaseException as error:  # noqa: BLE001 - told to the check
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not failed, failed


def check_tensors_of_other_kinds_are_left_alone() -> None:
    """Sparse tensors, tensors outside the pool and parameters are saved and found as ever."""
    limited(64)
    index = torch.tensor([[0, 1], [1, 0]])
    sparse = torch.sparse_coo_tensor(index, torch.ones(2), (2, 2), requires_grad=True, check_invariants=True)
    torch.sparse.mm(sparse, torch.ones(2, 2)).sum().backward()
    shared = torch.ones(FLOATS).share_memory_().requires_grad_()
    (shared * shared).sum().backward()
    gc.collect()  # of what other checks have left in cycles
    before = moved()
    layer = nn.Linear(1024, 1024)
    (layer(torch.ones(4, 1024)) * 2).sum().backward()
    joined().swapper.make_room(64 * MIB)
    joined().swapper.settle(DEADLINE_S)
    assert moved() == before


def check_tensors_that_are_read_otherwise_than_written() -> None:
    """A conjugate is a bit at the tensor, not in its memory; so is a sign, and rows of other lengths."""
    z = torch.view_as_complex(torch.randn(FLOATS // 2, 2)).requires_grad_()
    end = (z.tanh().conj() * z.tanh()).imag.square().sum()
    nested = torch.nested.nested_tensor([torch.ones(FLOATS), torch.ones(7)]).requires_grad_()
    rows = torch.relu(nested * nested)
    push_out(32)
    end.backward()
    rows.backward(rows)
    found = z.grad
    z.grad = None
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        (z.tanh().conj() * z.tanh()).imag.square().sum().backward()
    assert found is not None
    assert torch.equal(found, z.grad)


def check_memory_of_others_stays() -> None:
    """What a tensor shares with an array, or through it with another tensor, is read as it is in the end."""
    x = torch.full((FLOATS,), 0.5, requires_grad=True)
    owner = torch.ones(FLOATS)
    shared = torch.from_numpy(owner.numpy())
    end = (shared * x).sum()
    del shared
    last = push_out(32)
    owner.mul_(3.0)
    end.backward()
    assert x.grad is not None
    assert x.grad[0] == 3.0
    assert last.requires_grad


def check_a_thread_that_ends_has_no_hooks() -> None:
    """What a thread still has when it has ended is freed by whoever comes last, maybe after the interpreter."""
    tops: list[object] = []

    class Last(threading.Thread):
        """Looks after everything that it runs."""

        def _bootstrap_inner(self) -> None:
            super()._bootstrap_inner()  # type: ignore[misc] # it is there
            tops.append(torch._C._autograd._top_saved_tensors_default_hooks(False))  # noqa: FBT003 - by position

    thread = Last(target=push_out)
    thread.start()
    thread.join(DEADLINE_S)
    assert tops == [None]


def check_custom_functions_get_what_they_saved() -> None:
    """A function of the user's own finds shape, strides, type and contents, and may keep what it gets."""
    limited(16)
    kept: list[Any] = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's
            view = tensor.detach().clone().view(-1, 64).t()[1:]
            ctx.save_for_backward(view)
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's
            (view,) = ctx.saved_tensors
            assert view.shape == (63, FLOATS // 64)
            assert view.stride() == (1, 64)
            assert view.storage_offset() == 1
            assert view[:, 0].tolist() == list(range(1, 64))
            kept.append(view)
            return gradient

    leaf = torch.arange(FLOATS, dtype=torch.float32, requires_grad=True)
    end = Own.apply(leaf)
    away = push_out()
    end.sum().backward()
    del away, end
    push_out().sum().backward()
    assert kept[0][:, 0].tolist() == list(range(1, 64))


def check_a_forked_child_finds_what_is_away() -> None:
    """Invariant 10: a child goes back through a graph of its parent, with tensors that are away; so does the parent."""
    limited(16)
    leaf = torch.full((FLOATS,), 0.5, requires_grad=True)
    end = chain(12, leaf).sum()
    assert record()["out_now_bytes"] > 0
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        (gradient,) = torch.autograd.grad(end, leaf)
        os.write(writing, float(gradient[0]).hex().encode())
        os._exit(0)
    os.close(writing)
    told = os.read(reading, 100).decode()
    os.close(reading)
    assert os.waitpid(pid, 0)[1] == 0
    (gradient,) = torch.autograd.grad(end, leaf)
    assert float(gradient[0]).hex() == told
    del end
    nothing_is_left_but(leaf, gradient)


def check_a_compiled_graph_trains() -> None:
    """``torch.compile`` without a backend that generates code gives the same gradient as without it."""
    limited(64)
    leaf = torch.full((FLOATS,), 0.5, requires_grad=True)
    (expected,) = torch.autograd.grad(chain(3, leaf).sum(), leaf)
    compiled = torch.compile(lambda tensor: chain(3, tensor).sum(), backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(leaf), leaf)
    assert torch.equal(got, expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(globals())
