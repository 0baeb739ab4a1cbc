"""What is true of tensors that are dropped and made again; run by ``test_torch_saving.py``."""

from __future__ import annotations

import _thread
import contextlib
import copy
import ctypes
import gc
import io
import os
import pickle
import select
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pytest
import torch
from checking import run
from torch import nn
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from zico.adapters.torch_cuda_saving import DeviceSaving, DeviceStorage
from zico.adapters.torch_saving import Saving, Storage, digest_of

from zico.job import session
from zico.swap.mover import Place
from zico.swap.observed import problem_of
from zico.swap.schedule import Chosen, choose
from zico.tiers.layout import Rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.swap.mover import Idle
    from zico.swap.observed import Observed

MIB = 1 << 20
ROWS = 512
DEADLINE_S = 60.0
ANY = frozenset({1 << 40})
"""What a plan drops, without a recipe that is known to be wanted."""


def swapper_here() -> Any:  # noqa: ANN401 - the session's own
    """Return what decides in this process what leaves."""
    found = session.current()
    assert found is not None
    return found.swapper


def mover() -> Any:  # noqa: ANN401 - the swapper's own
    """Return what drops tensors in this process."""
    return swapper_here()._mover


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
        type(self._swapper).drops = ANY  # type: ignore[assignment] # as if a plan did
        return self

    def _note(self, idle: Idle, maker: str = "") -> None:
        self.storages.append(idle)  # type: ignore[arg-type] # it is one
        self._saved(idle, maker)

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
        assert not any(each.is_dropped for each in watched.storages), "it is here again"
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


def check_a_default_device_changes_nothing() -> None:
    """Operators, too, have recipes while ``torch.set_default_device`` has its mode on the stack."""
    torch.set_default_device("cpu")
    try:
        check_residual_sum()
    finally:
        torch.set_default_device(None)


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


def check_nobody_can_change_what_is_needed() -> None:
    """What somebody holds is no source: the script may change it, where autograd has no use for it any more."""
    source = leaf().detach().tanh().requires_grad_()
    with Watched() as watched:
        other = source * source
        end = through(functional.relu(source))
        assert watched.drop() == []
    with torch.no_grad():
        expected = 2.0 * functional.relu(source)
        source.add_(1.0)
    end.backward()
    assert bits(source.grad) == bits(expected)
    assert other.requires_grad


def check_a_source_that_nobody_keeps_is_lost() -> None:
    """A recipe keeps nothing alive: where autograd has let a source go, the result stays."""
    x = leaf()
    with Watched() as watched:
        source = x.tanh()
        other = source * source
        end = (functional.relu(source.detach()) * x).sum()
        del source
        assert watched.drop() == ["relu"]
    del other
    end.backward()
    with Watched() as watched:
        source = x.tanh()
        other = source * source
        normal = functional.relu(source.detach())
        kept = [weakref.ref(each) for each in watched.storages]
        del source, other
        watched.storages.clear()
        assert [each() for each in kept] == [None]
        assert normal.numel() == x.numel()


