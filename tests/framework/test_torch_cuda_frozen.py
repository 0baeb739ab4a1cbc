"""Who writes a frozen tensor that jobs share on a GPU asks first; here it has memory of the host."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from zico.adapters.torch_cuda_frozen import CudaFrozenSharing, SharedParameter, SharedTensor
from zico.adapters.torch_saving import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zico.job.frozen import Bytes

WIDTH = 32


@torch.library.custom_op("zico_test::touch", mutates_args=("weight",))
def touch(weight: torch.Tensor) -> None:
    """Write a tensor, under a name that does not tell."""
    weight.add_(1)


@torch.library.custom_op("zico_test::look", mutates_args=())
def look(weight: torch.Tensor) -> torch.Tensor:
    """Read one."""
    return weight.sum()


class Memory:
    """Stands for a content: bytes that must stay until somebody has asked."""

    def __init__(self, *, has_room: bool = True) -> None:
        """Have room for copies, or none."""
        self.has_room = has_room
        self.asked = 0
        self.held = types.SimpleNamespace(is_own=False)
        self.is_alone = False
        self.bytes: Any = None
        self.before = b""

    def own(self) -> bool:
        """Be asked; what is to be written has not been yet."""
        assert bytes(self.bytes) == self.before, "written before it asked"
        self.asked += 1
        self.held.is_own = self.has_room
        return self.has_room


class Sharing(CudaFrozenSharing):
    """Shares memory of the host as if it were a GPU's, each tensor in a content of its own."""

    device = "cpu"

    def __init__(self, *, has_room: bool = True) -> None:
        """Share nothing yet."""
        self.memories: list[Memory] = []
        frozen = types.SimpleNamespace(has=lambda _address: True, share=self._share_all, tell=lambda: None)
        self.has_room = has_room
        super().__init__(types.SimpleNamespace(frozen=frozen, is_member=True))  # type: ignore[arg-type]

    def _share_all(self, wanted: Iterable[Bytes], move: Callable[[Bytes, Any], bool]) -> None:
        for bytes_ in wanted:
            memory = Memory(has_room=self.has_room)
            memory.bytes = (ctypes.c_char * bytes_.size_bytes).from_buffer_copy(
                ctypes.string_at(bytes_.address, bytes_.size_bytes)
            )
            memory.before = bytes(memory.bytes)
            self.memories.append(memory)
            assert move(bytes_, types.SimpleNamespace(address=ctypes.addressof(memory.bytes), content=memory))

    def _storage(self, part: Any, _size_bytes: int, _device: Any) -> Any:  # noqa: ANN401 - torch has no types
        return storage_of(torch.frombuffer(part.content.bytes, dtype=torch.uint8))


class Setup:
    """A frozen layer that is shared, and what it computes with."""

    def __init__(self, *, has_room: bool = True) -> None:
        """Share the weight."""
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        self.alone = copy.deepcopy(self.layer)
        self.sharing = Sharing(has_room=has_room)
        assert self.sharing.share(self.layer) is self.layer
        (self.memory,) = self.sharing.memories
        self.weight = self.layer.weight
        assert type(self.weight) is SharedParameter
        assert self.weight.data_ptr() == ctypes.addressof(self.memory.bytes)


@pytest.fixture
def setup() -> Iterator[Setup]:
    """Give such a layer."""
    yield Setup()
    gc.collect()


def _out_of(setup: Setup) -> None:
    torch.mm(torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH), out=setup.weight)


