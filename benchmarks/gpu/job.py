"""Train a model of ``models/`` for a while: ``job.py resnet50 --batch 64 --seconds 8 --losses FILE``.

With ``--go FILE`` it imports, and touches the device only when the file is there. ``--figures FILE``
gets what the job took: times of its parts and of each iteration, and the most memory that PyTorch
reserved and allocated. A job that runs out of memory says so there, and ends well.

Iterations are told when the device has ended them, not when they were launched: the loss of an
iteration is read while the next ones are on their way, so that the processor runs ahead as it does
in training that seldom looks at its loss. The same seed gives the same losses to the last bit:
PyTorch's deterministic algorithms are on.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import psutil

_BEGUN_S = time.perf_counter()

import numpy as np  # noqa: E402 - imports are timed
import ready  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - which the first optimizer would import
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

IMPORT_S = time.perf_counter() - _BEGUN_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODELS = {
    "resnet50": ("resnet", {}),
    "resnet110": ("resnet", {}),
    "bert_base": ("transformer", {"length": 128}),
    "gpt2": ("transformer", {"length": 512}),
    "gnmt": ("gnmt", {}),
    "dcgan": ("dcgan", {}),
    "resnet18_small": ("resnet", {}),
    "lstm": ("lstm", {}),
    "branches": ("branches", {}),
}
"""Name -> module, and arguments that keep iterations short."""
AHEAD = 2
"""Iterations that are launched before the loss of one is read."""
LOADED_FLOATS = 1 << 20
"""In a batch that a data loader's worker makes."""
TOO_MANY_BYTES = 1 << 45
"""More than any device has."""


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--batch", type=int, help="default: the model's own")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after the first iteration")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--losses", type=Path, help="write every loss here, in hexadecimal")
    parser.add_argument("--figures", type=Path, help="write here what was counted and timed")
    parser.add_argument("--at-most", type=int, metavar="BYTES", help="what PyTorch may reserve of a GPU")
    parser.add_argument("--gauge", action="store_true", help="tell what the device has used before and behind")
    parser.add_argument("--lost-at", type=int, default=0, metavar="N", help="lose the context there, and live on")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: by autocast")
    parser.add_argument("--benchmark", action="store_true", help="let cuDNN time its algorithms")
    parser.add_argument("--workers", type=int, default=0, help="of a data loader, one batch an iteration")
    parser.add_argument("--oom", action="store_true", help="first ask for more than any device has, then train")
    parser.add_argument("--killed-at", type=int, default=0, help="end by SIGKILL when so many are launched")
    ready.add_option(parser)
    return parser.parse_args()


def build(options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return the training step, on its device."""
    torch.set_default_device(options.device)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(mode=not options.benchmark, warn_only=True)
    torch.backends.cudnn.benchmark = options.benchmark
    module, arguments = MODELS[options.model]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
    given = {} if options.batch is None else {"batch": options.batch}
    step: Callable[[], torch.Tensor] = getattr(importlib.import_module(module), options.model)(**given, **arguments)
    if options.dtype == "bfloat16":
        step = torch.autocast(options.device, dtype=torch.bfloat16)(step)
    return step


class Batches(IterableDataset):  # type: ignore[misc] # torch has no types
    """Endless batches of floats, made in the workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield them."""
        generator = np.random.default_rng(1)
        while True:
            yield torch.from_numpy(generator.random(LOADED_FLOATS, np.float32))


def loaded(step: Callable[[], torch.Tensor], options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return the step with a batch of a data loader's workers brought to the device in each iteration."""
    batches = iter(DataLoader(Batches(), batch_size=None, num_workers=options.workers))

    def both() -> torch.Tensor:
        brought = next(batches).to(options.device)
        loss = step()
        return loss + 0 * brought.sum()

    return both


def refused(options: argparse.Namespace) -> str:
    """Ask for more than any device has; returns the name of the error."""
    try:
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=options.device)
    except (RuntimeError, MemoryError) as error:  # PyTorch's error on a GPU is a RuntimeError
        return type(error).__name__
    return ""


class Launched:
    """An iteration that has been launched."""

    def __init__(self, loss: torch.Tensor) -> None:
        """Have its loss copied to the host once it has ended; waits for nothing."""
        self._event = torch.cuda.Event() if loss.is_cuda else None
        if self._event is None:
            self._loss = loss
        else:
            self._loss = torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
            self._loss.copy_(loss, non_blocking=True)
            self._event.record()

    def ended(self, number: int) -> float:
        """Wait until it has ended, say so, and return its loss; what was launched behind it goes on."""
        if self._event is not None:
            self._event.synchronize()
        value = float(self._loss.item())
        sys.stdout.write(f"iteration {number} loss {value.hex()}\n")
        sys.stdout.flush()
        return value


class Trained:
    """What came of a training: losses, and when each iteration ended, in seconds of ``time.monotonic``."""

    def __init__(self) -> None:
        """Start with none."""
        self.losses: list[float] = []
        self.ends_s: list[float] = []
        self.error = ""

    def end(self, launched: Launched) -> None:
        """Wait for an iteration's end and note it."""
        self.losses.append(launched.ended(len(self.losses) + 1))
        self.ends_s.append(time.monotonic())


