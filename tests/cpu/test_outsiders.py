"""Which processes compute outside the budget: what the kernel's lines say, and what a process tells the broker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zico
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import FrameReader
from zico.job import telling
from zico.launch.doctor import _why_not
from zico.launch.jobs import INJECT
from zico.launch.outsiders import HIDDEN, NO_SOCKET, frameworks_in, why_outside
from zico.report.model import JobFigures, OutsideProcess

LINE = "7f00-7f01 r-xp 00000000 08:01 42                         {}\n"


@pytest.mark.parametrize(
    ("libraries", "expected"),
    [
        (["/v/torch/lib/libc10.so"], "torch"),
        (["/v/tensorflow/libtensorflow_framework.so.2", "/v/jaxlib/libjax_common.so"], "tensorflow"),
        (["/v/jaxlib/xla_extension.so"], "jax"),
        (["/a folder/torch/lib/libc10.so", "/v/tensorflow/libtensorflow_framework.so.2"], "torch, tensorflow"),
        (["/v/libc10.so.txt", "/v/mylibc10.so", "/usr/lib/libc.so.6", "[heap]"], ""),
    ],
)
def test_frameworks_are_known_by_their_libraries(libraries: list[str], expected: str) -> None:
    """A library counts by its whole name; of TensorFlow and the JAX that it imports, TensorFlow does."""
    assert ", ".join(frameworks_in("".join(map(LINE.format, libraries)).encode())) == expected


WATCHED = {"ZICO_SOCKET": "/s", "PYTHONPATH": f"/mine{os.pathsep}{INJECT}"}


@pytest.mark.parametrize(
    ("argv", "environ", "has_pth", "expected"),
    [
        (["python", "a.py"], WATCHED, False, ""),
        (["python", "a.py"], WATCHED | {"PYTHONPATH": "."}, False, HIDDEN),
        (["python", "a.py"], WATCHED | {"PYTHONPATH": "."}, True, ""),
        (["python", "a.py"], {"PYTHONPATH": str(INJECT)}, True, NO_SOCKET),
        (["python", "-I", "a.py"], WATCHED, False, "python -I disables Zico: start python without -I"),
        (["python", "-I", "a.py"], WATCHED, True, ""),
        (["python", "-IS", "a.py"], WATCHED, True, "python -S disables Zico: start python without -S"),
    ],
)
def test_a_processs_start_says_why_it_cannot_join(
    argv: list[str],
    environ: dict[str, str],
    has_pth: bool,  # noqa: FBT001
    expected: str,
) -> None:
    """Its environment or a flag keeps Zico out, unless the .pth file helps; else it may be joining."""
    assert why_outside(argv, environ, has_pth=has_pth) == expected


@given(st.text(), st.text())
def test_what_a_process_tells_is_a_message_whatever_it_says(framework: str, reason: str) -> None:
    """The frame that needs the standard library only decodes to the message, cut and made printable."""
    (told,) = FrameReader().feed(telling.outside_frame(framework or "torch", reason))
    assert isinstance(told, m.Outside)
    assert told.pid == os.getpid()
    assert len(told.reason) == min(len(reason), m.MAX_REASON_CHARS)
    assert told.framework.isprintable()
    assert told.reason.isprintable()
    if reason.isprintable():
        assert told.reason == reason[: m.MAX_REASON_CHARS]


def test_what_a_process_tells_needs_the_standard_library_only() -> None:
    """A Python that has none of the packages that Zico needs can tell so."""
    path = str(Path(zico.__file__).parents[1])
    code = "from zico.job import telling; telling.outside_frame('torch', 'no NumPy')"
    subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({path!r}); {code}"], check=True)


def test_the_limits_of_what_is_told_are_the_protocols() -> None:
    """They stand twice, since the protocol's module needs more than the standard library."""
    assert (telling.MAX_NAME_CHARS, telling.MAX_REASON_CHARS) == (m.MAX_NAME_CHARS, m.MAX_REASON_CHARS)


JOB = JobFigures(name="a", command="a", exit_code=0, wall_s=1.0, framework="torch", pid=7)


@pytest.mark.parametrize(
    ("pid", "expected"),
    [
        (7, "Zico schedules its iterations, but does not share its memory: because"),
        (8, "process 8 uses torch outside the budget: because"),
    ],
)
def test_the_doctor_says_what_of_a_command_is_outside(pid: int, expected: str) -> None:
    """A command is not active if one of its processes is outside, or shares no memory although it has joined."""
    outside = OutsideProcess(pid=pid, framework="torch", reason="because")
    assert (
        _why_not(
            JobFigures(**{**{name: getattr(JOB, name) for name in JOB.__struct_fields__}, "outside": (outside,)}), []
        )
        == expected
    )