def check_saved_again_after_a_change() -> None:
    """What is saved of the same memory later has the recipe of that moment, or none."""

    def build(x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(x * 2.0)
        other = y * y
        y.mul_(0.5)
        end = through(y)
        assert other.requires_grad
        return end

    same(build, leaf(), [])
    same(lambda x: build(x.tanh()), leaf(), [])


def _by_data(y: torch.Tensor) -> None:
    y.data.mul_(0.5)


def _by_numpy(y: torch.Tensor) -> None:
    array = y.detach().numpy()
    array *= 0.5


def _by_array(y: torch.Tensor) -> None:
    array = np.asarray(y.detach())
    array *= 0.5


def _by_address(y: torch.Tensor) -> None:
    array = (ctypes.c_float * y.numel()).from_address(y.data_ptr())
    array[7] = 0.5


def _by_storage(y: torch.Tensor) -> None:
    torch.empty(0).set_(y.untyped_storage(), 0, y.size(), y.stride()).mul_(0.5)


def _by_tensor(y: torch.Tensor) -> None:
    torch.empty(0).set_(y.detach()).mul_(0.5)


def _by_dlpack(y: torch.Tensor) -> None:
    array = np.from_dlpack(y.detach())
    torch.from_dlpack(y.detach()).mul_(0.5)
    del array


def _by_each(y: torch.Tensor) -> None:
    y.detach().apply_(lambda x: 0.5 * x)


def _without_version(y: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(y):
        y.detach().mul_(0.5)


CHANGES = (_by_data, _by_numpy, _by_array, _by_address, _by_storage, _by_tensor, _by_dlpack, _by_each)


def check_changes_around_pytorch_are_noticed() -> None:
    """The result, or a source of it, changes without a version: autograd uses what is there then."""
    for change in (*CHANGES, _without_version):

        def result(x: torch.Tensor, change: Callable[[torch.Tensor], None] = change) -> torch.Tensor:
            y = functional.gelu(x * 2.0)
            change(y)
            return through(y)

        def source(x: torch.Tensor, change: Callable[[torch.Tensor], None] = change) -> torch.Tensor:
            h = x * 2.0
            y = functional.gelu(h)
            change(h)
            return through(y)

        def between(x: torch.Tensor, change: Callable[[torch.Tensor], None] = change) -> torch.Tensor:
            y = functional.batch_norm(x * 2.0, None, None, training=True)
            change(y)
            return through(functional.relu(y, inplace=True))

        same(result, leaf(), [])
        same(source, leaf(), [])
        same(between, leaf(), [])
        same(lambda x: through(functional.gelu(x * 2.0)), leaf(), ["gelu"])


def check_added_to_itself_in_place() -> None:
    """What is written over is a source twice."""

    def build(x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(x * 2.0)
        y += y
        return through(y)

    same(build, leaf(), ["iadd"])


def check_other_settings_in_the_backward_pass() -> None:
    """The number of threads decides in which order numbers are added up."""
    norm = nn.BatchNorm2d(4)
    x = leaf(64, 4, 64, 64).detach().to(memory_format=torch.channels_last).requires_grad_()
    threads, grads = torch.get_num_threads(), []
    try:
        for drops in (False, True):
            x.grad = None
            torch.set_num_threads(1)
            with Watched() as watched:
                end = through(norm(x * 2.0))
            torch.set_num_threads(3)
            if drops:
                assert watched.drop() == ["batch_norm"]
            end.backward()
            assert torch.get_num_threads() == 3
            grads.append(bits(x.grad))
    finally:
        torch.set_num_threads(threads)
    assert grads[0] == grads[1]


def check_signs_change_around_pytorch() -> None:
    """Rotary embeddings negate every other number: the highest bits of many words change, and no others."""
    for kind in (torch.float32, torch.float64, torch.bfloat16):

        def negated(x: torch.Tensor, kind: torch.dtype = kind) -> torch.Tensor:
            y = functional.gelu(x.to(kind) * 2.0)
            y.data[:, 1::2].neg_()
            return (y * y.sigmoid()).sum().float()

        same(lambda x, kind=kind: through(functional.gelu(x.to(kind) * 2.0)).float(), leaf(2048, 1024), ["gelu"])
        same(negated, leaf(2048, 1024), [])


def check_rare_settings_have_no_recipes() -> None:
    """What the whole process has off or on is not switched for one thread."""
    with torch.backends.mkldnn.flags(enabled=False):
        same(lambda x: through(functional.gelu(x * 2.0)), leaf(), [])
    torch.set_flush_denormal(True)
    try:
        same(lambda x: through(functional.gelu(x * 2.0)), leaf(), [])
    finally:
        torch.set_flush_denormal(False)
    x = leaf()
    with Watched() as watched:
        end = through(functional.gelu(x * 2.0))
        assert watched.drop() == ["gelu"]
    with torch.backends.mkldnn.flags(enabled=False):
        end.backward()
        assert not torch._C._get_mkldnn_enabled()
    assert torch._C._get_mkldnn_enabled()


def check_other_threads_keep_their_settings() -> None:
    """A thread that begins while another one makes something again computes with as many threads as ever."""
    x, threads, seen = leaf(1024, 2048), torch.get_num_threads(), set()
    try:
        torch.set_num_threads(1)
        with Watched() as watched:
            end = through(functional.gelu(x * 2.0))
            assert watched.drop() == ["gelu"]
        torch.set_num_threads(2)
        recipe = next(each.recipe for each in watched.storages if each.is_dropped)
        assert recipe is not None
        function = recipe.function

        def observed(*sources: torch.Tensor) -> torch.Tensor:
            other = threading.Thread(target=lambda: seen.add(torch.get_num_threads()))
            other.start()
            other.join()
            seen.add(-torch.get_num_threads())
            return function(*sources)

        recipe.function = observed
        end.backward()
        assert seen == {2, -1}
    finally:
        torch.set_num_threads(threads)


def check_shared_memory_stays() -> None:
    """Another process may write to it."""

    def build(x: torch.Tensor) -> torch.Tensor:
        h = x * 2.0
        y = functional.gelu(h)
        h.detach().share_memory_()
        return through(y)

    same(build, leaf(), [])


def check_compiled_backward_passes() -> None:
    """What compiles backward passes does not compile our hooks."""
    x = leaf()
    with Watched() as watched:
        end = through(functional.gelu(x * 2.0))
        assert watched.drop() == ["gelu"]
    with compiled_autograd._enable(torch.compile(backend="eager")):
        end.backward()
    found, x.grad = x.grad, None
    through(functional.gelu(x * 2.0)).backward()
    assert bits(found) == bits(x.grad)


def check_another_thread_draws_in_between() -> None:
    """A mask that was not drawn from the state that was seen has no recipe, however few numbers it drops."""
    real = torch.default_generator

    class Racing:
        """A generator of which somebody else draws as soon as its state is known."""

        @staticmethod
        def get_state() -> torch.Tensor:
            """Return it."""
            state = real.get_state()
            torch.rand(1)
            return state

    for p in (0.3, 1e-4):
        same(lambda x, p=p: through(functional.dropout(x.tanh(), p)), leaf(), ["dropout", "dropout's mask"])
    torch.default_generator = Racing()  # type: ignore[assignment] # as far as it is used
    try:
        for p in (0.3, 1e-4):
            same(lambda x, p=p: through(functional.dropout(x.tanh(), p)), leaf(), [])
    finally:
        torch.default_generator = real


def check_a_forked_child_does_not_compute() -> None:
    """OpenMP's threads are not there: what is dropped is made when the child asks."""
    x, threads = leaf(1024, 2048), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with Watched() as watched:
            end = through(functional.gelu(x * 2.0))
            assert watched.drop() == ["gelu"]
        child = os.fork()
        if child == 0:
            os._exit(0)
        with contextlib.closing(_Pidfd(child)) as opened:
            assert select.select([opened.number], [], [], DEADLINE_S)[0], "the child ends"
        assert os.waitpid(child, 0)[1] == 0
        end.backward()
    finally:
        torch.set_num_threads(threads)


class _Pidfd:
    """Tells when a child has ended."""

    def __init__(self, child: int) -> None:
        """Watch it."""
        self.number = os.pidfd_open(child)

    def close(self) -> None:
        """End."""
        os.close(self.number)


def check_a_source_is_away_when_a_kind_is_first_tried() -> None:
    """It is brought back for that."""

    def build(x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(x * 2.0, approximate="tanh")
        for each in watched.storages:
            assert mover().send(each)
        assert mover().settle(DEADLINE_S)
        assert watched.storages[0].place == 2
        return through(y)

    x = leaf(1000, 1100)
    with Watched() as watched:
        end = build(x)
        assert watched.drop() == ["gelu"]
    end.backward()


def check_a_source_may_be_away_when_its_result_goes() -> None:
    """It was the same when it left; one that was changed around PyTorch before that is not."""
    grads = []
    for moves, changes in ((False, False), (True, False), (True, True)):
        x = leaf()
        with Watched() as watched:
            h = x * 2.0
            end = through(functional.gelu(h))
            if changes:
                h.data.mul_(0.5)
            del h
        if moves:
            assert mover().send(watched.storages[0])
            assert mover().settle(DEADLINE_S)
            assert watched.drop() == ([] if changes else ["gelu"])
        end.backward()
        grads.append(bits(x.grad))
    assert grads[0] == grads[1] != grads[2]


def check_nothing_goes_without_a_digest() -> None:
    """While no plan drops anything, recipes have no digests, so nothing can be dropped."""
    x = leaf()
    with Watched() as watched:
        kind: Any = type(watched._swapper)
        kind.drops = frozenset()  # as if no plan did
        try:
            end = through(functional.gelu(x * 2.0))
            assert watched.drop() == []
        finally:
            kind.drops = ANY
    end.backward()


def check_digests_are_of_what_is_going_to_be_dropped() -> None:
    """Once an iteration has shown which recipes its dropped tensors had, the next one takes no other digests."""
    pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003 - by position
    saving, taken = pack.__self__, []
    x, counts = leaf(), []
    with Watched() as watched, pytest.MonkeyPatch.context() as patch:
        kind: Any = type(watched._swapper)
        patch.setattr(saving, "digest", lambda storage: taken.append(storage.nbytes()) or digest_of(storage))
        for turn in range(2):
            patch.setattr(kind, "turns", turn)
            taken.clear()
            watched.storages.clear()
            end = through(functional.silu(functional.gelu(x * 2.0) * 3.0))
            counts.append(len(taken))
            (dropped,) = (each for each in watched.storages if each.recipe is not None and each.recipe.name == "silu")
            patch.setattr(kind, "drops", frozenset({dropped.ordinal}))
            gone = watched.drop()
            end.backward()
    assert counts == [4, 2], "of a result and its source, each"
    assert gone == ["silu"]


def check_copied_inputs_lie_as_they_lay() -> None:
    """A copy begins at another address, for which a device may have another kernel."""
    numbers = torch.ones(1028)
    for first, expected in ((0, ["layer_norm"]), (1, []), (4, ["layer_norm"])):
        weight = numbers[first : first + 1024]
        same(lambda x, weight=weight: through(functional.layer_norm(x * 2.0, (1024,), weight)), leaf(), expected)


def check_a_trial_without_memory_is_no_error() -> None:
    """Where nothing is left to compare with, the tensor stays, and the next one is tried; not for ever."""
    failures = 0

    def no_memory(*_: Any) -> bool:  # noqa: ANN401 - torch's
        nonlocal failures
        failures += 1
        raise torch.OutOfMemoryError

    swapper: Any = type(swapper_here())

    def train(turn: int, expected: list[str], *shape: int) -> None:
        patch.setattr(swapper, "turns", turn)
        same(lambda x: through(functional.silu(x * 3.0)), leaf(*shape), expected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "equal", no_memory)
        train(1, [], ROWS, 1536)
        for turn in range(2, 6):
            train(turn, [], ROWS, 1600)
        assert failures == 1 + 3
    with pytest.MonkeyPatch.context() as patch:
        train(6, ["silu"], ROWS, 1536)
        train(7, [], ROWS, 1600)


def check_sums_of_themselves() -> None:
    """Each step doubles what a recipe would have to do."""
    x = leaf()
    with Watched() as watched:
        y = x.tanh()
        for _ in range(60):
            y = y + y
            y *= 0.5
        for _ in range(60):
            y = y + y
        end = through(y)
        assert watched.drop() == []
    end.backward()


def check_functions_stay_functions() -> None:
    """As PyTorch's own, they are no methods of classes that have them as attributes, and are found as keys."""

    class Layer:
        """Has a function."""

        act = torch.relu
        other = functional.gelu

    x = leaf().detach()
    assert torch.equal(Layer().act(x), x.clamp(min=0.0))
    assert torch.equal(Layer().other(x), functional.gelu(x))

    class Tagged(torch.Tensor):
        """A type with functions of its own."""

        handled: ClassVar[dict[Any, str]] = {torch.relu: "relu", torch.Tensor.relu: "method", torch.Tensor.add: "add"}

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            """Return the function's name."""
            return cls.handled.get(func) or super().__torch_function__(func, types, args, kwargs or {})

    tagged = x.as_subclass(Tagged)
    assert (torch.relu(tagged), tagged.relu(), tagged + 1) == ("relu", "method", "add")


def check_modes_see_what_the_user_does() -> None:
    """A user's mode is told of no operation of ours, and transformations work with functions in place.

    PyTorch detaches what it saves at other moments where there are hooks.
    """

    def log(into: list[str]) -> None:
        class Log(TorchDispatchMode):
            """Notes every operation."""

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
                """Note one."""
                if func is not torch.ops.aten.detach.default:
                    into.append(str(func))
                return func(*args, **(kwargs or {}))

        x = leaf()
        norm, drop = nn.LayerNorm(1024), nn.Dropout(0.2)
        with Log():
            through(drop(functional.relu(norm(x * 2.0)))).backward()

    mine: list[str] = []
    without: list[str] = []
    log(mine)
    done = threading.Event()
    _thread.start_new_thread(lambda: (log(without), done.set()), ())  # one without our hooks
    assert done.wait(DEADLINE_S)
    assert mine == without

    def add(x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        y += x
        return torch.relu_(y).sum()

    x = leaf()
    assert torch.equal(torch.vmap(add)(x.detach()), torch.stack([add(each) for each in x.detach()]))
    assert torch.func.jvp(add, (x.detach(),), (torch.ones_like(x),))[1] == 3 * (x > 0).sum()
    traced = make_fx(add)(torch.randn(ROWS, 1024))
    assert torch.equal(traced(x.detach()), add(x.detach()))


def check_nested_tensors() -> None:
    """They are no tensors like others."""
    x = leaf()
    nested = torch.nested.nested_tensor([x.detach(), x.detach()[:7]]).requires_grad_()
    with Watched() as watched:
        end = functional.relu(nested * nested).to_padded_tensor(0.0).sum()
        watched.drop()
    end.backward()
    assert bits(nested.grad[1]) == bits(2.0 * x[:7])


def check_autocast() -> None:
    """What may run in another type there is not made again; the rest is, in the types that it had."""
    norm = nn.BatchNorm2d(8)

    def build(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = functional.relu(norm(functional.conv2d(x, torch.ones(8, 8, 1, 1))))
            return through(functional.softmax(made.tanh(), dim=1)).float()

    same(build, leaf(64, 8, 32, 32), ["relu"])


class Added:
    """Something that a tensor is added to."""

    def __radd__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return something else than a sum."""
        return 3.0 * tensor


def check_functions_may_be_compiled_and_scripted() -> None:
    """TorchScript takes the wrapped functions for PyTorch's own."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.gelu(functional.relu(x)), 0.0)

    expected = block(leaf())
    assert torch.equal(torch.jit.script(block)(leaf()), expected)
    assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(leaf()), expected)
    for unbound in (torch.Tensor.relu, lambda x: torch.Tensor.softmax(x, 1), lambda x: torch.Tensor.__add__(x, x)):
        assert torch.equal(torch.compile(unbound, backend="eager", fullgraph=True)(leaf()), unbound(leaf()))
    assert torch.equal(torch.compile(lambda x: x + Added(), backend="eager")(leaf()), 3.0 * leaf())
    array = np.ones(1024, np.float32)
    plain = leaf().detach()
    assert torch.equal(torch.jit.trace(lambda x: x + array, (plain,))(plain), plain + 1.0)
    around = torch.compile(lambda x: torch.relu(x.data) + x.detach().data, backend="eager", fullgraph=True)
    assert torch.equal(around(leaf()), functional.relu(leaf()) + leaf())


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


# -- a device that tells later ---------------------------------------------------------------------


class LateDigest:
    """A digest that nobody may read before the device has come by."""

    def __init__(self, tier: LateTier, value: int) -> None:
        """Be of memory as it is now."""
        self._tier, self._value, self.fence = tier, value, tier.last + 1

    def __eq__(self, other: object) -> bool:
        """Tell whether memory was the same."""
        assert isinstance(other, LateDigest)
        assert max(self.fence, other.fence) <= self._tier.passed, "it is not there yet"
        return self._value == other._value

    def __hash__(self) -> int:
        """Tell digests apart."""
        return id(self)


class LateTier:
    """Marks on a device's timeline that are passed when the test says so."""

    def __init__(self) -> None:
        """Begin with none."""
        self.last = self.passed = 0
        self.marked: list[int] = []
        """The streams that have got marks."""

    def mark(self, stream: int) -> int:
        """Put a mark."""
        self.last += 1
        self.marked.append(stream)
        return self.last

    def has_passed(self, fence: int) -> bool:
        """Tell whether the device has come by."""
        return fence <= self.passed

    def follow(self, _stream: int, fence: int) -> None:
        """Wait on the device."""
        assert fence <= self.last, "a wait for a mark that nobody has put would never end"

    def fence_of(self, _ticket: int) -> int:
        """Return the mark behind a copy."""
        return self.last


class LateStorage(DeviceStorage):
    """Memory that is a GPU's to all but those who copy."""

    settle = Storage.settle
    last_digest = Storage.last_digest


class LateSaving(DeviceSaving):
    """The hooks for a GPU's tensors, over the host's memory: the device does at once what it tells later."""

    storage_type = LateStorage
    kind = "cpu"
    is_ours = Saving.is_ours
    timed = Saving.timed
    captures = False
    current_stream = 0

    def __init__(self) -> None:
        """Stand in for the hooks of this job."""
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003 - by position
        self.host: Any = pack.__self__
        Saving.__init__(self, self.host.swapper, self.host._begin, self.host._end, MIB)
        self.tier, self.record_stream = LateTier(), lambda *_: None
        self.clock: Any = SimpleNamespace(standing=contextlib.nullcontext)
        self.rebuilding = self.host.on_saved.__self__
        self.on_saved = self.rebuilding._note_saved

    def stream(self) -> int:
        """Return the one that the test says."""
        return self.current_stream

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Be on another one for a while."""
        before, self.current_stream = self.current_stream, stream
        yield
        self.current_stream = before

    def is_capturing(self) -> bool:
        """Tell what the test says."""
        return self.captures

    def digest(self, storage: Any) -> LateDigest:  # noqa: ANN401 - torch has no types
        """Take a digest."""
        return LateDigest(self.tier, digest_of(storage))

    def __enter__(self) -> Self:
        """Save by these hooks."""
        self.rebuilding._saving = self
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
        return self

    def __exit__(self, *_: object) -> None:
        """Save by the host's again."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self.rebuilding._saving = self.host

    def come_by(self) -> None:
        """Let the device do all that it was given."""
        self.tier.passed = self.tier.last


def block(x: torch.Tensor, between: Callable[[torch.Tensor], None] = lambda _: None) -> torch.Tensor:
    """Return something of which the last ReLU's result is saved and can be made again."""
    norm = torch.ones(8), torch.zeros(8)
    made = functional.batch_norm(x.tanh() * 2.0, None, None, *norm, training=True)
    between(made)
    return functional.relu(made, inplace=True)


def check_a_device_tells_later_what_can_go() -> None:
    """Nothing is dropped before the device has come by the digests; then it goes, and gradients are the same bits."""
    grads = []
    for late in (False, True):
        x = leaf(64, 8, 32, 32)
        with LateSaving() as saving, Watched() as watched:
            end = through(block(x))
            if late:
                assert watched.drop() == []
                assert watched.drop() == [], "and nothing is asked twice"
                assert saving.tier.last == 1
                saving.come_by()
                assert watched.drop() == ["relu"]
            end.backward()
        grads.append(bits(x.grad))
    assert grads[0] == grads[1]


def check_what_the_device_finds_changed_stays() -> None:
    """Written to by a kernel that no version tells of: the result, what it was made of, or what was on the way."""

    def written(tensor: torch.Tensor) -> None:
        tensor.data[0] = 7.0

    for what in ("result", "source", "between"):
        x = leaf(64, 8, 32, 32)
        with LateSaving() as saving, Watched() as watched:
            made = block(x, written if what == "between" else lambda _: None)
            if what == "result":
                written(made)
            end = through(made)
            del made
            if what == "source":
                for storage in watched.storages:
                    if storage.recipe is None:
                        written(storage._aliases()[0].alias)
            for _ in range(3):
                saving.come_by()
                assert watched.drop() == [], what
            end.backward()


def check_what_somebody_has_reached_for_is_looked_at_again() -> None:
    """Who reaches for a tensor while the device is asked may have changed it: it is asked anew."""
    x = leaf(64, 8, 32, 32)
    with LateSaving() as saving, Watched() as watched:
        end = through(block(x))
        assert watched.drop() == []
        (made,) = (each for each in watched.storages if each.recipe is not None)
        saving.unpack(made._aliases()[0])
        saving.come_by()
        assert watched.drop() == []
        assert saving.tier.last == 2
        saving.come_by()
        assert watched.drop() == ["relu"]
        end.backward()


def check_who_is_about_to_reach_for_it_has_reached_for_it() -> None:
    """A check that begins while somebody waits to be let in is not about what he leaves behind."""
    x = leaf(64, 8, 32, 32)
    with LateSaving() as saving, Watched() as watched:
        end = through(block(x))
        (made,) = (each for each in watched.storages if each.recipe is not None)
        used = saving.swapper.used

        def after_a_check(idle: Idle, take: Callable[[], Any], reader: str = "") -> Any:  # noqa: ANN401 - as it
            assert watched.drop() == []
            return used(idle, take, reader)

        saving.swapper.used = after_a_check
        try:
            saving.unpack(made._aliases()[0]).data[0] = 7.0
        finally:
            saving.swapper.used = used
        for _ in range(2):
            saving.come_by()
            assert watched.drop() == []
        end.backward()


def check_what_has_come_back_meanwhile_is_not_dropped() -> None:
    """It lies elsewhere and has no recipe any more, whatever the device finds about where it was."""
    grads = []
    for late in (False, True):
        x = leaf(64, 8, 32, 32)
        with LateSaving() as saving, Watched() as watched:
            end = through(block(x))
            (made,) = (each for each in watched.storages if each.recipe is not None)
            if late:
                assert watched.drop() == []
                assert mover().send(made)
                assert mover().settle(DEADLINE_S)
                assert made.place is Place.AWAY
                mover().need(made, lambda: None)
                saving.come_by()
                assert watched.drop() == []
            end.backward()
        grads.append(bits(x.grad))
    assert grads[0] == grads[1]


def check_no_other_stream_reads_what_is_leaving() -> None:
    """What is being copied out is freed behind the streams that are known to use it, so no other may read it."""
    x = leaf()
    with LateSaving() as saving, Watched() as watched:
        saving.current_stream = 1
        source = x.tanh()
        saving.current_stream = 0
        end = through(functional.relu(source))
        del source
        (kept,) = (each for each in watched.storages if each.recipe is None)
        for place in (Place.HERE, Place.LEAVING):
            kept.place = place
            assert watched.drop() == []
            assert saving.tier.last == 0
        kept.place = Place.HERE
        end.backward()


def check_whoever_asks_the_stream_that_computes_is_asked() -> None:
    """A thread that waits for memory has another stream; digests are of the one that saved the tensors."""
    x = leaf()
    with LateSaving() as saving, Watched() as watched:
        saving.current_stream = 1
        end = through(functional.relu(x.tanh()))
        saving.current_stream = 0
        assert watched.drop() == []
        assert (saving.tier.marked, saving.current_stream) == ([1], 0)
        saving.come_by()
        assert watched.drop() == ["relu"]
        end.backward()


def check_nothing_is_asked_while_a_graph_is_captured() -> None:
    """The graph would take digests at each launch. What is saved in it has no recipe, for the same reason."""
    x = leaf(64, 8, 32, 32)
    with LateSaving() as saving, Watched() as watched:
        end = through(block(x))
        saving.captures = True
        assert watched.drop() == []
        assert saving.tier.last == 0
        saving.captures = False
        assert watched.drop() == []
        assert saving.tier.last == 1
        end.backward()
    with LateSaving() as saving, Watched() as watched:
        made = functional.batch_norm(x.tanh(), None, None, training=True)
        saving.captures = True
        end = through(made)
        assert all(each.recipe is None for each in watched.storages)
        end.backward()


def check_who_waits_for_memory_waits_for_the_device() -> None:
    """While it is asked there is something to wait for; afterwards, and before, there is not."""
    x = leaf(64, 8, 32, 32)
    with LateSaving() as saving, Watched() as watched:
        end = through(block(x))
        (made,) = (each for each in watched.storages if each.recipe is not None)
        assert not made.await_check(DEADLINE_S)
        assert watched.drop() == []
        assert made.await_check(0.001), "in vain"
        threading.Timer(0.01, saving.come_by).start()
        assert made.await_check(DEADLINE_S)
        assert not made.await_check(DEADLINE_S)
        assert watched.drop() == ["relu"]
        end.backward()


# -- what planners of jobs decide by ---------------------------------------------------------------


class Convnet(nn.Module):
    """Convolutions with feature maps of 2 MiB, a pool, a sum with a shortcut, and no layer in place."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.first, self.shortcut = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.inner = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(5)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return feature maps."""
        x = self.norms[0](self.first(images)).relu()
        x = functional.max_pool2d(x, 3, 1, 1)
        y = self.norms[1](self.inner[0](x)).relu()
        x = (self.norms[2](self.inner[1](y)) + self.norms[3](self.shortcut(x))).relu()
        return self.norms[4](self.inner[2](x)).relu()


def observed() -> tuple[Observed, set[int], set[int]]:
    """Return an iteration of a net in training, and which of its tensors are convolutions' inputs and results."""
    gc.collect()
    torch.manual_seed(3)
    model, images = Convnet(), torch.randn(64, 4, 32, 32)
    inputs, results = set[int](), set[int]()

    def note(_module: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        inputs.add(args[0].data_ptr())
        results.add(result.data_ptr())

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    joined = session.current()
    assert joined is not None
    joined.pool.set_limit(joined.membership.job, 0)
    learner = swapper_here()._learner
    for _ in range(6):
        inputs.clear()
        results.clear()
        with Watched() as watched:
            loss = model(images).square().mean()
        numbers = {each._storage.data_ptr(): each.ordinal for each in watched.storages}
        watched.storages.clear()
        loss.backward()
        optimizer.step()
        del loss
        if learner.planning is not None:
            learner.planning.join(DEADLINE_S)
            assert not learner.planning.is_alive()
    seen = learner._planned
    assert seen is not None
    return seen, {numbers[each] for each in inputs if each in numbers}, {numbers[each] for each in results}


def check_planners_of_jobs_decide_by_the_operations_of_their_papers() -> None:
    """VDNN moves what convolutions read, SuperNeurons what they make, and cheap layers' results are made again."""
    seen, inputs, results = observed()
    instant = Rates(1e15, 1e15, 0.0, 0.0)
    found = problem_of(seen, instant)
    inputs &= set(found.numbers)
    results &= set(found.numbers)
    peak, ways = found.problem.peak_bytes, frozenset(seen.ways) & frozenset(found.numbers)
    chosen = {}
    for planner, less_mib in (("vdnn", 4), ("superneurons", 8), ("echo", 4), ("gist", 4)):
        answer = choose(seen, peak - less_mib * MIB, instant, planner)
        assert isinstance(answer, Chosen), (planner, answer)
        assert answer.note == "", planner
        chosen[planner] = answer
    assert chosen["vdnn"] == (inputs, frozenset(), "")
    assert chosen["gist"].leaves > inputs, "all that layers have read"
    assert chosen["superneurons"].drops == ways
    assert frozenset() < chosen["superneurons"].leaves <= results
    assert not ways & results
    assert frozenset() < chosen["echo"].drops <= ways
    assert chosen["echo"].leaves == frozenset()


if __name__ == "__main__":
    run(globals())
