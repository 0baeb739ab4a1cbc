"""How traced jobs could go on with less: by swap plans, by paging, and in ``zico simulate``."""

from __future__ import annotations

import functools
import json
import threading
from typing import TYPE_CHECKING

import pytest
from cpu.support.trace_cases import MIB, Loop, train

from zico.cli import main
from zico.lab.saving.files import swap_iteration
from zico.lab.saving.graphs import graph_of
from zico.lab.simulator.paging_simulation import by_paging
from zico.lab.simulator.points import by_planner, curve
from zico.planning.saving.clock import now_s
from zico.planning.saving.problem import Link
from zico.planning.saving.registry import save_planner
from zico.trace.events import Kind
from zico.trace.files import write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from zico.planning.packing.problem import NoPlan
    from zico.planning.saving.mixed import SavePlan
    from zico.planning.saving.problem import SwapProblem
    from zico.planning.saving.recomputation import Graph
    from zico.trace.events import Trace

LAYERS = 8
SIZE = 8 * MIB
FAST = 1e15
"""Bytes per second: nothing takes long."""


def layers() -> Trace:
    """Return a trace in which activations are idle until backward needs them in reverse."""
    loop = Loop()
    for number in range(4):
        loop.event(Kind.BEGIN, number)
        kept: list[int] = []
        for i in range(LAYERS):
            kept.append(loop.allocate(SIZE, f"forward {i}"))
            _run(loop, f"forward {i}", kept[-2:-1], kept[-1:])
        while kept:
            _run(loop, f"backward {len(kept)}", kept[-1:], [])
            loop.free(kept.pop())
    loop.event(Kind.END, 3)
    return loop.trace()


def _run(loop: Loop, name: str, reads: list[int], writes: list[int]) -> None:
    for kind, tensors in ((Kind.READ, reads), (Kind.WRITE, writes)):
        for tensor in tensors:
            loop.event(kind, tensor, name=name)
    loop.event(Kind.OP, size_bytes=900, name=name)


def test_slower_links_make_less_dearer() -> None:
    """With a fast link a few layers suffice at no cost but latencies; with a slow one each limit costs more."""
    fast, slow = (by_planner("flow", layers(), rate, 2) for rate in (FAST, 1e9))
    assert {way.among for way in fast} == {1, 2}
    assert all(way.how == "swap" and 0 < way.limit <= LAYERS * SIZE for way in (*fast, *slow))
    least = min(fast, key=lambda way: way.limit)
    assert least.limit <= 4 * SIZE
    dearer = [way.duration_ns for way in slow if way.among == 1 and way.limit <= least.limit]
    assert min(dearer) > least.duration_ns


@pytest.mark.parametrize("name", ["flow", "zico", "dtr"])
def test_the_curve_never_falls_as_the_limit_does(name: str) -> None:
    """From no overhead at the peak, each lower limit costs as much or more."""
    link = Link(1e9, 10_000)
    of = swap_iteration(layers(), out=link, back=link).problem
    limits, costs = zip(*curve(of, graph_of(of), save_planner(name), 6, 1.0), strict=True)
    assert limits[0] == of.peak_bytes
    assert costs[0] == 0
    assert list(limits) == sorted(limits, reverse=True)
    assert list(costs) == sorted(costs)
    assert costs[-1] > 0


