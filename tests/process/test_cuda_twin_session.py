"""Jobs that join a pool on a GPU as adapters do: heap, streams and fences in processes of their own, over the twin."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from process.support.cuda_twin import Process, compile_once, environment
from process.support.cuda_twin_broker import Broker
from process.support.cuda_twin_trainers import MIB, N_REGIONS, REGION_BYTES, TRAINER, WITHOUT_KERNELS, becomes

from zico.broker.protocol.messages import Change

if TYPE_CHECKING:
    from collections.abc import Iterator


PATIENCE_S = 30.0
LOST_WITHIN_S = 10.0
"""Three looks and the wait for copies take 2.5 s."""
ILLEGAL_ADDRESS = "700"


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Give a broker of 16 regions; every test leaves it without jobs."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zt-") as directory:
        room = {"total_bytes": 256 * MIB, "host_bytes": 256 * MIB}
        environ = environment(Path(directory) / "site", **room, attributes=WITHOUT_KERNELS)
        made = Broker(Path(directory), environ, "--budget-bytes", str(N_REGIONS * REGION_BYTES))
        with made.process, made.client:
            assert made.process.line() == "ready"
            yield made


@contextlib.contextmanager
def trainer(broker: Broker, name: str, **environ: str) -> Iterator[Process]:
    """Give a job; when it is dead, the broker knows."""
    with Process(TRAINER, **broker.environ, **environ, ZICO_SOCKET=str(broker.socket), ZICO_JOB=name) as job:
        assert job.line() == "joined"
        yield job
    broker.status(lambda status: name not in [job.name for job in status.jobs], within_s=5)


def test_a_jobs_tensors_are_in_the_gpus_pool(broker: Broker) -> None:
    """A job's heap takes regions of the device, its kernels write them, and what it frees goes back."""
    with trainer(broker, "a") as job:
        assert job.ask("alloc 3 7") == "allocated"
        becomes(job, "is_done", "True")
        assert job.ask("look") == "7 7"
        assert job.ask("status") == f"cuda:0 {3 * REGION_BYTES} {3 * REGION_BYTES}"
        assert broker.client.status().granted_bytes == 3 * REGION_BYTES
        assert job.ask("free") == "freed"
        assert job.ask("step") == "stepped"
        assert broker.client.status().granted_bytes == 0


def test_memory_changes_hands_on_the_devices_timeline(broker: Broker) -> None:
    """Invariant 2: who gets what another's stream still uses gets it at once, and its own stream waits for that one."""
    with trainer(broker, "a") as first, trainer(broker, "b") as second:
        assert first.ask(f"alloc {N_REGIONS} 1") == "allocated"
        becomes(first, "is_done", "True")
        assert first.ask("hold") == "held"
        assert first.ask("free") == "freed"
        assert second.ask(f"alloc {N_REGIONS} 2") == "allocated"
        assert second.ask("is_done") == "False"
        assert first.ask("let_go") == "let go"
        becomes(second, "is_done", "True")
        assert second.ask("look") == "2 2"


@pytest.mark.parametrize(("spacing", "alone", "beside"), [("1GiB", 0, 0), ("0", 3, 3), ("", 1, 2)])
def test_marks_are_as_far_apart_as_the_user_says(broker: Broker, spacing: str, alone: int, beside: int) -> None:
    """``ZICO_SPACING`` holds whoever is there; without it at most half of what is free is unmarked, in equal shares."""

    def marks_of(job: Process) -> int:
        """Free three regions of sixteen, one by one."""
        before = int(job.ask("marks"))
        for value in (1, 2, 3):
            assert job.ask(f"alloc 1 {value}") == "allocated"
        for _ in range(3):
            assert job.ask("free") == "freed"
        return int(job.ask("marks")) - before

    with trainer(broker, "a", **({"ZICO_SPACING": spacing} if spacing else {})) as job:
        assert job.ask("alloc 10 1") == "allocated"
        assert marks_of(job) == alone
        before = int(job.ask("marks"))
        assert job.ask("step") == "stepped"
        assert int(job.ask("marks")) - before == int(spacing != "0")
        with trainer(broker, "b"):
            assert marks_of(job) == beside


def test_a_stream_that_waits_for_a_killed_job_goes_on_within_a_second(broker: Broker) -> None:
    """Invariant 5: the broker advances a dead job's counters when its process is gone, so no stream waits for it."""
    with trainer(broker, "b") as second:
        with trainer(broker, "a") as first:
            assert first.ask(f"alloc {N_REGIONS} 1") == "allocated"
            becomes(first, "is_done", "True")
            assert first.ask("hold") == "held"
            assert first.ask("free") == "freed"
            assert second.ask(f"alloc {N_REGIONS} 2") == "allocated"
            assert second.ask("is_done") == "False"
            first.process.kill()
            becomes(second, "is_done", "True", within_s=1.0)
        assert second.ask("look") == "2 2"


