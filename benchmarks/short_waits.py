"""Does a job compute more slowly because its processor rests for a moment in each iteration?

Two jobs under a limit wait for a few hundredths of each iteration. This measures what such waits
cost besides their length, without Zico: two plain processes train at the same time, first without a
rest, then each with a sleep behind every iteration, and so on in turns. The figure is the
processor's time of an iteration with the sleep, over the mean of the turns before and after.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

QUESTION = "Does a job compute more slowly because its processor rests for a moment in each iteration?"
JOBS = 2
REST_S = 0.02
"""Some 4 % of an iteration, as two equal jobs wait in 72 % of the sum of their peaks."""
WARM_UP = 4
DEADLINE_S = 300.0


def job(connection: Connection, depth: int, batch: int, seed: int) -> None:
    """Train for as long as each message says, with such a rest; answer the iterations and times of each stretch."""
    sys.path.insert(0, str(common.ROOT / "examples"))
    torch: Any = importlib.import_module("torch")
    example: Any = importlib.import_module("digits_resnet")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = example.ResNet(depth, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    digits = example.Digits()
    images, labels = (torch.stack(of) for of in zip(*(digits[i] for i in range(batch)), strict=True))
    for _ in range(WARM_UP):
        example.train_step(model, optimizer, images, labels)
    connection.send("ready")
    while message := connection.recv():
        seconds, rest_s = message
        began_s, used_s = time.monotonic(), time.process_time()
        iterations = 0
        while time.monotonic() - began_s < seconds:
            example.train_step(model, optimizer, images, labels)
            iterations += 1
            if rest_s:
                time.sleep(rest_s)
        connection.send((iterations, time.process_time() - used_s, time.monotonic() - began_s))


def turns(rounds: int, seconds: float, depth: int, batch: int) -> list[list[tuple[int, float, float]]]:
    """Return what each job did in each stretch: without a rest first and last, and with one in every other."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(_started(depth, batch, seed)) for seed in range(JOBS)]
        for end in ends:
            _answer(end)
        found = []
        for rest_s in [*itertools.chain.from_iterable([(0.0, REST_S)] * rounds), 0.0]:
            for end in ends:
                end.send((seconds, rest_s))
            found.append([_answer(end) for end in ends])
            common.note(f"rest {rest_s:g} s: " + ", ".join(f"{used / n * 1e3:.0f} ms" for n, used, _ in found[-1]))
    return found


@contextlib.contextmanager
def _started(depth: int, batch: int, seed: int) -> Any:  # noqa: ANN401 - the connection
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=job, args=(theirs, depth, batch, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join(DEADLINE_S)


def _answer(end: Connection) -> Any:  # noqa: ANN401 - what it says
    if not end.poll(DEADLINE_S):
        message = f"a job did not answer within {DEADLINE_S:g} s"
        raise TimeoutError(message)
    return end.recv()


def ratios(found: Sequence[Sequence[tuple[int, float, float]]]) -> list[float]:
    """Return for each stretch with a rest the processor's time of an iteration over that of its neighbours in time."""
    each_s = [statistics.mean(used_s / n for n, used_s, _ in stretch) for stretch in found]
    return [each_s[i] / statistics.mean((each_s[i - 1], each_s[i + 1])) for i in range(1, len(each_s) - 1, 2)]


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    of = result["ratio"]
    rows = [(f"{REST_S * 1e3:.0f} ms", str(of["n"]), f"{of['median']:.3f}", f"{of['min']:.3f} to {of['max']:.3f}")]
    return common.table(("rest behind each iteration", "turns", "processor's time over none, median", "spread"), rows)


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=16, help="stretches with a rest")
    options = parser.parse_args()
    rounds, seconds, depth, batch = (1, 0.5, 8, 32) if options.smoke else (options.rounds, 6.0, 110, 128)
    settings = {"rounds": rounds, "seconds": seconds, "rest_s": REST_S, "jobs": JOBS, "depth": depth, "batch": batch}
    result = common.document("short_waits", QUESTION, settings)
    result["stretches"] = turns(rounds, seconds, depth, batch)
    result["ratio"] = common.spread(ratios(result["stretches"]))
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
