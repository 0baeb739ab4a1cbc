"""What is true of tensors that are dropped and made again; run by ``test_torch_rebuilding.py``."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from checking import run
from torch import nn
from torch.nn import functional

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.adapters.torch_saving import Storage

    from zico.offload.mover import Idle

MIB = 1 << 20
ROWS = 512


def mover() -> Any:  # noqa: ANN401 - the swapper's own
    """Return what drops tensors in this process."""
    found = session.current()
    assert found is not None
    return found.swapper._mover


class Watched:
    """Everything that is saved while it is entered."""

    def __init__(self) -> None:
        """Begin with none."""
        self.storages: list[Storage] = []

    def __enter__(self) -> Self:
        """Begin."""
        found = session.current()
        assert found is not None
        self._swapper, self._saved = found.swapper, found.swapper.saved
        self._swapper.saved = self._note
        return self

    def _note(self, idle: Idle) -> None:
        self.storages.append(idle)  # type: ignore[arg-type] # it is one
        self._saved(idle)

    def __exit__(self, *_: object) -> None:
        """End."""
        self._swapper.saved = self._saved

    def drop(self) -> list[str]:
        """Drop all that can be made again; returns the names of the functions that make it."""
        gone = [each for each in self.storages if mover().drop(each)]
        assert all(each.recipe is not None for each in gone)
        return [each.recipe.name for each in gone if each.recipe is not None]


def leaf(*shape: int) -> torch.Tensor:
    """Return a parameter of the same numbers as ever."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*(shape or (ROWS, 1024)), generator=generator).requires_grad_()


def bits(tensor: torch.Tensor | None) -> bytes:
    """Return a tensor's bytes."""
    assert tensor is not None
    return tensor.detach().numpy().tobytes()


def same(build: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, expected: list[str]) -> None:
    """Assert that gradients are the same bits with dropped tensors, and which functions make these."""
    grads = []
    for drops in (False, True):
        torch.manual_seed(5)
        start.grad = None
        with Watched() as watched:
            end = build(start)
        if drops:
            assert sorted(watched.drop()) == sorted(expected)
        end.backward()
        assert all(each.place == 0 for each in watched.storages if each.recipe is not None), "it is here again"
        grads.append(bits(start.grad))
    assert grads[0] == grads[1]


def through(x: torch.Tensor) -> torch.Tensor:
    """Return something that saves its input: a product."""
    return (x * x).sum()


def check_relu() -> None:
    """ReLU behind something that is saved anyway: its result is the next one's input."""
    same(lambda x: through(functional.relu(x.tanh())), leaf(), ["relu"])


def check_relu_of_nothing_that_is_saved_stays() -> None:
    """An addition saves nothing, and the weights in it are too large to be copied: there is no recipe."""
    same(lambda x: through(functional.relu(x + 1.0)), leaf(), [])


def check_gelu_and_silu() -> None:
    """Their inputs are saved by themselves."""
    same(lambda x: through(functional.gelu(x * 2.0)), leaf(), ["gelu"])
    same(lambda x: through(functional.gelu(x * 2.0, approximate="tanh")), leaf(), ["gelu"])
    same(lambda x: through(functional.silu(x * 2.0)), leaf(), ["silu"])


def check_layer_norm() -> None:
    """With weights, which the recipe has copies of, and without."""
    norm = nn.LayerNorm(1024)
    same(lambda x: through(norm(x * 2.0)), leaf(), ["layer_norm"])
    same(lambda x: through(functional.layer_norm(x * 2.0, (1024,))), leaf(), ["layer_norm"])


def check_weights_may_change_before_the_backward_pass() -> None:
    """What the recipe needs of a layer's weights is as they were; autograd itself has no use for the bias."""
    norm, x = nn.BatchNorm2d(8), leaf(64, 8, 32, 32)
    grads = []
    for drops in (False, True):
        nn.init.constant_(norm.bias, 0.25)
        x.grad = None
        with Watched() as watched:
            end = through(norm(x * 2.0))
        if drops:
            assert watched.drop() == ["batch_norm"]
        nn.init.constant_(norm.bias, 7.0)
        end.backward()
        grads.append(bits(x.grad))
    assert grads[0] == grads[1]


def check_batch_norm() -> None:
    """With ReLU in place behind it, as networks have it; running statistics are updated once."""
    norm, x = nn.BatchNorm2d(8), leaf(64, 8, 32, 32)
    same(lambda x: through(functional.relu(norm(x * 2.0), inplace=True)), x, ["relu"])
    same(lambda x: through(norm(x * 2.0)), x, ["batch_norm"])
    assert norm.num_batches_tracked == 4
    norm.eval()
    same(lambda x: through(norm(x * 2.0)), x, ["batch_norm"])


