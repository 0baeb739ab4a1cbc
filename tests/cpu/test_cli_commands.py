"""Commands: split without a shell, named after their scripts, names unique."""

import os
from pathlib import Path

import psutil
import pytest

from zico.base.errors import ConfigError
from zico.base.rundir import MAX_SOCKET_PATH_BYTES, base_directory, known_sockets, run_directory
from zico.cli.options import with_json_words
from zico.launch.devices import host_memory
from zico.launch.figures import JobOutcome, Outcome
from zico.launch.jobs import INJECT, MAX_COMMANDS, default_name, job_environment, name_commands, split_commands
from zico.pool.layout import MAX_JOBS, NAME_BYTES


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["python", "train.py", "--lr", "1"], "train"),
        (["python", "-u", "a/b/train_model.py"], "train_model"),
        (["python", "-m", "package.trainer"], "trainer"),
        (["python", "-c", "x.py"], "python"),
        (["./run.sh"], "run"),
        (["/usr/bin/env", "A=1", "python", "odd name.py"], "odd-name"),
        (["torchrun", "--nproc", "1", "fit.py"], "fit"),
    ],
)
def test_a_job_is_named_after_its_script(argv: list[str], name: str) -> None:
    """The default name is the script's, the module's or the program's, without what names may not have."""
    assert default_name(argv) == name


def test_equal_names_get_numbers() -> None:
    """The second and third of equal names get -2 and -3, whoever gave them, and never a name that is taken."""
    commands = split_commands(["python a.py", "python a.py", "python a.py"], ["a-2"])
    assert [command.name for command in commands] == ["a-2", "a", "a-3"]


def test_quotes_are_a_shells_and_nothing_else_is() -> None:
    """Quotes group words; variables, pipes and globs are ordinary characters."""
    (command,) = split_commands(["prog 'a b' $HOME | *"])
    assert command.argv == ("prog", "a b", "$HOME", "|", "*")


@pytest.mark.parametrize(
    ("texts", "names", "says"),
    [
        ([], [], "no command"),
        ([" "], [], "is empty"),
        (["a 'b"], [], "no closing quotation"),
        (["a"], ["x", "y"], "2 names for 1 commands"),
        (["a"], ["x y"], "is not a job name"),
        (["a"], [""], "is not a job name"),
        (["a"] * (MAX_COMMANDS + 1), [], "at most 64 jobs"),
    ],
)
def test_what_cannot_be_run_is_refused(texts: list[str], names: list[str], says: str) -> None:
    """Empty, unclosed and too many commands or names are refused with the reason."""
    with pytest.raises(ConfigError, match=says):
        split_commands(texts, names)


def test_names_and_numbers_fit_into_the_shared_table() -> None:
    """As many commands as the table has places, and the longest name with its numbers fits a place."""
    assert MAX_COMMANDS == MAX_JOBS
    commands = name_commands([["ü" * 100 + ".py"]] * MAX_COMMANDS)
    assert all(len(f"{command.name}.99".encode()) < NAME_BYTES for command in commands)


def test_a_jobs_environment_switches_zico_on_and_keeps_the_users_own() -> None:
    """The user's PYTHONPATH stays behind ours, and a surrounding run's marks are gone."""
    outer = {"PYTHONPATH": "/mine", "ZICO_OWNER_PID": "7", "ZICO_JOB": "outer", "ZICO_RUN": "0", "HOME": "/mine/home"}
    job = job_environment(outer, Path("/run/s"), "inner")
    assert job["PYTHONPATH"] == f"{INJECT}{os.pathsep}/mine"
    assert (job["ZICO_SOCKET"], job["ZICO_JOB"], job["HOME"]) == ("/run/s", "inner", "/mine/home")
    assert not {"ZICO_OWNER_PID", "ZICO_RUN"} & job.keys()
    assert job_environment(outer, Path("/run/s"), "inner", run="a1")["ZICO_RUN"] == "a1"
    assert job_environment({"PYTHONPATH": ""}, Path("/s"), "j")["PYTHONPATH"] == str(INJECT)


