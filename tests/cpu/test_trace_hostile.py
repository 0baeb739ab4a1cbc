"""Bad traces: whatever the bytes, reading ends in a trace or in one line that names the file."""

from __future__ import annotations

import io
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from cpu.support.trace_cases import Loop, train
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zico.base.errors import TraceError
from zico.trace.chrome import chrome_bytes
from zico.trace.events import EVENT, Kind, Origin, Trace
from zico.trace.files import read_trace, write_trace
from zico.trace.lifetimes import lifetimes
from zico.trace.lines import MAX_LINE_BYTES
from zico.trace.snapshot import snapshot_bytes, unpickle

HEADER = b'{"zico_trace":1}\n'
ALLOC = b'{"k":"alloc","t":0,"tensor":0,"bytes":8}\n'
FREE = b'{"k":"free","t":1,"tensor":0}\n'


def stop(events: int) -> bytes:
    """Return the last line."""
    return b'{"k":"stop","events":%d,"dropped":0}\n' % events


def refused(path: Path, content: bytes) -> TraceError:
    """Return the error that a file's content gives, reading and looking for lifetimes."""
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        lifetimes(read_trace(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        (b"", 1, "truncated.*record one"),
        (b"hello\n", 1, "no trace's first line"),
        (b'{"zico_trace":2}\n', 1, "version 2 of the format.*version 1"),
        (b'{"zico_trace":"1"}\n', 1, "no trace's first line"),
        (HEADER, 1, "no stop.*--allow-truncated"),
        (HEADER + ALLOC, 2, "no stop.*--allow-truncated"),
        (HEADER + ALLOC + b"{\n" + stop(2), 3, "is not an event.*record it again"),
        (HEADER + ALLOC + b"\xff\xfe\n" + stop(2), 3, "is not an event"),
        (HEADER + ALLOC + b'{"k":"alloc","op":"\xff"}\n' + stop(2), 3, "is not an event.*utf-8"),
        (HEADER + ALLOC + b"\n" + stop(1), 3, "is not an event"),
        (HEADER + b'{"k":"melt","t":0}\n' + stop(1), 2, "Invalid value 'melt'"),
        (HEADER + ALLOC.replace(b"8", b"-8") + stop(1), 2, "Expected `int` >= 1 - at `\\$.bytes`"),
        (HEADER + ALLOC.replace(b"8", b"0") + stop(1), 2, "Expected `int` >= 1"),
        (HEADER + ALLOC.replace(b"8", b"9" * 30) + stop(1), 2, "is not an event"),
        (HEADER + ALLOC.replace(b"8", b"1.5") + stop(1), 2, "Expected `int`"),
        (HEADER + b'{"k":"alloc","x":' + b"[" * 100_000 + b"\n" + stop(1), 2, "recursion"),
        (HEADER + stop(0) + ALLOC, 2, "more follow"),
        (HEADER + stop(0) * 2, 2, "more follow"),
        (HEADER + ALLOC + stop(2), 3, "says 2 events.*there are 1"),
        (HEADER + FREE + ALLOC + stop(2), 2, "frees tensor 0, which is not allocated before.*record it again"),
        (HEADER + ALLOC + FREE + FREE + stop(3), 4, "frees tensor 0 for the second time"),
        (HEADER + ALLOC + ALLOC + stop(2), 3, "allocates tensor 0 for the second time"),
        (HEADER + FREE.replace(b"0}", b"77}") + ALLOC + stop(2), 2, "frees tensor 77, which is not allocated"),
        (HEADER + ALLOC.replace(b"0", b"-1") + stop(1), 2, "Expected `int` >= 0"),
        (HEADER + stop(0), 0, "no allocations: trace a program that trains"),
        (HEADER + ALLOC + ALLOC.replace(b"0", b"1").replace(b"8", b"%d" % 2**60) + stop(2), 3, "all to 2.*60 bytes"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, line: int, says: str) -> None:
    """Each way in which a file can be wrong is one line with file, line and remedy, compressed or not."""
    for number, form in enumerate((content, zstandard.compress(content))):
        if not content and number:
            continue
        error = refused(tmp_path / str(number), form)
        assert error.line == line
        assert re.search(says, error.what), error.what


def test_a_free_may_lack_its_allocation_after_dropped_events(tmp_path: Path) -> None:
    """What the recorder could not write does not make a trace inconsistent."""
    dropped = b'{"k":"dropped","t":0,"events":3}\n'
    content = HEADER + ALLOC + dropped + FREE.replace(b"0}", b"7}") + b'{"k":"stop","events":3,"dropped":3}\n'
    (tmp_path / "t").write_bytes(content)
    assert len(lifetimes(read_trace(tmp_path / "t"))) == 1


def test_damage_in_compressed_data_is_found(tmp_path: Path) -> None:
    """Any byte of a compressed trace that is changed makes reading fail or changes nothing."""
    write_trace(tmp_path / "t", train(3))
    good = (tmp_path / "t").read_bytes()
    before = read_trace(tmp_path / "t").events.tobytes()
    found = 0
    for at in range(4, len(good), max(len(good) // 60, 1)):
        (tmp_path / "t").write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        try:
            assert read_trace(tmp_path / "t").events.tobytes() == before
        except TraceError:
            found += 1
    assert found > 50


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """A line of a gigabyte, packed into kilobytes, is refused after its first mebibyte."""
    compressor = zstandard.ZstdCompressor().compressobj()
    block = b"x" * (1 << 24)
    packed = compressor.compress(HEADER) + b"".join(compressor.compress(block) for _ in range(64)) + compressor.flush()
    assert len(packed) < 1 << 18
    assert f"more than {MAX_LINE_BYTES} bytes" in str(refused(tmp_path / "t", packed))


def test_a_huge_window_is_refused(tmp_path: Path) -> None:
    """Compressed data that asks for 2 GiB of window is refused."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=False)
    out = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(out, closefd=False) as writer:
        writer.write(HEADER)
    refused(tmp_path / "t", out.getvalue())


class Evil:
    """A pickle of this calls a function when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Ask for a directory to be made."""
        return Path.mkdir, (Path("evil-was-here"),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    """Code in a snapshot is not run, whatever the protocol, and the error says that it was refused."""
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps({"device_traces": [[{"action": Evil()}]], "segments": []}, protocol=protocol)
    assert "refused" in str(refused(tmp_path / "t.pickle", content))
    assert not (tmp_path / "evil-was-here").exists()
    pickle.loads(content)  # noqa: S301 - the control: this pickle does run code
    assert (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x04cos\nsystem\n(X\x02\x00\x00\x00lstR.",  # GLOBAL, REDUCE
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.",  # STACK_GLOBAL
        b"\x80\x02(X\x02\x00\x00\x00lsios\nsystem\n.",  # INST
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02Pid\n.",  # PERSID
        b"\x80\x02}}b.",  # BUILD
        b"\x80\x04\x8f.",  # EMPTY_SET
        b"\x80\x05C\x01x.",  # SHORT_BINBYTES
        b"\x80\x06}\xf0.",  # an operation to come
        b"\x80\x04" + b"}r\xff\xff\xff\xff" + b".",  # a memo of 2**32 entries: fine, it holds one
        b"\x80\x04X\xff\xff\xff\x7f.",  # a string of 2 GiB
        b"\x80\x04\x8b\xff\xff\xff\x7f.",  # an integer of 2 GiB
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame beyond the end
        b"\x80\x04" + b"(" * 100_000 + b".",  # 100,000 marks
        b"\x80\x04]" + b"\x85" * 100_000 + b".",  # nesting of 100,000 tuples
        b"\x80\x04]" + b"]a" * 100_000 + b".",
        b"\x80\x04]q\x00h\x00a.",  # a list that holds itself
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x04a.",
        b"\x80\x04K\x01]s.",
        b"\x80\x04}]]s.",  # a list as a key
        b"\x80\x04}(K\x01u.",
        b"\x80\x04h\x07.",
    ],
)
def test_other_pickle_programs_end_in_a_line(tmp_path: Path, program: bytes) -> None:
    """Pickles that call, import, nest, refer to nothing or ask for gigabytes are one-line errors."""
    refused(tmp_path / "t.pickle", program)


def test_lists_that_multiply_are_counted_first(tmp_path: Path) -> None:
    """A snapshot in which one list of a thousand events stands a million times is refused before it is copied."""
    inner = [{"action": "alloc", "addr": 1, "size": 1}] * 1000
    content = pickle.dumps({"device_traces": [inner] * 1_000_000, "segments": []}, protocol=4)
    assert "entries are more than" in str(refused(tmp_path / "t.pickle", content))


@settings(deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 70), 1 << 70)
        | st.floats(allow_nan=False)
        | st.text(max_size=300),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.lists(inner).map(tuple),
    ),
    st.integers(2, 5),
)
def test_harmless_pickles_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    """Numbers, strings, lists, tuples and dictionaries are the same objects that Python's own module builds."""
    shared = [value, value, {"again": value}]
    assert unpickle(pickle.dumps(shared, protocol=protocol)) == shared


SAMPLES = (
    HEADER + ALLOC + FREE + stop(2),
    zstandard.compress(HEADER + ALLOC + FREE + stop(2)),
    snapshot_bytes([train(2, layers=2)]),
    pickle.dumps(pickle.loads(snapshot_bytes([train(1, layers=1)])), protocol=2),  # noqa: S301 - our own
    chrome_bytes([train(2, layers=2)]),
)
changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=4), st.integers(0, 6)), min_size=1, max_size=5)


@settings(deadline=None)
@given(sample=st.sampled_from(SAMPLES), edits=changes)
def test_a_changed_file_is_a_trace_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, sample: bytes, edits: list[tuple[int, bytes, int]]
) -> None:
    """Valid files of every format with bytes changed, added and removed give a trace or a TraceError."""
    for at, new, removed in edits:
        place = at % (len(sample) + 1)
        sample = sample[:place] + new + sample[place + removed :]
    read_or_refuse(tmp_path_factory, sample)


