"""PyTorch's real build for CUDA over a driver of software, alone and as a job of a pool on that driver.

Everything between the two is as on a GPU: PyTorch's libraries, Zico's adapter, the broker, and
``cuda.bindings``. The runtime is not NVIDIA's, which refuses such a driver. Kernels do nothing.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from framework.support import turns
from process.support.cuda_twin import Process, compile_once
from process.support.cuda_twin_broker import Broker
from support.harness import FRAMEWORK as SCRIPTS
from zico.adapters import torch_cuda_memory, torch_pools

from zico.broker.protocol.messages import Change

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAMEWORK = "PyTorch"
MIB = 1 << 20
BUDGET_BYTES = 64 * MIB
REGION_BYTES = 2 * MIB
JOB = str(SCRIPTS / "wheel_job.py")
USUAL = (
    *("copies", "record_stream", "events", "out_of_memory", "cache_info", "questions", "sgd", "graph"),
    *("graphed_callable", "trees", "steady"),
)
FROZEN_BYTES = 16 * MIB
WAYS = ("plain", "pool")
CLEAN = {"goes_on": True, "left_bytes": 0}


@pytest.fixture(scope="module")
def broker(environ: dict[str, str]) -> Iterator[Broker]:
    """Give a broker on the first device."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zw-") as folder:
        made = Broker(Path(folder), environ, "--budget-bytes", str(BUDGET_BYTES))
        with made.process, made.client:
            assert made.process.line() == "ready"
            yield made


def run(way: str, broker: Broker, *names: str, **more: str) -> dict[str, Any]:
    """Return what a job saw that makes these checks, with its exit code and what it wrote to stderr."""
    environ = {**broker.environ, "ZICO_SOCKET": str(broker.socket), **more}
    with Process(JOB, way, *names, **environ) as job:
        found: dict[str, Any] = json.loads(job.line())
        code, errors = job.finish()
    return {**found, "exit": code, "errors": errors}


@pytest.fixture(scope="module", params=WAYS)
def usual(request: pytest.FixtureRequest, broker: Broker, note: dict[str, Any]) -> dict[str, Any]:
    """Give what a job saw that does what programs do."""
    note[request.param] = run(request.param, broker, *USUAL)
    return {**note[request.param], "way": request.param}


def test_bytes_are_kept_and_memory_comes_back(usual: dict[str, Any]) -> None:
    """Copies in, on the device and out keep every byte; tensors are the pool's in a pool, and none is left."""
    found = usual["copies"]
    assert found["is_equal"] == [True, True]
    assert (found["live_bytes"], found["left_bytes"]) == (2 * MIB, 0)
    assert found["in_pool"] is (usual["way"] == "pool")


def test_what_a_side_stream_reads_is_not_used_again(usual: dict[str, Any]) -> None:
    """After ``record_stream`` a freed tensor's memory is kept until that stream is done, and then used again."""
    assert usual["record_stream"] == {"is_kept": True, "is_used_again": True}


def test_events_say_when_a_stream_is_there(usual: dict[str, Any]) -> None:
    """An event and a stream that waits for it are not done while their stream is held, and done afterwards."""
    found = usual["events"]
    assert found["done"] == [False, False, True, True]
    assert found["elapsed_ms"] >= 0
    assert found["is_equal"]


def test_more_than_there_is_raises_pytorchs_error(usual: dict[str, Any]) -> None:
    """The error is ``torch.OutOfMemoryError``, nothing is taken, and the job goes on."""
    found = usual["out_of_memory"]
    name, text = found.pop("error")
    assert name == "torch.OutOfMemoryError"
    assert found == CLEAN
    if usual["way"] == "pool":
        assert re.search("1048576 MiB more .* may hold +64 MiB: raise --budget", text)


def test_a_lost_context_raises_pytorchs_error(broker: Broker, note: dict[str, Any]) -> None:
    """The error is the one that PyTorch's own checks raise for the status; what is freed goes back to the pool."""
    ended = run("pool", broker, "lost")
    note.setdefault("pool", {})["lost"] = found = ended["lost"]
    name, text = found.pop("error")
    assert name == "torch.AcceleratorError"
    assert text.startswith("CUDA error: ")
    assert found == {"left_bytes": 0, "held": 0}
    assert (ended["exit"], ended["errors"]) == (0, "")
    assert is_whole(broker)


