"""``--isolate`` from the command line: jobs in processes of their own, of which one dies with its memory full."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from cpu.support.zico_process import ZicoRun, python
from process.support.cuda_twin import environment
from process.support.cuda_twin_broker import SETTINGS, Broker
from support.harness import compile_once
from zico.kernels.compilation import COMPUTE_CAPABILITY

from zico.broker.__main__ import SCRUBS_FROM

JOB = """
import ctypes, os, signal
from zico.job import session
from zico.heap import allocator

SIZE = 48 << 20
heap = session.attach("light").heap.record[0]

def take():
    address = allocator.allocate(heap, SIZE, 64)
    assert 0 < address - heap["base"] < heap["spill_offset"], address
    return address
"""
FILLS = f"""{JOB}
ctypes.memset(take(), 0xA5, SIZE)
open({{fifo!r}}, "w").close()
print("filled by", os.getpid(), flush=True)
signal.pause()
"""
LOOKS = f"""{JOB}
open({{fifo!r}}).close()
print("isolated", int(session.status()["isolated"]), flush=True)
print("found", SIZE - ctypes.string_at(take(), SIZE).count(0), flush=True)
"""


@pytest.mark.parametrize("options", [("--isolate",), ()], ids=["isolated", "not isolated"])
def test_nobody_finds_what_a_killed_job_wrote(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Invariant 11: the job that gets a killed one's memory finds zeros; without ``--isolate`` the other's bytes."""
    compile_once()
    fifo = str(tmp_path / "filled")
    os.mkfifo(fifo)
    with ZicoRun(*options, python(FILLS.format(fifo=fifo)), python(LOOKS.format(fifo=fifo))) as run:
        os.kill(run.number_after("filled by"), signal.SIGKILL)
        assert run.number_after("isolated") == bool(options)
        found = run.number_after("found")
        assert run.finish() == 128 + signal.SIGKILL
    assert (found == 0) == bool(options), found
    assert ("isolate on (--isolate)" in run.stderr) == bool(options)


@pytest.mark.parametrize("too_old", [True, False])
def test_a_gpu_that_is_too_old_to_scrub_is_refused(*, too_old: bool) -> None:
    """The broker says before any job starts that a GPU cannot isolate, and serves one that can."""
    attributes = {"COMPUTE_CAPABILITY_MAJOR": 6 if too_old else 7}
    with tempfile.TemporaryDirectory(prefix="zt-") as directory:
        environ = environment(Path(directory) / "site", attributes=attributes, **SETTINGS)
        broker = Broker(Path(directory), environ, "--isolate")
        with broker.process, broker.client:
            if too_old:
                code, errors = broker.process.finish()
                assert code == 2
                assert "--isolate: cuda:0 has compute capability 6.0, and scrubbing memory needs 7.0" in errors
            else:
                assert broker.process.line() == "ready"


def test_the_broker_knows_what_the_kernels_need() -> None:
    """The least compute capability that the broker takes is that of the kernels."""
    assert SCRUBS_FROM == COMPUTE_CAPABILITY
