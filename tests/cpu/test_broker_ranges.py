"""Numbers at the ends of their ranges and beyond: a peer that says them harms its own connection and nothing else."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from cpu.support.broker_messages import framed, no_descriptor_left, raw_frame
from cpu.support.members import make_pool
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zico.base.errors import BrokerError, ConfigError, LocalProtocolError, RemoteProtocolError
from zico.broker import link, transport
from zico.broker.accounting import Ledger, write_record
from zico.broker.client import BrokerClient
from zico.broker.members import Entry
from zico.broker.notes import NOT_SEEN
from zico.broker.pool_manager import PoolManager
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import FrameReader, encode_frame
from zico.broker.server import Server
from zico.broker.transport import Listener
from zico.job import session
from zico.pool.layout import HEADER, JOB, MAX_JOBS, PLANNER_NOTE_BYTES, JobState
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 20.0
REGION_BYTES = 1 << 16
N_REGIONS = 8
GREETING: dict[str, Any] = {"version": m.PROTOCOL_VERSION, "name": "hostile", "pid": 1, "framework": "torch"}
HELLO = {"type": "hello", **GREETING}


def hello(**fields: Any) -> m.Hello:  # noqa: ANN401 - of any field, in its range or not
    """Return a greeting."""
    return m.Hello(**GREETING | fields)


# -- a true broker in this process -----------------------------------------------------------------


class DumbKeeper(PoolManager):
    """A pool manager that cannot tell how the pool is now."""

    def status(self, now_ns: int) -> m.Status:
        """Return a status that no message can carry."""
        return msgspec.structs.replace(super().status(now_ns), uptime_s=math.nan)


@contextlib.contextmanager
def serving(kind: type[PoolManager] = PoolManager) -> Iterator[Path]:
    """Serve a pool of eight regions in a thread of this process, which must end when it is told to, and not before."""
    faults: list[BaseException] = []
    with contextlib.ExitStack() as owned:
        directory = Path(owned.enter_context(tempfile.TemporaryDirectory()))
        table = owned.enter_context(make_pool(N_REGIONS, region_bytes=REGION_BYTES, claims=False))
        manager = kind(table, [table.memory_fd], policy_named("none"), record_path=directory / "record.npz")
        listener = owned.enter_context(Listener(directory / "zico" / "s"))
        stopped, stop = os.pipe()
        owned.callback(os.close, stopped)

        def serve() -> None:
            try:
                Server(manager, listener).serve(stop_fd=stopped)
            except Exception as fault:  # noqa: BLE001 - the test fails by it
                faults.append(fault)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.path
        finally:
            os.close(stop)
            thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the server does not end"
    assert faults == []


@contextlib.contextmanager
def raw(path: Path) -> Iterator[socket.socket]:
    """Give a plain connection."""
    with transport.connect(path, DEADLINE_S) as connection:
        connection.settimeout(DEADLINE_S)
        yield connection


def say(connection: socket.socket, frame: bytes) -> None:
    """Send a frame to a broker that may have hung up."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(frame)


def last_words(connection: socket.socket, *, hangs_up: bool = True) -> list[m.Message]:
    """Return all that the broker still says to a peer that is silent from now on; each encodes to itself."""
    reader, got = FrameReader(), []
    if hangs_up:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            got += reader.feed(data)
    for message in got:
        assert FrameReader().feed(encode_frame(message)) == [message]
    return got


# -- what a single field does ----------------------------------------------------------------------