def test_cudnn_is_told_what_there_is(usual: dict[str, Any]) -> None:
    """PyTorch's question for the largest workspace has an answer: in a pool, what it can have without waiting."""
    largest_bytes = usual["cache_info"]["largest_bytes"]
    if usual["way"] == "pool":
        assert 0 < largest_bytes <= BUDGET_BYTES - 4 * MIB
    else:
        assert largest_bytes > BUDGET_BYTES


def test_questions_about_memory_are_answered(usual: dict[str, Any], note: dict[str, Any]) -> None:
    """None raises; a snapshot shows what lives; ``torch.accelerator`` agrees; in a pool free is within the budget."""
    found = usual["questions"]
    assert found["errors"] == {}
    assert (found["known"], found["segsum"], found["same"], found["of_segments"]) == ([], True, [], 0)
    assert found["live_bytes"] == found["of_blocks"] == found["peak_bytes"] + found["live_bytes"] == MIB + 512
    assert [name for name, _ in found["no_device"]][1] == "torch.AcceleratorError"
    if usual["way"] == "pool":
        told = found["told"]
        assert [line.split(" does nothing here")[0] for line in told] == [
            "zico: torch.cuda.set_per_process_memory_fraction",
            "zico: torch.cuda.memory._record_memory_history",
        ]
        assert found["info"][0] == found["info"][1]
        assert found["info"][0][1] == BUDGET_BYTES
        assert 0 < found["info"][0][0] < BUDGET_BYTES
        assert found["no_device"][0] == [
            "builtins.RuntimeError",
            "zico: there is no cuda:7: this process sees 2, give a number from 0 to 1",
        ]
        if "plain" in note:
            assert found["keys"] == note["plain"]["questions"]["keys"]


def test_training_by_hand_is_exact(usual: dict[str, Any]) -> None:
    """Thirty steps with weights, gradients and batches on the device end with the bytes that the host's end with."""
    found = usual["sgd"]
    assert found["is_equal"]
    assert found["losses"][1] < found["losses"][0] / 1000
    assert found["iterations"] == (60 if usual["way"] == "pool" else None)


def test_graphs_are_captured_and_replayed(usual: dict[str, Any]) -> None:
    """Two graphs of one pool end with the right bytes, also in a crowd, and their memory goes with them.

    In a pool that memory counts as the job's: six copies of 1 MiB, of which each graph keeps what
    it still uses at its end.
    """
    found = usual["graph"]
    assert (found["is_equal"], found["apart"], found["is_kept"], found["outlives"]) == ([True] * 8, True, True, True)
    assert found["left_bytes"] == 0
    assert found["nodes"] == 24
    if usual["way"] == "pool":
        assert found["graphs_bytes"] <= 8 * MIB


def test_a_graphed_function_is_the_function(usual: dict[str, Any]) -> None:
    """What ``make_graphed_callables`` returns gives the outputs and gradients of the function, for each input."""
    assert usual["graphed_callable"] == {"is_equal": [True] * 4}


def test_the_job_ends_cleanly(usual: dict[str, Any]) -> None:
    """The job ends with 0 and says nothing, and the driver has refused no call for a handle or a context."""
    assert (usual["exit"], usual["errors"], usual["bad_calls"]) == (0, "", 0)


def test_a_steady_pair_calls_no_driver_of_ours(usual: dict[str, Any], note: dict[str, Any]) -> None:
    """Pairs of allocation and free make the driver calls that PyTorch alone makes: it asks for the current device.

    Where each free gives a region back, a mark is added for every half of what is free: its write,
    and the questions for context and capture.
    """
    found = usual["steady"]
    assert found["beside"].keys() <= {"cuCtxGetCurrent", "cuCtxGetDevice", "cuDevicePrimaryCtxGetState"}
    if usual["way"] == "pool" and "plain" in note:
        plain = note["plain"]["steady"]
        assert found["beside"] == plain["beside"]
        more = {name: n - plain["regions"].get(name, 0) for name, n in found["regions"].items()}
        assert {name for name, n in more.items() if n > 0} == {
            "cuCtxGetCurrent",
            "cuStreamIsCapturing",
            "cuStreamWriteValue64_v2",
        }
        assert max(more.values()) < 2 * 2 * MIB / (BUDGET_BYTES / 2 - 8 * MIB)