def test_a_stream_that_waits_for_a_lost_context_goes_on_though_its_job_makes_no_call(broker: Broker) -> None:
    """Invariant 7: a thread of the job at the prompt finds that its context is lost; the job gets nothing more."""
    with trainer(broker, "b") as second, trainer(broker, "a") as first:
        assert first.ask(f"alloc {N_REGIONS - 1} 1") == first.ask("alloc 1 1") == "allocated"
        becomes(first, "is_done", "True")
        assert first.ask("hold") == "held"
        assert first.ask("free") == first.ask("free") == "freed"
        assert second.ask(f"alloc {N_REGIONS} 2") == "allocated"
        assert second.ask("is_done") == "False"
        assert first.ask("crash") == "crashed"
        becomes(second, "is_done", "True", within_s=LOST_WITHIN_S)
        assert second.ask("look") == "2 2"
        assert first.ask("lost") == ILLEGAL_ADDRESS
        assert second.ask("free") == "freed"
        assert first.ask("alloc 1 1") == "refused"


def move_out(broker: Broker, job: Process) -> None:
    """Pause job ``a`` and wait until all that it keeps is outside the budget."""
    broker.client.change(Change(job="a", paused=True, move=True))
    job.tell("step")
    status = broker.status(lambda status: broker.has_moved(status, "a"), within_s=PATIENCE_S)
    assert status.granted_bytes == 0


def test_a_paused_job_gives_its_memory_back_and_finds_it_again(broker: Broker) -> None:
    """Invariant 4: another job has all of the GPU's pool meanwhile; the bytes come back to their addresses."""
    with trainer(broker, "a") as first, trainer(broker, "b") as second:
        assert first.ask("alloc 12 7") == "allocated"
        assert first.ask("step") == "stepped"
        move_out(broker, first)
        assert second.ask(f"alloc {N_REGIONS} 2") == "allocated"
        becomes(second, "is_done", "True")
        assert second.ask("look") == "2 2"
        assert second.ask("free") == second.ask("step").replace("stepped", "freed")
        broker.client.change(Change(job="a", paused=False))
        assert first.line() == "stepped"
        assert first.ask("look") == "7 7"
        assert first.ask("status") == f"cuda:0 {12 * REGION_BYTES} {12 * REGION_BYTES}"


def test_a_job_that_is_killed_while_its_memory_is_away_leaves_nothing(broker: Broker) -> None:
    """Invariant 5: nothing of it counts any more, and the next job in its place has nothing away."""
    with trainer(broker, "a") as job:
        assert job.ask("alloc 12 7") == "allocated"
        assert job.ask("step") == "stepped"
        move_out(broker, job)
        job.process.kill()
    with trainer(broker, "a") as job:
        assert job.ask(f"alloc {N_REGIONS} 1") == "allocated"
        (report,) = broker.client.status().jobs
        assert (report.held_bytes, report.away_bytes) == (N_REGIONS * REGION_BYTES, 0)


def test_a_place_is_used_again_with_its_counters(broker: Broker) -> None:
    """A job in a dead one's place marks on from where that one's counters stood: nobody waits for a value of before."""
    for value in (1, 2, 3):
        with trainer(broker, "a") as job:
            assert job.ask(f"alloc {N_REGIONS} {value}") == "allocated"
            assert job.ask("hold") == "held"
            assert job.ask("free") == "freed"
            job.process.kill()
    with trainer(broker, "a") as job:
        assert job.ask(f"alloc {N_REGIONS} 9") == "allocated"
        becomes(job, "is_done", "True")
        assert job.ask("look") == "9 9"


def test_a_job_that_pages_needs_more_than_it_holds(broker: Broker) -> None:
    """With ``ZICO_JOB_SAVE=page`` a job's tensors exceed its limit, keep their bytes, and it dies without a trace."""
    with trainer(broker, "a", ZICO_JOB_SAVE="page", ZICO_JOB_LIMIT=f"{6 * REGION_BYTES}B") as job:
        for value in range(1, 5):
            assert job.ask(f"alloc 4 {value}") == "allocated"
            becomes(job, "is_done", "True")
        assert job.ask("status") == f"cuda:0 {6 * REGION_BYTES} {16 * REGION_BYTES}"
        for value in (4, 3, 2, 1):
            assert job.ask("look") == f"{value} {value}"
            assert job.ask("free") == "freed"
        assert job.ask("step") == "stepped"
        assert job.ask("alloc 4 9") == "allocated"
        job.process.kill()
    assert broker.client.status().granted_bytes == 0


def test_a_window_that_the_gpu_has_no_room_for_is_refused(broker: Broker) -> None:
    """The job says why with both figures, and goes on as any other."""
    settings = {"ZICO_JOB_SAVE": "page", "ZICO_PAGED_BYTES": "1GiB"}
    with trainer(broker, "a", **settings) as job:
        assert job.ask("alloc 3 7") == "allocated"
        assert job.ask("free") == "freed"
        said = job.process.communicate(timeout=60)[1]
    assert "zico: this job is not paged: allocation of managed memory" in said
    assert "1 GiB are asked for" in said
    assert f"{256 - 32} MiB free" in said  # the pool is the rest


def test_a_forked_child_is_told_to_be_spawned(broker: Broker) -> None:
    """Invariant 10: a child of a job on a GPU leaves the pool to its parent, and hears why CUDA does not work in it."""
    with trainer(broker, "a") as job:
        assert job.ask("alloc 2 5") == "allocated"
        said = job.ask("fork")
        assert said.startswith("this process was forked from one that uses cuda:0")
        assert "spawn" in said
        assert said.endswith(", alone")
        (status,) = broker.client.status().jobs
        assert (status.state, status.iterations) == ("running", 0)
        becomes(job, "is_done", "True")
        assert job.ask("look") == "5 5"
