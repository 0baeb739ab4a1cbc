"""``zico run`` on several devices: a broker for each, jobs on all of them, and what is said of that."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu.support.zico_process import DEADLINE_S, ZicoRun, descendants, fifos, python, survivors
from process.support.cuda_twin import compile_once, environment
from support.harness import PROCESS

SWEEP_JOB = PROCESS / "sweep_job.py"
MIB = 1 << 20
TWO = ("--device", "host:0,host:1")
JOB = python("""
import ctypes
from zico.heap import allocator
from zico.job.session import attach
joined = attach("test")
heap, size = joined.heap.record[0], joined.membership.region_bytes
seen = 0
for iteration in range(20):
    held = [allocator.allocate(heap, size, 64) for _ in range(3)]
    for address in held:
        ctypes.memset(address, iteration + 1, size)
    seen += sum(ctypes.string_at(address + size - 1, 1)[0] for address in held)
    for address in held:
        allocator.free(heap, address)
    allocator.mark(heap)
print("seen", seen, flush=True)
""")


def report_of(*words: str, **environ: str) -> dict[str, Any]:
    """Return the report of a run of four jobs that has ended well, without a process or a file left."""
    with ZicoRun(*words, "--quiet", "--json", "r.json", JOB, JOB, JOB, JOB, **environ) as run:
        below: set[int] = set()
        run.read_until("seen")
        below |= set(descendants(run.process.pid))
        code = run.finish()
        assert (code, survivors(list(below)), run.leftovers) == (0, [], []), run.stderr
        assert run.stdout.count("seen 630") == 4
    found: dict[str, Any] = json.loads(Path("r.json").read_text())
    return found


def test_four_jobs_on_two_devices_are_two_on_each(tmp_path: Path) -> None:
    """Neither device exceeds its budget, which holds one job's peak and no second; results are those of one device."""
    with contextlib.chdir(tmp_path):
        two, one = report_of(*TWO, ZICO_BUDGET="16MiB"), report_of(ZICO_BUDGET="16MiB")
    assert [job["device"] for job in two["jobs"]] == ["host:0", "host:1", "host:0", "host:1"]
    assert [(pool["device"], pool["n_jobs"], pool["budget_bytes"]) for pool in two["pools"]] == [
        ("host:0", 2, 16 * MIB),
        ("host:1", 2, 16 * MIB),
    ]
    for pool in (*two["pools"], *one["pools"]):
        assert 12 * MIB <= pool["peak_granted_bytes"] <= 16 * MIB
        assert 0 < pool["peak_physical_bytes"] <= 16 * MIB
    assert two["pool"]["peak_granted_bytes"] == sum(pool["peak_granted_bytes"] for pool in two["pools"])
    assert {job["device"] for job in one["jobs"]} == {"host"}
    assert [job["iterations"] for job in two["jobs"]] == [job["iterations"] for job in one["jobs"]]


def statuses(run: ZicoRun) -> list[dict[str, Any]]:
    """Return what ``zico status --json`` says of a run's brokers."""
    argv = [sys.executable, "-m", "zico", "status", "--json"]
    environ = os.environ | {"XDG_RUNTIME_DIR": str(run.runtime)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_sweep_runs_on_two_devices(tmp_path: Path) -> None:
    """Three jobs run at once over both; status shows both brokers; the next starts where one ends."""
    command = shlex.join([sys.executable, str(SWEEP_JOB), "2", "fifo{x}"])
    words = (*TWO, "--at-most", "3", "--grid", "x=1..4", "--json", "r.json", command)
    with fifos(tmp_path, "1234") as ends, ZicoRun(*words) as run:
        for x in "123":
            run.read_until(f"x={x} | begun")
        assert "x=1 starts on host:0" in run.stderr
        assert "x=2 starts on host:1" in run.stderr
        shown = {status["device"]: {job["name"] for job in status["jobs"]} for status in statuses(run)}
        assert set(shown) == {"host:0", "host:1"}
        assert (shown["host:0"] | shown["host:1"], shown["host:0"] & shown["host:1"]) == ({"x=1", "x=2", "x=3"}, set())
        alone = "host:0" if len(shown["host:0"]) == 1 else "host:1"
        (name,) = shown[alone]
        os.write(ends[name[-1]], b"\n")
        run.read_until(f"x=4 starts on {alone}")
        for end in ends.values():
            os.write(end, b"\n")
        assert (run.finish(), run.leftovers) == (0, [])
        results = json.loads(Path("r.json").read_text())
        assert "|device" in run.stderr.replace(" ", "")
    assert results["device"] == "host:0,host:1"
    assert [job["device"] for job in results["jobs"][:2]] == ["host:0", "host:1"]


SEES_ITS_OWN = """
import os
from zico.device.cuda.facts import device_uuids
everything = device_uuids()
if os.environ.get("CUDA_VISIBLE_DEVICES") in everything:
    bindings.use(Twin(1, first=everything.index(os.environ["CUDA_VISIBLE_DEVICES"]), **{settings!r}))
"""
TRAIN = """
from zico.job import session
from zico.device.cuda import bindings
from zico.device.cuda.facts import device_uuids
from zico.heap.cuda import on_stream
joined = session.attach("trainer", kind="cuda")
twin = bindings.default_api()
twin.cuCtxSetCurrent(twin.cuDevicePrimaryCtxRetain(0)[1])
stream = int(twin.cuStreamCreate(1)[1])
address = on_stream.allocate_on(joined.heap.record[0], 2 << 20, stream)
assert int(twin.cuMemsetD8Async(address, 7, 2 << 20, stream)[0]) == 0
on_stream.free_on(joined.heap.record[0], address, stream)
session.step()
print(session.status()["device"], "as", *device_uuids(), flush=True)
"""


def test_jobs_on_two_gpus_see_their_own_one(tmp_path: Path) -> None:
    """One lands on each, and finds that GPU as its first and only one."""
    compile_once()
    settings = {"total_bytes": 256 * MIB, "attributes": {"COMPUTE_CAPABILITY_MAJOR": 6}}
    twin = environment(tmp_path / "site", SEES_ITS_OWN.format(settings=settings), devices=2, **settings)
    words = ("--device", "cuda:0,cuda:1", "--region", "2MiB", "--name", "a", "--name", "b")
    with ZicoRun(*words, python(TRAIN), python(TRAIN), **twin) as run:
        assert (run.finish(), run.leftovers) == (0, []), run.stderr
    assert "a | cuda:0 as GPU-7a69636f-2074-7769-6e20-646576696365\n" in run.stdout
    assert "b | cuda:1 as GPU-01010101-0101-0101-0101-010101010101\n" in run.stdout
    assert run.stderr.count("the jobs take turns on the GPU") == 1