def test_two_jobs_hand_their_memory_to_each_other(broker: Broker, note: dict[str, Any]) -> None:
    """Two jobs of which each fills five eighths of the budget take turns, and each reads what it wrote."""
    environ = {**broker.environ, "ZICO_SOCKET": str(broker.socket)}
    job = (JOB, "pool", "take_turns")
    with Process(*job, **environ) as one, Process(*job, **environ) as other:
        jobs = (one, other)
        assert [each.line() for each in jobs] == [turns.READY] * 2
        assert [each.ask("go") for each in jobs] == [turns.GOING] * 2
        found = [json.loads(each.line())["take_turns"] for each in jobs]
        ended = [each.finish() for each in jobs]
    note.setdefault("pool", {})["take_turns"] = found
    assert [each["is_equal"] for each in found] == [True, True]
    assert sum(each["waited_s"] for each in found) > 0
    assert ended == [(0, "")] * 2
    assert is_whole(broker)


@pytest.mark.parametrize("context", ["off", "on"])
def test_a_paused_jobs_memory_leaves_the_gpu_and_comes_back(broker: Broker, note: dict[str, Any], context: str) -> None:
    """Every byte is at its address again, also in the memory of a CUDA graph, and another job had the budget.

    A thread of Python's copies to the GPU all along: it is never refused, and no copy is lost. With the
    job's context put aside, no call gets through meanwhile.
    """
    environ = {**broker.environ, "ZICO_SOCKET": str(broker.socket), "ZICO_MOVE_CONTEXT": context}
    with Process(JOB, "pool", "moves_out", **environ, ZICO_JOB="paused") as job:
        assert job.line() == turns.READY
        broker.client.change(Change(job="paused", paused=True, move=True))
        job.tell("go")
        status = broker.status(lambda status: broker.has_moved(status, "paused"), within_s=30)
        moved_bytes = next(one.away_bytes for one in status.jobs if one.name == "paused")
        other = run("pool", broker, "copies")
        broker.client.change(Change(job="paused", paused=False))
        note.setdefault("pool", {})["moves_out"] = found = json.loads(job.line())["moves_out"]
        assert job.finish() == (0, "")
    assert other["copies"]["is_equal"] == [True, True]
    assert found == {
        "is_equal": [True] * 5,
        "is_where_it_was": True,
        "evicted_bytes": moved_bytes,
        "put_aside": int(context == "on"),
        "raised": ["nothing", ""],
        "is_last": True,
        **CLEAN,
    }
    assert is_whole(broker)


def test_frozen_weights_are_held_once_and_written_by_one(broker: Broker, note: dict[str, Any]) -> None:
    """Two jobs have the same memory for equal weights, mapped to be read; a write has regions of its own before."""
    environ = {**broker.environ, "ZICO_SOCKET": str(broker.socket)}
    with Process(JOB, "pool", "frozen", **environ) as one:
        assert one.line() == turns.READY
        with Process(JOB, "pool", "frozen", **environ) as other:
            assert other.line() == turns.READY
            assert broker.client.status().shared_bytes == FROZEN_BYTES
            found = []
            for job in (one, other):
                job.tell("go")
                found.append(json.loads(job.line())["frozen"])
                code, said = job.finish()
                assert code == 0
                assert said.startswith("zico: 4 frozen tensors, 16 MiB, are held once")
    note.setdefault("pool", {})["frozen"] = found[0]
    for each in found:
        assert each.pop("held_bytes") < 4 * MIB
        assert each == {
            "kinds": ["SharedParameter"] * 4,
            "is_equal": [True] * 4,
            "is_where_it_was": True,
            "kinds_then": ["Parameter"] * 4,
        }
    assert is_whole(broker)


# -- saved tensors that leave and come back --------------------------------------------------------

LAYER_BYTES = 4 * MIB
LIMIT_BYTES = 28 * MIB
MADE_LIMIT_BYTES = 40 * MIB


