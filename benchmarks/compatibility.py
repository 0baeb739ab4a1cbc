"""Do scripts that nobody wrote for Zico train under ``zico run`` as without it, alone and in pairs?

Twenty scripts of public repositories (``compatibility_scripts.py``) run as they are, on random data.
Each runs without Zico, under ``zico run`` without a limit, and in a budget of its own peak. Then
pairs run without a limit and in a share of the sum of their peaks.

*Equal* means that all losses are those of the script without Zico, bit by bit. Times are of whole
commands, with start and end. *Over unlimited* is the mean over a pair's jobs of the command's time
without a limit over its time in the budget; *over serial* is the sum of both commands' times alone
over the time until the pair's last command ends, and left out where these were measured at another
commit. *Possible* is what the oracle of ``zico simulate``
leaves of the throughput without a limit: the jobs' curves are those that the runs alone showed, and
who is left over when the other has ended runs without a limit.

The scripts come from checkouts (``--sources``), which this benchmark does not fetch. The frameworks
must be installed where it runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from compatibility_scripts import DIGEST, PAIRS, SCRIPTS, SMOKE, Script, command, prepare, write_smoke_sources

from zico.report.files import JOBS_NAME, JSON_NAME

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

QUESTION = "Do scripts that nobody wrote for Zico train under zico run as without it, alone and in pairs?"
NAME = "compatibility"
MIB = 1 << 20
SHARE = 75
NO_BUDGET = "none"
GOOD = 0.9
"""Of what is possible: a pair that is below gets an explanation."""
SIMULATE_S = 300.0
_JOB_FIGURES = (
    *("framework", "iterations", "exit_code", "wall_s", "waited_s", "boundary_waited_s", "peak_bytes"),
    *("peak_tensor_bytes", "persistent_bytes", "requested_bytes", "pooled_bytes", "pool_fraction", "spilled_bytes"),
    *("evicted_bytes", "note"),
)


# -- runs ------------------------------------------------------------------------------------------


def plain(script: Script, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a script without Zico."""
    begin_s = time.monotonic()
    done = _call(command(script, folder), limit_s)
    wall_s = time.monotonic() - begin_s
    return {"exit_code": done.returncode, "wall_s": wall_s, "losses": _losses(done.stdout, None)}


def under_zico(scripts: Sequence[Script], work: Path, budget: str, limit_s: float) -> dict[str, Any]:
    """Run scripts together; return the figures of the pool and the jobs, and the jobs as the simulator reads them."""
    with tempfile.TemporaryDirectory(prefix="zico-bench-") as directory:
        names = [word for script in scripts for word in ("--name", script.name)]
        commands = [shlex.join(command(script, work / script.name)) for script in scripts]
        options = ["--budget", budget, *names, "--report", directory, "--quiet"]
        done = _call([*common.ZICO, "run", *options, *commands], limit_s)
        path = Path(directory) / JSON_NAME
        if not path.exists():
            return {"budget": budget, "exit_code": done.returncode, "jobs": [], "stalls": 0, "loads": []}
        report = json.loads(path.read_text())
        loads = Path(directory) / JOBS_NAME
        known = json.loads(loads.read_text())["jobs"] if loads.exists() else []
    jobs = [
        {"name": job["name"], "losses": _losses(done.stdout, job["name"]), **{name: job[name] for name in _JOB_FIGURES}}
        for job in report["jobs"]
    ]
    return {
        "budget": budget,
        "exit_code": done.returncode,
        "budget_bytes": report["budget_bytes"],
        "stalls": report["pool"]["stalls"],
        "recoveries": report["pool"]["recoveries"],
        "jobs": jobs,
        "loads": known,
    }


