"""What every benchmark needs: the machine's facts, statistics over repeats, result files, a table."""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
"""What is committed; benchmarks write here if told to by ``-o``, or by ``make ... KEEP=1``."""
BUILT = ROOT / "build" / "benchmarks"
"""Where they write else."""
ZICO = (sys.executable, "-m", "zico")
"""The command of this interpreter's installation, whatever is first on ``PATH``."""

SCHEMA = "zico.benchmark.v1"
_PACKAGES = ("zico", "numpy", "numba", "llvmlite", "torch", "tensorflow-cpu", "tensorflow", "keras")
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_GIT_S = 10.0

os.environ.setdefault("ZICO_PROFILES", "off")  # a repeat must not begin with what the one before has taught


# -- where and with what ---------------------------------------------------------------------------


@functools.cache
def commit() -> str:
    """Return the checked-out commit, with ``-dirty`` if the tree differs from it, or ``unknown``.

    As it is when this is first asked: the results of a run make the tree differ.
    """
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ("git", "-C", str(ROOT), *arguments), capture_output=True, text=True, check=True, timeout=_GIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Return what the numbers depend on, with the load at the time of the call."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "transparent_hugepage": {
            name: path.read_text().strip() for name in ("enabled", "shmem_enabled") if (path := _THP / name).exists()
        },
        "load_average_at_start": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the numbers depend on, where installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def digest(version: str, patterns: Iterable[str]) -> str:
    """Return a digest of a version and of all files that match, by which what they make is kept."""
    found = hashlib.sha256(version.encode())
    for pattern in patterns:
        for source in sorted(ROOT.glob(pattern)):
            found.update(source.read_bytes())
    return found.hexdigest()[:16]


# -- statistics ------------------------------------------------------------------------------------


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return median, least, most and count of some repeats."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1], "n": len(ordered)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: the smallest value that ``percent`` of them do not exceed."""
    ordered = sorted(values)
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[min(len(ordered), max(1, rank)) - 1]


# -- results ---------------------------------------------------------------------------------------


def document(name: str, question: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Begin a result: what was asked, of which commit, where, with what. Take it before measuring."""
    return {
        "schema_version": SCHEMA,
        "name": name,
        "question": question,
        "commit": commit(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
    }


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def provenance(result: Mapping[str, Any]) -> str:
    """Return in one line where a result comes from."""
    on = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"Commit `{result['commit'][:12]}{'-dirty' if result['commit'].endswith('-dirty') else ''}`, {result['date']}, "
        f"{on['cores_usable']} cores of {on['cpu']}, {on['memory_bytes'] / 2**30:.1f} GiB, "
        f"Linux {on['kernel']}; {packages}.\n"
    )


def write(result: Mapping[str, Any], text: str, directory: Path | None) -> None:
    """Print ``text``, and write it and the result to ``directory`` unless that is ``None``."""
    print(text)
    if directory is None:
        return
    save(result, text, directory)
    print(f"written: {directory / result['name']}.json and .md")


def write_again(name: str, text_of: Callable[[dict[str, Any]], str], directory: Path | None) -> None:
    """Print a committed result, and write its text anew; nothing is measured."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    write(result, text_of(result), directory)


def save(result: Mapping[str, Any], text: str, directory: Path) -> None:
    """Write ``text`` and the result to ``directory``; a file is whole whenever it is there."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = json.dumps(result, indent=1).replace(sys.executable, "python")  # a result names no machine's path
    noted = f"{result['note']}\n\n" if "note" in result else ""
    page = f"# {result['question']}\n\n{text}\n{noted}{provenance(result)}"
    for kind, content in (("json", figures + "\n"), ("md", page)):
        part = directory / f"{result['name']}.{kind}.part"
        part.write_text(content)
        part.replace(part.with_suffix(""))


def note(text: str) -> None:
    """Tell the person who waits what is going on."""
    print(f"  {text}", file=sys.stderr, flush=True)


# -- command lines ---------------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--smoke", action="store_true", help="run as briefly as possible; the numbers mean nothing")
    made.add_argument("-o", "--output", type=Path, metavar="DIR", help="write results here (default: build/benchmarks)")
    return made


AGAIN = "measure nothing: write the text of the committed figures"


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return what was chosen of these options, as a result tells it."""
    return {name: getattr(options, name) for name in names}


def output_directory(options: argparse.Namespace) -> Path | None:
    """Return where results go: nowhere for a smoke run that was not told a place."""
    if options.output is not None:
        directory: Path = options.output.resolve()
        return directory
    return None if options.smoke else BUILT