def test_saved_tensors_leave_and_return_behind_the_device(broker: Broker, note: dict[str, Any]) -> None:
    """All that three layers save is away before the device has done anything, and every byte comes back in order."""
    ended = run("pool", broker, "swap_queued", ZICO_JOB_SAVE="swap")
    note.setdefault("pool", {})["swap_queued"] = found = ended["swap_queued"]
    assert found == {
        "settled": True,
        "queued": True,
        "is_equal": [True] * 4,
        "out_bytes": 2 * LAYER_BYTES,  # the first layer's input is the program's
        "in_bytes": 2 * LAYER_BYTES,
        "away_bytes": 0,
    }
    assert (ended["exit"], ended["errors"], ended["bad_calls"]) == (0, "", 0)
    assert is_whole(broker)


@pytest.mark.parametrize(("way", "planner"), [("swap", "longest"), ("auto", "longest"), ("lms", "lms")])
@pytest.mark.parametrize("tier", ["memory:64MiB", "memory:8MiB,file:64MiB"])
def test_a_job_trains_with_less_than_its_peak(
    broker: Broker, note: dict[str, Any], way: str, planner: str, tier: str
) -> None:
    """By need and by its planner's plan, within its limit, all that layers save is read back as it was."""
    limits = {"ZICO_JOB_SAVE": way, "ZICO_JOB_LIMIT": f"{LIMIT_BYTES}B", "ZICO_TIER": tier}
    ended = run("pool", broker, "swap_planned", **limits)
    note.setdefault("pool", {})[f"swap_planned {way} {tier}"] = found = ended["swap_planned"]
    assert found["is_equal"]
    assert found["planner"] == planner
    assert found["planned"] >= 2
    assert min(found["moved_bytes"]) >= 2 * LAYER_BYTES
    assert 0 < found["beside_bytes"] <= found["moved_bytes"][1], "what returns has memory of the stream that copies"
    assert found["peak_bytes"] <= LIMIT_BYTES
    assert found["failures"] == 0
    assert (ended["exit"], ended["errors"], ended["bad_calls"]) == (0, "", 0)
    assert is_whole(broker)


def test_two_jobs_swap_beside_each_other(broker: Broker, note: dict[str, Any]) -> None:
    """Two jobs that swap within limits that fit together read back what they saved."""
    limits = {"ZICO_JOB_SAVE": "swap", "ZICO_JOB_LIMIT": f"{LIMIT_BYTES}B", "ZICO_TIER": "memory:64MiB"}
    environ = {**broker.environ, "ZICO_SOCKET": str(broker.socket), **limits}
    job = (JOB, "pool", "swap_planned")
    with Process(*job, **environ) as one, Process(*job, **environ) as other:
        found = [json.loads(each.line()) for each in (one, other)]
        ended = [each.finish() for each in (one, other)]
    note.setdefault("pool", {})["swap_planned beside another"] = [each["swap_planned"] for each in found]
    assert [each["swap_planned"]["is_equal"] for each in found] == [True, True]
    assert min(each["swap_planned"]["moved_bytes"][1] for each in found) >= 2 * LAYER_BYTES
    assert [each["bad_calls"] for each in found] == [0, 0]
    assert ended == [(0, "")] * 2
    assert is_whole(broker)


def test_saved_tensors_are_made_again(broker: Broker, note: dict[str, Any]) -> None:
    """Copies are dropped and made again behind the device; one that holds something else by then is kept."""
    limits = {"ZICO_JOB_SAVE": "superneurons", "ZICO_JOB_LIMIT": f"{MADE_LIMIT_BYTES}B", "ZICO_TIER": "memory:64MiB"}
    ended = run("pool", broker, "swap_made", **limits)
    note.setdefault("pool", {})["swap_made"] = found = ended["swap_made"]
    assert found["planner"] == "superneurons"
    assert all(all(each) for each in found["is_equal"])
    before, after = found["dropped_bytes"]
    assert before >= 2 * LAYER_BYTES
    assert after <= before - LAYER_BYTES
    assert (found["away_bytes"], found["failures"]) == (0, 0)
    assert found["with_cudnn"] == [True], "as when they were made first"
    assert found["timed_on"] == [0, 0], "as the pool is"
    assert (ended["exit"], ended["errors"], ended["bad_calls"]) == (0, "", 0)
    assert is_whole(broker)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "backend:native,max_split_size_mb:64,roundup_power2_divisions:[256:1,>:8]"),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync,pinned_use_cuda_host_register:True"),
    ],
)
def test_settings_of_the_allocator_leave_a_job_in_the_pool(broker: Broker, name: str, settings: str) -> None:
    """Tensors are the pool's, pinned memory is PyTorch's as ever, and one line names what has no effect."""
    ended = run("pool", broker, "copies", **{name: settings})
    found = ended["copies"]
    assert (found["in_pool"], found["is_equal"], found["left_bytes"]) == (True, [True, True], 0)
    without_effect = settings.removesuffix(",pinned_use_cuda_host_register:True")
    assert ended["errors"].splitlines() == [f"zico: {torch_cuda_memory.NO_EFFECT.format(f'{name}={without_effect}')}"]
    assert (ended["exit"], ended["bad_calls"]) == (0, 0)
    assert is_whole(broker)


