"""Write a run's report: JSON for programs, Markdown for people, the picture and the record behind it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from zico.report.table import (
    SAVING_COLUMNS,
    TIME_COLUMNS,
    attention_lines,
    columns_of,
    job_rows,
    pool_lines,
    saving_rows,
    time_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from zico.report.model import Record, RunReport

JSON_NAME = "report.json"
MARKDOWN_NAME = "report.md"
PICTURE_NAME = "report.png"
PAGE_NAME = "report.html"
TRACE_NAME = "perfetto.json"
RECORD_NAME = "record.npz"
JOBS_NAME = "jobs.json"
_FILE_MODE = 0o666
_LEAST_S = 1e-6  # of an iteration in a job file


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``: readers see the old file or the whole new one.

    A device or a pipe is written to and stays.

    Raises:
        OSError: It names ``path``. The old file, if there was one, is unchanged.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            _replace(path, content)
    except OSError as error:  # which does not always say where, and names the file beside it otherwise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # mkstemp's files are private; a report is as open as the user's other new files.
            os.fchmod(descriptor, _FILE_MODE & ~_umask())
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_jobs(record: Record, path: Path) -> bool:
    """Write what the jobs' iterations did to memory to ``path``, as ``zico simulate`` reads it; false if no job did.

    Atomically.
    """
    jobs = jobs_of(record)
    if jobs:
        write_atomically(path, msgspec.json.encode({"jobs": jobs}) + b"\n")
    return bool(jobs)


def jobs_of(record: Record) -> list[dict[str, Any]]:
    """Return what the jobs' iterations did to memory, as a job file for ``zico simulate`` says it.

    A job is left out if it has not ended an iteration; of those of one name the last to join is
    there. Stretches in which it held more than its usual iteration does, such as an evaluation, are
    phases, as the history's samples show them.
    """
    jobs: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(record.names):
        t_s, held_bytes = record.curve_of(number)
        if len(t_s) and record.iteration_s[number] > 0:
            usual = {
                "iteration_s": float(record.iteration_s[number]),
                "persistent_bytes": min(int(record.persistent_bytes[number]), int(held_bytes[-1])),
                "curve": [[round(t, 9), held] for t, held in zip(t_s.tolist(), held_bytes.tolist(), strict=True)],
            }
            jobs[name] = {"name": name, **usual}
            if phases := list(_phases(record, number, usual)):
                jobs[name]["phases"] = phases
    return list(jobs.values())


_MORE = 17 / 16  # of the usual peak: what is above is no usual iteration
_MISSED = 2  # iterations between two that were above, whose samples may have missed it
_MOST_STRETCHES = 8  # of a job, those that hold the most
_POINTS = 16  # of a stretch's curve: samples of its iterations, laid over each other


def _phases(record: Record, job: int, usual: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the job did instead of usual iterations, and after each of these stretches the usual one again.

    What came before the first iteration's end is none of them: a job begins with it, whatever it is.
    """
    import numpy as np

    ends, held = record.boundaries_of(job), record.held_bytes[:, job]
    number = np.searchsorted(ends, record.t_s, side="right")
    most = max(level for _, level in usual["curve"]) * _MORE
    above = np.unique(number[(held > most) & (number > 0)])
    if not len(above):
        return
    stretches = np.split(above, 1 + np.flatnonzero(np.diff(above) > 1 + _MISSED))
    peaks = [held[(number >= one[0]) & (number <= one[-1])].max() for one in stretches]
    for place in sorted(np.argsort(peaks, kind="stable")[-_MOST_STRETCHES:].tolist()):
        first, last = int(stretches[place][0]), int(stretches[place][-1])
        samples = (number >= first) & (number <= last) & (held > 0)
        end_s = ends[last] if last < len(ends) else record.t_s[samples].max()
        length_s = max(float(end_s - ends[first - 1]) / (last - first + 1), _LEAST_S)
        within_s = record.t_s[samples] - ends[number[samples] - 1]
        levels = np.zeros(_POINTS, np.int64)
        np.maximum.at(levels, np.minimum(within_s / length_s * _POINTS, _POINTS - 1).astype(np.int64), held[samples])
        levels[levels == 0] = usual["persistent_bytes"]
        changes = np.flatnonzero(np.diff(levels, prepend=-1))
        curve = [[round(length_s * at / _POINTS, 9), int(levels[at])] for at in changes.tolist()]
        yield {**usual, "after": first, "iteration_s": length_s, "curve": curve}
        if last < len(ends):
            yield {**usual, "after": last + 1}


def of_device(name: str, device: str, *, several: bool) -> str:
    """Return the name of a report's file about one device: where there are several, the device is in it."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{device.replace(':', '-')}{dot}{suffix}" if several else name


def markdown(report: RunReport, *, pictures: Mapping[str, str]) -> str:
    """Return the report as Markdown.

    Args:
        report: The report.
        pictures: The file names of pictures by the devices that they show.
    """
    lines = ["# Report of a run", ""]
    lines += _rows(columns_of(report), job_rows(report))
    if saved := list(saving_rows(report)):
        lines += ["", *_rows(SAVING_COLUMNS, saved)]
    if times := list(time_rows(report)):
        lines += ["", *_rows(TIME_COLUMNS, times)]
    lines += ["", *(f"* {line}" for line in [*pool_lines(report), *attention_lines(report)]), ""]
    lines += [f"* `{job.name}` is `{job.command}`, {job.wall_s:.1f} s" for job in report.jobs]
    for device, picture in pictures.items():
        where = f" on {device}" if report.has_several_devices else ""
        lines += ["", f"![Memory of each job{where} over time]({picture})"]
    return "\n".join(lines) + "\n"


def _rows(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    head = [_row(columns), _row(["---", *["---:"] * (len(columns) - 1)])]
    return head + [_row(cells) for cells in rows]


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |"


def _umask() -> int:
    """Return this process's umask, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