def _step(setup: Setup, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    setup.weight.requires_grad_()
    optimizer = make([setup.weight])
    setup.layer(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()


def _iadd(setup: Setup) -> None:
    weight = setup.weight
    weight += 1


def _set(setup: Setup) -> None:
    setup.weight[0, 1] = 3


WRITERS: dict[str, Callable[[Setup], object]] = {
    "add_": lambda s: s.weight.add_(1),
    "+=": _iadd,
    "item": _set,
    "copy_": lambda s: s.weight.copy_(torch.zeros(WIDTH, WIDTH)),
    "view": lambda s: s.weight.t().mul_(2),
    "part": lambda s: s.weight[3].zero_(),
    "chunk": lambda s: s.weight.chunk(2)[1].fill_(4),
    "view of a view": lambda s: s.weight.view(-1)[8:].view(4, -1).neg_(),
    "detach": lambda s: s.weight.detach().add_(1),
    "data": lambda s: s.weight.data.clamp_(0),
    "T": lambda s: s.weight.T.exp_(),
    "out": _out_of,
    "foreach": lambda s: torch._foreach_add_([torch.ones(2), s.weight], 1.0),
    "second list": lambda s: torch._foreach_copy_([s.weight], [torch.ones(WIDTH, WIDTH)]),
    "init": lambda s: torch.nn.init.normal_(s.weight),
    "clip": lambda s: torch.nn.functional.relu(s.weight, inplace=True),
    "relu_": lambda s: torch.relu_(s.weight),
    "load_state_dict": lambda s: s.layer.load_state_dict({"weight": torch.ones(WIDTH, WIDTH)}),
    "addmm_": lambda s: s.weight.addmm_(torch.ones(WIDTH, 2), torch.ones(2, WIDTH)),
    "index_copy_": lambda s: s.weight.index_copy_(0, torch.tensor([1]), torch.ones(1, WIDTH)),
    "set by a mask": lambda s: s.weight.masked_fill_(torch.ones(WIDTH, WIDTH, dtype=torch.bool), 0.5),
    "SGD": lambda s: _step(s, lambda those: torch.optim.SGD(those, lr=0.1, foreach=False)),
    "AdamW": lambda s: _step(s, lambda those: torch.optim.AdamW(those, foreach=True)),
    "fused": lambda s: _step(s, lambda those: torch.optim.AdamW(those, fused=True)),
    "average": lambda s: s.weight.lerp_(torch.zeros(WIDTH, WIDTH), 0.1),
    "max_norm": lambda s: torch.nn.functional.embedding(torch.tensor([1, 2]), s.weight, max_norm=0.01),
    "statistics": lambda s: torch.nn.functional.batch_norm(
        torch.randn(4, WIDTH), s.weight[0], s.weight[1], training=True
    ),
    "operator": lambda s: torch.ops.zico_test.touch(s.weight),
    "overload": lambda s: torch.ops.aten.add_.Tensor(s.weight, torch.ones(1)),
    "copy.copy": lambda s: copy.copy(s.weight).mul_(2),
    "parameter of it": lambda s: torch.nn.Parameter(s.weight, requires_grad=False).mul_(2),
    "native norm": lambda s: torch.native_batch_norm(
        torch.randn(4, WIDTH), None, None, s.weight[0], s.weight[1], training=True, momentum=0.1, eps=1e-5
    ),
    "einsum": lambda s: torch.einsum("ij->ji", s.weight).add_(1),
    "parameter": lambda s: torch.nn.Parameter(s.weight.data, requires_grad=False).add_(1),
    "by a name": lambda s: torch.relu_(input=s.weight.sub_(0.1)),
    "random": lambda s: s.weight.uniform_(),
    "swapped parts": lambda s: s.weight.T[0].copy_(s.weight[1].clone()),
}


@pytest.mark.parametrize("name", WRITERS)
def test_who_writes_asks_before(setup: Setup, name: str) -> None:
    """Invariant 12: the memory is this process's by the time it is written, where the tensor is."""
    address = setup.weight.data_ptr()
    with torch.no_grad() if name not in {"SGD", "AdamW", "fused"} else torch.enable_grad():
        WRITERS[name](setup)
    assert setup.memory.asked == 1
    assert bytes(setup.memory.bytes) != setup.memory.before
    assert setup.weight.data_ptr() == address


READERS: dict[str, Callable[[Setup], object]] = {
    "forward": lambda s: s.layer(torch.ones(2, WIDTH)),
    "backward": lambda s: s.layer(torch.ones(2, WIDTH, requires_grad=True)).sum().backward(),
    "added": lambda s: torch.ones(WIDTH, WIDTH).add_(s.weight),
    "copied": lambda s: torch.ones(WIDTH, WIDTH).copy_(s.weight),
    "into": lambda s: torch.mm(s.weight, s.weight, out=torch.empty(WIDTH, WIDTH)),
    "norm": lambda s: s.weight.norm(),
    "clone": lambda s: s.weight.clone().add_(1),
    "state": lambda s: s.layer.state_dict(),
    "half": lambda s: copy.deepcopy(s.layer).half(),
    "compare": lambda s: torch.equal(s.weight, s.alone.weight),
    "flags": lambda s: (s.weight.requires_grad_(), s.weight.requires_grad_(requires_grad=False)),
    "lists": lambda s: torch._foreach_add([s.weight], 1.0),
    "print": lambda s: repr(s.weight),
    "embedding": lambda s: torch.nn.functional.embedding(torch.tensor([1, 2]), s.weight),
    "operator": lambda s: torch.ops.zico_test.look(s.weight),
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_asks_nothing(setup: Setup, name: str) -> None:
    """What only reads goes on without a copy, and gets tensors of PyTorch's own class."""
    result = READERS[name](setup)
    assert setup.memory.asked == 0
    assert bytes(setup.memory.bytes) == setup.memory.before
    if torch.is_tensor(result):
        assert type(result) is torch.Tensor


def test_losses_and_gradients_are_those_of_a_plain_layer(setup: Setup) -> None:
    """Invariant 6."""
    outcomes = []
    for layer in (setup.layer, setup.alone):
        given = torch.ones(2, WIDTH, requires_grad=True)
        loss = layer(given).square().sum()
        loss.backward()
        outcomes.append((loss.item(), given.grad))
    (loss, gradient), (loss_alone, gradient_alone) = outcomes
    assert loss == loss_alone
    assert torch.equal(gradient, gradient_alone)


inductor_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@inductor_warns
def test_a_compiled_layer_is_one_graph_and_asks_nothing(setup: Setup) -> None:
    """What only reads is compiled as without sharing."""
    words = torch.nn.Embedding(WIDTH, WIDTH)
    words.weight = setup.weight
    layers = torch.nn.Sequential(words, setup.layer, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 2))
    given = torch.tensor([1, 3])
    expected = layers(given)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(layers, fullgraph=True)(given), expected)
    assert setup.memory.asked == 0


def _average(weight: torch.Tensor) -> None:
    weight.lerp_(torch.zeros(WIDTH, WIDTH), 0.5)


def _average_a_view(weight: torch.Tensor) -> None:
    weight.t()[1].mul_(2)


def _average_data(weight: torch.Tensor) -> None:
    weight.data.add_(1)


def _renormalise(weight: torch.Tensor) -> None:
    torch.nn.functional.embedding(torch.tensor([1, 2]), weight, None, 0.01)


@inductor_warns
@pytest.mark.parametrize("write", [_average, _average_a_view, _average_data, _renormalise])
def test_a_compiled_function_that_writes_asks_before(setup: Setup, write: Callable[[Any], None]) -> None:
    """Invariant 12: such a function breaks the graph, so that it can ask."""
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(write)(setup.weight)
    assert setup.memory.asked == 1
    assert bytes(setup.memory.bytes) != setup.memory.before


def test_modules_that_would_compute_in_another_way_keep_their_own() -> None:
    """Invariant 6: attention of PyTorch's own has a faster way, and other results, without such tensors."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True).requires_grad_(requires_grad=False)
    sharing = Sharing()
    sharing.share(torch.nn.Sequential(layer, torch.nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)))
    assert len(sharing.memories) == 2, "weight and bias of the last layer"
    assert {type(one) for one in layer.parameters()} == {torch.nn.Parameter}


def test_a_parameter_that_is_made_of_one_is_a_parameter(setup: Setup) -> None:
    """It is copied and saved as one, and trains if it is to."""
    made = torch.nn.Parameter(setup.weight.data)
    assert type(made) is SharedParameter
    for one in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301 - made here
        assert type(one) is torch.nn.Parameter
        assert one.requires_grad
    assert torch.nn.utils.parametrizations.weight_norm(setup.layer) is setup.layer


def test_whoever_broadcasts_parameters_asks(setup: Setup) -> None:
    """``DistributedDataParallel`` writes frozen parameters, too, where it begins; ranks share nothing more."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        both = torch.nn.Sequential(setup.layer, torch.nn.Linear(WIDTH, 2))
        torch.nn.parallel.DistributedDataParallel(both)
        asked = setup.memory.asked
        other = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        sharing = Sharing()
        sharing.share(other)
        assert sharing.memories == []
    finally:
        torch.distributed.destroy_process_group()
    assert asked == 1


def test_without_a_broker_the_error_says_so(setup: Setup) -> None:
    """Raising the budget would not help."""
    setup.memory.has_room, setup.memory.is_alone = False, True
    with pytest.raises(RuntimeError, match="the broker that gives memory for a copy of it is gone"):
        setup.weight.add_(1)


def test_a_write_without_room_is_refused_before_it_is_made() -> None:
    """The error names the budget, and nothing has been written."""
    setup = Setup(has_room=False)
    with pytest.raises(RuntimeError, match="no room for a copy of it now: raise the budget"):
        setup.weight.add_(1)
    assert bytes(setup.memory.bytes) == setup.memory.before


def test_copies_and_checkpoints_are_plain(setup: Setup) -> None:
    """A checkpoint names no class of Zico, and loads with weights alone."""
    assert type(copy.deepcopy(setup.layer).weight) is torch.nn.Parameter
    file = io.BytesIO()
    torch.save({"layer": setup.layer.state_dict(), "weight": setup.weight, "part": setup.weight[1]}, file)
    assert b"zico" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["weight"]) is torch.nn.Parameter
    assert type(loaded["part"]) is torch.Tensor
    assert torch.equal(loaded["layer"]["weight"], setup.alone.weight)
    assert setup.memory.asked == 0


def test_what_became_its_own_is_forgotten_at_the_end_of_an_iteration(setup: Setup) -> None:
    """The parameter has PyTorch's class again, and is not offered a second time."""
    setup.weight.add_(1)
    setup.sharing.at_boundary()
    assert type(setup.weight) is torch.nn.Parameter
    setup.sharing.share(setup.layer)
    assert len(setup.sharing.memories) == 1


def test_a_view_keeps_asking_when_its_parameter_is_gone(setup: Setup) -> None:
    """Guarded is what has the memory, not who was shared."""
    part = setup.weight[2]
    assert type(part) is SharedTensor
    del setup.layer, setup.weight
    gc.collect()
    part.zero_()
    assert setup.memory.asked == 1