def test_pools_of_pytorchs_are_names(broker: Broker, note: dict[str, Any]) -> None:
    """Tensors in ``MemPool`` are the heap's, graphs may have one's name; an allocator of its own is one sentence."""
    ended = run("pool", broker, "named_pools")
    note.setdefault("pool", {})["named_pools"] = found = ended["named_pools"]
    name, text = found.pop("own_allocator")
    assert (name, text) == ("builtins.RuntimeError", torch_pools.OWN_ALLOCATOR)
    assert set(found.pop("is_equal")) == {True}
    assert found == {"apart": True, "left_bytes": 0}
    assert (ended["exit"], ended["errors"], ended["bad_calls"]) == (0, "", 0)
    assert is_whole(broker)


# -- what programs should not do -------------------------------------------------------------------


def is_whole(broker: Broker) -> bool:
    """Tell whether all of the pool comes back once its jobs have ended."""
    return broker.status(lambda status: not status.jobs, within_s=20).granted_bytes == 0


def test_gpu_memory_is_not_shared_with_processes(broker: Broker, note: dict[str, Any]) -> None:
    """A tensor that is sent, or received, ends in one sentence and not deep in the driver; the job goes on."""
    ended = run("pool", broker, "shared_with_processes")
    note.setdefault("pool", {})["shared_with_processes"] = found = ended["shared_with_processes"]
    assert found == {"errors": [["builtins.RuntimeError", torch_pools.SHARED]] * 2}
    assert (ended["exit"], ended["errors"], ended["bad_calls"]) == (0, "", 0)
    assert is_whole(broker)


def test_a_device_that_is_not_the_pools_is_refused(broker: Broker, note: dict[str, Any]) -> None:
    """Another GPU is one sentence of the pool's, and one that there is not is PyTorch's own; the pool is whole."""
    note.setdefault("pool", {})["other_device"] = found = run("pool", broker, "other_device")["other_device"]
    (other, text), (none, ordinal) = found.pop("errors")
    assert (other, none) == ("builtins.RuntimeError", "torch.AcceleratorError")
    assert text.startswith("zico: this tensor is for another GPU than the pool's, cuda:0: ")
    assert ordinal == "CUDA error: invalid device ordinal"
    assert found == CLEAN
    assert is_whole(broker)


def test_a_capture_by_others_gets_nothing_of_ours(broker: Broker, note: dict[str, Any]) -> None:
    """C code captures a stream on which tensors come and go: no mark is in its graph, and the pool is whole."""
    ended = run("pool", broker, "foreign_capture")
    note.setdefault("pool", {})["foreign_capture"] = found = ended["foreign_capture"]
    assert found == {"status": [0, 0], "nodes": 0, **CLEAN}
    assert (ended["exit"], ended["errors"]) == (0, "")
    assert is_whole(broker)


def test_a_second_capture_at_once_is_refused(broker: Broker, note: dict[str, Any]) -> None:
    """Both ways into it end in one sentence; the first capture goes on, and its graph is right."""
    ended = run("pool", broker, "second_capture")
    note.setdefault("pool", {})["second_capture"] = found = ended["second_capture"]
    for name, text in found.pop("errors"):
        assert name == "builtins.RuntimeError"
        assert text.startswith("zico: a CUDA graph is being captured already, ")
    assert found == {"is_equal": [True] * 4, **CLEAN}
    assert (ended["exit"], ended["errors"]) == (0, "")
    assert is_whole(broker)


