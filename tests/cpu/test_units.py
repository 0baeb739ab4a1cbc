"""Sizes and times as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.base.units import GIB, KIB, MIB, TIB, format_bytes, parse_size, parse_time

MEMORY = 64 * GIB
FACTORS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("4096", 4096),
        ("64KiB", 64 * KIB),
        ("512MiB", 512 * MIB),
        ("512mb", 512 * MIB),
        ("2G", 2 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        (" 2 g ", 2 * GIB),
        ("8B", 8),
        ("50%", MEMORY // 2),
        ("100%", MEMORY),
        ("12.5 %", MEMORY // 8),
        ("none", MEMORY),
        ("NONE", MEMORY),
        ("64G", MEMORY),
    ],
)
def test_a_size_is_read_as_a_person_means_it(text: str, expected: int) -> None:
    """Each accepted form names its number of bytes."""
    assert parse_size(text, whole_bytes=MEMORY) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "-1", "-1G", "+1G", "0", "0G", "0%", "0.5", "0.2B", "1e9", "1,5G", "1.G", ".5G", "nan", "inf"),
        *("G", "%", "1GG", "1 G iB", "1iB%", "101%", "65G", "64.1GiB", "1P", "0x10", "none none", "1\x00", "1\n2"),
        *("9" * 400, "9" * 400 + "%", "1" + "0" * 5000),
    ],
)
def test_nonsense_is_refused_with_what_would_be_accepted(text: str) -> None:
    """A size that is none, is not positive or is above the memory raises an error that says what is accepted."""
    with pytest.raises(ConfigError, match="512MiB"):
        parse_size(text, whole_bytes=MEMORY)


@given(st.integers(1, 1 << 52))
def test_whole_bytes_are_read_exactly(size_bytes: int) -> None:
    """A plain number of bytes is not rounded."""
    assert parse_size(str(size_bytes), whole_bytes=1 << 60) == size_bytes


@given(st.text(alphabet="0123456789.kKmMgGtTiIbB% -ex\u0663", max_size=12), st.integers(1, 1 << 62))
def test_any_text_is_a_size_inside_the_memory_or_an_error(text: str, whole_bytes: int) -> None:
    """Whatever is typed, the answer is between one byte and the whole memory, or a ``ConfigError``."""
    try:
        size_bytes = parse_size(text, whole_bytes=whole_bytes)
    except ConfigError:
        return
    assert 0 < size_bytes <= whole_bytes


@given(st.integers(1, 1 << 50))
def test_a_printed_size_reads_back_within_its_precision(size_bytes: int) -> None:
    """What is printed is accepted again and is at most a tenth of its unit or half a percent off."""
    text = format_bytes(size_bytes)
    factor = FACTORS[text.split()[1].removesuffix("iB").removesuffix("B")]
    again = parse_size(text, whole_bytes=1 << 60)
    assert abs(again - size_bytes) <= max(0.05 * factor, 0.005 * size_bytes) + 1


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (100 * MIB + 1, "100 MiB"),
        (GIB, "1 GiB"),
        (3 * TIB // 2, "1.5 TiB"),
        (-2 * MIB, "-2 MiB"),
    ],
)
def test_sizes_print_in_the_largest_fitting_unit(size_bytes: int, text: str) -> None:
    """Sizes print in the largest power of 1024 that leaves at least one."""
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("8h", 28800), ("90m", 5400), ("1h30m", 5400), ("2d", 172800), ("30", 30), ("1m05s", 65)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    """Days, hours, minutes and seconds, in this order, and plain seconds."""
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-1h", "1w", "30m1h", "1.5h", "h", "400d", "9" * 400])
def test_what_is_no_time_is_refused(text: str) -> None:
    """The sentence says what was given and what may be."""
    with pytest.raises(ConfigError, match="is not a time: give more than zero and at most a year, such as 8h"):
        parse_time(text)
