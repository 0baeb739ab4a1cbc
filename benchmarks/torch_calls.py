"""What do PyTorch's calls for memory cost in a pool, against its own allocator?

Two processes take turns, one in a pool and one outside, so that what else the machine does falls on
both alike. Each times allocations by ``timeit``, and ``fork``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import torch_worker

from zico.base.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "What do PyTorch's calls for memory cost in a pool, against its own allocator?"
END_S = 20.0
START_S = 300.0
"""For a worker's start, which compiles the first time."""
PAIR_BYTES = (512, 64 << 10, 1 << 20, 20 << 20)
PAIRS = 1000
"""In a batch: enough that reading the clock does not count."""
ANSWER_S = 120.0
"""For one answer of a worker: some seconds at most, where it does not hang."""


@contextlib.contextmanager
def worker(
    script: Path, *arguments: str, pooled: bool, device: str = "host", budget: str = "1GiB"
) -> Iterator[Connection]:
    """Start a worker, under ``zico run`` if ``pooled``; it ends with the block.

    The worker is told the address of a socket, PyTorch's name of the device, and the arguments.
    """
    with tempfile.TemporaryDirectory(prefix="zico-calls-") as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/socket")
        listener.listen()
        run = (*common.ZICO, "run", "--quiet", "--device", device, "--budget", budget, "--") if pooled else ()
        kind = "cpu" if device == "host" else "cuda"
        argv = (*run, sys.executable, str(script), f"{directory}/socket", kind, *arguments)
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
        try:
            with accepted(listener, process) as connection:
                if answer(connection) is not pooled:
                    message = f"the worker is {'not ' if pooled else ''}in a pool"
                    raise RuntimeError(message)
                yield connection
        finally:
            _end(process)


def accepted(listener: socket.socket, process: subprocess.Popen[bytes]) -> Connection:
    """Return the worker's connection.

    Raises:
        TimeoutError: The worker has not connected in time.
        RuntimeError: It ended before.
    """
    end = os.pidfd_open(process.pid)
    try:
        ready = wait([listener, end], START_S)
    finally:
        os.close(end)
    if listener in ready:
        return Connection(listener.accept()[0].detach())
    if ready:
        message = "the worker ended before it connected"
        raise RuntimeError(message)
    message = f"the worker did not connect within {START_S:.0f} s"
    raise TimeoutError(message)


def answer(connection: Connection) -> Any:  # noqa: ANN401 - whatever was asked for
    """Return what a worker answers.

    Raises:
        TimeoutError: It has not answered in time.
        EOFError: It ended.
    """
    if not connection.poll(ANSWER_S):
        message = f"the worker did not answer within {ANSWER_S:.0f} s"
        raise TimeoutError(message)
    return connection.recv()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a worker that nobody asks any more, kill it if it does not end, and pass its errors on if it failed."""
    for stop in (process.terminate, process.kill):
        try:
            _, errors = process.communicate(timeout=END_S)
            break
        except subprocess.TimeoutExpired:
            stop()
    else:
        _, errors = process.communicate(timeout=END_S)
    if process.returncode:
        sys.stderr.buffer.write(errors)


def measure(rounds: int, batches: int, live_mib: int = 0, device: str = "host") -> dict[str, Any]:
    """Return what PyTorch's calls cost in both workers, round by round, in nanoseconds.

    On a GPU nobody forks; its allocator is also called as PyTorch's C++ calls it.
    """
    asks: dict[str, tuple[str, tuple[Any, ...]]] = {
        name: ("statement", (name, batches, 100)) for name in torch_worker.STATEMENTS
    }
    if device == "host":
        asks |= {f"fork, {mib} MiB live": ("fork", (mib, 5)) for mib in (0, live_mib)}
    else:
        asks |= {f"pair, {format_bytes(size)}": ("pairs", (size, batches, PAIRS)) for size in PAIR_BYTES}
    raw: dict[str, dict[str, list[dict[str, float]]]] = {name: {"plain": [], "zico": []} for name in asks}
    script = Path(torch_worker.__file__)
    with (
        worker(script, pooled=False, device=device) as plain,
        worker(script, pooled=True, device=device) as pooled,
    ):
        for index in range(rounds):
            ends = [("plain", plain), ("zico", pooled)]
            for name, ask in asks.items():
                for kind, connection in ends if index % 2 == 0 else reversed(ends):
                    connection.send(ask)
                    raw[name][kind].append(_quantiles(answer(connection)))
    return {name: {**kinds, "ratio": ratio(kinds)} for name, kinds in raw.items()}


def ratio(kinds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the spread over rounds of the time in the pool over the time outside it."""
    pairs = zip(kinds["zico"], kinds["plain"], strict=True)
    return common.spread(zico["median_ns"] / plain["median_ns"] for zico, plain in pairs)


def _quantiles(values: list[float]) -> dict[str, float]:
    return {"median_ns": common.percentile(values, 50), "p99_ns": common.percentile(values, 99)}


def text_of(figures: dict[str, Any]) -> str:
    """Return what ``measure`` found as Markdown."""
    rows = []
    for name, kinds in figures.items():
        medians = (np.median([one["median_ns"] for one in kinds[kind]]) / 1e3 for kind in ("plain", "zico"))
        ratios = kinds["ratio"]
        span = f"{ratios['min']:.2f}-{ratios['max']:.2f}"
        rows.append((name, *(f"{median:.2f}" for median in medians), f"{ratios['median']:.2f}", span))
    return common.table(("PyTorch, us", "plain", "in the pool", "ratio", "min-max"), rows)


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of the two processes")
    parser.add_argument("--device", default="host", help="host or cuda (default: host)")
    parser.add_argument("--name", default="torch_calls", help="of the results")
    options = parser.parse_args()
    rounds, batches, live_mib = (2, 5, 8) if options.smoke else (options.rounds, 50, 256)
    result = common.document(options.name, QUESTION, {"rounds": rounds, "batches": batches, "device": options.device})
    result["torch"] = measure(rounds, batches, live_mib, options.device)
    common.write(result, text_of(result["torch"]), common.output_directory(options))


if __name__ == "__main__":
    main()