def train(step: Callable[[], torch.Tensor], options: argparse.Namespace, trained: Trained) -> None:
    """Train until the time or the iterations are used up."""
    launched: collections.deque[Launched] = collections.deque()
    ends_s = float("inf")
    for n in range(options.iterations):
        launched.append(Launched(step()))
        if n + 1 == options.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)  # what was launched may still run
        if n + 1 == options.lost_at:
            lose_context(options)
        if len(launched) > AHEAD or n == 0:
            trained.end(launched.popleft())
        if n == 0:
            ends_s = time.monotonic() + options.seconds
        if time.monotonic() > ends_s:
            break
    while launched:
        trained.end(launched.popleft())


def lose_context(options: argparse.Namespace) -> None:
    """Let a kernel fault, and live on without a context for the time of the training, as a prompt would."""
    try:
        torch.zeros(1, device=options.device)[torch.ones(1, dtype=torch.int64, device=options.device)].item()
    except (RuntimeError, IndexError) as error:
        sys.stdout.write(f"the context is lost: {str(error).partition(chr(10))[0]}\n")
        sys.stdout.flush()
    time.sleep(options.seconds)
    os._exit(0)  # what PyTorch would do at its end needs a context


def is_lack(error: BaseException) -> bool:
    """Tell whether an error says that memory lacks: PyTorch's own, or of a library that asked for some."""
    said = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        word in said for word in ("out of memory", "alloc_failed", "allocate memory")
    )


def counted() -> dict[str, int]:
    """Return what Zico's heap has counted, zeros for a job without one."""
    session = importlib.import_module("zico.job.session").current() if "zico.job.session" in sys.modules else None
    record: Any = {} if session is None else session.heap.record[0]
    return {name: 0 if session is None else int(record["streams"][name]) for name in ("marks", "failures")}


def used_bytes() -> int | None:
    """Return what is used of the first GPU, by whomever, ``None`` where NVIDIA's management library does not know."""
    from ballast import device_use

    use = device_use()
    return None if use is None else use.used_bytes


class Stages:
    """How long each stage of the job took, in seconds."""

    def __init__(self) -> None:
        """Begin when the process did."""
        age_s = time.time() - psutil.Process().create_time()
        self.seconds = {"python_s": age_s - (time.perf_counter() - _BEGUN_S), "import_s": IMPORT_S}
        self._at_s = time.perf_counter()

    def end(self, name: str) -> None:
        """End a stage; the next one begins."""
        now_s = time.perf_counter()
        self.seconds[name] = now_s - self._at_s
        self._at_s = now_s


def timed(stages: Stages, trained: Trained, begun_s: float) -> dict[str, Any]:
    """Return the times of a training: of each iteration behind the first, their mean and their median."""
    ends_s = trained.ends_s
    if ends_s:
        stages.seconds["first_iteration_s"] = ends_s[0] - begun_s
    steps_s = np.diff(ends_s)
    return {
        "stages": {name: round(value, 4) for name, value in stages.seconds.items()},
        "iterations": len(ends_s),
        "first_end_s": ends_s[0] if ends_s else None,
        "steps_us": (steps_s * 1e6).round().astype(int).tolist(),
        "mean_ms": float(steps_s.mean() * 1e3) if len(steps_s) else None,
        "median_ms": float(np.median(steps_s) * 1e3) if len(steps_s) else None,
        "longest_ms": float(steps_s.max() * 1e3) if len(steps_s) else None,
    }


def memory(options: argparse.Namespace, before_bytes: int | None) -> dict[str, Any]:
    """Return the most that PyTorch took of a GPU, and what a context took beside it where that can be known."""
    if not torch.cuda.is_initialized():  # the host, or a GPU without room for a context
        return {}
    names = ("max_memory_reserved", "max_memory_allocated")
    found: dict[str, int | None] = {name: int(getattr(torch.cuda, name)()) for name in names}
    if options.gauge:
        after_bytes = used_bytes()
        found["used_before_bytes"], found["used_after_bytes"] = before_bytes, after_bytes
        if before_bytes is not None and after_bytes is not None:
            found["context_bytes"] = after_bytes - before_bytes - int(torch.cuda.memory_reserved())
    return found


def main() -> None:
    """Train and write the losses."""
    options = parsed()
    stages = Stages()
    ready.wait(options.go)
    stages.end("waited_s")
    on_gpu = options.device != "cpu"
    before_bytes = used_bytes() if options.gauge and on_gpu else None
    trained, error, begun_s = Trained(), "", time.monotonic()
    try:
        if options.at_most and on_gpu:
            total_bytes = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.at_most / total_bytes))
        torch.empty(1, device=options.device)
        stages.end("first_call_s")
        error = refused(options) if options.oom else ""
        step = build(options)
        stages.end("build_s")
        begun_s = time.monotonic()
        train(loaded(step, options) if options.workers else step, options, trained)
    except (RuntimeError, MemoryError) as lack:  # PyTorch's error on a GPU is a RuntimeError
        if not is_lack(lack):
            raise
        trained.error = str(lack).partition("\n")[0]
        sys.stdout.write(f"out of memory: {trained.error}\n")
        sys.stdout.flush()
    if options.losses:
        options.losses.write_text(json.dumps([loss.hex() for loss in trained.losses]))
    if options.figures:
        figures = {**timed(stages, trained, begun_s), "out_of_memory": trained.error, "refused_by": error}
        figures |= {**counted(), **memory(options, before_bytes)}
        part = options.figures.with_name(f"{options.figures.name}.part")  # whole whenever it is there
        part.write_text(json.dumps(figures))
        part.replace(options.figures)


if __name__ == "__main__":
    main()
