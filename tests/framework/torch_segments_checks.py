"""What is true of modules that run again in the backward pass; run by ``test_torch_segments.py``."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checking import run
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from zico.adapters.torch_saving import Saving
from zico.adapters.torch_segments import Block, Segments, _Segment, chosen

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WIDTH = 256
ROWS = 1024


def segments() -> Segments:
    """Return segments over the hooks of this job."""
    found = session.current()
    assert found is not None
    pack = torch._C._autograd._top_saved_tensors_default_hooks(False)[0]  # type: ignore[attr-defined] # noqa: FBT003
    assert isinstance(pack.__self__, Saving)
    return Segments(pack.__self__)


class Plain(nn.Module):  # type: ignore[misc] # torch has no types
    """A block of the usual kind."""

    def __init__(self) -> None:
        """Make layers."""
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result."""
        return self.down(self.drop(functional.gelu(self.norm(self.up(x)))))


class Counting(Plain):
    """Counts its runs."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count, and run."""
        self.runs += 1
        return super().forward(x)


class Listing(Plain):
    """Keeps what it has computed."""

    def __init__(self) -> None:
        """Have a list."""
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Keep a number, and run."""
        self.seen.append(1.0)
        return super().forward(x)


class DrawingNumpy(Plain):
    """Skips its dropout by NumPy's generator."""

    def forward(self, x: Tensor) -> Tensor:
        """Draw, and run."""
        return super().forward(x) * float(np.random.rand())  # noqa: NPY002 - as scripts do


class DrawingPython(Plain):
    """The same by Python's."""

    def forward(self, x: Tensor) -> Tensor:
        """Draw, and run."""
        return super().forward(x) * random.random()  # noqa: S311 - as scripts do


class OwnGenerator(Plain):
    """Draws from a generator that nobody else knows."""

    def __init__(self) -> None:
        """Have a generator."""
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        """Draw, and run."""
        return super().forward(x) * torch.rand(x.shape, generator=self.generator)


OUTSIDE = torch.ones(ROWS, WIDTH)


class Foreign(Plain):
    """Reads what it was not given."""

    def forward(self, x: Tensor) -> Tensor:
        """Read, and run."""
        return super().forward(x + OUTSIDE)


class InPlace(Plain):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """Change, and run."""
        with torch.no_grad():
            x.detach().mul_(1.5)
        return super().forward(x)


