"""Fake traces: they are what a real run does to memory, and whatever a script does wrong is said in one line."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from zico.cli import main
from zico.lab.frameworks.torch_codeless import COMPILES
from zico.lab.frameworks.torch_fake import fake_trace
from zico.lab.simulator.roofline import device_model
from zico.trace.events import Kind
from zico.trace.files import read_trace

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from zoo import fake_peak_bytes, real_peak_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.trace.events import Trace

    Step = Callable[[], object]

HOST = device_model("cpu-2core")
GPU = device_model("a100-80gb")


def training(model: nn.Module, *shape: int, optimizer: Any = torch.optim.SGD) -> Step:  # noqa: ANN401 - its class
    """Return a step of a model on random input of a shape."""
    steps = optimizer(model.parameters(), lr=0.1)

    def step() -> float:
        steps.zero_grad()
        loss = model(torch.randn(*shape)).square().mean()
        loss.backward()
        steps.step()
        return loss.item()

    return step


def perceptron() -> Step:
    """Build two layers and Adam, whose state is made in the first step."""
    return training(
        nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)), 64, 512, optimizer=torch.optim.Adam
    )


def accumulating() -> Step:
    """Build a step that adds the gradients of three batches."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()

    return step


def tied() -> Step:
    """Build a model that uses its weights twice: two gradients are added, the first of them a view."""
    words = nn.Embedding(1000, 500)
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.linear(words(torch.randint(1000, (8,))), words.weight).sum().backward()
        optimizer.step()

    return step


def shared() -> Step:
    """Build a step in which the second gradient of a tensor is added into the first one, in place."""
    weights = torch.zeros(1 << 20, requires_grad=True)

    def step() -> None:
        weights.grad = None
        ((weights * 2).sum() + (weights * 3).sum()).backward()

    return step


class Residual(nn.Module):
    """Keeps nothing inside of its layers for the backward pass, and adds what came in."""

    def __init__(self) -> None:
        """Make six blocks."""
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def recomputing() -> Step:
    """Build a model that recomputes."""
    return training(Residual(), 512, 256)


def attending() -> Step:
    """Build a transformer's layer with PyTorch's own attention."""
    return training(nn.TransformerEncoderLayer(256, 8, batch_first=True), 8, 128, 256, optimizer=torch.optim.AdamW)


@pytest.mark.parametrize("build", [perceptron, accumulating, tied, shared, recomputing, attending])
def test_the_peak_is_that_of_a_real_run(build: Callable[[], Step]) -> None:
    """A fake trace of the host peaks within 1 in 1000 of what PyTorch's profiler counts in a real run."""
    _, real = real_peak_bytes(build)
    assert fake_peak_bytes(fake_trace(build, HOST)) == pytest.approx(real, rel=1e-3)


def compiled() -> Step:
    """Build the perceptron's layers, compiled."""
    return training(torch.compile(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))), 1024, 512)


needs_compiler = pytest.mark.skipif(not COMPILES, reason="this PyTorch compiles nothing below a dispatch mode")
inductor_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@inductor_warns
@needs_compiler
def test_the_peak_of_a_compiled_step_is_that_of_a_real_run() -> None:
    """A fake trace knows what is fused; a real run after it has code of its own."""
    fake = fake_trace(compiled, HOST)
    _, real = real_peak_bytes(compiled)
    assert fake_peak_bytes(fake) == pytest.approx(real, rel=1e-3)
    assert "gelu" not in fake.names
    operations = fake.events[fake.events["kind"] == Kind.OP]
    assert (operations["name"] == fake.names.index("fused")).any()


