"""A sweep with a real PyTorch job that is too large for the pool: it is tried again, alone."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cpu.support.zico_process import ZicoRun, python

from zico.base.rundir import SOCKET_NAME
from zico.broker.client import BrokerClient
from zico.broker.protocol.messages import Change

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("torch")

MIB = 1 << 20
SCRIPT = """
import torch

weight = torch.nn.Parameter(torch.ones(40 << 18))
optimizer = torch.optim.SGD([weight], lr=0.5)
for _ in range(3):
    optimizer.zero_grad()
    (weight * weight).mean().mul(weight.numel()).backward()
    optimizer.step()
print("weight", float(weight.detach().abs().max()), flush=True)
"""


@pytest.fixture
def held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Write the script where the test runs, and give what lets a job end that reads the fifo."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    os.mkfifo("fifo")
    end = os.open("fifo", os.O_RDWR)
    yield end
    os.close(end)


def test_a_torch_job_without_memory_runs_again_alone_once(held_up: int) -> None:
    """It fits when more memory is there for its second try. That a third never comes: ``test_sweep.py``."""
    jobs = {"large": shlex.join([sys.executable, "train.py"]), "other": python("open('fifo').readline()")}
    Path("jobs.json").write_text(json.dumps({"jobs": [{"name": job, "command": jobs[job]} for job in jobs]}))
    words = ("--budget", "32MiB", "--most", "256MiB", "--save", "none", "--at-most", "2")
    with ZicoRun(*words, "--jobs-file", "jobs.json", "--json", "r.json") as run:
        run.read_until("large ran out of memory: it runs again, alone, after all others")
        assert "DefaultCPUAllocator: can't allocate memory" in run.stderr
        (path,) = run.runtime.glob(f"zico/run-*/{SOCKET_NAME}")
        with BrokerClient(path) as client:
            client.change(Change(budget_bytes=256 * MIB))
        os.write(held_up, b"\n")
        assert (run.finish(), run.leftovers) == (0, [])
        assert run.stderr.count("ran out of memory: it runs again") == 1
        assert "large+again | weight 0.0" in run.stdout
    found = {job["name"]: job for job in json.loads(Path("r.json").read_text())["jobs"]}
    told = {
        name: [job[key] for key in ("exit_code", "tries", "alone", "ran_out_of_memory")] for name, job in found.items()
    }
    assert told == {"large": [0, 2, True, False], "other": [0, 1, False, False]}
    assert found["large"]["peak_bytes"] > 32 * MIB