def test_a_capture_that_fails_leaves_nothing(broker: Broker, note: dict[str, Any]) -> None:
    """PyTorch's own errors end captures that are spoilt or cannot begin; the next one is right."""
    ended = run("pool", broker, "failed_capture")
    note.setdefault("pool", {})["failed_capture"] = found = ended["failed_capture"]
    assert all(name != "nothing" and "zico" not in text for name, text in found.pop("errors"))
    assert found == {"is_equal": [True] * 2, **CLEAN}
    assert (ended["exit"], ended["errors"]) == (0, "")
    assert is_whole(broker)


def test_a_capture_may_free_what_it_did_not_allocate(broker: Broker, note: dict[str, Any]) -> None:
    """Tensors from before are freed, no mark of theirs is in the graph, and the pool is whole."""
    ended = run("pool", broker, "freed_in_capture")
    note.setdefault("pool", {})["freed_in_capture"] = found = ended["freed_in_capture"]
    assert found == {"is_equal": [True] * 2, **CLEAN}
    assert (ended["exit"], ended["errors"]) == (0, "")
    assert is_whole(broker)


def test_graph_trees_follow_each_other(usual: dict[str, Any]) -> None:
    """Results are right in each order and at each launch, PyTorch's checks of its pool hold, and nothing is left."""
    found = usual["trees"]
    assert found == {
        "is_right": True,
        "results": 21,
        "launched": [6, 6, 6],
        "ways_back": 3,
        "captures": 5,
        **CLEAN,
    }


@pytest.mark.parametrize(("name", "captures"), [("compiled_trees", 2), ("compiled_without", None)])
def test_reduce_overhead_trains(broker: Broker, note: dict[str, Any], name: str, captures: int | None) -> None:
    """Compiled passes are captured and launched; where trees cannot run, they run plainly and one line says why."""
    ended = run("pool", broker, name)
    note.setdefault("pool", {})[name] = found = ended[name]
    assert found == {"captures": captures, "skips": 0}
    line = "zico: torch.compile with mode='reduce-overhead' runs without CUDA graphs in this job: a job that pages"
    assert [each.startswith(line) for each in ended["errors"].splitlines()] == [True] * (captures is None)
    assert ended["exit"] == 0
    assert is_whole(broker)


def test_a_stream_that_is_destroyed_with_work_on_it(broker: Broker, note: dict[str, Any]) -> None:
    """What was allocated on it can be freed, and the job's other streams get it after the next boundary."""
    ended = run("pool", broker, "destroyed_stream")
    note.setdefault("pool", {})["destroyed_stream"] = found = ended["destroyed_stream"]
    assert {name: found[name] for name in CLEAN} == CLEAN
    assert found["refused"] > 0
    assert (found["in_pool"], found["spilled_bytes"]) == (True, 0)
    assert (ended["exit"], ended["errors"]) == (0, "")
    assert is_whole(broker)


def test_a_graph_from_before_joining_keeps_the_job_out(broker: Broker, note: dict[str, Any]) -> None:
    """Joining is refused by one sentence; the graph's replay stays right, and the pool is whole."""
    ended = run("plain", broker, "captured_before")
    note.setdefault("plain", {})["captured_before"] = found = ended["captured_before"]
    name, text = found["join"]
    assert name == "zico.base.errors.HookError"
    assert "is in use already" in text
    assert found["is_equal"] == [True, True]
    assert found["after"]
    assert (ended["exit"], ended["errors"]) == (0, "")
    assert is_whole(broker)


def test_tensors_may_be_left_to_the_end(broker: Broker, note: dict[str, Any]) -> None:
    """A job that ends with tensors, streams and events alive ends with 0 and says nothing, and all comes back."""
    ended = run("pool", broker, "leave")
    note.setdefault("pool", {})["leave"] = ended["leave"]
    assert ended["leave"]["live_bytes"] > 8 * MIB
    assert (ended["exit"], ended["errors"]) == (0, "")
    assert is_whole(broker)