@pytest.mark.parametrize(
    ("membership", "limit_path", "limit"),
    [
        ("0::/job\n", "job/memory.max", "1048576"),
        ("4:memory:/a/b\n0::/\n", "memory/a/memory.limit_in_bytes", "1048576"),
    ],
)
def test_a_control_groups_limit_lowers_the_devices_memory(
    tmp_path: Path, membership: str, limit_path: str, limit: str
) -> None:
    """The limit of any group above this process counts, in version 1 and in version 2."""
    (tmp_path / limit_path).parent.mkdir(parents=True)
    (tmp_path / limit_path).write_text(limit)
    (tmp_path / "self").write_text(membership)
    memory = host_memory(tmp_path, tmp_path / "self")
    assert (memory.total_bytes, memory.available_bytes) == (1 << 20, 1 << 20)


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    """No control group, or one with "max", leaves what the kernel says of the machine."""
    memory = host_memory(tmp_path, tmp_path / "missing")
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_what_other_pools_may_yet_take_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budgets that brokers of all users show count, less the shared memory that there is; a tenth is left."""
    machine = psutil.virtual_memory()._replace(available=100 << 30, shared=3 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)

    def promised_gib() -> float:
        return host_memory(tmp_path, tmp_path / "missing", tmp_path).promised_bytes / (1 << 30)

    (tmp_path / "1").mkdir()
    (tmp_path / "1/stat").write_bytes(b"1 (\xffpython) S 0\n")
    assert promised_gib() == 0
    for pid, budget_gib in enumerate((2, 9, 200), 2):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (zico {budget_gib << 10}MiB) S 0\n")
    assert promised_gib() == 90
    for other in ("4 (zico) S 0\n", "4 (zico 204800MiB) Z 0\n"):
        (tmp_path / "4/stat").write_text(other)
        assert promised_gib() == 8
    (tmp_path / "group").mkdir()
    (tmp_path / "group/memory.max").write_text(str(5 << 30))
    (tmp_path / "self").write_text("0::/group\n")
    assert host_memory(tmp_path, tmp_path / "self", tmp_path).promised_bytes == 0, "the group's own limit is lower"


def test_a_run_directory_is_private_short_and_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The directory has mode 0700, its socket's path fits, and it is removed with what is in it."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    del tmp_path_factory
    with run_directory() as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert len(bytes(path / "broker.sock")) <= MAX_SOCKET_PATH_BYTES
        (path / "file").touch()
    assert not path.exists()


def test_a_runtime_directory_open_to_others_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where others may write, or where a link leads elsewhere, sockets do not go."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "zico").mkdir(mode=0o755)
    (tmp_path / "zico").chmod(0o755)
    assert base_directory() != tmp_path / "zico"
    (tmp_path / "zico").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "zico").symlink_to(tmp_path / "elsewhere")
    assert base_directory() != tmp_path / "zico"


def test_no_usable_directory_is_an_error_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing can be used, the message names each candidate and the variables to set."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 120)
    with pytest.raises(ConfigError, match=r"/proc/none/zico cannot be created.*too long.*XDG_RUNTIME_DIR"):
        base_directory()


def test_plain_files_are_no_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only sockets count as places where a broker may be."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    base = base_directory()
    (base / "broker.sock").touch()
    assert known_sockets() == []


def test_the_first_failure_in_time_decides() -> None:
    """The exit code is 0 if all are, else that of the job that failed first."""
    (command,) = split_commands(["true"])
    ended = [JobOutcome(command, code, 1.0, ended_s) for code, ended_s in ((0, 1.0), (3, 9.0), (4, 5.0))]
    assert Outcome(tuple(ended), None).exit_code == 4
    assert Outcome(tuple(ended[:1]), None).exit_code == 0


@pytest.mark.parametrize(
    ("words", "then"),
    [
        (["status", "--json"], ["status", "--json=-"]),
        (["status", "--json=a"], ["status", "--json=a"]),
        (["fit", "--json", "a.json"], ["fit", "--json=-", "a.json"]),
        (["run", "--json", "a.json", "true"], ["run", "--json", "a.json", "true"]),
        (["run", "--json", "-", "true"], ["run", "--json", "-", "true"]),
        (["run", "--json", "python a.py b.json"], ["run", "--json=-", "python a.py b.json"]),
        (["run", "--", "a", "--json"], ["run", "--", "a", "--json"]),
        ([], []),
    ],
)
def test_json_alone_means_standard_output(words: list[str], then: list[str]) -> None:
    """What follows is no file but where it was one before; a command of the user's is left alone."""
    assert with_json_words(words) == then
