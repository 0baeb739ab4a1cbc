"""Cutting a byte stream into lines: nothing lost, nothing damaged, no flood of redraws."""

import signal
import subprocess
import sys
from collections.abc import Iterator

from cpu.support.zico_process import HEADLESS
from hypothesis import given
from hypothesis import strategies as st

from zico.launch import watchdog
from zico.launch.outsiders import blocking_flag
from zico.launch.processes import MAX_LINE_BYTES, PARTIAL_S, REDRAW_S, LineSplitter


def fed(*chunks: bytes) -> list[bytes]:
    """Feed all chunks at the same instant and finish."""
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk, 0.0)] + splitter.finish()


@given(st.binary(max_size=60).map(lambda text: text.replace(b"\r", b"").replace(b"\x1b", b"")), st.data())
def test_chunks_do_not_matter(text: bytes, data: st.DataObject) -> None:
    """However the bytes of lines are cut into chunks, the same lines come out."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = text.split(b"\n")
    assert fed(*chunks) == [*expected[:-1], *filter(None, expected[-1:])]


def test_a_line_end_of_two_bytes_is_one_even_when_cut() -> None:
    """CR LF is one end of a line, also if the chunk ends between the two."""
    assert fed(b"a\r\nb\r", b"\nc") == [b"a", b"b", b"c"]


def test_redraws_are_passed_on_at_most_once_a_second_and_the_last_always() -> None:
    """Of a line redrawn by carriage returns the first, about one a second, and the final state come through."""
    splitter = LineSplitter()
    assert splitter.feed(b"1%\r2%\r3%\r4%", 10.0) == [b"1%"]
    assert splitter.feed(b"\r5%\r", 10.1) == []
    assert splitter.expire(10.0 + REDRAW_S) == [b"5%"]
    assert splitter.feed(b"100%\n", 12.0) == [b"100%"]
    assert splitter.finish() == []


def test_a_bar_that_ends_without_a_line_end_keeps_its_last_state() -> None:
    """What a stream's last redraw showed is passed on when the stream ends."""
    assert fed(b"1%\r2%\r")[-1] == b"2%"


def test_a_prompt_is_passed_on_after_a_while() -> None:
    """Text without a line end is held back briefly, then passed on as a line."""
    splitter = LineSplitter()
    assert splitter.feed(b"name? ", 5.0) == []
    assert splitter.expire(5.0 + PARTIAL_S / 2) == []
    assert splitter.expire(5.0 + PARTIAL_S) == [b"name? "]
    assert splitter.finish() == []


def test_an_endless_line_is_cut() -> None:
    """A line without an end cannot fill our memory."""
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (MAX_LINE_BYTES + 1), 0.0)
    assert [len(line) for line in lines] == [MAX_LINE_BYTES + 1]
    assert splitter.finish() == []


def test_cursor_movements_go_and_colours_stay() -> None:
    """Sequences that would draw over other jobs' lines are removed, colours are kept."""
    assert fed(b"\x1b[31mred\x1b[0m\x1b[A\x1b[2K\n") == [b"\x1b[31mred\x1b[0m"]


def test_the_guardian_ends_what_was_announced_and_not_withdrawn() -> None:
    """Sessions that live when the supervisor dies are to be ended, some last; after ``done``, none and no directory."""
    assert watchdog.watch(["*3\n", "*4\n", "+1\n", "+2\n", "-1\n", "-3\n"]) == ({2}, {4})
    assert watchdog.watch(["+1\n", "done\n"]) is None
    assert watchdog.watch([]) == (set(), set())


def test_a_session_is_found_with_all_its_process_groups() -> None:
    """Processes that have left the leader's process group are still members of its session, and get its signals."""
    code = (
        "import subprocess; p = subprocess.Popen(['sleep', '100'], process_group=0); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        found = watchdog.members(leader.pid)
        assert watchdog.send([leader.pid], signal.SIGKILL) == 2
        leader.wait(timeout=10)
    assert set(found) == {leader.pid, child}
    assert found[child] == child != found[leader.pid]


def test_a_process_whose_first_thread_has_ended_is_still_one_of_its_session() -> None:
    """The kernel shows it as a zombie until its last thread ends; it would be left behind."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdin=pipe, stdout=pipe, start_new_session=True) as leader:
        assert leader.stdout is not None
        said = leader.stdout.read(1)
        found = set(watchdog.members(leader.pid))
        leader.kill()
        leader.wait(timeout=10)
    assert (said, found) == (b".", {leader.pid})


def flags() -> Iterator[tuple[list[str], str | None]]:
    """Yield commands and the flag in them that keeps Zico out."""
    yield ["python", "train.py", "-I"], None
    yield ["python3.12", "-I", "train.py"], "-I"
    yield ["/usr/bin/python", "-uE", "train.py"], "-E"
    yield ["python", "-S", "-c", "pass"], "-S"
    yield ["python", "-X", "importtime", "-E", "x.py"], "-E"
    yield ["python", "-W", "error", "x.py", "-S"], None
    yield ["python", "-c", "pass", "-I"], None
    yield ["sh", "-E", "x"], None
    yield [], None


def test_flags_that_keep_zico_out_are_found_before_the_script_only() -> None:
    """-I, -E and -S count as the interpreter's own options, not as the script's."""
    for argv, expected in flags():
        assert blocking_flag(argv) == expected, argv
