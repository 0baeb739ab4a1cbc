"""``zico fit`` on trace files."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
from cpu.support.trace_cases import train

from zico.cli import main
from zico.trace.files import write_trace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Write a training loop of a few hundred MiB."""
    path = tmp_path / "job.ztrace"
    write_trace(path, train(6))
    return str(path)


def peak_of(trace: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Return what one job needs alone, in MiB."""
    assert main(["fit", trace, "--budget", "64GiB", "--region", "1MiB", "--json"]) == 0
    peak: int = json.loads(capsys.readouterr().out)["jobs"][0]["peak_bytes"]
    return peak >> 20


def test_it_answers_fits_waits_and_no(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two copies fit into twice the peak, wait in less, and do not fit into less than one; codes 0, 0 and 1."""
    peak = peak_of(trace, capsys)
    answers = []
    for budget in (2 * peak, peak * 29 // 20, peak - 1):
        code = main(["fit", trace, trace, "--budget", f"{budget}MiB", "--region", "1MiB", "--json"])
        found = json.loads(capsys.readouterr().out)
        answers.append((code, found["answer"]))
        assert [job["name"] for job in found["jobs"]] == ["job-1", "job-2"]
        assert found["schema_version"] == "zico.fit.v1"
    assert answers == [(0, "fits"), (0, "fits with waiting"), (1, "does not fit")]


def test_regions_are_those_of_the_traces_device(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace of the host is counted in its regions of 4 MiB; one of a GPU by the budget, as ``zico run`` does."""
    on_gpu = tmp_path / "gpu.ztrace"
    loop = train(6)
    write_trace(on_gpu, dataclasses.replace(loop, origin=dataclasses.replace(loop.origin, device="cuda:0")))
    found = []
    for files, budget in (([trace], "8GiB"), ([str(on_gpu)], "8GiB"), ([trace, str(on_gpu)], "1GiB")):
        assert main(["fit", *files, "--budget", budget, "--save", "none", "--json"]) in {0, 1}
        found.append(json.loads(capsys.readouterr().out)["region_bytes"] >> 20)
    assert found == [4, 64, 8]


def test_a_budget_that_is_no_whole_number_of_regions_is_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What of the budget no region covers is not left out silently."""
    main(["fit", trace, "--budget", "1030MiB", "--region", "16MiB", "--save", "none"])
    assert "of --budget 1030MiB, 1 GiB are whole regions of 16 MiB" in capsys.readouterr().err


def test_the_table_names_job_delay_and_reason(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed table has a row for each job, and the last line the answer with its reason."""
    peak = peak_of(trace, capsys)
    assert main(["fit", trace, trace, "--budget", f"{peak * 29 // 20}MiB", "--region", "1MiB"]) == 0
    out = capsys.readouterr().out
    assert "job-1" in out
    assert "later each iteration" in " ".join(out.split())
    assert out.splitlines()[-1].startswith("fits with waiting: peaks ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "nothing"], "--budget: 'nothing' is not a size"),
        (["--budget", "1GiB", "--region", "3MiB"], "--region '3MiB': give a power of two"),
        (["--budget", "1GiB", "--policy", "fifo"], "'fifo' is not a policy: choose one of"),
    ],
)
def test_bad_options_are_refused(
    trace: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad option is one line on stderr that says what to give, and code 2."""
    assert main(["fit", trace, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is one line that names it, and no answer: code 1 would say that it does not fit."""
    assert main(["fit", str(tmp_path / "none.ztrace"), "--budget", "1GiB"]) == 2
    assert "none.ztrace" in capsys.readouterr().err
