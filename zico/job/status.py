"""What a job sees of itself in its pool: ``zico.status()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zico.job.session import Session


class JobStatus(dict[str, Any]):
    """A job's figures in its pool, as attributes and as items; times are in seconds."""

    name: str
    device: str
    frameworks: list[str]
    iterations: int
    held_bytes: int
    """What the job holds now."""
    peak_bytes: int
    """What it held at most."""
    tensor_bytes: int
    """What its tensors take."""
    shared_bytes: int
    """Frozen memory that jobs of the pool have in common, in whole regions; the budget has it once."""
    waited_s: float
    budget_bytes: int
    """Of the pool."""
    isolated: bool
    """Whether no job of the pool sees another one's old data."""
    refusals: int
    """Requests that could never be met."""
    needed_bytes: int
    """What the last of them needed together with what the job held; 0: none."""
    spilled_bytes: int
    """Tensors placed in the next tier."""
    evicted_bytes: int
    """Tensors moved there for other jobs."""
    moved_out_bytes: int
    """Of a job that swaps or pages, as all that follows; else 0 or empty."""
    moved_in_bytes: int
    late_arrivals: int
    page_faults: int
    copies_waited_s: float
    copies_hidden_s: float
    dropped_bytes: int
    making_again_s: float
    planner: str
    """Whose choice of tensors the job follows."""
    planner_note: str
    """Why that is not the planner asked for, or plans for more than the job may hold."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as annotated
        """Return a figure."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} has no figure {name!r}") from None


def status_of(session: Session) -> JobStatus:
    """Return the figures of this process's job."""
    from zico.pool.layout import iterations_of  # with NumPy, which the name of the class does without

    record = session.record
    region_bytes = session.pool.region_bytes
    refused = session.refusal()
    return JobStatus(
        {
            "name": record["name"].decode(),
            "device": session.device,
            "frameworks": list(session.frameworks),
            "iterations": iterations_of(record),
            "held_bytes": int(record["held"]) * region_bytes,
            "peak_bytes": int(record["peak_held"]) * region_bytes,
            "tensor_bytes": int(record["live_bytes"]),
            "shared_bytes": int(session.pool.header["shared"]) * region_bytes,
            "waited_s": int(record["boundary_waited_ns"] + record["need_waited_ns"]) / 1e9,
            "budget_bytes": int(session.pool.header["budget_total"]) * region_bytes,
            "isolated": bool(session.pool.header["isolate"]),
            "refusals": int(record["oom_count"]),
            "needed_bytes": refused.requested_bytes + refused.held_bytes if refused else 0,
            "spilled_bytes": int(record["spilled_bytes"]),
            "evicted_bytes": int(record["evictions"]) * region_bytes,
            "moved_out_bytes": int(record["out_bytes"]),
            "moved_in_bytes": int(record["in_bytes"]),
            "late_arrivals": int(record["late"]),
            "page_faults": int(record["faults"]),
            "copies_waited_s": int(record["copy_waited_ns"]) / 1e9,
            "copies_hidden_s": int(record["copy_hidden_ns"]) / 1e9,
            "dropped_bytes": int(record["dropped_bytes"]),
            "making_again_s": int(record["making_ns"]) / 1e9,
            "planner": record["planner"].decode("ascii"),
            "planner_note": record["planner_note"].decode("ascii"),
        }
    )