BEYOND = {
    "a limit": (hello(limit_bytes=2**63 - 1), r"<= 9007199254740992 - at `\$.limit_bytes`, not 9223372036854775807"),
    "a limit below 0": (hello(limit_bytes=-1), r">= 0 - at `\$.limit_bytes`, not -1"),
    "a pid": (hello(pid=2**31), r"<= 4194304 - at `\$.pid`, not 2147483648"),
    "a version": (hello(version=2**64 - 1), r"<= 2147483647 - at `\$.version`, not 18446744073709551615"),
    "a weight": (hello(share=m.Share(weight=math.inf)), r"<= 1000.0 - at `\$.share.weight`, not inf"),
    "no weight": (hello(share=m.Share(weight=math.nan)), r"> 0.0 - at `\$.share.weight`, not nan"),
    "a priority": (
        hello(share=m.Share(priority=-(2**63))),
        r">= -1000 - at `\$.share.priority`, not -922337203685477580",
    ),
    "a guarantee": (hello(share=m.Share(slo=1e308)), r"<= 100.0 - at `\$.share.slo`, not 1e\+308"),
    "no processors": (hello(share=m.Share(compute=0.0)), r"> 0.0 - at `\$.share.compute`, not 0.0"),
    "more processors than there are": (hello(share=m.Share(compute=1.5)), r"<= 1.0 - at `\$.share.compute`, not 1.5"),
    "a C1 control": (hello(name="a\x9b2J"), r"at `\$.name`, not 'a\\x9b2J'"),
    "an observer's version": (m.Observe(2**31), r"<= 2147483647 - at `\$.version`, not 2147483648"),
    "a budget": (m.Change(budget_bytes=2**53 + 1), r"<= 9007199254740992 - at `\$.budget_bytes`, not 9007199254740993"),
    "a new limit": (
        m.Change(limit_bytes=2**53 + 1),
        r"<= 9007199254740992 - at `\$.limit_bytes`, not 9007199254740993",
    ),
}


@pytest.mark.parametrize(("message", "sentence"), BEYOND.values(), ids=BEYOND.keys())
def test_a_field_out_of_range_is_named_with_its_value_and_range(message: m.Message, sentence: str) -> None:
    """Both ends refuse it: the reader as its peer's fault, the sender, before anything is sent, as its own."""
    with pytest.raises(RemoteProtocolError, match=sentence):
        FrameReader().feed(framed(msgspec.msgpack.encode(message)))
    with pytest.raises(LocalProtocolError, match=sentence):
        encode_frame(message)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800"], ids=["too large", "too small", "a surrogate"])
def test_what_msgpack_cannot_hold_is_our_own_fault_too(value: int | str) -> None:
    """Numbers of more than 64 bits and broken text are refused before they are sent, by the one error."""
    with pytest.raises(LocalProtocolError, match="Hello cannot be sent"):
        encode_frame(hello(name=value) if isinstance(value, str) else hello(pid=value))


def test_a_message_carries_any_planners_note_of_a_record() -> None:
    """Both have the same room, so a longest note that a job writes ends no answer of the broker."""
    assert m.MAX_PLANNER_NOTE_CHARS == PLANNER_NOTE_BYTES


def test_text_that_is_told_can_be_carried_whatever_it_was() -> None:
    """Control characters and surrogates are shown as escapes, and what is too long is cut."""
    text = m.as_text("\x1b[2J\n\x9b\ud800" + "x" * 3000)
    assert text.startswith(r"\x1b[2J\n\x9b\ud800xxx")
    assert FrameReader().feed(encode_frame(m.Refused(text))) == [m.Refused(text)]


def test_the_largest_limit_is_all_of_the_pool() -> None:
    """A limit at the end of its range holds for a job that joins and for one that is changed, as what the pool has."""
    with no_descriptor_left(), serving() as path, BrokerClient(path, DEADLINE_S) as client, raw(path) as connection:
        say(connection, raw_frame(**HELLO, limit_bytes=m.MAX_SIZE_BYTES))
        connection.recv(1 << 16)
        assert [job.limit_bytes for job in client.status().jobs] == [N_REGIONS * REGION_BYTES]
        client.change(m.Change(job="hostile", limit_bytes=REGION_BYTES))
        client.change(m.Change(job="hostile", limit_bytes=m.MAX_SIZE_BYTES))
        assert [job.limit_bytes for job in client.status().jobs] == [N_REGIONS * REGION_BYTES]


def test_a_refusal_that_names_every_job_is_cut_to_what_can_be_said() -> None:
    """With all places taken by the longest names, who changes a job that is not there gets a sentence."""
    with serving() as path, contextlib.ExitStack() as owned, BrokerClient(path, DEADLINE_S) as client:
        for number in range(MAX_JOBS):
            connection = owned.enter_context(raw(path))
            say(connection, raw_frame(**HELLO | {"name": f"{number:x<48}"}))
            connection.recv(1 << 16)
        observer = owned.enter_context(raw(path))
        say(observer, encode_frame(m.Observe(m.PROTOCOL_VERSION)) + encode_frame(m.Change(job="nobody", weight=2.0)))
        (changed,) = last_words(observer)
        assert isinstance(changed, m.Changed)
        assert len(changed.refused) == m.MAX_TEXT_CHARS
        assert len(client.status().jobs) == MAX_JOBS


