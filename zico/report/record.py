"""The history of a run that the broker wrote: who held what and when, and every wait."""

from __future__ import annotations

import dataclasses
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zico.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from zico.broker.messages import WaitKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Record:
    """A history: n instants, m jobs, k iterations' ends, w waits, c budgets; seconds since the broker began."""

    names: tuple[str, ...]
    budget_t_s: Floats
    """[c]: when each budget came into force."""
    budget_bytes: Ints
    """[c]"""
    t_s: Floats
    """[n]"""
    held_bytes: Ints
    """[n, m]: regions held by each job."""
    out_bytes: Ints
    """[n, m]: of each job's live tensors, in a tier."""
    physical_bytes: Ints
    """[n]: the pool's memory as the kernel counted it."""
    boundary_job: Ints
    """[k]"""
    boundary_t_s: Floats
    """[k]"""
    wait_job: Ints
    """[w]"""
    wait_t_s: Floats
    """[w, 2]: from, to."""
    wait_kind: Ints
    """[w]: a ``WaitKind``."""
    iteration_s: Floats
    """[m]: of each job's profile, 0 where it has none."""
    persistent_bytes: Ints
    """[m]: held at the last boundary."""
    profile_job: Ints
    """[p]"""
    profile_t_s: Floats
    """[p]: since the iteration began."""
    profile_bytes: Ints
    """[p]: held from then on."""

    @property
    def most_budget_bytes(self) -> int:
        """Return the largest budget."""
        return int(self.budget_bytes.max())

    def boundaries_of(self, job: int) -> Floats:
        """Return when the job's iterations ended, in seconds."""
        of_job: Floats = self.boundary_t_s[self.boundary_job == job]
        return of_job

    def waits_of(self, job: int, kind: WaitKind) -> Floats:
        """Return the job's waits of that kind as [count, 2] seconds."""
        of_kind: Floats = self.wait_t_s[(self.wait_job == job) & (self.wait_kind == kind)]
        return of_kind

    def curve_of(self, job: int) -> tuple[Floats, Ints]:
        """Return when in its iteration a job comes to hold how many bytes; nothing if it has no profile."""
        of_job = self.profile_job == job
        held: Ints = self.profile_bytes[of_job]
        changes = np.flatnonzero(np.diff(held, prepend=-1))
        return self.profile_t_s[of_job][changes], held[changes]


def read_record(path: Path) -> Record:
    """Return the record that a broker wrote to ``path``.

    Raises:
        ConfigError: It cannot be read, a field is missing, or the fields' lengths do not fit each other.
    """
    try:
        with np.load(path, allow_pickle=False) as fields:
            record = Record(
                names=tuple(str(name) for name in fields["names"]),
                budget_t_s=fields["budget_t_s"].astype(np.float64),
                budget_bytes=fields["budget_bytes"].astype(np.int64),
                t_s=fields["t_s"].astype(np.float64),
                held_bytes=fields["held_bytes"].astype(np.int64),
                out_bytes=fields["out_bytes"].astype(np.int64),
                physical_bytes=fields["physical_bytes"].astype(np.int64),
                boundary_job=fields["boundary_job"].astype(np.int64),
                boundary_t_s=fields["boundary_t_s"].astype(np.float64),
                wait_job=fields["wait_job"].astype(np.int64),
                wait_t_s=fields["wait_t_s"].astype(np.float64).reshape(-1, 2),
                wait_kind=fields["wait_kind"].astype(np.int64),
                iteration_s=fields["iteration_s"].astype(np.float64),
                persistent_bytes=fields["persistent_bytes"].astype(np.int64),
                profile_job=fields["profile_job"].astype(np.int64),
                profile_t_s=fields["profile_t_s"].astype(np.float64),
                profile_bytes=fields["profile_bytes"].astype(np.int64),
            )
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"cannot read the record {path}: {error}") from None
    _check_lengths(record, path)
    return record


def _check_lengths(record: Record, path: Path) -> None:
    n, m = len(record.t_s), len(record.names)
    fits = {
        "budget_bytes": record.budget_t_s.shape == record.budget_bytes.shape and record.budget_bytes.size > 0,
        "held_bytes": record.held_bytes.shape == (n, m),
        "out_bytes": record.out_bytes.shape == (n, m),
        "physical_bytes": record.physical_bytes.shape == (n,),
        "boundary_t_s": record.boundary_t_s.shape == record.boundary_job.shape,
        "iteration_s": record.iteration_s.shape == record.persistent_bytes.shape == (m,),
        "profile_t_s": record.profile_t_s.shape == record.profile_job.shape == record.profile_bytes.shape,
        "wait_t_s": len(record.wait_t_s) == len(record.wait_job) == len(record.wait_kind),
    }
    wrong = [field for field, is_right in fits.items() if not is_right]
    if wrong:
        raise ConfigError(f"cannot read the record {path}: the length of {', '.join(wrong)} does not fit the others")