class Replacing(Plain):
    """Has another buffer object after each run."""

    def __init__(self) -> None:
        """Have a buffer."""
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Replace it, and run."""
        self.last = x.detach().mean(0)
        return super().forward(x)


class Raising(Plain):
    """Fails when it runs again."""

    def forward(self, x: Tensor) -> Tensor:
        """Fail where nobody has made the input."""
        if x.is_leaf:
            message = "not again"
            raise ValueError(message)
        return super().forward(x)


def trained(module: nn.Module, of: Segments | None, steps: int = 4, step: Callable[..., None] | None = None) -> Any:  # noqa: ANN401 - any bits
    """Train a module between two layers; returns all that must be the same bits with segments as without."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - as scripts do
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    model = nn.ModuleList([first, module, last])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 16)
    if of is not None:
        of._of[module] = _Segment("block", Block(module, 1 << 21, 1, ()))
        of._patch(type(module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH)
        loss = last(functional.relu(module(first(x)))).square().mean()
        optimizer.zero_grad()
        (step or (lambda each: each.backward()))(loss)
        optimizer.step()
        losses.append(loss.item())
    state = {name: each.numpy().tobytes() for name, each in model.state_dict().items()}
    return losses, state, torch.get_rng_state().numpy().tobytes(), random.getstate(), torch.rand(1).item()


def same(
    make: Callable[[], nn.Module], *, refused: str = "", step: Callable[..., None] | None = None, steps: int = 4
) -> None:
    """Assert that a module trains to the same bits as a segment, and whether it is one, or why not."""
    expected = trained(make(), None, step=step, steps=steps)
    of, module, said = segments(), make(), io.StringIO()
    with contextlib.redirect_stderr(said):
        found = trained(module, of, step=step, steps=steps)
    assert found == expected
    if refused:
        assert said.getvalue() == f"zico: block keeps what it saves: {refused}\n"
        assert module not in of._of
    else:
        assert said.getvalue() == ""
        assert of._of[module].is_good


def made_again() -> int:
    """Return what has been let go without a copy in this process."""
    found = session.current()
    assert found is not None
    return int(found.swapper.figures.dropped_bytes)


def check_a_block_trains_to_the_same_bits() -> None:
    """Dropout, batch norm's statistics and counts, and all generators are as without; it did run again."""
    before = made_again()
    same(Plain)
    assert made_again() > before


def check_a_module_that_computes_with_what_it_changes() -> None:
    """Spectral norm's vectors are buffers that a run changes and uses: the second run has those of the first."""

    def spectral() -> nn.Module:
        module = Plain()
        spectral_norm(module.up)
        return module

    same(spectral)


def check_a_module_that_differs_each_time() -> None:
    """Numbers from nowhere are found by what comes of them: what is returned, or only saved."""

    class Clocked(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + next(clock)

    class Hidden(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x * next(clock)) * torch.zeros_like(x, requires_grad=True)

    clock = itertools.count(1.0)
    for kind in (Clocked, Hidden):
        said, of = io.StringIO(), segments()
        with contextlib.redirect_stderr(said):
            trained(kind(), of)
        assert said.getvalue() == "zico: block keeps what it saves: run again, its bits would differ\n"


def check_modules_that_change_more_are_refused() -> None:
    """Each by what it does, with one line, and without a difference to training."""
    same(Counting, refused="it changes its attributes")
    same(Listing, refused="it changes its attributes")
    same(Replacing, refused="it changes its attributes")
    same(DrawingNumpy, refused="it draws from a generator of NumPy or Python")
    same(DrawingPython, refused="it draws from a generator of NumPy or Python")
    same(InPlace, refused="it changes what it is given")
    same(Foreign, refused="it reads tensors that are neither its own nor given to it")
    same(OwnGenerator, refused="it draws from a generator of its own")
    same(Raising, refused="to run it again fails: not again")


def check_hooks_are_refused() -> None:
    """A hook of the user's would be called twice; so would a forward of the module's own."""

    def hooked() -> nn.Module:
        module = Plain()
        module.down.register_forward_hook(lambda *_: None)
        return module

    same(hooked, refused="it has hooks")


def check_weights_that_change_before_the_backward_pass() -> None:
    """A module whose weights change every time is refused; one whose weights change once raises and says why."""
    module = Plain()

    def step(loss: Tensor) -> None:
        with torch.no_grad():
            changed[0].norm.bias.data.add_(1.0)
        loss.backward()

    changed: list[Any] = []

    def make() -> nn.Module:
        changed[:] = [Plain()]
        return changed[0]

    same(make, refused="its parameters or inputs change before its backward pass", step=step)
    of = segments()
    trained(module, of)
    assert of._of[module].is_good
    loss = module(torch.randn(ROWS, WIDTH, requires_grad=True)).sum()
    module.norm.bias.data.add_(1.0)
    with pytest.raises(RuntimeError, match="block runs again for the backward pass, and its parameters"):
        loss.backward()


def check_inputs_that_change_before_the_backward_pass() -> None:
    """An input changed in place raises, as PyTorch does, and one changed behind PyTorch's back, too."""
    of, module = segments(), Plain()
    trained(module, of)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = module(x).sum()
    x.data.add_(1.0)
    with pytest.raises(RuntimeError, match="inputs have been changed in place"):
        loss.backward()
    y = x * 1.0
    loss = module(y).sum()
    y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Double(nn.Module):  # type: ignore[misc] # torch has no types
    """Runs a block twice."""

    def __init__(self) -> None:
        """Have a block."""
        super().__init__()
        self.block = Plain()

    def forward(self, x: Tensor) -> Tensor:
        """Run it twice."""
        return self.block(self.block(x))


def loss_of(module: nn.Module, x: Tensor, how: str) -> Tensor:
    """Return a loss of a module in one of the ways of ``check_other_ways_to_use_a_block``."""
    if how == "checkpoint":
        return checkpoint(module, x, use_reentrant=False).sum()
    if how == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x).float().sum()
    loss = module(x).square().sum()
    if how == "penalty":
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return gradient.square().sum()
    return loss


def shared(of: Segments | None, how: str) -> Any:  # noqa: ANN401 - any bits
    """Train a module that uses its block twice, and evaluate it; returns what must be the same bits."""
    torch.manual_seed(4)
    module = Double()
    if of is not None:
        of._of[module.block] = _Segment("block", Block(module.block, 1 << 21, 1, ()))
        of._patch(Plain)
    found = []
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss_of(module, x, how).backward()
        module.eval()
        with torch.no_grad():
            found.append(module(x).sum().item())
        found.append(module(x).sum().item())
        module.train()
    assert of is None or how == "checkpoint" or of._of[module.block].is_good
    return found, [each.grad.numpy().tobytes() for each in module.parameters()], module.block.norm.running_mean


def check_other_ways_to_use_a_block() -> None:
    """Twice before one backward pass, twice backward, gradients of gradients, evaluation, autocast, a user's own."""

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    same(Plain, step=twice)
    for how in ("twice", "penalty", "autocast", "checkpoint"):
        expected, found = shared(None, how), shared(segments(), how)
        assert found[:2] == expected[:2], how
        assert torch.equal(found[2], expected[2]), how


def check_models_can_be_copied_and_pickled() -> None:
    """Nothing of ours is in a module, and a copy is no segment."""
    of, module = segments(), Plain()
    trained(module, of)
    other = copy.deepcopy(module)
    assert other not in of._of
    assert vars(other).keys() == vars(Plain()).keys()
    assert isinstance(pickle.loads(pickle.dumps(module)), Plain)  # noqa: S301 - our own
    assert module.state_dict().keys() == Plain().state_dict().keys()


def check_what_is_chosen() -> None:
    """The cheapest blocks for what they save, until enough is saved and the largest of them has room again."""
    mib = 1 << 20
    plain = [Plain() for _ in range(8)]
    blocks = [Block(module, 4 * mib, 1000 + i, ()) for i, module in enumerate(plain)]
    counts = dict.fromkeys(plain, 1)
    root = Block(nn.Sequential(*plain), 32 * mib, 9000, tuple(blocks))
    counts[root.module] = 1
    assert chosen([root], 3 * mib, counts) == blocks[:2]
    assert chosen([root], 100 * mib, counts) == blocks
    counts[plain[0]] = 2
    assert chosen([root], 3 * mib, counts) == blocks[1:3]
    small = [each._replace(saved_bytes=mib // 2) for each in blocks]
    assert chosen([root._replace(inside=tuple(small))], 3 * mib, counts) == []


if __name__ == "__main__":
    run(globals())