@inductor_warns
@needs_compiler
def test_each_trace_compiles_for_its_own_shapes() -> None:
    """A compiled model of other shapes is no reason to compile less: each job compiles for itself."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for batch in (64, 96, 128):
            layers = nn.Sequential(nn.Linear(64, 256), nn.GELU())
            trace = fake_trace(lambda batch=batch, layers=layers: training(torch.compile(layers), batch, 64), HOST, 1)
            assert "gelu" not in trace.names


@inductor_warns
@needs_compiler
def test_a_method_of_a_tensor_does_not_break_the_graph() -> None:
    """``Tensor.unflatten`` calls that of its base class, where the compiler stopped, which makes other graphs."""
    layers = nn.Sequential(nn.Linear(64, 256), nn.Unflatten(1, (4, 64)), nn.GELU())
    trace = fake_trace(lambda: training(torch.compile(layers, fullgraph=True), 32, 64), HOST, 1)
    assert "gelu" not in trace.names


def test_a_job_still_has_at_its_peak_what_the_step_before_left_in_cycles() -> None:
    """Python's collector comes late in a job, so a forecast has it; a trace of equal iterations has not."""
    weights = torch.zeros(1 << 20, requires_grad=True)
    steps = torch.optim.SGD([weights])

    def step() -> None:
        kept = [weights * 2]
        kept.append(kept)
        kept[0].sum().backward()
        steps.step()
        steps.zero_grad()

    later = fake_peak_bytes(fake_trace(lambda: step, HOST, 3, marks=[]))
    assert later == fake_peak_bytes(fake_trace(lambda: step, HOST, 3)) + weights.nbytes


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_the_peak_of_any_chain_of_layers_is_that_of_a_real_run(data: st.DataObject) -> None:
    """Random widths, layers, skips and optimizers: fake and real peaks stay within 1 in 1000."""
    width = data.draw(st.integers(64, 256))
    kinds = st.sampled_from(
        (nn.ReLU, nn.GELU, nn.Tanh, nn.Dropout, lambda: nn.LayerNorm(width), lambda: nn.Linear(width, width))
    )
    optimizer = data.draw(st.sampled_from((torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop)))
    chosen = [data.draw(kinds) for _ in range(data.draw(st.integers(1, 6)))]
    batch = data.draw(st.integers(1, 512))

    def build() -> Step:
        return training(
            nn.Sequential(nn.Linear(width, width), *(kind() for kind in chosen)), batch, width, optimizer=optimizer
        )

    _, real = real_peak_bytes(build)
    assert fake_peak_bytes(fake_trace(build, HOST)) == pytest.approx(real, rel=1e-3)


def convolving() -> Step:
    """Build convolutions with strides, in groups, of images of few channels, and back to larger images."""
    layers = (
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(64, 16, 2, 2), nn.ReLU(), nn.Conv2d(16, 2, 1)),
    )
    return training(nn.Sequential(*layers), 16, 3, 48, 48)


class LastOutput(nn.LSTM):
    """Recurrent layers that return what the last one puts out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        outputs, _ = super().forward(x)
        return outputs


def recurring() -> Step:
    """Build two recurrent layers."""
    return training(LastOutput(128, 192, 2), 20, 32, 128)


@pytest.mark.parametrize(("build", "within"), [(convolving, 0.01), (recurring, 0.05)])
def test_what_onednn_allocates_is_in_a_trace_that_asks_for_it(build: Callable[[], Step], within: float) -> None:
    """With copies the peak is nearly that of all that a real run allocates; without, it is at least 10 % lower."""
    _, everything = real_peak_bytes(build)
    assert fake_peak_bytes(fake_trace(build, HOST, copies=True)) == pytest.approx(everything, rel=within)
    assert fake_peak_bytes(fake_trace(build, HOST)) < 0.9 * everything


def test_a_gpu_has_no_copies_of_onednns() -> None:
    """A trace for a CUDA device is the same, asked for copies or not."""
    asked, plain = (fake_trace(convolving, GPU, copies=copies) for copies in (True, False))
    assert np.array_equal(asked.events, plain.events)


def test_marks_are_where_the_first_optimizer_steps() -> None:
    """Each step of it is one mark, and the events before the last one end with that step's operations."""

    def build() -> Step:
        first, second = (training(nn.Linear(300, 300), 8, 300) for _ in range(2))
        return lambda: (first(), second())

    marks: list[int] = []
    trace = fake_trace(build, HOST, 3, marks=marks)
    begins = np.flatnonzero(trace.events["kind"] == Kind.BEGIN).tolist()
    assert len(marks) == 4
    assert all(mark < begin < later for mark, begin, later in zip(marks, begins, marks[1:], strict=False))


# -- what a trace consists of ----------------------------------------------------------------------


def iteration(trace: Trace, number: int) -> np.ndarray:
    """Return the events from one BEGIN mark to the next or to the END."""
    marks = np.flatnonzero(np.isin(trace.events["kind"], (Kind.BEGIN, Kind.END)))
    return trace.events[marks[number] + 1 : marks[number + 1]]


