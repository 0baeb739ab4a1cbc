"""Whatever is typed, set or written in the settings file: a sentence and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.base.settings import DEVICE_VARIABLE, starting_s
from zico.cli import command, main
from zico.cli.options import KEYS
from zico.cli.run import _written
from zico.heap.layout import GRANULE_BYTES
from zico.job.settings import job_settings
from zico.report.files import write_atomically
from zico.tiers.destinations import parse_tiers

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 60.0
DIGITS = "9" * 5000
NASTY = (
    *("", "+-5", "-1", DIGITS, f"{DIGITS}%", f"cuda:{DIGITS}", f"a={DIGITS}", f"x=1..{DIGITS}", "a=nan", "inf"),
    *(".", "/", "x" * 5000, "[/]", "\udcff", "a=\udcff", "\u00b2", "=", ",", "a=,b=", "zico:a=1", "a\nb", "\u202e"),
)
anything = st.sampled_from(NASTY) | st.text(max_size=20).filter(lambda text: "\0" not in text)
NEVER_RUNS = ("--report", "/proc/none", "true {x}")
"""What ``zico run`` refuses in the end, if nothing before it was wrong."""
SINGLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)


@pytest.fixture(autouse=True)
def _nobody_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let no broker be found, and no settings but a test's own."""
    for name in os.environ.keys() - {"ZICO_CACHE_DIR"}:
        if name.startswith("ZICO"):
            monkeypatch.delenv(name)
    (tmp_path / "r").mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def refused(*words: str) -> str:
    """Run a command that cannot succeed; returns what it says, which is a sentence."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(words)
    assert code in (1, 2), words
    assert said.getvalue().strip(), words
    assert "Traceback" not in said.getvalue()
    return said.getvalue()


def _options() -> list[tuple[str, ...]]:
    """Return the words before the value, of each option of the commands that ask brokers or start jobs."""
    found: list[tuple[str, ...]] = []
    for names in (
        ("run",),
        ("status",),
        ("top", "--once"),
        ("limit",),
        ("pause", "a"),
        ("resume", "a"),
        ("fit", "none"),
    ):
        of_command = command.get_command(None, names[0])  # type: ignore[arg-type]
        assert of_command is not None
        for option in of_command.params:
            if getattr(option, "is_flag", True) or option.opts[0] in ("--report", "--resume", "--jobs-file"):
                continue
            found.append((*names, option.opts[0]))
    return [*found, ("broker", "status", "--socket"), ("broker", "stop", "--socket"), ("broker", "stop", "--device")]


@pytest.mark.parametrize("words", _options(), ids=" ".join)
def test_whatever_an_option_says_the_answer_is_a_sentence(words: tuple[str, ...]) -> None:
    """Numbers of any length, texts that are no UTF-8, folders and an empty text end a command with a sentence."""
    for value in NASTY:
        refused(*words, value, *(NEVER_RUNS if words[0] == "run" else ()))


@given(words=st.sampled_from(_options()), value=anything)
@SINGLE
def test_no_text_at_all_ends_a_command_otherwise(words: tuple[str, ...], value: str) -> None:
    """Any other text as an option's value ends a command with a sentence, too."""
    refused(*words, value, *(NEVER_RUNS if words[0] == "run" else ()))


def test_the_words_of_a_sweep_are_utf8() -> None:
    """Its file, from which it can be resumed, could not hold them otherwise."""
    assert "'x=\\udcff' is not UTF-8" in refused("run", "--grid", "x=\udcff", *NEVER_RUNS)
    assert "'a\\udcff' is not UTF-8" in refused("run", "--at-most", "1", *NEVER_RUNS, "a\udcff")


