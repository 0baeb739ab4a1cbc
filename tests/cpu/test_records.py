"""Records: the dtypes that classes stand for, and misspelt fields, which mypy finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest

from zico.base.records import F8, I4, I8, U1, Numbers, Record, Records, dtype_of
from zico.pool.layout import HEADER, Header

ROOT = Path(__file__).resolve().parent.parent.parent

WELL_SPELT = """
from zico.heap.layout import HeapRecord
from zico.heap.layout import slots_of
from zico.pool.layout import JOB, Job
from zico.base.compiled import record_at
from zico.trace.profile import claim_at

def held(job: Job) -> int:
    return job.held

def persistent_at(address: int) -> int:
    return record_at(address, JOB).persistent

def live_in(heap: HeapRecord, slot: int) -> int:
    return slots_of(heap)[slot].live

def claim(job: Job) -> int:
    return claim_at(job.profile, job.claims, job.progress)
"""
MISSPELT = (
    ("job.held", "job.hold", '"Job" has no attribute "hold"'),
    ("record_at(address, JOB).persistent", "record_at(address, JOB).persists", '"Job" has no attribute "persists"'),
    ("slots_of(heap)[slot].live", "slots_of(heap)[slot].lives", '"Slot" has no attribute "lives"'),
    ("claim_at(job.profile,", "claim_at(job,", 'Argument 1 to "claim_at" has incompatible type "Job"'),
)


class Point(Record):
    """Two numbers with a gap between them."""

    kind: U1
    at: I8


class Packed(Record, align=False):
    """The same without the gap."""

    kind: U1
    at: I8


class Line(Record):
    """Fields of every sort."""

    name: Annotated[bytes, "S5"]
    first: Point
    others: Annotated[Records[Packed], Packed, (3,)]
    weights: Annotated[Numbers, "f4", (2, 2)]
    length: F8
    n: I4


def test_fields_lie_in_the_order_of_their_annotations() -> None:
    """A class is its annotated fields, aligned as C does or, where it says so, without gaps."""
    assert dtype_of(Point) == np.dtype([("kind", "u1"), ("at", "i8")], align=True)
    assert dtype_of(Packed) == np.dtype([("kind", "u1"), ("at", "i8")])
    assert (dtype_of(Point).itemsize, dtype_of(Packed).itemsize) == (16, 9)


def test_records_lie_within_records() -> None:
    """A field is a number, text, a record, or several of one of these."""
    point, packed = np.dtype([("kind", "u1"), ("at", "i8")], align=True), np.dtype([("kind", "u1"), ("at", "i8")])
    fields = [
        ("name", "S5"),
        ("first", point),
        ("others", packed, (3,)),
        ("weights", "f4", (2, 2)),
        ("length", "f8"),
        ("n", "i4"),
    ]
    assert dtype_of(Line) == np.dtype(fields, align=True)
    assert dtype_of(Line).fields["others"][1] == 24


def test_a_layout_has_its_class_s_fields() -> None:
    """What the layout modules offer as dtypes are those of their classes."""
    assert dtype_of(Header) == HEADER
    assert tuple(Header.__annotations__) == HEADER.names


@pytest.mark.parametrize("hint", [int, Annotated[int, 4], Numbers], ids=["int", "a number", "an array"])
def test_an_unknown_type_is_refused(hint: object) -> None:
    """A field whose size nobody can know ends in a sentence that names it."""
    wrong = type("Wrong", (Record,), {"__annotations__": {"size": hint}})
    with pytest.raises(
        TypeError, match=r"^Wrong\.size is .*: a field is a record, or Annotated with a type of NumPy\.$"
    ):
        dtype_of(wrong)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which mypy keeps what it knows of the other modules."""
    return tmp_path_factory.mktemp("mypy")


def checked(snippet: Path, source: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Let mypy check a source text with the project's own settings."""
    snippet.write_text(source)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache), str(snippet)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_mypy_finds_misspelt_fields(tmp_path: Path, cache: Path) -> None:
    """Each misspelt field of a compiled record is an error in its line, and well spelt ones are none."""
    answer = checked(tmp_path / "snippet.py", WELL_SPELT, cache)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    source = WELL_SPELT
    for right, wrong, _ in MISSPELT:
        assert right in source
        source = source.replace(right, wrong)
    answer = checked(tmp_path / "snippet.py", source, cache)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    errors = [line for line in answer.stdout.splitlines() if ": error:" in line]
    assert len(errors) == len(MISSPELT), answer.stdout
    for error, (_, _, expected) in zip(errors, MISSPELT, strict=True):
        assert expected in error


def test_mypy_finds_one_misspelt_field(tmp_path: Path, cache: Path) -> None:
    """The shortest example: what a job holds is ``held``."""
    source = "from zico.pool.layout import Job\n\n\ndef held(job: Job) -> int:\n    return job.hold\n"
    answer = checked(tmp_path / "one.py", source, cache)
    assert answer.returncode == 1
    assert '"Job" has no attribute "hold"' in answer.stdout
