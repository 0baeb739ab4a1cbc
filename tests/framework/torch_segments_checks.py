"""What is true of modules that run again in the backward pass; run by ``test_torch_saving.py``."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import random
import threading
import weakref
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
from zico.adapters.torch_segments import Block, Segments, chosen

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
        of.add(module, "block", 1 << 21)
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
        assert of._of[module].good


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


class OwnNumpy(Plain):
    """Draws from a NumPy generator of its own."""

    def __init__(self) -> None:
        """Have a generator."""
        super().__init__()
        self.generators = {"numpy": np.random.default_rng(1)}

    def forward(self, x: Tensor) -> Tensor:
        """Draw, and run."""
        return super().forward(x) * float(self.generators["numpy"].random())


class Auxiliary(Plain):
    """Leaves a second loss where it can be found."""

    def __init__(self) -> None:
        """Have a place for it."""
        super().__init__()
        self.losses: dict[str, Any] = {"balance": None}

    def forward(self, x: Tensor) -> Tensor:
        """Leave it, and run."""
        self.losses["balance"] = x.square().mean()
        return super().forward(x)


SEEN: list[int] = []


class Reporting(Plain):
    """Tells others of its runs."""

    def forward(self, x: Tensor) -> Tensor:
        """Tell, and run."""
        SEEN.append(1)
        return super().forward(x)


class Clamped(Plain):
    """Keeps its weights small by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Clamp, and run."""
        self.up.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class Squared(torch.autograd.Function):  # type: ignore[misc] # torch has no types
    """Reads what it has saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # noqa: ANN401 - PyTorch's
        """Multiply."""
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - PyTorch's
        """Multiply with the other."""
        return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]


class Custom(Plain):
    """Calls a function with a backward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Run, and call it."""
        return Squared.apply(super().forward(x), x)


class Forces(Plain):
    """Takes a gradient inside."""

    def forward(self, x: Tensor) -> Tensor:
        """Run, and return the gradient by the input."""
        (gradient,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return gradient


def check_modules_of_attacks_are_refused() -> None:
    """Each before its trial changes anything that a script could see."""
    same(OwnNumpy, refused="it draws from a generator of its own")
    same(Auxiliary, refused="it changes its attributes")
    same(Clamped, refused="it changes its parameters or large buffers")
    same(Custom, refused="it calls a function with a backward pass of its own")
    same(Forces, refused="it has a backward pass inside")
    SEEN.clear()
    same(Reporting, refused="it uses SEEN, which is no part of it")
    assert len(SEEN) == 2 * 4


def switched(of: Segments | None, switch: Callable[[int, nn.Module], None]) -> Any:  # noqa: ANN401 - any bits
    """Train a block that is switched before each step; returns what must be the same bits."""
    torch.manual_seed(6)
    module = Plain()
    if of is not None:
        of.add(module, "block", 1 << 21)
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.01), []
    for i in range(8):
        switch(i, module)
        loss = module(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, [each.detach().numpy().tobytes() for each in module.state_dict().values()], torch.rand(1).item()


def check_modules_that_become_others() -> None:
    """Frozen statistics, evaluation, other parts, hooks and fast weights, long after the trial: it is tried again."""
    calls: list[int] = []

    def statistics(i: int, module: nn.Module) -> None:
        module.norm.train(i >= 4)

    def evaluation(i: int, module: nn.Module) -> None:
        module.train(i % 3 > 0)

    def replaced(i: int, module: nn.Module) -> None:
        if i == 4:
            module.norm = nn.Identity()

    def hooked(i: int, module: nn.Module) -> None:
        if i == 4:
            module.up.register_forward_hook(lambda *_: calls.append(1))

    def reset(i: int, module: nn.Module) -> None:
        if i == 4:
            module.norm.running_mean = module.norm.running_var = None

    for switch in (statistics, evaluation, replaced, hooked, reset):
        with contextlib.redirect_stderr(io.StringIO()):
            expected, found = switched(None, switch), switched(segments(), switch)
        assert found == expected, switch
    assert len(calls) == 2 * 4


def check_what_is_switched_before_the_backward_pass_is_had_again() -> None:
    """Evaluation, frozen parameters and attention's kernels are as they were in the forward pass; then as they are."""
    module, of = Plain(), segments()
    trained(module, of)
    for change in (lambda: module.eval(), lambda: module.requires_grad_(requires_grad=False)):  # noqa: PLW0108 - alike
        grads = []
        for again in (True, False):
            torch.manual_seed(7)
            module.train().requires_grad_()
            if not again:
                of._of.pop(module)
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            loss = module(x).square().sum()
            change()
            loss.backward()
            grads.append(bits_of(x.grad))
            switches = [module.training, module.up.weight.requires_grad]
            module.train().requires_grad_()
            assert not all(switches)
            of.add(module, "block", 1 << 21)
            trained_once(module)
        assert grads[0] == grads[1]


def bits_of(tensor: Tensor | None) -> bytes:
    """Return a tensor's bytes."""
    assert tensor is not None
    return tensor.detach().numpy().tobytes()


def trained_once(module: nn.Module) -> None:
    """Let a module be tried, and its trial be confirmed."""
    module(torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()


def check_another_result_raises() -> None:
    """What nobody can see before, a number of others, is seen when the module has run again: never other gradients."""

    class Tempered(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * FACTOR.value

    class FACTOR:
        value = 1.0

    module, of = Tempered(), segments()
    trained(module, of)
    assert of._of[module].good
    loss = module(torch.randn(ROWS, WIDTH, requires_grad=True)).sum()
    FACTOR.value = 2.0
    with pytest.raises(RuntimeError, match="block has run again for the backward pass with another result"):
        loss.backward()


def check_other_threads_train_it_as_ever() -> None:
    """Only the thread of the trial lets a module run again."""
    module, of = Plain(), segments()
    trained(module, of)
    before = made_again()
    thread = threading.Thread(target=trained_once, args=(module,))
    thread.start()
    thread.join(60.0)
    assert made_again() == before
    trained_once(module)
    assert made_again() > before


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

    same(make, refused="what it reads changes before its backward pass", step=step)
    of = segments()
    trained(module, of)
    assert of._of[module].good
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
    with pytest.raises(RuntimeError, match="inputs have been changed"):
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
        of.add(module.block, "block", 1 << 21)
    found = []
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss_of(module, x, how).backward()
        module.eval()
        with torch.no_grad():
            found.append(module(x).sum().item())
        found.append(module(x).sum().item())
        module.train()
    assert of is None or how == "checkpoint" or of._of[module.block].good
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
    blocks = [Block(weakref.ref(module), 4 * mib, 1000 + i, ()) for i, module in enumerate(plain)]
    counts = dict.fromkeys(plain, 1)
    model = nn.Sequential(*plain)
    root = Block(weakref.ref(model), 32 * mib, 9000, tuple(blocks))
    counts[model] = 1
    assert chosen([root], 3 * mib, counts) == blocks[:2]
    assert chosen([root], 100 * mib, counts) == blocks
    counts[plain[0]] = 2
    assert chosen([root], 3 * mib, counts) == blocks[1:3]
    small = [each._replace(saved_bytes=mib // 2) for each in blocks]
    assert chosen([root._replace(inside=tuple(small))], 3 * mib, counts) == []


if __name__ == "__main__":
    run(globals())
