"""Jobs of one pool in control groups of their own: who is charged for its pages, and who is killed for them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.harness import ANSWER_S, MIB, LightJob, Nursery, pool, until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
USES = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}
SPARE_MIB = 16
"""For what a job without a framework has of its own: a few MiB, as it is forked."""


class Group(NamedTuple):
    """A control group that a test has made."""

    directory: Path
    limit_file: str

    def limit(self, mib: int) -> None:
        """Let its processes be charged for so much at the most."""
        (self.directory / self.limit_file).write_text(str(mib * MIB))

    def take(self, job: LightJob) -> None:
        """Put a job into it: what the job touches then is charged here."""
        (self.directory / "cgroup.procs").write_text(str(job.pid))

    @property
    def used_mib(self) -> int:
        """Return what is charged to it."""
        return int((self.directory / USES[self.limit_file]).read_text()) // MIB


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Give two groups; their processes are dead in the end, and so are they."""
    with contextlib.ExitStack() as undo:
        made = []
        for name in ("first", "second"):
            for root, limit_file in ROOTS:
                directory = root / f"zico-{os.getpid()}-{name}"
                with contextlib.suppress(OSError):
                    directory.mkdir()
                    undo.callback(lambda path=directory: until(lambda: _is_gone(path), ANSWER_S, f"{path} goes"))
                    if (directory / limit_file).exists():
                        made.append(Group(directory, limit_file))
                        break
        if len(made) < len(("first", "second")):
            pytest.skip("this process may not make control groups with a limit of memory")
        yield made


def _is_gone(directory: Path) -> bool:
    with contextlib.suppress(OSError):  # a process in it is dead, and not yet gone
        directory.rmdir()
    return not directory.exists()


def test_pages_are_charged_to_who_touches_them_first(nursery: Nursery, groups: list[Group]) -> None:
    """A job that gets another's pages is not charged, and one killed at its group's limit leaves the others as were."""
    first, second = groups
    second.limit(SPARE_MIB + 8)
    with (
        pool(regions=64, region_bytes=MIB) as made,
        nursery.job(made, "a") as a,
        nursery.job(made, "b") as b,
    ):
        for job, group in ((a, first), (b, second)):
            assert job.ask("mark") == "began"
            group.take(job)
        assert a.ask("hold 40") == "1"
        assert first.used_mib >= 40
        assert a.ask("free") == "freed"
        assert b.ask("hold 40") == "1"
        assert second.used_mib <= SPARE_MIB, "the pages that the pool had are still the first group's"
        b.tell("hold 24")
        b.wait_dead()
        made.settled(lambda look: look.granted == 0, "what it held is free", ANSWER_S)
        assert a.ask("hold 40") == "1"
        assert a.ask("free") == "freed"
        made.look().check()
