"""``benchmarks/colocation.py`` on a GPU, which is the driver's software twin: what is measured is what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from process.support.cuda_twin import PATIENCE_S, ROOT, compile_once, environment, nvml

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
SECONDS = 0.5
JOB = """
import json, os, sys, time
if "ZICO_SOCKET" in os.environ:
    from zico.heap.cuda import on_stream
    from zico.job import session
    joined = session.attach("trainer", kind="cuda")
    heap = joined.heap.record[0]
count, seconds = int(sys.argv[sys.argv.index("--iterations") + 1]), {seconds}
end_s, losses = time.monotonic() + seconds, []
for n in range(count):
    if "ZICO_SOCKET" in os.environ:
        held = [int(on_stream.allocate_on(heap, 3 << 20, 0)) for _ in range(8)]
        assert all(address > 0 for address in held), held
        for address in held:
            on_stream.free_on(heap, address, 0)
        session.step()
    print("iteration", n + 1, "loss 1.0", flush=True)
    losses.append("0x1.0p+0")
    time.sleep(0.01)  # an iteration takes some time
    if time.monotonic() > end_s:
        break
with open(sys.argv[sys.argv.index("--losses") + 1], "w") as file:
    json.dump(losses, file)
"""
MEASURED = """
import json, sys
from colocation import Configuration, Group, Runner
from together import Job
jobs = tuple(Job(name, {job!r}) for name in ("a", "b"))
runner = Runner(Group("a+b", jobs, "cuda:0"), {seconds}, 1)
report = runner.run(Configuration("zico", 70))["report"]
json.dump({{"measured": runner.region_bytes, "peaks": runner.peaks_bytes, "report": report}}, sys.stdout)
"""


def test_peaks_are_measured_with_the_regions_of_the_runs(tmp_path: Path) -> None:
    """A share is one of what the jobs hold at that size of a region, though a pool without a budget has larger ones."""
    compile_once()
    (tmp_path / "job.py").write_text(JOB.format(seconds=SECONDS))
    settings = {"total_bytes": 4 * GIB, "attributes": {"COMPUTE_CAPABILITY_MAJOR": 6}}
    environ = os.environ | environment(tmp_path / "site", nvml(4 * GIB), **settings)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED.format(job=str(tmp_path / "job.py"), seconds=SECONDS)],
        cwd=ROOT / "benchmarks",
        env=environ | {"PYTHONPATH": os.pathsep.join((environ["PYTHONPATH"], str(ROOT / "benchmarks")))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    report = found["report"]
    assert report["pool"]["region_bytes"] == found["measured"]
    assert report["budget_bytes"] <= 0.7 * sum(found["peaks"]) < report["budget_bytes"] + found["measured"]