@pytest.mark.parametrize("key", KEYS)
def test_variables_and_the_settings_file_are_read_alike(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a value is refused, the sentence names the variable, or the file and the key."""
    variable = f"ZICO_{key.upper().replace('-', '_')}"
    for value in NASTY:
        monkeypatch.setenv(variable, value)
        said = refused("run", *NEVER_RUNS)
        assert "/proc/none" in said or variable in said
    monkeypatch.delenv(variable)
    for value in (*(json.dumps(text) for text in NASTY if text.isprintable()), DIGITS, "[1]", '"\\u0000"', "[" * 20000):
        with open("settings.toml", "w") as file:  # noqa: PTH123
            file.write(f"{key} = {value}\n")
        monkeypatch.setenv("ZICO_CONFIG", "settings.toml")
        said = refused("run", *NEVER_RUNS)
        assert "/proc/none" in said or "settings.toml" in said


@pytest.mark.parametrize("variable", ["ZICO_SOCKET", "ZICO_CONFIG", "ZICO_CACHE_DIR", DEVICE_VARIABLE, "ZICO_JOB"])
def test_other_variables_end_no_command(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they say, a command that cannot go on says so in a sentence."""
    for value in NASTY:
        monkeypatch.setenv(variable, value)
        refused("status")
        refused("run", *NEVER_RUNS)


JOBS_VARIABLES = (
    *("ZICO_THRESHOLD", "ZICO_WAIT_LIMIT_S", "ZICO_SPACING", "ZICO_PAGING", "ZICO_JOB", "ZICO_RUN", "ZICO_JOB_SAVE"),
    *("ZICO_JOB_LIMIT", "ZICO_JOB_WEIGHT", "ZICO_JOB_PRIORITY", "ZICO_JOB_SLO", "ZICO_JOB_COMPUTE"),
    "ZICO_TIER",
)


@given(variable=st.sampled_from(JOBS_VARIABLES), value=anything, script=anything)
@example(variable="ZICO_JOB", value="x" * 49, script="")
@example(variable="ZICO_THRESHOLD", value="1", script="")
@example(variable="ZICO_TIER", value="bad", script="")
@example(variable="ZICO_RUN", value="my run", script="\udcff.py")
@SINGLE
def test_a_job_refuses_a_variable_by_its_name(variable: str, value: str, script: str) -> None:
    """What is not refused by its name is a threshold, a tier or a name that heap and broker take."""
    try:
        found = job_settings({variable: value}, script)
    except ConfigError as error:
        assert str(error).startswith(f"{variable}: ")  # noqa: PT017 - hypothesis gives the value
        return
    assert found.heap.get("threshold_bytes", GRANULE_BYTES) >= GRANULE_BYTES
    assert not found.wish.tier or parse_tiers(found.wish.tier)
    assert found.name.isprintable()
    assert 0 < len(found.name.encode()) <= 48


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "1e9", "soon", "\u0663x"])
def test_a_job_waits_for_no_broker_for_ever(text: str) -> None:
    """How long it may take to start has a bound."""
    with pytest.raises(ConfigError, match=r"^ZICO_STARTING: .* is not a wait: give seconds from 0 to 3600"):
        starting_s(text)
    assert [starting_s(""), starting_s("300")] == [0.0, 300.0]


# -- what cannot be written ------------------------------------------------------------------------


def test_what_can_be_written_is_written_and_what_cannot_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A full disk costs its own file only; the exit code is that of the job that failed, else 1."""
    written = []
    (tmp_path / "full").symlink_to("/dev/full")  # the device itself would not survive a fault

    def full() -> None:
        write_atomically(tmp_path / "full", b"x")

    assert _written(0, full, lambda: written.append(1)) == 1
    assert _written(7, full, lambda: written.append(2)) == 7
    assert written == [1, 2]
    assert capsys.readouterr().err == f"zico: {tmp_path / 'full'}: No space left on device\n" * 2


def test_a_device_or_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """A file in its place would be found by whoever uses it next."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(tmp_path / "pipe", b"{}")
        assert os.read(reader, 10) == b"{}"
        assert (tmp_path / "pipe").is_fifo()
    finally:
        os.close(reader)


def ended(script: str, **how: object) -> tuple[int, str]:
    """Run a shell's script with the words of ``zico`` as ``$0 $1 $2``; returns its code and its stderr."""
    argv = ["sh", "-c", script, sys.executable, "-m", "zico"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **how)  # type: ignore[call-overload]
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("$0 $1 $2 --help > /dev/full", 1, "zico: No space left on device\n"),
        ("$0 $1 $2 --help >&-", 0, ""),
        ("$0 $1 $2 status 2>&-", 1, ""),
    ],
)
def test_streams_that_are_full_or_closed_are_no_traceback(script: str, code: int, says: str) -> None:
    """Nor does Python complain at its end."""
    assert ended(script) == (code, says)


def test_too_few_addresses_are_a_sentence() -> None:
    """Libraries that cannot be loaded for it are named, with the remedy, in one line."""
    limit_bytes = 200 << 20
    code, said = ended("$0 $1 $2 --help", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes,) * 2))
    assert code == 1
    assert said.startswith("zico: 200 MiB of addresses are too few: ")
    assert said.endswith("; raise the limit, as in ulimit -v unlimited\n")
    assert said.count("\n") == 1
