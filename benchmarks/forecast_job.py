"""Train small models (``models/small.py``) in a pool, each in a process of its own: what ``forecast.py`` runs for real.

Each line of standard input is a job, in JSON. Its process is forked from this one, which has loaded
PyTorch and used nothing of it, and joins the pool as any job does. It prints what it held.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it

from zico.base.settings import DEFAULT_REGION_BYTES
from zico.base.warming import JOBS, load
from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

sys.path.insert(0, str(Path(__file__).parent / "models"))

import small

THREADS = 1


def train(socket: Path, iterations: int, build: dict[str, Any]) -> dict[str, int]:
    """Join the pool, train, and return the most that this process held."""
    os.environ.update(job_environment({}, socket, "job", wish=Wish("none")))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # by this process: another one would join, too
    from zico.adapters.torch import enable  # joins

    joined = enable()
    if joined is None:
        raise SystemExit(f"forecast_job.py: no pool at {socket}")
    step = small.build(**build)
    for _ in range(iterations):
        step()
    record = joined.record
    figures = {"live_bytes": int(record["peak_live_bytes"]), "iterations": int(record["iteration"])}
    return {**figures, "held_bytes": int(record["peak_held"]) * DEFAULT_REGION_BYTES}


def main() -> None:
    """Serve until standard input ends."""
    socket, iterations = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(THREADS)
    load(*JOBS)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            print(json.dumps(train(socket, iterations, json.loads(line))), flush=True)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            print(json.dumps({"failed": code}), flush=True)


if __name__ == "__main__":
    main()
