"""Settings: precedence, origins, and refusals that say what would be accepted."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from types import MappingProxyType
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from zico.base.errors import ConfigError
from zico.base.settings import (
    DEFAULT_REGION_BYTES,
    DeviceMemory,
    Setting,
    Settings,
    device_of,
    resolve,
)
from zico.base.units import GIB, MIB
from zico.broker.protocol.messages import Share
from zico.broker.saving import Wish
from zico.cli.broker import broker
from zico.cli.options import KEYS, given_in, read_settings
from zico.cli.run import run
from zico.job.settings import JobSettings, job_name, job_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SWITCHES = ("isolate", "mps")
MEMORY = DeviceMemory(total_bytes=16 * GIB, available_bytes=10 * GIB)
GPU = DeviceMemory(
    total_bytes=80 * GIB,
    available_bytes=60 * GIB,
    granularity_bytes=2 * MIB,
    is_taken_at_once=True,
    held_by="python (process 7) 20 GiB",
)
POLICIES = ("zico", "serial")


def flags(**texts: str) -> dict[str, str]:
    """Return what a command line says, by the names of the settings."""
    return texts


def given(said: Mapping[str, str], path: Path | None = None, **environ: str) -> dict[str, Setting[str]]:
    """Return what click finds in a command line, a file and an environment that has nothing else of Zico's."""
    words = [f"--{name.replace('_', '-')}" + f"={text}" * (name not in SWITCHES) for name, text in said.items()]
    own = {name: text for name, text in os.environ.items() if not name.startswith("ZICO_")}
    named = {} if path is None else {"ZICO_CONFIG": str(path)}
    with mock.patch.dict(os.environ, own | named | environ, clear=True):
        return given_in((broker if "jobs" in said else run).make_context("zico", words))


def resolved(said: Mapping[str, str] = MappingProxyType({}), path: Path | None = None, **environ: str) -> Settings:
    """Resolve against a machine of 16 GiB with 10 GiB available."""
    return resolve(given(said, path, **environ), MEMORY, POLICIES)


def on_gpu(memory: DeviceMemory = GPU, n_jobs: int | None = 2, **said: str) -> Settings:
    """Resolve for two jobs on a GPU of 80 GiB with 60 GiB free."""
    return resolve(given({"device": "cuda", **said}), memory, POLICIES, n_jobs=n_jobs)


def file_of(directory: Path, text: str) -> Path:
    """Write a settings file."""
    path = directory / "z.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("environ", "script", "expected"),
    [
        ({}, "/x/my train.py", "my-train"),
        ({}, "-c", "job"),
        ({}, "/x/" + "long" * 30 + ".py", "long" * 10),
        ({"ZICO_JOB": "given"}, "/v/ipykernel_launcher.py", "given"),
        ({"JPY_SESSION_NAME": "/u/exp/ResNet 50.ipynb"}, "/v/ipykernel_launcher.py", "ResNet-50"),
        ({"JPY_SESSION_NAME": "/u/exp/a.ipynb"}, "/x/train.py", "train"),
        ({}, "/v/ipykernel_launcher.py", "notebook"),
    ],
)
def test_a_job_is_called_as_its_script_or_its_notebook(environ: dict[str, str], script: str, expected: str) -> None:
    """A notebook's process has the kernel's script; Jupyter's server tells it the notebook; names fit the table."""
    assert job_name(environ, script) == expected


def test_visual_studio_code_tells_a_notebooks_name_by_a_variable_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session's path of its server is a made one, and does not count."""
    shell = types.SimpleNamespace(user_ns={"__vsc_ipynb_file__": "/u/gpt.ipynb"})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    environ = {"JPY_SESSION_NAME": "gpt-jvsc-1234.ipynb"}
    assert job_name(environ, "/v/ipykernel_launcher.py") == "gpt"


def test_a_flag_beats_the_environment_and_that_beats_the_default() -> None:
    """Each setting comes from the flag, else from the variable, else from the default, and says which."""
    both = resolved(flags(budget="1G"), ZICO_BUDGET="2G", ZICO_POLICY="serial")
    assert (both.budget_bytes.value, both.budget_bytes.origin) == (GIB, "--budget")
    assert (both.policy.value, both.policy.origin) == ("serial", "ZICO_POLICY")
    assert (both.device.value, both.device.origin) == ("host", "default")
    assert resolved(ZICO_BUDGET="").budget_bytes.origin.startswith("default")


def test_the_default_budget_is_80_percent_of_what_is_available() -> None:
    """Without a budget a run takes 80 % of the available memory in whole regions, and says so."""
    budget = resolved().budget_bytes
    assert budget.value == 8 * GIB
    assert budget.origin == "default: 80 % of the 10 GiB available"


