"""Run out of memory where PyTorch has hooks of the user's, or may have none; run by ``test_torch.py``."""

# ruff: noqa: T201 - a script that talks to its test, and PyTorch has no other names for its hooks

from __future__ import annotations

import threading
import time

import torch
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks
from zico.adapters.torch_saving import Saving

import zico
from zico.job import session

FLOATS = 1 << 19
"""Of 2 MiB; the budget is 16 MiB."""
DEADLINE_S = 60.0


def top() -> object:
    """Return the hooks in force in this thread."""
    return _autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003 - by position


def is_swapping(within_s: float) -> bool:
    """Wait until the job has begun to swap; false if it does not in time."""
    here = session.current()
    assert here is not None
    begun = threading.Event()
    end_s = time.monotonic() + within_s
    while here.swapper is None or not any(isinstance(watcher, Saving) for watcher in here.watchers):
        if time.monotonic() > end_s:
            return False
        begun.wait(0.01)
    return True


def fill() -> list[torch.Tensor]:
    """Hold more than the budget."""
    return [torch.full((FLOATS,), float(number)) for number in range(10)]


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a copy."""
    return tensor.detach().clone()


def main() -> None:
    """Say ok if all is as it should be."""
    torch.set_num_threads(1)
    leaf = torch.ones(4, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        tensors = fill()
        assert is_swapping(DEADLINE_S)
        end = leaf.tanh()
        own = top()
        assert isinstance(own, tuple)
        assert own[0] is pack
    assert top() is None, "nobody's hooks are left"
    (gradient,) = torch.autograd.grad(end.sum(), leaf)
    assert torch.allclose(gradient, 1 - torch.ones(4).tanh() ** 2)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    del tensors
    _autograd._saved_tensors_hooks_disable("no hooks here")
    zico.step()
    assert top() is None
    _autograd._saved_tensors_hooks_enable()
    zico.step()
    hooks = top()
    zico.step()
    assert isinstance(hooks, tuple)
    assert top() == hooks, "once"
    print("ok")


if __name__ == "__main__":
    main()
