"""Jobs that hold equal frozen memory once, as tests of each framework start and ask them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from support.harness import MIB, Pool, clean_environment, compile_once, pool
from support.scripts import Script
from zico.base.errors import ZicoError
from zico.broker.client import BrokerClient
from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS = 6
"""Of the base of a job, 4 MiB each."""
BASE = LAYERS * 4 * MIB
REGIONS = 64


@contextlib.contextmanager
def fresh() -> Iterator[Pool]:
    """Give a pool of 64 MiB."""
    compile_once()
    with pool(regions=REGIONS, region_bytes=MIB) as one:
        yield one


def start(made: Pool | None, script: Path, seed: int, *, share: bool = True, loaded: str = "torch") -> Script:
    """Start a job, in the pool or alone, where a framework is loaded; without one it imports its own."""
    environment = clean_environment()
    if made is not None:
        environment = job_environment(environment, made.socket, f"job{seed}", wish=Wish(share_frozen=share))
    command = [str(script), str(seed)]
    return Script(command, environment | {"PYTHONUNBUFFERED": "1"}, loaded=loaded, fresh=not loaded)


def ask(job: Script, what: str) -> str:
    """Have a job do something and return what it says."""
    job.tell(what)
    return job.line()


def steps(*jobs: Script, n: int = 1) -> list[list[str]]:
    """Have jobs train for so many iterations, at the same time; returns each one's losses."""
    losses = []
    for _ in range(n):
        for job in jobs:
            job.tell("step")
        losses.append([job.line() for job in jobs])
    return [list(of_one) for of_one in zip(*losses, strict=True)]


def shared(made: Pool) -> int:
    """Return the bytes that jobs have in common."""
    with contextlib.suppress(ZicoError), BrokerClient(made.socket) as client:
        return client.status().shared_bytes
    return -1


@contextlib.contextmanager
def begin(
    made: Pool | None, script: Path, *seeds: int, share: bool = True, loaded: str = "torch"
) -> Iterator[list[Script]]:
    """Give jobs that are ready, each dead when the block ends."""
    with contextlib.ExitStack() as owned:
        jobs = [owned.enter_context(start(made, script, seed, share=share, loaded=loaded)) for seed in seeds]
        assert [job.line() for job in jobs] == ["ready"] * len(seeds)
        yield jobs