class Waiting:
    """A planner that waits, as for a processor, and then asks ``flow``."""

    name = "waiting"

    def __init__(self) -> None:
        """Count nothing yet."""
        self.took_s = 0.0

    def plan(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Plan, and add up the time that this has taken by the planners' clock."""
        began_s = now_s()
        threading.Event().wait(0.05)
        self.took_s += now_s() - began_s
        return save_planner("flow").plan(problem, graph, deadline_s)


def test_time_in_which_others_have_the_processor_is_not_a_planners() -> None:
    """A curve counts the processor time of its planners, and outside of it the wall's clock counts."""
    of = swap_iteration(layers(), out=Link(1e9, 0), back=Link(1e9, 0)).problem
    planner = Waiting()
    curve(of, graph_of(of), planner, 4, 1.0)
    assert planner.took_s < 4 * 0.05 / 2
    began_s = now_s()
    threading.Event().wait(0.05)
    assert now_s() - began_s >= 0.05


def test_half_of_the_link_is_never_faster() -> None:
    """At each limit the way that shares the link takes as long or longer, swapping and paging."""
    for make in (functools.partial(by_planner, "flow"), by_paging):
        ways = make(layers(), 1e10, 2)
        alone = {way.limit: way.duration_ns for way in ways if way.among == 1}
        shared = {way.limit: way.duration_ns for way in ways if way.among == 2}
        assert len(alone) > 1
        assert all(shared[limit] >= alone[limit] for limit in alone.keys() & shared.keys())
        assert max(shared.values()) > 1.5 * max(alone.values())


def test_a_trace_without_accesses_has_no_ways() -> None:
    """Nobody knows what is idle in it."""
    assert by_planner("zico", train(4), FAST, 2) == ()
    assert by_paging(train(4), FAST, 2) == ()


def test_what_can_run_again_is_cheaper_than_a_slow_link() -> None:
    """At each limit that swaps alone keep, too, the planner that jobs follow under auto takes at most as long."""
    swapping, both = (by_planner(name, layers(), 1e9, 1) for name in ("flow", "zico"))
    took_ns = {way.limit: way.duration_ns for way in both}
    assert len(swapping) > 1
    assert all(took_ns[way.limit] <= way.duration_ns for way in swapping)
    assert min(took_ns.values()) < max(way.duration_ns for way in swapping)
    assert took_ns[swapping[-1].limit] < 0.9 * swapping[-1].duration_ns


def test_fit_lets_jobs_do_with_less_as_zico_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job larger than the budget fits with less memory, unless it may hold only all that it wants."""
    write_trace(tmp_path / "layers.zst", layers())
    arguments = ["fit", str(tmp_path / "layers.zst"), "--budget", "48MiB", "--region", "1MiB", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    job = found["jobs"][0]
    assert found["answer"] == "fits with less memory"
    assert job["limit_bytes"] <= 48 * MIB < job["peak_bytes"]
    assert job["save"] in {"zico", "page"}
    assert job["delay_s"] > 0
    assert job["normalised"] < 1
    assert f"it trains in {job['limit_bytes'] // MIB} MiB with --save {job['save']}" in job["reason"]
    assert main([*arguments, "--save", "none"]) == 1
    assert json.loads(capsys.readouterr().out)["answer"] == "does not fit"
    assert main([*arguments[:3], "1GiB", *arguments[4:]]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["limit_bytes"] is None


@pytest.mark.parametrize("save", ["swap", "auto", "dtr"])
def test_simulate_takes_ways_from_the_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str], save: str) -> None:
    """A job larger than the budget runs by them, and is refused without; what ``less`` says itself stays."""
    write_trace(tmp_path / "layers.zst", layers())
    jobs = tmp_path / "jobs.json"
    job = {"name": "a", "trace": "layers.zst"}
    jobs.write_text(json.dumps({"jobs": [job]}))
    arguments = ["simulate", str(jobs), "--budget", "70%", "--policy", "auto", "--json", "-"]
    assert main([*arguments, "--save", save]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["rows"][0]["normalised"] <= 1
    assert any("trains in" in note for note in found["notes"])
    assert main([*arguments, "--save", "none"]) != 0
    assert "raise --budget" in capsys.readouterr().err
    jobs.write_text(json.dumps({"jobs": [job | {"less": [["10MiB", 1.0]]}]}))
    assert main([*arguments, "--save", save]) == 0
    assert "trains in 10 MiB" in str(json.loads(capsys.readouterr().out)["notes"])