def test_the_default_budget_leaves_alone_what_other_pools_may_yet_take() -> None:
    """It is 80 % of the rest, and says so; a share that is given is of the whole device all the same."""
    memory = dataclasses.replace(MEMORY, promised_bytes=5 * GIB)
    budget, share = (resolve(given(said), memory, POLICIES).budget_bytes for said in ({}, {"budget": "50%"}))
    assert budget.value == 4 * GIB
    assert budget.origin == "default: 80 % of the 5 GiB that other pools leave of 10 GiB available"
    assert share.value == MEMORY.total_bytes // 2


def test_percent_and_none_are_of_the_whole_device() -> None:
    """On the host a percentage and ``none`` refer to the device's memory, not to what is available."""
    assert resolved(flags(budget="50%")).budget_bytes.value == 8 * GIB
    assert resolved(flags(budget="none")).budget_bytes.value == 16 * GIB


def test_the_budget_is_rounded_down_to_whole_regions() -> None:
    """What does not fill a region is left out, so that the budget is never exceeded."""
    assert resolved(flags(budget="10MiB")).budget_bytes.value == 2 * DEFAULT_REGION_BYTES
    assert resolved(flags(budget="10MiB", region="1MiB")).budget_bytes.value == 10 * MIB


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (flags(budget="0"), "more than zero"),
        (flags(budget="-1G"), "is not a size"),
        (flags(budget="17G"), "more than the device's 16 GiB"),
        (flags(budget="lots"), "--budget: 'lots' is not a size"),
        (flags(budget="1MiB"), "less than one region"),
        (flags(region="3MiB"), "power of two"),
        (flags(region="4K"), "power of two from 64 KiB"),
        (flags(device="tpu"), "--device: 'tpu' is not a device: give host, cuda or cuda:N"),
        (flags(device="cuda:-1"), "'cuda:-1' is not a device"),
        (flags(device="cuda:x"), "'cuda:x' is not a device"),
        (flags(device="cuda:"), "'cuda:' is not a device"),
        (flags(device="CUDA"), "'CUDA' is not a device"),
        (flags(mps="1"), "--mps: MPS needs a GPU"),
        (flags(policy="fast"), "give one of zico, serial"),
        (flags(log_level="loud"), "give one of debug"),
        (flags(grace="soon"), "give seconds"),
        (flags(grace="-1"), "give seconds"),
        (flags(grace="nan"), "give seconds"),
    ],
)
def test_nonsense_is_refused_with_what_would_be_accepted(said: dict[str, str], says: str) -> None:
    """Every setting that cannot be used is refused with its origin and a remedy."""
    with pytest.raises(ConfigError, match=says):
        resolved(said)