def test_a_frame_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that owes the rest of its frame is told and dropped when the patience ends; one that owes nothing stays.

    When it ends, ``test_broker_link.py`` shows.
    """
    with serving() as path, BrokerClient(path, DEADLINE_S) as other, raw(path) as connection:
        other.status()
        connection.sendall(encode_frame(m.Observe(m.PROTOCOL_VERSION)) + encode_frame(m.StatusRequest()))
        connection.recv(1 << 16)
        monkeypatch.setattr(link, "PATIENCE_NS", 0)
        connection.sendall(encode_frame(m.StatusRequest())[:5])
        (last,) = last_words(connection, hangs_up=False)
        assert last == m.ErrorReply("owed the rest of a message or the taking of an answer for 10 s")
        other.status()


def test_an_answer_that_cannot_be_sent_ends_its_own_connection_only() -> None:
    """Whatever the broker fails to encode, the peer that asked is told and dropped, and the next one is served."""
    with no_descriptor_left(), serving(DumbKeeper) as path, BrokerClient(path, DEADLINE_S) as client:
        for _ in range(2):
            with pytest.raises(BrokerError, match=r"cannot be answered: Status cannot be sent: .*uptime_s`, not nan"):
                client.status()
            assert client.report().jobs == ()


@pytest.mark.parametrize("word", [2**63 - 1, -(2**63)])
def test_whatever_a_jobs_words_in_the_table_are_the_answers_can_be_sent(word: int, tmp_path: Path) -> None:
    """A job that has left nonsense in its own counters is told of as well as it can be."""
    header, jobs = np.zeros(1, HEADER)[0], np.zeros(MAX_JOBS, JOB)
    ledger = Ledger(policy="none", device="host", region_bytes=REGION_BYTES, budget_bytes=REGION_BYTES, began_ns=0)
    ledger.join(Entry(name="a", process=NOT_SEEN, job=0, framework="torch", share=m.DEFAULT_SHARE), pid=1)
    for field, (kind, _) in JOB.fields.items():  # type: ignore[union-attr]
        if kind == np.int64 and field not in {"held", "out_now_bytes", "save"}:
            jobs[0][field] = word
    jobs[0]["state"] = JobState.RUNNING
    ledger.observe(header, jobs, 0, 1)
    for answer in (ledger.status(2), ledger.report(2)):
        assert FrameReader().feed(encode_frame(answer)) == [answer]
    write_record(tmp_path / "record.npz", ledger.arrays(2))


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "1e10", "soon"])
def test_a_wait_limit_that_cannot_be_said_is_the_users_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job refuses its own variable, by its name, value and range, before it looks for a broker."""
    monkeypatch.setenv("ZICO_SOCKET", "/nowhere/s")
    monkeypatch.setenv("ZICO_WAIT_LIMIT_S", text)
    with pytest.raises(ConfigError, match=f"ZICO_WAIT_LIMIT_S: '{text}' is not a number of seconds from 0 to 1e\\+09"):
        session.attach("torch")


# -- all of them -----------------------------------------------------------------------------------

