"""What is true of saved tensors in a job that encodes them; run by ``test_torch_saving.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from checking import run
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from zico.job import session
from zico.swap.mover import Place
from zico.tiers.encodings import SIGNS, ZEROS

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.adapters.torch_saving import Storage

    from zico.swap.mover import Idle

DEADLINE_S = 60.0
SHAPE = (8, 8, 128, 64)
"""Of two megabytes."""


def swapper() -> Any:  # noqa: ANN401 - the session's own
    """Return what moves tensors in this process."""
    found = session.current()
    assert found is not None
    return found.swapper


class Watched:
    """Everything that is saved while it is entered."""

    def __enter__(self) -> Self:
        """Begin with nothing."""
        self.storages: list[Storage] = []
        self._saved = swapper().saved
        swapper().saved = self._note
        return self

    def _note(self, idle: Idle, maker: str = "") -> None:
        self.storages.append(idle)  # type: ignore[arg-type] # it is one
        self._saved(idle, maker)

    def __exit__(self, *_: object) -> None:
        """End."""
        swapper().saved = self._saved

    def send(self) -> list[int]:
        """Let all leave that can; returns the encoding of each that is away."""
        mover = swapper()._mover
        encodings = [(each, each.encoding()) for each in self.storages]  # before they can be gone
        leaving = [(each, encoding) for each, encoding in encodings if mover.send(each)]
        assert swapper().settle(DEADLINE_S)
        assert all(each.place is Place.AWAY for each, _ in leaving)
        return sorted(encoding for _, encoding in leaving)


def leaf() -> torch.Tensor:
    """Return a parameter with zeros of both signs, NaNs and infinities among its numbers."""
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    for i, number in enumerate((0.0, -0.0, float("nan"), float("inf"), -float("inf"))):
        made.view(-1)[i::97] = number
    return made.requires_grad_()


def same(build: Callable[[torch.Tensor], torch.Tensor], expected: list[int]) -> None:
    """Assert that gradients are the same bits whether tensors stay or leave, and how those that leave are kept."""
    grads = []
    for leaves in (False, True):
        start = leaf()
        torch.manual_seed(5)
        with Watched() as watched:
            end = build(start)
        if leaves:
            assert watched.send() == expected
        end.backward()
        assert start.grad is not None
        grads.append(start.grad.numpy().tobytes())
    assert grads[0] == grads[1]


def check_relu_before_pooling_is_signs() -> None:
    """Max pooling, average pooling, of a copy or in place: a bit a number is kept, and gradients are the same bits."""
    same(lambda x: functional.max_pool2d(functional.relu(x * 2), 4).sum(), [SIGNS])
    same(lambda x: functional.max_pool2d((x * 2).relu_(), 4).sum(), [SIGNS])
    same(lambda x: functional.avg_pool2d(torch.relu_(x * 2), 2).sum(), [SIGNS])
    same(lambda x: functional.adaptive_avg_pool2d((x * 2).relu(), 3).sum(), [SIGNS])


def check_places_of_max_pooling_keep_all_bits() -> None:
    """What max pooling saves besides its input is numbers of places, and comes back whole."""
    same(lambda x: functional.max_pool2d(functional.relu(x * 2), 2, 1).sum(), [ZEROS, SIGNS])


def check_relu_before_dropout_is_signs() -> None:
    """Dropout saves its mask and not its input."""
    same(lambda x: functional.dropout(functional.relu(x * 2), 0.3).sum(), [ZEROS, SIGNS])


def check_who_reads_the_numbers_gets_them() -> None:
    """A convolution's input, a product's, a view's, and what a user's function saves keep all bits."""
    convolution = nn.Conv2d(8, 2, 3)
    same(lambda x: convolution(functional.relu(x * 2)).nansum(), [ZEROS])

    def both(x: torch.Tensor) -> torch.Tensor:
        made = functional.relu(x * 2)
        return functional.max_pool2d(made, 4).sum() + (made[1:] * made[:-1]).nansum()

    same(both, [ZEROS, ZEROS])


def check_a_subclass_runs_whatever_it_likes_inside() -> None:
    """A tensor whose class runs Python in ReLU's place has what that saves kept whole."""

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - PyTorch's protocol
            if func in {torch.relu, torch.nn.functional.relu}:
                return (args[0].as_subclass(torch.Tensor) * 2).exp()
            return super().__torch_function__(func, types, args, kwargs or {})

    start = leaf()
    with Watched() as watched:
        end = torch.relu(start.as_subclass(Own)).as_subclass(torch.Tensor).sum()
    assert watched.send() == [ZEROS]
    end.backward()
    assert torch.equal(start.grad.nan_to_num(), (2 * (leaf() * 2).exp()).nan_to_num())


def check_a_mode_runs_whatever_it_likes_inside() -> None:
    """So has what is saved while a mode of the user's is on."""

    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            return func(*args, **(kwargs or {}))

    with Watched() as watched, Doubling():
        end = functional.relu(leaf() * 2).sum()
    assert watched.send() == [ZEROS]
    end.backward()


def check_double_backward_and_two_backward_passes() -> None:
    """The gradient's gradient, and a graph that is kept, see the same bits."""

    def build(x: torch.Tensor) -> torch.Tensor:
        y = functional.max_pool2d(functional.relu(x * 2), 2)
        (grad,) = torch.autograd.grad((y * y).nansum(), x, create_graph=True)
        return (grad * grad).nansum()

    grads = []
    for leaves in (False, True):
        start = leaf()
        with Watched() as watched:
            end = build(start)
        if leaves:
            watched.send()
        end.backward(retain_graph=True)
        if leaves:
            watched.send()
        end.backward()
        grads.append(start.grad.numpy().tobytes())  # type: ignore[union-attr]
    assert grads[0] == grads[1]


def check_who_reads_the_result_from_the_graph_is_told() -> None:
    """``_saved_result`` is the result while it is here, and an error that says why once only signs are kept."""
    with Watched() as watched:
        result = functional.relu(leaf() * 2)
        node: Any = result.grad_fn
        end = functional.max_pool2d(result, 4).sum()
        assert torch.equal(node._saved_result.nan_to_num(), result.nan_to_num())
        del result
    assert watched.send() == [SIGNS]
    with pytest.raises(RuntimeError, match=r"kept only the signs .* \(--save gist\)"):
        _ = node._saved_result
    end.backward()


def check_other_types_keep_all_bits() -> None:
    """Numbers of 8 or of 2 bytes are no numbers of 4."""
    for dtype in (torch.float64, torch.bfloat16):
        start = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
        with Watched() as watched:
            end = functional.max_pool2d(functional.relu(start * 2), 4).sum()
        assert watched.send() == [ZEROS]
        end.backward()


if __name__ == "__main__":
    run(globals())
