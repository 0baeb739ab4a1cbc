"""Are the numbers the same bits in a pool on a GPU? All checks run at once: none of them is timed.

Each check runs its programs without Zico and with it, in less memory than they want where that is
the question, and appends a line of its own when it ends. A check that has passed in an earlier
lease is not run again. A library or a tool that is not installed is named; that is no pass.
"""

from __future__ import annotations

import argparse
import concurrent.futures as cf
import dataclasses
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import record

from zico.base.mps import CONTROL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Check = Callable[["Programs"], dict[str, Any]]

SANITIZER = "compute-sanitizer"
PART = "bits"
ALL = "programs"
"""The name of the line behind all others."""
ROOMY = "3GiB"
"""The budget of a program that is to have all that it wants: a dozen of them fit a GPU."""
SHARE = 75
"""Of the sum of the peaks, in percent, where programs share."""
LIMIT = 60
"""Of its peak, in percent, what a program may hold that saves."""
UNIT_BYTES = 4 << 20
"""What budgets are rounded to."""
AT = "12"
"""The iteration at which a job dies, or loses its context."""
STALL_S = 10.0
"""No iteration of a job may take longer while its neighbour lives without a context."""
KEPT = 300
"""Characters of what a failed command said last."""
_LOSS = re.compile(r"^(?:(?P<name>\S+) +\| )?(?P<line>iteration \d+ loss \S+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command went."""

    losses: dict[str, list[str]]
    """By the job's name; plain commands have none."""
    exit_code: int | None
    said: str
    jobs: list[dict[str, Any]]
    """What Zico's report says of each."""

    @property
    def of_first(self) -> list[str]:
        """Return the losses of the only job, or of the first one that printed any."""
        return next(iter(self.losses.values()), [])


class Programs:
    """The commands that checks run, each of them once."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Take where they run."""
        self.twin: bool = options.twin
        self._deadline_s: float = options.expected
        self._device = "host" if options.twin else "cuda:0"
        self._locks: dict[object, threading.Lock] = {}
        self._known: dict[object, Done] = {}
        self._guard = threading.Lock()

    # -- commands ----------------------------------------------------------------------------------

    def job(self, model: str, *extra: str, batch: int = 64, iterations: int = 30) -> tuple[str, ...]:
        """Return a command that trains a model of ``job.py``."""
        kind = "cpu" if self.twin else "cuda"
        if self.twin:
            batch, iterations = (2, 4) if model == "dcgan" else (16, 12)
        words = ("benchmarks/gpu/job.py", model, "--batch", str(batch), "--device", kind)
        return (sys.executable, *words, "--iterations", str(iterations), *extra)

    def arrays(self, library: str) -> tuple[str, ...]:
        """Return a command that trains with a library of arrays, with NumPy in a rehearsal."""
        words = ("numpy", "--iterations", "3") if self.twin else (library, "--iterations", "60")
        return (sys.executable, "benchmarks/gpu/array_job.py", *words)

    # -- runs --------------------------------------------------------------------------------------

    def plain(self, command: tuple[str, ...]) -> Done:
        """Run a command without Zico; the same command is run once."""
        return self._once(command, functools.partial(self._run, command))

    def alone(self, command: tuple[str, ...]) -> Done:
        """Run a command with Zico and with all the memory that it wants; the same command is run once."""
        return self._once(("alone", *command), functools.partial(self.pooled, [command], budget=ROOMY))

    def pooled(self, commands: Sequence[tuple[str, ...]], *told: str, budget: str) -> Done:
        """Run commands in one pool; jobs are named a, b, and so on."""
        with tempfile.TemporaryDirectory(prefix="zico-bits-") as folder:
            report = Path(folder, "report.json")
            argv = (*common.ZICO, "run", "--quiet", "--device", self._device, "--budget", budget, *told)
            names = [word for number in range(len(commands)) for word in ("--name", chr(ord("a") + number))]
            return self._run((*argv, "--json", str(report), *names, *map(shlex.join, commands)), report)

    def share_of(self, commands: Sequence[tuple[str, ...]], share: int = SHARE) -> str:
        """Return a share of the sum of what commands take alone, as a budget."""
        peak_bytes = sum(self.alone(command).jobs[0]["peak_bytes"] for command in commands)
        return f"{share * peak_bytes // 100 // UNIT_BYTES * UNIT_BYTES}B"

    def _once(self, key: object, run: Callable[[], Done]) -> Done:
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._known:
                self._known[key] = run()
            return self._known[key]

    def _run(self, argv: tuple[str, ...], report: Path | None = None) -> Done:
        try:
            done = subprocess.run(
                argv,
                cwd=common.ROOT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Done({}, None, f"longer than {self._deadline_s:.0f} s", [])
        losses: dict[str, list[str]] = {}
        for match in _LOSS.finditer(done.stdout):
            losses.setdefault(match["name"] or "", []).append(match["line"])
        jobs = json.loads(report.read_text())["jobs"] if report is not None and report.exists() else []
        return Done(losses, done.returncode, (done.stderr or done.stdout).strip()[-KEPT:], jobs)


# -- what is compared ------------------------------------------------------------------------------


def compared(alone: Sequence[Done], together: Done, *, outside: int = 0) -> dict[str, Any]:
    """Return whether jobs that shared a pool printed what each prints without Zico.

    All but ``outside`` of them must have been in the pool.
    """
    names = [chr(ord("a") + number) for number in range(len(alone))]
    found = [together.losses.get(name, []) for name in names]
    same = [bool(own) and own == one.of_first for own, one in zip(found, alone, strict=True)]
    fractions = [job["pool_fraction"] for job in together.jobs]
    were_in = sum(fraction > 0 for fraction in fractions)
    passed = all(same) and together.exit_code == 0 and were_in == len(alone) - outside
    figures = {"losses_equal": same, "losses": [len(own) for own in found], "exit_code": together.exit_code}
    figures |= {"pool_fraction": fractions, "exit_codes_alone": [one.exit_code for one in alone]}
    return figures | {"passed": passed, "said": "" if passed else together.said}


def prefix_kept(alone: Done, together: Done, name: str) -> dict[str, Any]:
    """Return whether a job whose neighbour failed printed what it prints alone, from the begin to the end."""
    found = together.losses.get(name, [])
    same = bool(found) and found == alone.of_first
    codes = [job["exit_code"] for job in together.jobs]
    return {"passed": same, "losses_equal": same, "losses": len(found), "exit_codes": codes, "said": together.said}


def is_lacking(module: str) -> dict[str, Any] | None:
    """Return the result of a check whose library is not installed, ``None`` where it is."""
    return None if find_spec(module) else {"passed": False, "why": f"{module} is not installed"}


# -- the checks ------------------------------------------------------------------------------------


def one(
    programs: Programs, command: tuple[str, ...], *told: str, before: tuple[str, ...] = (), needs: str = ""
) -> dict[str, Any]:
    """One program in a pool that has all that it wants; ``before`` stands before its command there."""
    lacking = is_lacking(needs) if needs else None
    if lacking:
        return lacking
    is_altered = bool(told or before)
    done = programs.pooled([(*before, *command)], *told, budget=ROOMY) if is_altered else programs.alone(command)
    return compared([programs.plain(command)], done)


def arrays(library: str) -> Check:
    """A library of arrays."""
    return lambda programs: one(programs, programs.arrays(library), needs=library)


def graph(way: str) -> Check:
    """A way to CUDA graphs in PyTorch, whose memory stays with the graph."""
    command = (sys.executable, "benchmarks/gpu/graph_job.py", way, "--iterations", "20")
    return lambda programs: one(programs, command)


def option(*words: str) -> Check:
    """PyTorch with further words for ``job.py``."""
    return lambda programs: one(programs, programs.job("dcgan", *words))


def isolated(programs: Programs) -> dict[str, Any]:
    """A job of a pool that clears memory before another job gets it."""
    return one(programs, programs.job("dcgan"), "--isolate")


def beside_jax(programs: Programs) -> dict[str, Any]:
    """PyTorch beside JAX in one pool that holds three quarters of what they want."""
    commands = [programs.job("dcgan"), programs.arrays("jax")]
    lacking = None if programs.twin else is_lacking("jax")
    if lacking:
        return lacking
    budget = programs.share_of(commands)
    alone = [programs.plain(command) for command in commands]
    found = compared(alone, programs.pooled(commands, budget=budget), outside=int(programs.twin))  # NumPy's
    return found | {"budget": budget}


def expandable(programs: Programs) -> dict[str, Any]:
    """A script whose environment asks PyTorch's allocator for expandable segments."""
    return one(programs, programs.job("dcgan"), before=("env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))


def sanitized(programs: Programs) -> dict[str, Any]:
    """A job whose kernels compute-sanitizer watches."""
    if not shutil.which(SANITIZER):
        return {"passed": False, "why": f"{SANITIZER} is not installed"}
    watching = (SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    return one(programs, programs.job("dcgan", iterations=5), before=watching)


def killed(programs: Programs) -> dict[str, Any]:
    """One of two jobs under MPS kills itself with work on the device; the other goes on."""
    if not programs.twin and not shutil.which(CONTROL):
        return {"passed": False, "why": f"{CONTROL} is not installed"}
    command = programs.job("dcgan")
    told = () if programs.twin else ("--mps",)
    dying = programs.job("dcgan", "--killed-at", "2" if programs.twin else AT)
    done = programs.pooled([dying, command], *told, budget=programs.share_of([command, command]))
    return prefix_kept(programs.plain(command), done, "b")


def lost(programs: Programs) -> dict[str, Any]:
    """One of two jobs loses its context and lives on; the other's stream must not wait for it."""
    seconds = 2 * STALL_S
    with tempfile.TemporaryDirectory(prefix="zico-bits-") as folder:
        figures = Path(folder, "figures.json")
        command = programs.job("dcgan", iterations=300)
        watched = (*command, "--figures", str(figures))
        losing = programs.job("dcgan", "--lost-at", AT, "--seconds", str(seconds))
        budget = programs.share_of([programs.job("dcgan"), programs.job("dcgan")])
        found = prefix_kept(programs.plain(command), programs.pooled([losing, watched], budget=budget), "b")
        longest_ms = json.loads(figures.read_text())["longest_ms"] if figures.exists() else None
    fast = longest_ms is not None and longest_ms < 1e3 * STALL_S
    return found | {"longest_ms": longest_ms, "passed": found["passed"] and fast}


def many_streams(programs: Programs) -> dict[str, Any]:
    """17 streams in a job whose tensors leave and come back."""
    command = programs.job("branches", batch=4096)
    limit = programs.share_of([command], LIMIT)
    done = programs.pooled([command], "--save", "swap", "--limit", f"a={limit}", budget=ROOMY)
    found = compared([programs.plain(command)], done)
    out_bytes = done.jobs[0]["saving"]["out_bytes"] if done.jobs else 0
    return found | {"limit": limit, "out_bytes": out_bytes, "passed": found["passed"] and out_bytes > 0}


CHECKS: dict[str, Check] = {
    "PyTorch beside JAX": beside_jax,
    "17 streams with swapping": many_streams,
    "a kill under MPS": killed,
    "a lost context beside a waiting stream": lost,
    "expandable_segments": expandable,
    "reduce-overhead": graph("compiled"),
    "a captured step": graph("captured"),
    "graphed callables": graph("callables"),
    "isolated": isolated,
    "loader workers": option("--workers", "2"),
    "a request that no device can serve": option("--oom"),
    "CuPy": arrays("cupy"),
    "JAX": arrays("jax"),
    "Numba": arrays("numba"),
}
SLOW: dict[str, Check] = {"compute-sanitizer": sanitized}
"""Only with ``--only``."""
REHEARSED = ("PyTorch beside JAX", "a kill under MPS")
"""The others run the same code, or need a GPU."""


def check(name: str, programs: Programs, options: argparse.Namespace) -> tuple[str, bool]:
    """Run a check and append its line; returns whether it passed."""
    begun_s = time.monotonic()
    try:
        figures = (CHECKS | SLOW)[name](programs)
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        figures = {"passed": False, "why": f"{type(error).__name__}: {error}"}
    status = record.DONE if figures["passed"] else record.FAILED
    told = {"seconds": time.monotonic() - begun_s, "turn": options.round, "status": status}
    record.append(options.result, PART, name, figures, **told)
    common.note(f"{name}: {'passed' if figures['passed'] else figures}")
    return name, bool(figures["passed"])


def main() -> int:
    """Run all checks at once; returns 1 unless all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--expected", type=float, default=60.0, metavar="SECONDS", help="that a program may take")
    parser.add_argument("--only", action="append", choices=[*CHECKS, *SLOW], help="only these checks")
    parser.add_argument("--twin", action="store_true", help="rehearse some of them on the host")
    options = parser.parse_args()
    if options.twin:
        options.expected = 240.0
    begun_s = time.monotonic()
    chosen = options.only or (REHEARSED if options.twin else CHECKS)
    todo = [name for name in chosen if record.newest(options.result, PART, name) is None]
    programs = Programs(options)
    with cf.ThreadPoolExecutor(len(CHECKS)) as threads:
        passed = dict(threads.map(lambda name: check(name, programs, options), todo))
    failed = [name for name in todo if not passed[name]]
    told = {"seconds": time.monotonic() - begun_s, "turn": options.round}
    record.append(options.result, PART, ALL, {"failed": failed, "passed": [*(set(chosen) - set(failed))]}, **told)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