def test_iterations_are_alike_and_the_optimizers_state_is_older() -> None:
    """Each marked iteration has the same events, and as many bytes live before as after it."""
    trace = fake_trace(perceptron, GPU)
    first, second, third = (iteration(trace, number) for number in range(3))
    for field in ("kind", "size_bytes", "name"):
        assert np.array_equal(first[field], second[field])
        assert np.array_equal(second[field], third[field])
    assert trace.origin.parameters == 2 * 512 * 2048 + 2048 + 512
    assert (trace.origin.source, trace.origin.device, trace.origin.threshold_bytes) == ("fake", "a100-80gb", 0)
    freed = second["size_bytes"][second["kind"] == Kind.ALLOC].sum()
    assert freed > 0
    assert (second["kind"] == Kind.ALLOC).sum() == (second["kind"] == Kind.FREE).sum()


def test_tensors_are_numbered_in_order_and_end_once() -> None:
    """Numbers count up with allocations, and nothing is used or freed before it begins or after it ends."""
    for build in (shared, tied, recomputing):
        alive: set[int] = set()
        expected = 0
        for event in fake_trace(build, GPU).events:
            kind, tensor = int(event["kind"]), int(event["tensor"])
            if kind == Kind.ALLOC:
                assert tensor == expected
                assert event["size_bytes"] > 0
                expected += 1
                alive.add(tensor)
            elif kind in (Kind.READ, Kind.WRITE):
                assert tensor in alive
            elif kind == Kind.FREE:
                alive.remove(tensor)


def test_an_operation_follows_what_it_uses_and_time_passes_by_operations() -> None:
    """READ and WRITE events bear the name of the OP after them, and times are sums of durations."""
    trace = fake_trace(perceptron, GPU)
    clock, pending = 0, set()
    for event in trace.events:
        assert event["t_ns"] == clock
        if event["kind"] in (Kind.READ, Kind.WRITE):
            pending.add(int(event["name"]))
        elif event["kind"] == Kind.OP:
            assert pending <= {int(event["name"])}
            pending.clear()
            clock += int(event["size_bytes"])
    assert not pending


def test_a_product_takes_the_time_of_its_operations() -> None:
    """Two matrix products of 2 N^3 operations each at the device's peak are the two longest operations."""
    n = 4096

    def build() -> Step:
        left, right = torch.randn(n, n), torch.randn(n, n)
        return lambda: (left @ right) @ right

    second = iteration(fake_trace(build, GPU), 1)
    durations = second["size_bytes"][second["kind"] == Kind.OP]
    assert durations.tolist() == [GPU.duration_ns(2 * n**3, 0)] * 2


@pytest.mark.parametrize(
    ("operation", "moved"),
    [
        (lambda table: table.zero_(), 1 << 26),
        (lambda table: table.normal_(), 1 << 26),
        (lambda table: table.add_(1), 2 << 26),
        (lambda table: table + 1, 2 << 26),
        (lambda table: table[:1].expand(1 << 18, 64) + 1, (1 << 26) + 256),
        (lambda table: nn.functional.embedding(torch.zeros(1 << 10, dtype=torch.int64), table), (2 << 18) + (8 << 10)),
        (lambda table: torch.add(table, 1, out=table), 2 << 26),
    ],
    ids=["zero_", "normal_", "add_", "add", "expanded", "embedding", "out"],
)
def test_an_operation_moves_each_byte_once(operation: Callable[[torch.Tensor], torch.Tensor], moved: int) -> None:
    """On a table of 64 MiB the last operation takes as long as the bytes that it must read and write."""

    def build() -> Step:
        table = torch.zeros(1 << 18, 64)
        return lambda: operation(table)

    second = iteration(fake_trace(build, GPU), 1)
    assert second["size_bytes"][second["kind"] == Kind.OP][-1] == GPU.duration_ns(0, moved)


def test_a_gpu_has_kernels_of_its_own() -> None:
    """For a CUDA device optimizers work on all tensors at once and attention with dropout keeps no scores."""
    kernels = {"_scaled_dot_product_efficient_attention", "_foreach_addcdiv_", "native_dropout"}
    assert kernels <= set(fake_trace(attending, GPU).names)
    assert not kernels & set(fake_trace(attending, HOST).names)


