"""What training steps of known models need, traced without the hardware.

``zoo_problems`` gives the same models' iterations to whoever measures planners.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import sys
import time
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import torch
from torch.autograd import ProfilerConfig, ProfilerState
from torch.autograd import _disable_profiler as disable_profiler
from torch.autograd import _enable_profiler as enable_profiler
from torch.autograd import _prepare_profiler as prepare_profiler
from torch.profiler import ProfilerActivity, _ExperimentalConfig

from zico.base.paths import cache_root
from zico.base.units import GIB, KIB
from zico.lab.simulator.roofline import device_model
from zico.planning.packing.from_trace import iteration_problem
from zico.trace.events import Kind
from zico.trace.files import read_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zico.planning.packing.problem import Problem
    from zico.trace.events import Trace

fake_trace = importlib.import_module("zico.lab.frameworks.torch_fake").fake_trace  # mypy knows it by another name
MODELS = common.ROOT / "benchmarks" / "models"
DEVICE = "a100-80gb"
HOST = "cpu-2core"
LARGE_BYTES = 64 * KIB
_MARK = "second step"
_KERNELS = ("aten::convolution", "aten::convolution_backward")
_TRACED_BY = (
    "benchmarks/models/*.py",
    "lab/frameworks/torch_fake.py",
    "zico/trace/events.py",
    "lab/simulator/roofline.py",
)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the zoo: ``SCRIPT:function`` in ``benchmarks/models``, whose defaults are its published batch."""

    name: str
    script: str
    function: str
    batch: str
    parameters: int
    """As published."""
    source: str
    """Where that number is from."""
    small: dict[str, int]
    """Arguments with which it runs on this machine."""

    def build(self, **arguments: int) -> Callable[[], Callable[[], None]]:
        """Return what builds it."""
        if str(MODELS) not in sys.path:
            sys.path.insert(0, str(MODELS))
        return functools.partial(getattr(importlib.import_module(self.script), self.function), **arguments)


ZOO = {
    model.name: model
    for model in (
        Model("NASNet-A mobile", "nasnet", "nasnet_mobile", "140", 5_289_978, "Keras, trainable", {"batch": 2}),
        Model("ResNet-50", "resnet", "resnet50", "200", 25_557_032, "torchvision", {"batch": 8}),
        Model("ResNet-110", "resnet", "resnet110", "800", 1_727_962, "paper, table 6: 1.7 M", {"batch": 16}),
        Model("GNMT, 4 layers", "gnmt", "gnmt", "1000 x 25", 160_671_297, "MLPerf", {"batch": 16, "length": 6}),
        Model("RHN", "rhn", "rhn", "60 x 35", 23_482_400, "paper, table 1: 23.5 M", {"batch": 10, "length": 8}),
        Model(
            *("BERT-base", "transformer", "bert_base", "64 x 512"),
            *(110_106_428, "transformers, BertForPreTraining", {"batch": 2, "length": 128}),
        ),
        Model(
            *("GPT-2", "transformer", "gpt2", "8 x 1024"),
            *(124_439_808, "transformers, gpt2", {"batch": 1, "length": 256}),
        ),
        Model("ViT-B/16", "transformer", "vit_b16", "128", 86_567_656, "torchvision", {"batch": 2}),
        Model("U-Net", "unet", "unet", "6", 31_030_658, "paper's layers, by hand", {"batch": 2, "size": 252}),
        Model("DCGAN", "dcgan", "dcgan", "128", 3_576_704 + 2_765_568, "PyTorch's example, G + D", {"batch": 64}),
        Model("MobileNetV2", "mobilenet", "mobilenet_v2", "96", 3_504_872, "torchvision", {"batch": 4}),
        Model("DenseNet-121", "densenet", "densenet121", "84", 7_978_856, "torchvision", {"batch": 4}),
    )
}


# -- for planners ----------------------------------------------------------------------------------


def zoo_problems(names: tuple[str, ...] = tuple(ZOO)) -> Iterator[tuple[str, Problem]]:
    """Yield each model's name and one iteration at its published batch, from a trace kept in the cache directory."""
    for name in names:
        yield name, iteration_problem(zoo_trace(ZOO[name])).problem


def zoo_trace(model: Model, device: str = DEVICE, **arguments: int) -> Trace:
    """Return a model's trace at its published batch; the first call with these sources takes seconds."""
    what = "-".join([model.function, *(f"{name}{value}" for name, value in arguments.items()), device])
    path = cache_root() / "zoo" / f"{what}-{_digest()}.trace.zst"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        job = f"{model.script}.py:{model.function}"
        write_trace(path, fake_trace(model.build(**arguments), device_model(device), job=job))
    return read_trace(path)


@functools.cache
def _digest() -> str:
    return common.digest(torch.__version__, _TRACED_BY)


# -- the peak, fake and real -----------------------------------------------------------------------


def fake_peak_bytes(trace: Trace) -> int:
    """Return the most bytes alive in the second marked iteration."""
    events = trace.events
    sizes = np.zeros(int(events["tensor"].max()) + 1, np.int64)
    begins = events[events["kind"] == Kind.ALLOC]
    sizes[begins["tensor"]] = begins["size_bytes"]
    sign = (events["kind"] == Kind.ALLOC).astype(np.int64) - (events["kind"] == Kind.FREE)
    first, last = np.flatnonzero(events["kind"] == Kind.BEGIN)[1:3]
    return int(np.cumsum(sign * sizes[events["tensor"]])[first:last].max())


