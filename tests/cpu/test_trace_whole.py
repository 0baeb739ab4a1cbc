"""Files of one or two steps: as one iteration they are read, and parts of a step are not taken for steps."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import zstandard
from cpu.support.trace_cases import MIB, Loop, train

from zico.base.errors import TraceError
from zico.cli import main
from zico.planning.packing.from_trace import iteration_problem
from zico.trace.chrome import chrome_bytes
from zico.trace.files import MAX_NAMES_BYTES, read_trace, write_trace
from zico.trace.iterations import as_one_iteration
from zico.trace.snapshot import snapshot_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from zico.trace.events import Trace


def transformer(steps: int, *, again: bool, layers: int = 24, leaks: int = 0) -> Trace:
    """Return steps of layers whose feature maps are kept, or of which one map is, and the rest is made ``again``."""
    loop = Loop()
    for i in range(layers):
        loop.allocate((2 + i % 3) * MIB, "weights")

    def inside(*sizes: int) -> list[int]:
        return [loop.allocate(size * MIB) for size in sizes]

    for _ in range(steps):
        kept: list[list[int]] = []
        for _layer in range(layers):
            kept.append(inside(1))
            maps = inside(8, 4, 12, 16, 8)
            if again:
                loop.free(*maps)
            else:
                kept[-1] += maps
        loop.free(*inside(64, 32))
        while kept:
            loop.free(*inside(*((8, 4, 12, 16, 8) if again else ()), 6, 18, 9, 3))
            loop.free(*kept.pop())
        for i in range(layers):
            loop.free(*inside(2 + i % 3, 2 + i % 3))
        inside(*[1] * leaks)
    return loop.trace()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_layers_are_no_steps(steps: int, again: bool) -> None:  # noqa: FBT001 - a case
    """A file of one or two steps says that it has too few, and as one iteration it has the peak of the file."""
    trace = transformer(steps, again=again)
    with pytest.raises(TraceError, match="take all of it as one iteration by --whole, or record four steps or more"):
        iteration_problem(trace)
    found = iteration_problem(as_one_iteration(trace))
    assert len(found.iterations) == 1
    live = iteration_problem(as_one_iteration(transformer(6, again=again))).problem.peak_live_bytes
    assert found.problem.peak_live_bytes == live


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("leaks", [0, 1])
def test_steps_of_layers_are_steps(again: bool, leaks: int) -> None:  # noqa: FBT001 - a case
    """Six steps of the same model are found, also where each leaves memory a little higher."""
    found = iteration_problem(transformer(6, again=again, leaks=leaks))
    assert len(found.problem) > 24 * 8
    assert found.iterations.typical.sum() >= 4


def test_a_file_is_taken_as_one_iteration_by_each_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--whole`` of show, plan and fit: the same peak, of a file that none of them takes without it."""
    path = tmp_path / "two.ztrace"
    write_trace(path, transformer(2, again=False))
    peaks = []
    for arguments, key in (
        (["trace", "show", str(path), "--json"], "peak_bytes"),
        (["plan", str(path), "--planner", "size-best", "--json", "-"], "live_peak_bytes"),
    ):
        assert main(arguments) != 0
        assert "--whole" in capsys.readouterr().err
        assert main([*arguments, "--whole"]) == 0
        peaks.append(json.loads(capsys.readouterr().out.partition("written")[0])[key])
    assert peaks[0] == peaks[1]
    assert main(["fit", str(path), "--budget", "8GiB", "--save", "none", "--whole", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["peak_bytes"] >= peaks[0]


@pytest.mark.parametrize("content", [chrome_bytes([train(5)]), snapshot_bytes([train(5)])])
def test_what_gzip_compressed_is_read(tmp_path: Path, content: bytes) -> None:
    """PyTorch's profiler writes ``.json.gz``: the same trace as without gzip."""
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed").write_bytes(gzip.compress(content))
    assert read_trace(tmp_path / "packed").events.tobytes() == read_trace(tmp_path / "plain").events.tobytes()


@pytest.mark.parametrize("compress", [gzip.compress, bytes])
def test_a_raw_memory_timeline_is_read(tmp_path: Path, compress: type) -> None:
    """What was there before, what is made, written and freed: the bytes alive are those of the file."""
    now = 1_795_890_096_099_705_672  # ns since 1970
    entries = [[now, 2, 512, 3], [now + 1, 3, -512, 3], [now + 1, 3, 512, 4], [now + 2, 4, -512, 4], [-1, 1, 4096, 0]]
    entries += [[now + 9, 4, -64, 7]]
    path = tmp_path / "memory.raw.json"
    path.write_bytes(compress(json.dumps(entries).encode()))
    trace = read_trace(path, whole=True)
    assert trace.names == ("parameter", "temporary")
    assert iteration_problem(trace).problem.peak_live_bytes == 4096 + 512 + 64


@pytest.mark.parametrize(
    "content",
    [
        b"[[1, 2], [[3, 4], [5, 6]]]",
        b"[[1, 9, 8, 0]]",
        b"[[0, 1, 0, 0]]",
        b"[[1e99, 1, 0, 0]]",
        b"[[9%s, 1, 8, 0]]" % (b"9" * 5000),
        b"[[" * 9000,
    ],
)
def test_other_lists_are_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    """A timeline's curve, which knows no tensors, is told from its raw form; so is what is damaged."""
    path = tmp_path / "memory.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"export it by export_memory_timeline|holds no events"):
        read_trace(path)


@pytest.mark.parametrize("end", [100, -9])
def test_a_damaged_gzip_file_is_refused_in_a_sentence(tmp_path: Path, end: int) -> None:
    """One that was cut, or whose checksum is another, says so."""
    packed = bytearray(gzip.compress(snapshot_bytes([train(5)])))
    if end < 0:
        packed[end] ^= 255
    (tmp_path / "t").write_bytes(packed[: len(packed) if end < 0 else end])
    with pytest.raises(TraceError, match="damaged within its compression by gzip"):
        read_trace(tmp_path / "t")


def test_a_gzip_bomb_is_refused_before_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out of a small file is counted while it comes."""
    monkeypatch.setattr("zico.trace.files.MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "t").write_bytes(gzip.compress(b'{"traceEvents":[' + b" " * (1 << 25)))
    tracemalloc.start()
    with pytest.raises(TraceError, match="more than 1048576 bytes"):
        read_trace(tmp_path / "t")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 23


def test_millions_of_names_are_refused_before_they_fill_memory(tmp_path: Path) -> None:
    """A hundred KB of zstd may hold gigabytes of names."""
    path = tmp_path / "bomb.zst"
    padding = b"x" * 1000
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as writer:
        writer.write(b'{"zico_trace":1}\n')
        for i in range(MAX_NAMES_BYTES // 1000):
            writer.write(b'{"k":"held","t":%d,"bytes":1,"op":"%d%s"}\n' % (i, i, padding))
    assert path.stat().st_size < MAX_NAMES_BYTES >> 6
    began_s = time.thread_time()
    with pytest.raises(TraceError, match="different names of operations"):
        read_trace(path)
    assert time.thread_time() - began_s < 20