def test_on_a_gpu_dropout_keeps_bytes_and_devices_are_the_model() -> None:
    """For a CUDA device a dropout's mask has a byte an element, on the host it is as large as its input."""

    def build() -> Step:
        model = nn.Dropout().cuda()
        x = torch.randn(1024, 1024, device="cuda:0", requires_grad=True)
        return lambda: model(x.to("cuda")).sum().backward()

    sizes = {
        device: iteration(fake_trace(build, device_model(device)), 1)["size_bytes"].tolist()
        for device in ("a100-80gb", "cpu-2core")
    }
    assert 1 << 20 in sizes["a100-80gb"]
    assert 1 << 20 not in sizes["cpu-2core"]


def test_half_a_model_is_half_as_large_and_stays_tied() -> None:
    """Converting a module replaces its tensors as for real, and weights that are shared stay shared."""

    def build() -> Step:
        model = nn.ModuleList([nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)])
        model[1].weight = model[0].weight
        model.half()
        assert model[1].weight is model[0].weight
        return lambda: model[0].weight * 2

    second = iteration(fake_trace(build, GPU), 1)
    assert second["size_bytes"][second["kind"] == Kind.ALLOC].tolist() == [512 * 512 * 2]


def test_nothing_stays_changed() -> None:
    """After a build that fails PyTorch computes again and the garbage collector runs again."""
    before = (nn.functional.dropout, nn.functional.scaled_dot_product_attention, nn.Module._apply)

    def build() -> Step:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fake_trace(build, GPU)
    assert gc.isenabled()
    assert (nn.functional.dropout, nn.functional.scaled_dot_product_attention, nn.Module._apply) == before
    assert torch.ones(2).sum().item() == 2


# -- from the command line -------------------------------------------------------------------------

SCRIPT = """\
import torch
from helper import WIDTH

def build():
    model = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        model(torch.randn(64, WIDTH).cuda()).sum().backward()
        optimizer.step()
    return step

weights = torch.zeros(1000, requires_grad=True)
def step():
    weights.grad = None
    (weights * 2).sum().backward()

def idle():
    return lambda: None

def number():
    return 3

def fails():
    raise ValueError("no\\nluck")

def leaves():
    raise SystemExit(3)

def depends_on_values():
    return lambda: torch.randn(10).nonzero()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write a script with functions good and bad, and a module beside it."""
    (tmp_path / "helper.py").write_text("WIDTH = 1000\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(("function", "parameters"), [("build", 1_001_000), ("step", 0)])
def test_a_function_is_traced(script: Path, function: str, parameters: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What builds a step, and what is a step, become a trace with three iterations, and its peak is said."""
    file = script.with_suffix(".trace")
    assert main(["trace", "--fake", "--device-model", "T4", "-o", str(file), f"{script}:{function}"]) == 0
    trace = read_trace(file)
    assert (trace.events["kind"] == Kind.BEGIN).sum() == 3
    assert (trace.origin.job, trace.origin.device) == (f"train.py:{function}", "t4")
    assert trace.origin.parameters == parameters
    assert "of 16 GiB at the peak" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("{}:idle", "train.py: the step of 'idle' allocates nothing: return the function that trains"),
        ("{}:number", "returned 3: return a function"),
        ("{}:fails", "train.py:25: ValueError: no: check that it trains without --fake"),
        ("{}:leaves", "train.py:28: SystemExit: 3"),
        ("{}:depends_on_values", "train.py:31: RuntimeError: the shape of what aten.nonzero.default returns depends"),
        ("{}:missing", "has no function 'missing': define one"),
        ("{}", "does not name a function: give SCRIPT:function"),
        ("{}.py:build", "does not name a function: give SCRIPT:function"),
        ("helper.txt:build", "does not name a function: give SCRIPT:function"),
    ],
)
def test_a_bad_target_is_one_line_and_leaves_nothing(
    script: Path, target: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each error is one line that names the script and the remedy, and no file is written."""
    before = sorted(path.name for path in script.parent.iterdir())
    assert main(["trace", "--fake", "-o", str(script.with_suffix(".trace")), target.format(script)]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert sorted(path.name for path in script.parent.iterdir() if path.name != "__pycache__") == before


def test_a_syntax_error_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that is no Python is refused with the line at which it is not."""
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ndef f(:\n")
    assert main(["trace", "--fake", "-o", str(tmp_path / "t"), f"{path}:f"]) == 1
    assert "broken.py:2: SyntaxError" in capsys.readouterr().err