def test_an_error_in_the_environment_names_the_variable() -> None:
    """The message about a wrong variable begins with its name."""
    with pytest.raises(ConfigError, match=r"^ZICO_BUDGET: "):
        resolved(ZICO_BUDGET="x")
    with pytest.raises(ConfigError, match=r"^ZICO_ISOLATE: 'perhaps' is neither on nor off"):
        resolved(ZICO_ISOLATE="perhaps")


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "device"), [("host", "host"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:07", "cuda:7")]
)
def test_a_device_has_one_name(text: str, device: str) -> None:
    """``cuda`` is the first GPU, and every device is called the same however it was given."""
    assert device_of(given(flags(device=text))).value == device
    assert device_of(given({}, ZICO_DEVICE=text)).value == device
    assert device_of(given({})).value == "host"


def test_a_gpus_defaults() -> None:
    """On a GPU a region is 64 MiB and the budget 80 % of what is free; on the host 4 MiB."""
    settings = on_gpu()
    assert settings.region_bytes.value == 64 * MIB
    assert settings.budget_bytes.value == 48 * GIB
    assert (resolved().region_bytes.value, resolved().mps.value, resolved().isolate.value) == (4 * MIB, False, False)


@pytest.mark.parametrize(
    ("budget", "expected"), [("30MiB", 2), ("768MiB", 4), ("4GiB", 32), ("8191MiB", 32), ("8GiB", 64), ("40GiB", 64)]
)
def test_a_small_budget_on_a_gpu_has_small_regions(budget: str, expected: int) -> None:
    """There are at least 128 of them, as long as the device gives memory in such pieces."""
    assert on_gpu(budget=budget).region_bytes.value == expected * MIB


@pytest.mark.parametrize(
    ("save", "expected"),
    [("none", 64), ("auto", 64), ("a=page,b=auto", 64), ("swap", 16), ("zico", 16), ("a=none, b = longest", 16)],
)
def test_jobs_that_move_tensors_have_small_regions_on_a_gpu(save: str, expected: int) -> None:
    """Those that do so from the start; what a user says is what there is."""
    assert on_gpu(save=save).region_bytes.value == expected * MIB
    assert on_gpu(save=save, budget="768MiB").region_bytes.value == 4 * MIB
    assert on_gpu(save=save, region="32MiB").region_bytes.value == 32 * MIB


def test_a_region_is_at_least_the_granularity() -> None:
    """A device that gives memory in larger pieces than the default region gets regions of one piece."""
    coarse = DeviceMemory(80 * GIB, 60 * GIB, granularity_bytes=512 * MIB)
    assert on_gpu(coarse).region_bytes.value == 512 * MIB


@pytest.mark.parametrize("region", ["2MiB", "4MiB", "1GiB"])
def test_a_region_may_be_any_power_of_two_of_the_granularity(region: str) -> None:
    """From the granularity up, each power of two is a region."""
    assert on_gpu(region=region).region_bytes.origin == "--region"


@pytest.mark.parametrize("region", ["1MiB", "3MiB", "6MiB", "64KiB", "2097153B"])
def test_a_region_that_is_no_such_power_is_refused(region: str) -> None:
    """What is no power-of-two multiple of the granularity is refused with the least that works."""
    with pytest.raises(ConfigError, match=r"--region: a region of .* give a power of two from 2 MiB, such as 64MiB"):
        on_gpu(region=region)


def test_a_budget_above_the_free_memory_names_who_holds_the_rest() -> None:
    """Free, total and the holders are in the sentence; where they are not known it says others."""
    with pytest.raises(ConfigError) as caught:
        on_gpu(budget="70GiB")
    assert str(caught.value) == (
        "--budget: a budget of 70GiB is 70 GiB, but 60 GiB of the device's 80 GiB are free, the rest is held by "
        "python (process 7) 20 GiB: give a smaller --budget or end those"
    )
    with pytest.raises(ConfigError, match="the rest is held by others"):
        on_gpu(DeviceMemory(80 * GIB, 60 * GIB, is_taken_at_once=True), budget="70GiB")
    assert on_gpu(budget="60GiB").budget_bytes.value == 60 * GIB


def test_none_and_percentages_on_a_gpu_leave_each_job_its_reserve() -> None:
    """They are of what is free less 1 GiB for each job; on the host, where nothing is reserved, of the whole memory."""
    assert on_gpu(budget="none").budget_bytes.value == on_gpu(budget="100%").budget_bytes.value == 58 * GIB
    assert on_gpu(budget="50%", n_jobs=4).budget_bytes.value == 28 * GIB
    assert on_gpu(budget="10G", most="none").most_bytes.value == 58 * GIB
    assert (on_gpu(budget="none").reserve_bytes.origin, resolved().reserve_bytes.value) == ("default", 0)
    assert on_gpu(budget="none", reserve="3GiB").budget_bytes.value == 54 * GIB
    assert [on_gpu(budget="none", reserve=text).budget_bytes.value for text in ("0", "none")] == [60 * GIB] * 2
    assert resolved(flags(budget="none")).budget_bytes.value == 16 * GIB


def test_the_default_budget_leaves_the_reserve_where_that_is_more_than_a_fifth() -> None:
    """On a small GPU 20 % are less than its jobs need, so that the default is what is free less the reserve."""
    small = DeviceMemory(8 * GIB, 6 * GIB, granularity_bytes=2 * MIB, is_taken_at_once=True)
    budget = on_gpu(small).budget_bytes
    assert (budget.value, budget.origin) == (4 * GIB, "default: the 6 GiB available less the reserve")


@pytest.mark.parametrize("budget", [{}, {"budget": "none"}, {"budget": "50%"}, {"budget": "4G", "most": "none"}])
def test_a_reserve_that_leaves_no_region_is_refused(budget: dict[str, str]) -> None:
    """The sentence has the reserve, the free bytes and both ways out."""
    says = r"the reserve of 60 GiB leaves less than one region of 60 GiB: give --budget as a size"
    with pytest.raises(ConfigError, match=says):
        on_gpu(n_jobs=60, **budget)


def test_a_size_that_leaves_less_than_the_reserve_is_taken_with_a_warning() -> None:
    """The user may know better; the line has the option, both figures and the reserve."""
    assert on_gpu(budget="58GiB").warning == ""
    assert on_gpu(budget="59GiB").warning == (
        "warning: --budget: 59 GiB leave 1 GiB of the device for contexts and workspaces, less than the "
        "reserve of 2 GiB"
    )
    assert on_gpu(budget="10GiB", most="60GiB").warning.startswith("warning: --most: 60 GiB leave 0 B of the device")
    assert resolved(flags(budget="16GiB")).warning == ""
    tiny = DeviceMemory(GIB // 2, GIB // 2, granularity_bytes=2 * MIB, is_taken_at_once=True)
    assert on_gpu(tiny, budget="64MiB").warning.endswith("less than the reserve of 2 GiB")


def test_the_reserve_comes_from_a_flag_a_variable_or_the_file(tmp_path: Path) -> None:
    """The reserve follows the precedence of all settings, and on the host whoever asks for one has it."""
    file = file_of(tmp_path, 'reserve = "3G"')
    assert resolved(flags(budget="none", reserve="1G"), file, ZICO_RESERVE="2G").budget_bytes.value == 14 * GIB
    assert resolved(flags(budget="none"), file, ZICO_RESERVE="2G").budget_bytes.value == 12 * GIB
    assert resolved(flags(budget="none"), file).budget_bytes.value == 10 * GIB


def test_a_broker_assumes_two_jobs_unless_it_is_told() -> None:
    """Who starts a broker may say how many jobs are to come; a run has counted its commands and asks nobody."""
    assert on_gpu(n_jobs=None, budget="none").budget_bytes.value == 58 * GIB
    assert on_gpu(n_jobs=None, budget="none", jobs="5").budget_bytes.value == 55 * GIB
    assert on_gpu(n_jobs=3, budget="none", jobs="5").expected_jobs == Setting(3, "the commands")
    for text in ("0", "-1", "1.5", "many", "1001"):
        with pytest.raises(ConfigError, match=r"--jobs: .* is not a number of jobs: give a number from 1 to 1000"):
            on_gpu(n_jobs=None, jobs=text)


def test_the_hosts_budget_may_exceed_what_is_available() -> None:
    """The host gives memory when it is touched, so a budget above what is available now is the user's affair."""
    assert resolved(flags(budget="12GiB")).budget_bytes.value == 12 * GIB


def test_switches_come_from_flags_and_variables() -> None:
    """``--mps`` and ``--isolate`` are on by their flag or by 1 in their variable."""
    assert on_gpu(mps="1").mps.origin == "--mps"
    assert resolved(ZICO_ISOLATE="1").isolate.value
    assert not resolved(ZICO_ISOLATE="0").isolate.value


# -- the settings file -----------------------------------------------------------------------------


def test_the_file_comes_after_the_environment_and_before_the_default(tmp_path: Path) -> None:
    """A setting of the file is used where neither flag nor variable gives one, and its origin names the file."""
    file = file_of(tmp_path, 'budget = "1G"\npolicy = "serial"\nweight = "a=2, b=3"')
    settings = resolved(flags(budget="2G"), file)
    assert (settings.budget_bytes.value, settings.policy.origin) == (2 * GIB, f"policy in {file}")
    assert settings.shares["weight"] == Setting("a=2, b=3", f"weight in {file}")
    assert resolved({}, file, ZICO_BUDGET="3G").budget_bytes.value == 3 * GIB
    with pytest.raises(ConfigError, match=f"^budget in {file}: "):
        resolved({}, file_of(tmp_path, 'budget = "x"'))


def test_lists_are_taken_whole() -> None:
    """What a variable says for several jobs is not split, and an option that is given twice is one list."""
    assert resolved(ZICO_LIMIT="a=2 GiB, b=1G").saving["limit"] == Setting("a=2 GiB, b=1G", "ZICO_LIMIT")
    with mock.patch.dict(os.environ, {"ZICO_WEIGHT": "c=4"}):
        found = given_in(run.make_context("zico", ["--weight", "a=2", "--weight", "b=3"]))
    assert found["weight"] == Setting("a=2,b=3", "--weight")


def test_a_file_says_what_flags_say(tmp_path: Path) -> None:
    """Each key is a flag's name; text, numbers and truth values are what the flag would be given."""
    path = file_of(tmp_path, 'device = "cuda:1"\nbudget = "80%"\ngrace = 2.5\nlog-level = "info"\nisolate = true\n')
    assert device_of(given({}, path)).value == "cuda:1"
    settings = resolved(flags(device="host"), path)
    assert (settings.isolate.value, settings.grace_s.value, settings.log_level.value) == (True, 2.5, "info")
    assert settings.isolate.origin == f"isolate in {path}"
    assert "region" in KEYS


def test_without_a_file_nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's own file need not be there; it is read where it is."""
    monkeypatch.delenv("ZICO_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_settings() == ("", {})
    (tmp_path / "zico").mkdir()
    (tmp_path / "zico" / "config.toml").write_text("policy = 'serial'")
    assert read_settings()[1] == {"policy": "serial"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("device = ", "is not TOML"),
        ("devices = 'host'", "'devices' in .* is not a setting: give some of budget, device"),
        ("budget = ['1G']", "budget in .* is neither text nor a number"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str | bytes, says: str) -> None:
    """What is no TOML, no setting or no value is refused with the file's path."""
    path = tmp_path / "z.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says):
        given({}, path)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    """A missing file is an error if the variable names it."""
    with pytest.raises(ConfigError, match=r"ZICO_CONFIG: the file .* does not exist"):
        given({}, tmp_path / "none")


def test_a_budget_on_the_host_may_be_raised_to_what_the_machine_has() -> None:
    """That costs address space only; a table of more regions than is usual has to be asked for."""
    assert resolved(flags(budget="1G")).most_bytes.value == MEMORY.total_bytes
    small = resolved(flags(budget="1G", region="64KiB"))
    assert small.most_bytes.value == 4 * GIB
    assert resolved(flags(budget="8G", region="64KiB")).most_bytes.value == 8 * GIB
    assert resolved(flags(budget="1G", region="64KiB"), ZICO_MOST="12G").most_bytes.value == 12 * GIB


def test_a_budget_on_a_gpu_may_be_raised_only_if_that_was_asked_for() -> None:
    """Its memory is taken when the pool is made, so that more than the budget must be free then."""
    assert on_gpu(budget="10G").most_bytes.value == 10 * GIB
    assert on_gpu(budget="10G", most="20G").most_bytes.value == 20 * GIB
    with pytest.raises(ConfigError, match=r"--most.* are free"):
        on_gpu(budget="10G", most="70G")


def test_a_most_below_the_budget_is_refused() -> None:
    """The sentence has both figures."""
    with pytest.raises(ConfigError, match="--most: 1 GiB is below the budget of 2 GiB"):
        resolved(flags(budget="2G", most="1G"))


# -- a job's own process ---------------------------------------------------------------------------


def test_a_job_reads_what_its_environment_says() -> None:
    """Each variable that a job's process reads is in its settings; without any, the defaults hold."""
    says = {"ZICO_JOB": "a", "ZICO_JOB_WEIGHT": "2", "ZICO_JOB_SAVE": "page", "ZICO_TIER": "file"}
    heap = {"ZICO_THRESHOLD": "1MiB", "ZICO_WAIT_LIMIT_S": "2.5", "ZICO_SPILL_DIR": "/s"}
    others = {"ZICO_SPACING": "0", "ZICO_PAGING": "0x7:1", "ZICO_PAGED_BYTES": "50%"}
    recorded = {"ZICO_TRACE_RING": "/r", "ZICO_TRACE_OPS": "1", "ZICO_PLAN": "off"}
    assert job_settings(says | heap | others | recorded, "train.py") == JobSettings(
        name="a",
        share=Share(weight=2.0),
        wish=Wish("page", tier="file"),
        heap={"threshold_bytes": MIB, "wait_limit_s": 2.5, "spill_directory": "/s"},
        spacing_bytes=0,
        paging={"flags": 7, "degree": 1},
        window="50%",
        ring="/r",
        ops=True,
        plans=False,
    )
    assert job_settings({}, "/x/train.py") == JobSettings(name="train")
    assert job_settings({"ZICO_THRESHOLD": ""}) == JobSettings()
    assert job_settings({"ZICO_PAGING": "7"}).paging == {"flags": 7}


@pytest.mark.parametrize(
    "variable",
    ["ZICO_THRESHOLD", "ZICO_WAIT_LIMIT_S", "ZICO_SPACING", "ZICO_PAGING", "ZICO_JOB_SLO", "ZICO_JOB_LIMIT"],
)
def test_a_job_names_the_variable_that_it_cannot_use(variable: str) -> None:
    """The message begins with the variable and has its value."""
    with pytest.raises(ConfigError, match=f"^{variable}: 'x' is not a "):
        job_settings({variable: "x"})


@pytest.mark.parametrize("text", ["7:0", "7:257", "7:", ":7", "7:8:9"])
def test_a_job_refuses_a_look_ahead_that_no_pager_has(text: str) -> None:
    """The degree behind the flags of paging is a number from 1 to 256."""
    with pytest.raises(ConfigError, match=f"^ZICO_PAGING: '{text}' is not a .* degree from 1 to 256: give "):
        job_settings({"ZICO_PAGING": text})
