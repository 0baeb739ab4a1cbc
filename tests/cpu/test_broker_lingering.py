"""Dead jobs on a GPU: which signs keep their regions from others, and for how long."""

from __future__ import annotations

import logging
import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support import fake_nvml
from cpu.support.fake_nvml import UUID, Library, Memory, Process

from zico.base.units import GIB, MIB
from zico.broker import lingering, notes
from zico.broker.lingering import LOOK_NS, SAY_AFTER_NS, Contexts, Lingering
from zico.pool.deaths import LINGER_NS
from zico.pool.rules import IDLE_NS

if TYPE_CHECKING:
    from pathlib import Path

DEAD_PID = 1 << 30
"""More than any process number (proc(5), pid_max)."""
SERVER = 7
DIED_NS = 5 * LOOK_NS
DEADLINE_S = 10.0


def dead(*, is_open: bool = False) -> Any:  # noqa: ANN401 - as a member and a link, as far as they are asked
    """Return a job that died at ``DIED_NS``."""
    member: Any = SimpleNamespace(pid=DEAD_PID, process=notes.Process(DEAD_PID, 1), name="a")
    link: Any = SimpleNamespace(is_open=is_open)
    return Lingering(member, link, DIED_NS)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Install a library that lists the dead process beside this one."""
    made = Library(Memory(80 * GIB, 20 * GIB), [Process(DEAD_PID, MIB), Process(os.getpid(), MIB)])
    made.install(monkeypatch)
    return made


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody know what runs on the GPU."""
    fake_nvml.uninstall(monkeypatch)


@pytest.mark.usefixtures("no_library")
def test_an_open_connection_holds_until_it_closes(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has the connection may have the driver's files; what takes long is said once."""
    contexts, job = Contexts(UUID), dead(is_open=True)
    with caplog.at_level(logging.WARNING):
        assert not contexts.has_ended(job, MIB, DIED_NS)
        assert not caplog.messages
        for _ in range(3):
            assert not contexts.has_ended(job, MIB, DIED_NS + SAY_AFTER_NS)
    assert len(caplog.messages) == 1
    assert "its 1 MiB stay held until that ends, 20 s at most" in caplog.messages[0]
    job.link.is_open = False
    assert contexts.has_ended(job, MIB, DIED_NS + SAY_AFTER_NS)


@pytest.mark.usefixtures("no_library")
def test_a_deadline_ends_every_hold() -> None:
    """Invariant 7: the regions come back before a job that waits for them goes to the next tier; contexts may live."""
    job = dead(is_open=True)
    assert not job.is_late(DIED_NS + LINGER_NS - 1)
    assert job.is_late(DIED_NS + LINGER_NS)
    assert not Contexts(UUID).has_ended(job, MIB, DIED_NS + LINGER_NS)
    assert LINGER_NS < IDLE_NS


@pytest.mark.usefixtures("no_library")
def test_a_daemon_that_does_not_tell_holds_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where MPS never answers, a job's place is free after the deadline, else a daemon ran out of them."""
    contexts, job = Contexts(UUID, tmp_path), dead()
    monkeypatch.setattr(contexts._mps, "_answer", lambda _asked_ns: None)
    assert not contexts.has_ended(job, MIB, DIED_NS + LINGER_NS - 1)
    assert contexts.has_ended(job, MIB, DIED_NS + LINGER_NS)


def test_a_process_that_the_driver_lists_holds(library: Library) -> None:
    """The library is asked now and then; when it lists the process no longer, the context has ended."""
    contexts, job = Contexts(UUID), dead()
    assert not contexts.has_ended(job, MIB, DIED_NS)
    library.processes = [Process(os.getpid(), MIB)]
    assert not contexts.has_ended(job, MIB, DIED_NS + LOOK_NS - 1)
    assert contexts.has_ended(job, MIB, DIED_NS + LOOK_NS)


def test_numbers_of_another_namespace_tell_nothing(library: Library) -> None:
    """A number that is listed beside others that do not exist here is somebody else's."""
    library.processes.append(Process(DEAD_PID + 1, MIB))
    assert Contexts(UUID).has_ended(dead(), MIB, DIED_NS)


@pytest.mark.usefixtures("no_library")
def test_a_client_of_mps_holds_until_the_server_has_let_it_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what is answered after the death counts; a daemon that does not tell holds up to the deadline."""
    answers: dict[int, frozenset[int] | None] = {1: frozenset({DEAD_PID}), 2: None, 3: frozenset()}
    asked, may_answer = iter(answers.values()), threading.Semaphore(0)

    def clients(_pipes: Path) -> dict[int, frozenset[int]] | None:
        assert may_answer.acquire(timeout=DEADLINE_S)
        answer = next(asked)
        return None if answer is None else {SERVER: answer}

    monkeypatch.setattr(lingering.mps, "clients", clients)
    contexts, job = Contexts(UUID, tmp_path), dead()
    mps = contexts._mps
    assert mps is not None
    mps._found = (DIED_NS - 1, frozenset())
    for number, answer in answers.items():
        now_ns = DIED_NS + number * 2 * LOOK_NS
        assert not contexts.has_ended(job, MIB, now_ns), "the last answer is older or does not let it go"
        may_answer.release()
        assert mps._thread is not None
        mps._thread.join(timeout=DEADLINE_S)
        assert contexts.has_ended(job, MIB, now_ns) == (answer == frozenset())