def real_peak_bytes(build: Callable[[], Callable[[], object]]) -> tuple[int, int]:
    """Return the most bytes that PyTorch's CPU allocator has out in the second step, by PyTorch's own profiler.

    Without and with what convolution kernels allocate for themselves: blocks that come and go
    within one of them.
    """
    # Of its switches only profile_memory is on.
    config = ProfilerConfig(ProfilerState.KINETO, *(False, True, False, False, False), _ExperimentalConfig())
    prepare_profiler(config, {ProfilerActivity.CPU})
    enable_profiler(config, {ProfilerActivity.CPU})
    try:
        step = build()
        step()
        gc.collect()
        with torch.profiler.record_function(_MARK):
            step()
    finally:
        result = disable_profiler()
    changes = sorted(_changes(result.experimental_event_tree(), None))
    own = np.zeros(len(changes), bool)
    alive: dict[int, tuple[int, int | None]] = {}
    for i, (_, pointer, size_bytes, kernel) in enumerate(changes):
        if size_bytes > 0:
            alive[pointer] = (i, kernel)
        else:
            begun, by = alive.pop(pointer)
            own[[begun, i]] = kernel is not None and by == kernel
    sizes = np.array([size_bytes for _, _, size_bytes, _ in changes])
    begin_ns = next(event.start_ns() for event in result.events() if event.name() == _MARK)
    second = np.array([t_ns for t_ns, _, _, _ in changes]) >= begin_ns
    return int(np.cumsum(np.where(own, 0, sizes))[second].max()), int(np.cumsum(sizes)[second].max())


def _changes(nodes: Iterable[Any], kernel: int | None) -> Iterator[tuple[int, int, int, int | None]]:
    """Yield time, address and bytes of what is allocated (positive) and freed, and in which convolution."""
    for node in nodes:
        if node.name == "[memory]":
            yield node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size, kernel
        else:
            yield from _changes(node.children, node.id if kernel is None and node.name in _KERNELS else kernel)


# -- the table -------------------------------------------------------------------------------------


def measure(model: Model, *, real: bool) -> dict[str, Any]:
    """Trace a model anew, and compare it with a real run at a small batch if asked."""
    begin_s = time.process_time()
    trace = fake_trace(model.build(), device_model(DEVICE))
    traced_s = time.process_time() - begin_s
    found = iteration_problem(trace)
    row = {
        "batch": model.batch,
        "parameters": trace.origin.parameters,
        "parameters_published": model.parameters,
        "parameters_source": model.source,
        "peak_bytes": fake_peak_bytes(trace),
        "tensors": len(found.problem),
        "tensors_large": int((found.problem.size_bytes >= LARGE_BYTES).sum()),
        "iteration_s": float(found.iteration.tick_ns[-1]) / 1e9,
        "events": len(trace.events),
        "traced_cpu_s": traced_s,
    }
    if real:
        build = model.build(**model.small)
        row |= {"small": model.small, "fake_small_bytes": fake_peak_bytes(fake_trace(build, device_model(HOST)))}
        row["real_small_bytes"], row["real_small_bytes_with_kernels"] = real_peak_bytes(build)
    return row


def _line(name: str, row: dict[str, Any]) -> list[str]:
    small = ["-", "-", "-"]
    if "small" in row:
        real, everything = row["real_small_bytes"], row["real_small_bytes_with_kernels"]
        small = [" x ".join(str(value) for value in row["small"].values())]
        small += [f"{100 * (row['fake_small_bytes'] / real - 1):+.2f} %", f"{100 * (everything / real - 1):.1f} %"]
    return [
        *(name, row["batch"], f"{row['parameters']:,}", f"{row['peak_bytes'] / GIB:.2f}"),
        *(f"{row['tensors']:,}", f"{row['tensors_large']:,}", f"{row['iteration_s'] * 1e3:.1f}"),
        *(f"{row['traced_cpu_s']:.1f}", *small),
    ]


_HEADER = (
    *("model", "batch", "parameters", "peak GiB", "tensors", "of 64 KiB or more", "iteration ms, at least"),
    *("CPU s to trace", "small batch", "fake / real peak - 1", "kernels' own"),
)
_TEXT = f"""
Traced for `{DEVICE}`, three iterations and one before; tensors of one iteration, persistent ones among them. The last
columns compare a fake trace of the host with a real run on this machine, whose peak PyTorch's profiler counts in the
CPU allocator. Convolutions there allocate for themselves (reordered weights and images), blocks that come and go within
one operation; no trace of operations has them, so they are left out of the comparison, and the last column says how
much higher the peak is with them. Parameters equal the published number, for RHN to its three digits; the sources are
in `zoo.json`.
"""


def main() -> None:
    """Measure all models and write the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=ZOO, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    names = options.model or (["DCGAN"] if options.smoke else list(ZOO))
    result = common.document("zoo", "What do training steps of known models need?", {"device_model": DEVICE})
    result["models"] = {}
    for name in names:
        common.note(name)
        result["models"][name] = measure(ZOO[name], real=not options.smoke)
    table = common.table(_HEADER, [_line(name, row) for name, row in result["models"].items()])
    common.write(result, table + _TEXT, common.output_directory(options))


if __name__ == "__main__":
    main()
