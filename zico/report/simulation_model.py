"""The figures of simulated policies as they are shown and written: frozen, in bytes and seconds, with one JSON form."""

from __future__ import annotations

import msgspec

SIMULATION_SCHEMA = "zico.simulation.v1"


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job under one policy and budget."""

    name: str
    iterations_per_s: float
    normalised: float
    """Iterations per second over alone's."""
    waited_s: float
    iterations: int
    slowdown: float | None
    """How many times longer an iteration takes than alone; null if the job never got on."""
    reason: str
    """What the policy said most often when it made the job wait."""
    left_s: float | None
    """When it had done all its iterations; null if it stayed."""


class SimulatedRow(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs under one policy and budget."""

    policy: str
    budget_bytes: int
    normalised: float
    """The mean over the jobs."""
    peak_granted_bytes: int
    deadlocks: int
    decisions: int
    decision_us: float
    jobs: tuple[SimulatedJob, ...]
    jain: float
    slowdown: float | None
    """The slowest job's."""
    vs_serial: float | None
    """The mean over the jobs of their throughput over what serial gives them; null without a row of serial."""
    seconds: float
    """Simulated, or until the last job left."""
    warm_up_s: float
    """Of which this does not count."""

    @property
    def waited_s(self) -> float:
        """Return what all jobs waited together."""
        return sum(job.waited_s for job in self.jobs)


class SimulatedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One job as it was given."""

    name: str
    iteration_s: float
    peak_bytes: int
    persistent_bytes: int


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``zico simulate`` found. New fields are only ever added."""

    schema_version: str = SIMULATION_SCHEMA
    rows: tuple[SimulatedRow, ...]
    jobs: tuple[SimulatedLoad, ...]
    sum_of_peaks_bytes: int
    region_bytes: int
    device_model: str
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def budgets_bytes(self) -> tuple[int, ...]:
        """Return the budgets in the order of the rows."""
        return tuple(dict.fromkeys(row.budget_bytes for row in self.rows))

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies in the order of the rows."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))


def simulation_json(report: SimulationReport) -> bytes:
    """Return the report as indented JSON with a line end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
