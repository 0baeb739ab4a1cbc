"""What tests of planning processes share: an iteration to plan for, and planners that never come to an end."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from zico.swap import planning_process
from zico.swap.observed import Observed
from zico.swap.planning_process import PlanningProcess
from zico.tiers.layout import Rates

MIB = 1 << 20
RATES = Rates(1e9, 1e9, 0.0, 0.0)
LIMIT_BYTES = 20 * MIB
ENDLESS = planning_process._BEGIN.replace(
    "serve(int",
    """from zico.swap import schedule as swap_schedule
swap_schedule.choose = lambda _seen, _limit, _rates, marker: (open(marker, "w").close(), sum(iter(int, 1)))
serve(int""",
)
"""Its planner is machine code that holds the GIL for ever; makes the file that is given as the planner's name."""


def trained(n: int = 8) -> Observed:
    """Return an iteration that saves ``n`` tensors of 4 MiB, and uses and frees them from the last on."""
    sequence = [2 * i for i in range(n)] + [2 * i + 1 for i in reversed(range(n))]
    up = 4 * MIB * np.arange(1, n + 1)
    load = np.concatenate([up, [up[-1]], up[::-1][:-1], [0]])
    ticks = (*range(n), *range(n + 1, 2 * n + 1))
    return Observed(tuple(sequence), (4 * MIB,) * n, ticks, load, np.arange(2 * n + 1) * 10_000_000)


# -- jobs: python planning_jobs.py WHAT MARKER -----------------------------------------------------


def _say(*pids: int) -> None:
    sys.stdout.write(" ".join(map(str, pids)) + "\n")
    sys.stdout.flush()


def _stay(idle: PlanningProcess) -> None:
    """Have C code fork a process that keeps all descriptors; say who there is, and wait to be killed."""
    import ctypes
    import signal

    idle.choose(trained(), LIMIT_BYTES, RATES, "doa")
    holder = ctypes.CDLL(None).fork()
    if holder == 0:
        ctypes.CDLL(None).pause()
    _say(idle.pid, holder)
    signal.pause()


def _plan(busy: PlanningProcess, marker: str) -> None:
    """Ask a planner that never answers, in a thread as a learner's is; end as soon as it plans."""
    import threading

    from support.harness import PATIENCE_S, until
    from zico.base.background import work_lock

    lock = work_lock()

    def work() -> None:
        with lock:
            busy.choose(trained(), LIMIT_BYTES, RATES, marker)

    threading.Thread(target=work, daemon=True).start()
    until(lambda: Path(marker).exists(), PATIENCE_S, "a planner plans")
    _say(busy.pid)


if __name__ == "__main__":
    if sys.argv[1] == "stay":
        _stay(PlanningProcess())
    _plan(PlanningProcess(begin=ENDLESS), sys.argv[2])
    if sys.argv[1] == "plan on":
        import signal

        signal.pause()
