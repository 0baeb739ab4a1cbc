"""A sweep of many jobs that do nothing, by hand: ``many_jobs.py [JOBS]``, 1,000 by default.

Prints what a job costs in each quarter of the sweep, and the most memory of ``zico run``. It ends
with 1 if a job is missing, or if the last quarter is twice as slow as the second one: the first has
the start of the pool in it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_DEADLINE_S = 3600.0
_LOOK_S = 0.1


def main() -> int:
    """Run the sweep and look at its file while it grows."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory(prefix="zico-") as folder:
        command = [sys.executable, "-P", "-m", "zico", "run", "--quiet", "--at-most", "4", "--budget", "256MiB"]
        command += ["--report", "report", "--grid", f"n=1..{n}", "--", "true", "{n}"]
        began_s = time.monotonic()
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
            ended_s = [began_s]
            while sweep.poll() is None and time.monotonic() < began_s + _DEADLINE_S:
                ended = _results(Path(folder))
                ended_s += [time.monotonic()] * (4 * len(ended) // n + 1 - len(ended_s))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    sweep.wait(_LOOK_S)
            sweep.kill()
        names = {result["name"] for result in _results(Path(folder)) if result["exit_code"] == 0}
        ended_s += [time.monotonic()] * (5 - len(ended_s))
    cost_ms = [(end - begin) / (n / 4) * 1e3 for begin, end in itertools.pairwise(ended_s)]
    most_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    quarters = ", ".join(f"{one:.0f}" for one in cost_ms)
    sys.stdout.write(f"{len(names)} of {n} jobs; ms a job in each quarter: {quarters}; zico run: {most_mib} MiB\n")
    return int(len(names) < n or cost_ms[3] > 2 * cost_ms[1])


def _results(folder: Path) -> list[dict[str, object]]:
    """Return the whole lines of the sweep's file that tell how a job ended."""
    for path in folder.glob("report/*.jsonl"):
        return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True)[1:] if line.endswith(b"\n")]
    return []


if __name__ == "__main__":
    sys.exit(main())