def _call(argv: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or to the limit; its output is in ``stdout``, with errors in between."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # zico run ends its jobs
        said, _ = process.communicate()
    return subprocess.CompletedProcess(argv, process.returncode, said)


def _losses(said: str, name: str | None) -> str | None:
    """Return count and digest of the losses that a job's last line tells; ``None`` if it did not get there."""
    before = "" if name is None else rf"{re.escape(name)}\s*\| "
    found = re.findall(rf"^{before}{DIGEST} (\d+ [0-9a-f]+)", said, re.MULTILINE)
    return found[-1] if found else None


# -- figures ---------------------------------------------------------------------------------------


def alone(script: Script, work: Path, options: Namespace) -> dict[str, Any]:
    """Run a script without Zico, with it, and in a budget of its own peak, each a few times."""
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "unlimited": [], "own_peak": []}
    peak = NO_BUDGET
    for _ in range(options.repeat):
        runs["plain"].append(plain(script, work / script.name, options.limit))
        runs["unlimited"].append(under_zico([script], work, NO_BUDGET, options.limit))
        peaks = [job["peak_bytes"] for run in runs["unlimited"] for job in run["jobs"]]
        peak = str(max(peaks)) if any(peaks) else NO_BUDGET
        runs["own_peak"].append(under_zico([script], work, peak, options.limit))
    source = {name: getattr(script, name) for name in ("repository", "commit", "path", "framework", "fed")}
    edits = [{"file": edit.file, "old": edit.old, "new": edit.new} for edit in script.edits]
    return {**source, "arguments": list(script.arguments), "edits": edits, **runs}


def pair(
    names: Sequence[str], known: dict[str, Any], scripts: Sequence[Script], work: Path, options: Namespace
) -> dict[str, Any]:
    """Run two scripts without a limit and in a share of the sum of their peaks, and ask what is possible."""
    budget_bytes = sum(peak_bytes(known[name]) for name in names) * options.share // 100
    budget = str(budget_bytes) if budget_bytes else NO_BUDGET
    runs: dict[str, list[dict[str, Any]]] = {"unlimited": [], "shared": []}
    for _ in range(options.repeat):
        runs["unlimited"].append(under_zico(scripts, work, NO_BUDGET, options.limit))
        runs["shared"].append(under_zico(scripts, work, budget, options.limit))
    loads = [load for name in names for load in known[name]["unlimited"][-1]["loads"]]
    return {
        **runs,
        "budget_bytes": budget_bytes,
        "simulated": simulated(loads, budget_bytes) if len(loads) == len(names) else None,
    }


def peak_bytes(of: dict[str, Any]) -> int:
    """Return the most that a script held alone."""
    return max((job["peak_bytes"] for run in of["unlimited"] for job in run["jobs"]), default=0)


def beyond_bytes(names: Sequence[str], known: dict[str, Any], budget_bytes: int) -> int:
    """Return what must lie outside the budget at a job's peak, whoever waits: what the other keeps has no room then."""
    jobs = [job for name in names for job in known[name]["unlimited"][-1]["jobs"]]
    together = (one["peak_bytes"] + other["persistent_bytes"] for one, other in itertools.permutations(jobs, 2))
    return max(0, max(together, default=0) - budget_bytes)


def simulated(loads: Sequence[dict[str, Any]], budget_bytes: int) -> dict[str, list[float]] | None:
    """Return each job's throughput over its own alone, by the oracle and under Zico; ``None`` if nobody can say."""
    given = json.dumps({"jobs": loads})
    found = {}
    for policy in ("oracle", "zico"):
        with tempfile.TemporaryDirectory(prefix="zico-bench-") as directory:
            path = Path(directory) / "simulated.json"
            options = ["--budget", str(budget_bytes), "--policy", policy, "--json", str(path), "--quiet"]
            with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError, LookupError):
                subprocess.run(
                    [*common.ZICO, "simulate", "-", *options],
                    input=given,
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=SIMULATE_S,
                )
                row = json.loads(path.read_text())["rows"][0]
                found[policy] = [job["normalised"] for job in row["jobs"]]
    return found or None


