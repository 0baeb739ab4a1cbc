"""A job of an earlier run begins with what that one has learned, if it is the same job."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Self

import pytest
from support.harness import PROCESS, TESTS, Pool, clean_environment, pool
from support.scripts import Script, place_of

from zico.base.paths import CACHE_VARIABLE, code_directory
from zico.broker.protocol.messages import DEFAULT_SHARE, Share
from zico.launch.jobs import job_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOB = PROCESS / "remembering_job.py"
LAYERS = 6
FEW = 4


class Trainer:
    """A job in a pool, and what the pool's table says of it."""

    def __init__(self, made: Pool, script: Path, cache: Path, name: str, share: Share = DEFAULT_SHARE) -> None:
        """Start it, and wait until it has joined."""
        own = {"ZICO_PROFILES": "on", CACHE_VARIABLE: str(cache), "PYTHONPATH": str(TESTS)}
        environment = job_environment(clean_environment(), made.socket, name, share) | own
        self.process = Script([str(script), str(LAYERS)], environment, fresh=True)
        self._made = made
        self._place = place_of(made, name, self.process)
        assert self.process.line() == "joined"

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.process.__exit__()

    def does(self, *words: str) -> None:
        """Have it do one thing after the other, and wait until it has."""
        for word in words:
            self.process.tell(word)
            assert self.process.line() == "done"

    def says(self, field: str) -> int:
        """Return a word of its record."""
        return int(self._made.jobs[self._place][field])

    @property
    def events(self) -> int:
        """Return the events of an iteration that it expects."""
        return int(self._made.jobs[self._place]["profile"]["n_events"])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a cache of its own for what jobs have learned, with the machine code that is there already."""
    path = tmp_path / "cache"
    path.mkdir(0o700)
    (path / "code").symlink_to(code_directory())
    return path


@pytest.fixture(scope="module")
def made() -> Iterator[Pool]:
    """Give a pool."""
    with pool(regions=32) as one:
        yield one


def test_a_job_that_was_killed_begins_its_next_run_with_what_it_had_learned(made: Pool, cache: Path) -> None:
    """Its first iteration is known to the pool while it goes on, and its second one from its begin."""
    with Trainer(made, JOB, cache, "first") as job:
        job.does("set up")
        assert (job.says("profiled"), job.says("remembered")) == (0, 0)
        job.does(*["train"] * FEW)
    with Trainer(made, JOB, cache, "again") as job:
        assert (job.says("profiled"), job.says("remembered"), job.says("claim_peak")) == (1, 1, LAYERS + 1)
        assert job.events == 2 * LAYERS + 1
        job.does("set up", "train")
        assert (job.says("remembered"), job.events) == (0, 2 * LAYERS)


def test_a_job_whose_script_has_changed_begins_anew(made: Pool, cache: Path, tmp_path: Path) -> None:
    """One byte more makes it another job, in whatever directory it lies."""
    script = tmp_path / JOB.name
    shutil.copy(JOB, script)
    with Trainer(made, JOB, cache, "old") as job:
        job.does("set up", *["train"] * FEW)
    with Trainer(made, script, cache, "copied") as job:
        assert job.says("remembered") == 1
    script.write_text(script.read_text() + "\n")
    with Trainer(made, script, cache, "changed") as job:
        assert (job.says("profiled"), job.says("remembered")) == (0, 0)


def test_a_job_with_another_share_of_the_processors_begins_anew(made: Pool, cache: Path) -> None:
    """Its iterations take another time; what it did with all processors is kept beside."""
    with Trainer(made, JOB, cache, "all") as job:
        job.does("set up", *["train"] * FEW)
    for share, known in ((Share(compute=0.5), 0), (Share(weight=2.0), 1)):
        with Trainer(made, JOB, cache, "then", share) as job:
            assert (job.says("profiled"), job.says("remembered")) == (known, known)


def test_a_job_that_does_something_else_drops_what_it_had_learned(made: Pool, cache: Path) -> None:
    """What the command does not show, the first iteration does: from then on it learns as a new job does."""
    with Trainer(made, JOB, cache, "plain") as job:
        job.does("set up", *["train"] * FEW)
    with Trainer(made, JOB, cache, "higher") as job:
        job.does(*["set up"] * 5)
        assert job.says("outgrown") == 0
        job.does("train")
        assert (job.says("remembered"), job.says("claim_peak")) == (0, LAYERS + 5)
        job.does("train")
        assert job.events == 2 * LAYERS
