"""``zico.Pool`` and ``zico.run``: what the commands do, from Python."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pytest
from support.harness import ANSWER_S, PATIENCE_S, LightJob, Nursery, clean_environment, compile_once, pool, until

import zico
from zico.base.errors import CommandError, ConfigError
from zico.job.status import JobStatus
from zico.launch.client import words_of

MIB = 1 << 20
CODE = """
import sys, zico
report = zico.run(
    [[sys.executable, "-c", "print('of a')"], f"{sys.executable} -c 'raise SystemExit(3)'"],
    budget="64MiB", name=["a", "b"], weight={"a": 2}, quiet=True,
)
print([(job.name, job.exit_code) for job in report.jobs])
"""
REFUSED = """
import zico
try:
    zico.run(["true"], budget="none at all")
except zico.base.errors.CommandError as error:
    print(error, error.exit_code)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code that starts a broker in a runtime directory of its own."""
    with tempfile.TemporaryDirectory(prefix="zr-") as runtime:  # sockets have short paths
        return subprocess.run(
            [sys.executable, "-c", code],
            env=clean_environment() | {"XDG_RUNTIME_DIR": runtime},
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip


def test_a_pool_is_asked_and_changed(nursery: Nursery) -> None:
    """Status, budget, limit, weight and promise are those of the commands, and so are their words."""
    with pool(regions=16) as made, nursery.job(made, "a"):
        client = zico.Pool(socket=made.socket)
        assert [job.name for job in client.status().jobs] == ["a"]
        assert client.limit("3MiB").budget_bytes == 3 * MIB
        assert client.limit(4 * MIB).budget_bytes == 4 * MIB
        (job,) = client.limit("1MiB", job="a", weight=2, slo="10%").jobs
        assert (job.limit_bytes, job.share.weight, job.share.slo) == (MIB, 2, 0.1)
        (job,) = client.limit("none", job="a").jobs
        assert job.limit_bytes == 0
        with pytest.raises(ConfigError, match=r"^nothing to change: give a SIZE"):
            client.limit()
        with pytest.raises(ConfigError, match=r"^no job is called 'b'"):
            client.pause("b")
    with pytest.raises(CommandError, match="no broker is running"):
        client.status()


def test_a_job_is_paused_and_goes_on(nursery: Nursery) -> None:
    """The job stands at its boundary until it is resumed."""
    with pool() as made, nursery.job(made, "a") as job:
        client = zico.Pool(socket=made.socket)
        assert _began(job)
        assert [one.state for one in client.pause("a").jobs] == ["pausing"]
        job.tell("mark")
        until(lambda: [one.state for one in client.status().jobs] == ["paused"], ANSWER_S, "it is paused")
        client.resume("a")
        assert job.answer() == "began"


def _began(job: LightJob) -> bool:
    return job.ask("mark") == "began"


def test_jobs_are_run_from_python() -> None:
    """The report has every job's exit code; the jobs' output leaves standard output to the caller."""
    compile_once()
    done = python(CODE)
    assert done.stdout == "[('a', 0), ('b', 3)]\n", done.stderr
    assert "of a" in done.stderr


def test_a_run_that_cannot_start_raises() -> None:
    """The reason is on standard error, as of the command."""
    done = python(REFUSED)
    assert done.stdout == "zico run did not start the jobs: standard error says why 2\n", done.stderr
    assert "none at all" in done.stderr


def test_options_become_words() -> None:
    """Flags, texts, numbers, sequences and mappings."""
    options = {"budget": "8GiB", "mps": True, "quiet": False, "grace": 3, "name": ["a", "b"], "limit": {"a": "1GiB"}}
    assert list(words_of({**options, "policy": None, "at_most": 2})) == [
        *("--budget", "8GiB", "--mps", "--grace", "3", "--name", "a", "--name", "b", "--limit", "a=1GiB"),
        *("--at-most", "2"),
    ]


def test_figures_are_attributes_and_items() -> None:
    """What ``zico.status`` returns is still a dictionary that can be written as JSON."""
    found = JobStatus({"name": "a", "held_bytes": 4})
    assert (found.name, found["held_bytes"], json.loads(json.dumps(found))) == ("a", 4, {"name": "a", "held_bytes": 4})
    with pytest.raises(AttributeError, match="'JobStatus' has no figure 'peak'"):
        found.peak  # noqa: B018 - a mistake


def test_the_package_shows_what_it_has() -> None:
    """``dir`` and ``help`` list the functions, and each of them is there."""
    assert set(zico.__all__) <= set(dir(zico))
    assert all(getattr(zico, name) for name in zico.__all__)
    shown = subprocess.run(
        [sys.executable, "-c", "import pydoc, zico; print(pydoc.plain(pydoc.render_doc(zico)))"],
        env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    ).stdout  # fmt: skip
    assert all(f"\n    {name}(" in shown for name in ("iteration", "join", "leave", "run", "status", "step"))
    assert "class Pool(" in shown


def test_a_shell_completes_policies_jobs_and_runs(nursery: Nursery) -> None:
    """What a shell asks for while a pool runs: options, policies, jobs; nothing where nobody answers."""

    def completed(line: str, **environ: str) -> list[str]:
        words = {"_ZICO_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        done = subprocess.run(
            [sys.executable, "-m", "zico"],
            env=clean_environment() | words | environ,
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert not done.stderr
        return [word.partition(",")[2] for word in done.stdout.splitlines() if word]

    with pool() as made, nursery.job(made, "train"):
        assert completed("zico pause t", ZICO_SOCKET=str(made.socket)) == ["train"]
        assert completed("zico limit --job t", ZICO_SOCKET=str(made.socket)) == ["train"]
    assert completed("zico pause t", ZICO_SOCKET=str(made.socket)) == []
    assert completed("zico run --policy sh") == ["shift"]