def expected(alone_s: Sequence[float], rates: Sequence[float]) -> float | None:
    """Return over-unlimited of two jobs that run at these rates until one ends, then the other at 1."""
    if min(rates) <= 0:
        return None
    ends_s = [time_s / rate for time_s, rate in zip(alone_s, rates, strict=True)]
    first_s = min(ends_s)
    ends_s = [
        end_s if end_s == first_s else first_s + time_s - first_s * rate
        for end_s, time_s, rate in zip(ends_s, alone_s, rates, strict=True)
    ]
    return statistics.fmean(time_s / end_s for time_s, end_s in zip(alone_s, ends_s, strict=True))


def summary(names: Sequence[str], found: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return what the table says of a pair: medians, each with its spread."""
    whole = [run for run in found["shared"] if len(run["jobs"]) == len(names)]
    free = [run for run in found["unlimited"] if len(run["jobs"]) == len(names)]
    if not whole or not free:
        return {}
    free_s = [statistics.median(run["jobs"][at]["wall_s"] for run in free) for at in range(len(names))]
    alone_s = [
        statistics.median(run["wall_s"] for one in known[name]["unlimited"] for run in one["jobs"]) for name in names
    ]
    over_unlimited = [
        statistics.fmean(before / job["wall_s"] for before, job in zip(free_s, run["jobs"], strict=True))
        for run in whole
    ]
    over_serial = [sum(alone_s) / max(job["wall_s"] for job in run["jobs"]) for run in whole]
    at_once = all(known[name]["zico_commit"] == found["zico_commit"] for name in names)  # else another machine, too
    rates = (found["simulated"] or {}).get("oracle")
    possible = expected(free_s, rates) if rates else None
    told: dict[str, Any] = {
        "over_unlimited": common.spread(over_unlimited),
        "over_serial": common.spread(over_serial) if at_once else None,
        "stalls": common.spread(run["stalls"] for run in whole),
        "possible": possible,
        "of_possible": statistics.median(over_unlimited) / min(possible, 1.0) if possible else None,
    }
    for figure in ("waited_s", "wall_s", "spilled_bytes", "evicted_bytes", "pool_fraction"):
        told[figure] = [common.spread(run["jobs"][at][figure] for run in whole) for at in range(len(names))]
    return told


# -- text ------------------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    """Return both tables, and which pairs are below what is possible."""
    return _alone_text(result["alone"]) + "\n" + _pairs_text(result) + _older_text(result)


def _older_text(result: dict[str, Any]) -> str:
    """Return which rows are of other commits than the last one."""
    older: dict[str, list[str]] = {}
    for name, of in (*result["alone"].items(), *result["pairs"].items()):
        if of["zico_commit"] != result["commit"]:
            older.setdefault(of["zico_commit"][:12], []).append(name)
    return "".join(f"Measured at `{commit}`: {', '.join(names)}.\n" for commit, names in older.items())


def sources_text() -> str:
    """Return where each script comes from, and what was changed to feed it, as a table."""
    rows = []
    for script in SCRIPTS:
        changed = "; ".join(
            f"`{_inline(edit.old)}` is `{_inline(edit.new)}`" + (f" in `{edit.file}`" if edit.file else "")
            for edit in script.edits
        )
        source = f"[{script.repository}](https://github.com/{script.repository}) `{script.path}`"
        rows.append((script.name, source, f"`{script.commit[:12]}`", script.fed, changed or "nothing"))
    return common.table(("name", "script", "commit", "fed with, size", "changed"), rows)


def _inline(text: str) -> str:
    return " ".join(text.split())


def _alone_text(known: dict[str, Any]) -> str:
    header = [*("script", "framework", "exit codes", "losses", "pool share", "peak", "plain", "zico", "own peak")]
    header += ["waited at own peak", "to the file"]
    rows = []
    for name, of in known.items():
        runs = [*of["unlimited"], *of["own_peak"]]
        jobs = [job for run in runs for job in run["jobs"]]
        own = [job for run in of["own_peak"] for job in run["jobs"]]
        codes = sorted({run["exit_code"] for run in (*of["plain"], *runs)})
        rows.append(
            (
                name,
                of["framework"],
                _list(codes),
                equal([run["losses"] for run in of["plain"]], [job["losses"] for job in jobs]),
                _percent(min((job["pool_fraction"] for job in jobs), default=0.0)),
                _mib(peak_bytes(of)),
                _seconds(run["wall_s"] for run in of["plain"]),
                _seconds(job["wall_s"] for run in of["unlimited"] for job in run["jobs"]),
                _seconds(job["wall_s"] for job in own),
                _seconds(job["waited_s"] for job in own),
                _mib(max((job["spilled_bytes"] + job["evicted_bytes"] for job in own), default=0)),
            )
        )
    return "Alone; times are of the whole command.\n\n" + common.table(header, rows)


def _pairs_text(result: dict[str, Any]) -> str:
    share = result["settings"]["share"]
    header = [*("pair", "budget", "beyond it", "exit codes", "losses", "pool share", "to the file", "waited", "stalls")]
    header += ["over unlimited", "over serial", "possible", "of possible"]
    rows, below = [], []
    for name, found in result["pairs"].items():
        names, told = found["names"], found["summary"]
        runs = found["shared"]
        plain_losses = [[run["losses"] for run in result["alone"][one]["plain"]] for one in names]
        jobs = [[job for run in runs for job in run["jobs"] if job["name"] == one] for one in names]
        beyond = beyond_bytes(names, result["alone"], found["budget_bytes"])
        row = [name.replace("+", " + "), _mib(found["budget_bytes"]), _mib(beyond)]
        row.append(_list([_list(sorted({job["exit_code"] for job in of})) for of in jobs]))
        losses = [equal(before, [job["losses"] for job in of]) for before, of in zip(plain_losses, jobs, strict=True)]
        row.append(" / ".join(losses))
        if not told:
            rows.append((*row, *["-"] * 8))
            below.append(name)
            continue
        files = [
            out["median"] + moved["median"]
            for out, moved in zip(told["spilled_bytes"], told["evicted_bytes"], strict=True)
        ]
        waits = [
            f"{waited['median']:.1f} s ({_percent(waited['median'] / max(wall['median'], 1e-9))})"
            for waited, wall in zip(told["waited_s"], told["wall_s"], strict=True)
        ]
        row += [
            " / ".join(_percent(of["min"]) for of in told["pool_fraction"]),
            " / ".join(_mib(bytes_) for bytes_ in files),
            " / ".join(waits),
            f"{told['stalls']['median']:.0f}",
            _spread(told["over_unlimited"]),
            "-" if told["over_serial"] is None else _spread(told["over_serial"]),
            "-" if told["possible"] is None else f"{told['possible']:.2f}",
            "-" if told["of_possible"] is None else f"{told['of_possible']:.2f}",
        ]
        rows.append(tuple(row))
        if told["of_possible"] is None or told["of_possible"] < GOOD:
            below.append(name)
    ending = f"Below {GOOD} of what is possible, or not known: {', '.join(below) or 'none'}.\n"
    ending += "*Beyond it*: what one job keeps and the other's peak exceed the budget by so much.\n"
    return f"Pairs in {share} % of the sum of their peaks.\n\n{common.table(header, rows)}\n{ending}"


def equal(before: Sequence[str | None], now: Sequence[str | None]) -> str:
    """Tell whether all runs had the same losses; ``varies`` if those without Zico had not, either."""
    if len(set(before)) > 1:
        return "varies"
    return "equal" if before and before[0] is not None and set(now) == set(before) else "differ"


def _list(values: Iterable[Any]) -> str:
    return " / ".join(map(str, values))


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / MIB:.0f} MiB"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 1 else "100 %"


def _seconds(values: Iterable[float]) -> str:
    known = list(values)
    return f"{statistics.median(known):.1f} s" if known else "-"


def _spread(of: dict[str, float]) -> str:
    return f"{of['median']:.2f}" + (f" ({of['min']:.2f} to {of['max']:.2f})" if of["n"] > 1 else "")


# -- all -------------------------------------------------------------------------------------------


def _directory(options: Namespace) -> Path | None:
    directory = common.output_directory(options)
    return directory / NAME if directory in {common.RESULTS, common.BUILT} else directory


def _kept(options: Namespace) -> dict[str, Any]:
    """Return the rows of an earlier result, where only some are measured anew."""
    directory = _directory(options)
    path = directory / f"{NAME}.json" if directory else None
    if path is None or not path.exists() or not (options.script or options.pair):
        return {"alone": {}, "pairs": {}}
    found = json.loads(path.read_text())
    return {name: found[name] for name in ("alone", "pairs")}


def _measure(result: dict[str, Any], scripts: dict[str, Script], options: Namespace, work: Path) -> None:
    directory = _directory(options)
    pairs = [tuple(name.split("+")) for name in options.pair or ()]
    if not pairs and not options.script:
        pairs = [(SMOKE[0].name, SMOKE[1].name)] if options.smoke else list(PAIRS)
    in_pairs = {name for names in pairs for name in names}
    wanted = options.script or [name for name in scripts if not options.pair or name in in_pairs]
    for name in {*wanted, *in_pairs}:
        prepare(scripts[name], options.sources, work / name)
    for name in wanted:
        if options.pair and not options.script and name in result["alone"]:
            continue
        common.note(name)
        result["alone"][name] = {"zico_commit": result["commit"], **alone(scripts[name], work, options)}
        _keep(result, directory)
    for names in pairs:
        common.note(" + ".join(names))
        found = pair(names, result["alone"], [scripts[name] for name in names], work, options)
        result["pairs"]["+".join(names)] = {**found, "names": list(names), "zico_commit": result["commit"]}
        _keep(result, directory)


def _keep(result: dict[str, Any], directory: Path | None) -> None:
    """Sum up all pairs by the newest times of their scripts alone, and write what is known so far."""
    for found in result["pairs"].values():
        found["summary"] = summary(found["names"], found, result["alone"])
    if directory is not None:
        common.save(result, text_of(result), directory)


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a script failed or had other losses."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--sources", type=Path, metavar="DIR", help="checkouts: a folder OWNER+NAME for each repository"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where scripts and data are laid out (default: temporary)"
    )
    parser.add_argument("--script", action="append", help="run only this one alone; others stay as they are")
    parser.add_argument("--pair", action="append", metavar="A+B", help="run only this pair; others stay as they are")
    parser.add_argument("--share", type=int, default=SHARE, help="a pair's budget in percent of the sum of peaks")
    parser.add_argument("--repeat", type=int, default=3, help="how often each run is done")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a run is stopped")
    parser.add_argument("--list", action="store_true", help="only print where the scripts come from, as a table")
    options = parser.parse_args()
    if options.list:
        print(sources_text())
        return 0
    if options.smoke:
        options.repeat = 1
    elif options.sources is None:
        parser.error("--sources DIR is missing: the scripts are not part of this project")
    settings = {name: getattr(options, name) for name in ("share", "repeat", "limit")}
    result = common.document(NAME, QUESTION, settings) | _kept(options)
    with tempfile.TemporaryDirectory(prefix="zico-bench-") as temporary:
        work = options.work or Path(temporary) / "work"
        if options.smoke:
            options.sources = Path(temporary) / "sources"
            write_smoke_sources(options.sources)
        scripts = {script.name: script for script in (SMOKE if options.smoke else SCRIPTS)}
        _measure(result, scripts, options, work)
    text = text_of(result)
    common.write(result, text, _directory(options))
    codes = [run["exit_code"] for of in (*result["alone"].values(), *result["pairs"].values()) for run in _runs(of)]
    return int(any(codes) or "differ" in text)


def _runs(of: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for name in ("plain", "unlimited", "own_peak", "shared") for run in of.get(name, ())]


if __name__ == "__main__":
    sys.exit(main())
