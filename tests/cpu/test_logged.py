"""Numbers that a job logs: one line out, and the same numbers in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.base import logged
from zico.base.errors import ConfigError

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)


@given(values=st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_what_is_logged_is_read(values: dict[str, float]) -> None:
    """Every finite number comes through as it is."""
    line = f"zico.log {' '.join(f'{name}={value!r}' for name, value in values.items())}"
    assert logged.values_in(line.encode()) == values


@given(line=st.binary(max_size=200))
def test_any_other_line_is_left_alone(line: bytes) -> None:
    """No line of a job's harms, whatever it begins with."""
    assert logged.values_in(line) == {} or line.startswith(b"zico.log ")
    assert all(isinstance(value, float) for value in logged.values_in(b"zico.log " + line).values())


def test_only_a_job_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Outside a run nothing is printed, and what is no number is refused inside one."""
    monkeypatch.delenv("ZICO_JOB", raising=False)
    logged.log(loss=1)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("ZICO_JOB", "a")
    logged.log()
    logged.log(loss=1, rate=0.25)
    assert capsys.readouterr().out == "zico.log loss=1.0 rate=0.25\n"
    with pytest.raises(ConfigError, match=r"^zico.log: give numbers, such as loss=0.3 \("):
        logged.log(loss="low")  # type: ignore[arg-type]


def test_numbers_that_json_lacks_and_long_lines_are_left_out() -> None:
    """A report can always be written."""
    assert logged.values_in(b"zico.log a=nan b=inf c=-inf d=1e999 e=2") == {"e": 2.0}
    assert logged.values_in(b"zico.log " + b"a=1 " * 500) == {}