@settings(deadline=None)
@given(content=st.binary(max_size=200))
@example(struct.pack("<I", 0x184D2A50))  # a skippable frame of zstd, cut
@example(b'[{"ph":"i","name":"[memory]","ts":1e999,"args":{"Addr":1,"Bytes":1}}]')
@example(b'{"traceEvents":[{"ph":"i","name":"[memory]","ts":0,"args":{"Addr":1,"Bytes":-9223372036854775808}}]}')
@example(
    b'{"traceEvents":[{"ph":"i","name":"[memory]","ts":0,"args":{"Addr":1,"Bytes":1}},{"ph":"X","name":"ProfilerStep#99999999999"}]}'
)
@example(b'[{"ph":"X","cat":"cpu_op","ts":-1e14,"dur":1e300,"pid":[]}]')
def test_any_bytes_are_a_trace_or_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Any bytes, also behind the beginnings that formats are known by, give a trace or a TraceError."""
    for start in (b"", HEADER, b"\x80\x04", b"{", b"[", b"\x28\xb5\x2f\xfd", HEADER + ALLOC):
        read_or_refuse(tmp_path_factory, start + content)


def read_or_refuse(factory: pytest.TempPathFactory, content: bytes) -> None:
    """Read a file of this content; only a TraceError may come of it."""
    path = factory.getbasetemp() / "fuzzed"
    path.write_bytes(content)
    try:
        trace = read_trace(path)
        assert trace.events.dtype == EVENT
        lifetimes(trace)
    except TraceError as error:
        named = str(error).startswith(str(path))
    else:
        named = True
    assert named


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 5), st.integers(-1, 5)), max_size=30))
def test_any_events_have_lifetimes_or_an_error(rows: list[tuple[Kind, int, int]]) -> None:
    """Events in any order give as many lifetimes as allocations, each ending after it begins, or a TraceError."""
    events = np.array([(0, tensor, size, -1, 0, kind, 0) for kind, tensor, size in rows], EVENT)
    try:
        life = lifetimes(Trace(Origin(), events))
    except TraceError:
        return
    assert len(life) == sum(kind == Kind.ALLOC for kind, _, _ in rows)
    assert (life.begin < life.end).all()
    assert (life.size_bytes > 0).all()


def test_a_loop_that_never_repeats_is_refused() -> None:
    """A script whose allocations never come again is told what to do."""
    from zico.planning.packing.from_trace import iteration_problem

    loop = Loop()
    for i in range(200):
        loop.free(loop.allocate(1000 + i * i))
    with pytest.raises(TraceError, match=r"trace: shows no iteration three times: .*--whole"):
        iteration_problem(loop.trace())
