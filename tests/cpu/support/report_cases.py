"""Runs to report, and a page taken apart."""

import dataclasses
from html.parser import HTMLParser

import numpy as np

from zico.base.units import MIB
from zico.broker.protocol.messages import Saving
from zico.report.attribution import Attribution
from zico.report.model import JobFigures, PoolFigures, Record, RunReport


def record(iterations: int, samples_per_iteration: int = 50) -> Record:
    """Return two jobs whose sawtooth iterations of a second are half a second apart."""
    n = iterations * samples_per_iteration
    t_s = np.arange(n) / samples_per_iteration
    held = np.stack([(t_s % 1.0), ((t_s + 0.5) % 1.0)], axis=1) * 40 * MIB
    ends = np.arange(1, iterations, dtype=np.float64)
    return Record(
        names=("a", "b"),
        peak_bytes=np.array([44, 40]) * MIB,
        budget_t_s=np.zeros(1),
        budget_bytes=np.array([64 * MIB]),
        t_s=t_s,
        held_bytes=held.astype(np.int64),
        out_bytes=np.zeros_like(held, np.int64),
        physical_bytes=np.full(n, 60 * MIB),
        boundary_job=np.repeat([0, 1], len(ends)),
        boundary_t_s=np.concatenate([ends, ends + 0.5]),
        wait_job=np.array([0, 1]),
        wait_t_s=np.array([[1.0, 1.1], [1.5, 1.7]]),
        wait_kind=np.array([0, 1]),
        blocker_wait=np.array([0]),
        blocker_job=np.array([1]),
        iteration_s=np.array([1.0, 0.0]),
        persistent_bytes=np.zeros(2, np.int64),
        profile_job=np.zeros(2, np.int64),
        profile_t_s=np.array([0.0, 0.5]),
        profile_bytes=np.array([20, 40]) * MIB,
    )


TIME = Attribution(
    elapsed_s=4.0, iterations_s=2.0, learning_s=0.5, boundary_waited_s=0.1, inside_waited_s=0.0, copies_s=0.0,
    processor_waited_s=0.2, slower_s=0.2, other_s=1.0, own_iteration_s=0.5, own_iteration_is="best",
)  # fmt: skip
EVIL = '</script><b id="evil">&amp;'


def run(name: str = "a") -> tuple[RunReport, Record]:
    """Return a run of two jobs, the first with this name; b waits for it twice, with one wait seen to end late."""
    jobs = (
        JobFigures(
            name=name, command=f"python {EVIL}", exit_code=0, wall_s=3.0, iterations=4, iterations_per_s=1.25,
            waited_s=0.1, peak_bytes=40 * MIB, peak_tensor_bytes=39 * MIB, pool_fraction=0.999, attribution=TIME,
        ),
        JobFigures(name="b", command="x", exit_code=3, wall_s=3.0, saving=Saving(how="swap", out_bytes=5 * MIB)),
    )  # fmt: skip
    report = RunReport(device="host", policy="zico", budget_bytes=64 * MIB, pool=PoolFigures(stalls=1), jobs=jobs)
    history = dataclasses.replace(
        record(5),
        names=(name, "b"),
        wait_job=np.array([0, 1, 1, 1]),
        wait_t_s=np.array([[1.0, 1.1], [1.7, 1.85], [1.8, 1.9], [2.5, 2.6]]),
        wait_kind=np.array([0, 1, 1, 0]),
        blocker_wait=np.array([0, 1, 2]),
        blocker_job=np.array([1, 0, 0]),
    )
    return report, history


class Parsed(HTMLParser):
    """What a page has: its elements, cells of its tables, titles of its shapes, and texts."""

    def __init__(self, text: str) -> None:
        """Parse the page."""
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.titles: list[str] = []
        self.script = ""
        self._table, self._in = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, dict(attrs)))
        self._in = tag
        if tag == "table":
            self._table = str(dict(attrs)["id"])
            self.rows[self._table] = []
        elif tag == "tr":
            self.rows[self._table].append([])
        elif tag in ("td", "th"):
            self.rows[self._table][-1].append("")
        elif tag == "title":
            self.titles.append("")

    def handle_endtag(self, _tag: str) -> None:
        """Leave the element."""
        self._in = ""

    def handle_data(self, data: str) -> None:
        """Note text."""
        if self._in in ("td", "th"):
            self.rows[self._table][-1][-1] += data
        elif self._in == "title":
            self.titles[-1] += data
        elif self._in == "script":
            self.script += data