def check_residual_sum() -> None:
    """A block's end: normalised, added to what came in, ReLU in place."""
    norm, x = nn.BatchNorm2d(8), leaf(64, 8, 32, 32)

    def block(x: torch.Tensor) -> torch.Tensor:
        shortcut = x.tanh()
        return through(functional.relu(norm(shortcut * 2.0) + shortcut, inplace=True))

    same(block, x, ["relu"])


def check_softmax() -> None:
    """Of something that is saved anyway."""
    same(lambda x: through(functional.softmax(x.tanh(), dim=-1)), leaf(), ["softmax"])


def check_dropout_draws_the_same_mask() -> None:
    """Mask and result are made again from the state of the generator; the user's goes on as it was."""
    drop, x = nn.Dropout(0.3), leaf()
    same(lambda x: through(drop(x.tanh())), x, ["dropout", "dropout's mask"])
    torch.manual_seed(5)
    expected = [torch.rand(3) for _ in range(1)]
    torch.manual_seed(5)
    with Watched() as watched:
        end = through(drop(x.tanh()))
    state = torch.get_rng_state()
    watched.drop()
    end.backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected[0])


def check_a_view_of_what_is_made_is_another_input() -> None:
    """The same functions of a view, whose rows are others: what was tried for one is not taken for the other."""
    norm, x = nn.BatchNorm2d(8), leaf(64, 8, 32, 32)
    same(lambda x: through(functional.softmax(norm(x * 2.0), dim=1)), x, ["softmax"])
    same(lambda x: through(functional.softmax(norm(x * 2.0).view(64, 32, 256), dim=1)), x, [])


def check_dropout_of_another_memory_format() -> None:
    """Where the input lies otherwise in memory, its mask does not, and the result does."""
    drop, x = nn.Dropout(0.3), leaf(64, 8, 32, 32)
    same(lambda x: through(drop(x.tanh())), x, ["dropout", "dropout's mask"])
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    same(lambda x: through(drop(x.tanh())), last, ["dropout", "dropout's mask"])


def check_a_chain_is_made_from_its_beginning() -> None:
    """A dropped source is made again first."""
    same(lambda x: through(functional.gelu(functional.relu(x.tanh()))), leaf(), ["relu", "gelu"])


def check_a_changed_source_raises() -> None:
    """What autograd would say of a saved tensor that was changed in place, it says of a source, too."""
    x = leaf()
    with Watched() as watched:
        source = x.tanh()
        end = through(functional.relu(source))
    assert watched.drop() == ["relu"]
    source.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        end.backward()


def check_autocast_has_no_recipes() -> None:
    """What runs in other types there is not made again."""
    with torch.autocast("cpu", dtype=torch.bfloat16), Watched() as watched:
        end = through(functional.relu(leaf().tanh()))
    assert watched.drop() == []
    end.backward()


def check_functions_may_be_compiled_and_scripted() -> None:
    """TorchScript takes the wrapped functions for PyTorch's own."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.gelu(functional.relu(x)), 0.0)

    expected = block(leaf())
    assert torch.equal(torch.jit.script(block)(leaf()), expected)
    assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(leaf()), expected)


def check_functions_may_be_pickled_traced_and_exported() -> None:
    """A pickle names PyTorch's function; a traced graph and an exported one are what they were."""
    for function in (torch.relu, torch.softmax, functional.gelu, functional.silu, torch.Tensor.__add__):
        assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301 - its own
    layer = nn.TransformerEncoderLayer(64, 4, activation=functional.gelu, batch_first=True)
    assert b"zico" not in pickle.dumps(copy.deepcopy(layer))
    block = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.1)).eval()
    image = torch.randn(2, 3, 4, 4)
    assert torch.equal(torch.jit.trace(block, image)(image), block(image))
    assert torch.equal(torch.export.export(block, (image,)).module()(image), block(image))
    assert torch.equal(torch.fx.symbolic_trace(block)(image), block(image))


def check_other_threads_and_modes_go_on() -> None:
    """Without gradients, with ``torch.func`` and with odd arguments, functions do what they did."""
    x = leaf().detach()
    with torch.no_grad():
        assert torch.equal(functional.relu(x), x.clamp(min=0.0))
    assert torch.func.grad(lambda y: functional.relu(y).sum())(x).sum() == (x > 0).sum()
    assert torch.equal(torch.vmap(functional.relu)(x.requires_grad_()), x.clamp(min=0.0))
    assert (x + 1).requires_grad
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(TypeError):
        torch.relu(1, 2, 3)  # type: ignore[call-arg] # on purpose


if __name__ == "__main__":
    run(globals())