integers = st.sampled_from([
    *(0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(m.MAX_PID, REGION_BYTES, N_REGIONS * REGION_BYTES, N_REGIONS * REGION_BYTES + 1),
])  # fmt: skip
floats = st.sampled_from([0.0, -0.0, 5e-324, 0.1, 100.0, 1000.0, 1e9, 1e308, math.inf, -math.inf, math.nan])
numbers = integers | floats
texts = st.sampled_from(["hostile", "nobody", "", "x" * 48, "x" * 49, "\N{GRINNING FACE}" * 48, "\x9b", "a\n"])
shares = st.fixed_dictionaries(
    {}, optional={"weight": numbers, "priority": numbers, "slo": numbers | st.none(), "compute": numbers}
)
greetings = st.fixed_dictionaries(
    {
        "type": st.just("hello"),
        "version": st.just(m.PROTOCOL_VERSION) | integers,
        "name": st.just("hostile") | texts,
        "pid": integers,
        "framework": st.just("torch") | texts,
    },
    optional={"share": shares, "limit_bytes": numbers, "save": st.sampled_from(["none", "swap", "page", "auto", "?"])},
)
observing = st.fixed_dictionaries({"type": st.just("observe"), "version": st.just(m.PROTOCOL_VERSION) | integers})
changing = st.fixed_dictionaries(
    {"type": st.just("change")},
    optional={
        "budget_bytes": numbers,
        "job": texts,
        "limit_bytes": numbers,
        "weight": numbers,
        "priority": numbers,
        "slo": numbers | st.none(),
    },
)
questions = st.sampled_from([{"type": kind} for kind in ("status?", "report?", "more?", "goodbye", "format disk")])
paging = st.fixed_dictionaries({"type": st.just("pages"), "wait_limit_s": numbers})
frames = st.one_of(
    st.one_of(greetings, observing, changing, questions, paging).map(lambda fields: raw_frame(**fields)),
    st.binary(min_size=1, max_size=60).map(framed),
    st.binary(min_size=1, max_size=60),
)
peers = st.one_of(
    st.lists(frames, min_size=1, max_size=4),
    st.tuples(st.just(raw_frame(**HELLO)), frames, frames).map(list),
    st.tuples(greetings.map(lambda fields: raw_frame(**fields)), frames).map(list),
    st.tuples(st.just(encode_frame(m.Observe(m.PROTOCOL_VERSION))), frames, frames, frames).map(list),
)
ASKED = encode_frame(m.Observe(m.PROTOCOL_VERSION)), encode_frame(m.StatusRequest()), encode_frame(m.ReportRequest())


def is_fault(frame: bytes) -> bool:
    """Tell whether bytes are no whole message, whoever says them."""
    reader = FrameReader()
    try:
        return not reader.feed(frame) or reader.in_frame
    except RemoteProtocolError:
        return True


def is_observer(spoken: list[bytes]) -> bool:
    """Tell whether somebody says what an observer may say, and nothing else."""
    if any(map(is_fault, spoken)):
        return False
    first, *questions = FrameReader().feed(b"".join(spoken))
    asks = all(isinstance(question, m.StatusRequest | m.ReportRequest | m.Change) for question in questions)
    return asks and first == m.Observe(m.PROTOCOL_VERSION)


@given(st.lists(peers, min_size=1, max_size=4))
@example([[raw_frame(**HELLO, limit_bytes=2**63 - 1)]])
@example([[raw_frame(**HELLO, limit_bytes=m.MAX_SIZE_BYTES)], list(ASKED)])
@example([[raw_frame(**HELLO), raw_frame(type="pages", wait_limit_s=math.inf)]])
@settings(max_examples=60)
def test_extreme_messages_end_their_own_connection_and_nothing_else(said: list[list[bytes]]) -> None:
    """Between any messages of hostile peers an honest job's state stays as it was, and every answer is sound."""
    with serving() as path, contextlib.ExitStack() as owned:
        honest = owned.enter_context(BrokerClient(path, DEADLINE_S))
        membership = honest.join("honest", "torch", m.Share(weight=2.0, priority=1))
        owned.callback(membership.close_descriptors)
        owned.callback(membership.leave)
        before = figures(honest)
        connections = [owned.enter_context(raw(path)) for _ in said]
        for turn in range(max(map(len, said))):
            for connection, spoken in zip(connections, said, strict=True):
                if turn < len(spoken):
                    say(connection, spoken[turn])
                    assert figures(honest) == before
        for connection, spoken in zip(connections, said, strict=True):
            got = last_words(connection)
            assert figures(honest) == before
            if is_fault(spoken[0]):
                assert [type(message) for message in got] == [m.ErrorReply]
            elif is_observer(spoken):
                assert len(got) == len(spoken) - 1
                assert m.ErrorReply not in map(type, got)


def figures(client: BrokerClient) -> tuple[object, ...]:
    """Return what the broker says of the honest job, and see that it also answers for all of the others."""
    status, report = client.status(), client.report()
    assert report.jobs[0].name == "honest"
    assert FrameReader().feed(encode_frame(status) + encode_frame(report)) == [status, report]
    (job,) = (job for job in status.jobs if job.name == "honest")
    return (job.job, job.pid, job.state, job.limit_bytes, job.share, job.held_bytes, status.most_bytes)
