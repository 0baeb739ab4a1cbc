"""What tests share: brokers, the process that light jobs are forked from, and deaths at chosen instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.broker_messages import no_descriptor_left
from process.support.broker_process import Broker, close_all, kill
from process.support.single_steps import NO_PTRACE
from support.harness import ANSWER_S, TESTS, Nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zico.broker.protocol import messages as m


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Give a function that starts brokers; they are killed afterwards, and no descriptor stays open here."""
    brokers: list[Broker] = []

    def start_broker(*options: str, ready: bool = True) -> Broker:
        brokers.append(Broker(tmp_path, *options))
        if ready:
            brokers[-1].wait_ready()
        return brokers[-1]

    with no_descriptor_left():
        yield start_broker
        for broker in brokers:
            broker.client.close()
            kill(broker.process)


@pytest.fixture
def broker(start: Callable[..., Broker]) -> Broker:
    """Give a broker with the policy ``none``."""
    return start("--policy", "none")


@pytest.fixture(scope="module")
def veteran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Give one broker to all tests that cannot disturb it; earlier attackers may still be LEAVING in it."""
    broker = Broker(tmp_path_factory.mktemp("veteran"), "--policy", "none")
    try:
        broker.wait_ready()
        yield broker
    finally:
        broker.client.close()
        kill(broker.process)


@pytest.fixture
def undisturbed(veteran: Broker) -> Iterator[Broker]:
    """Give the veteran with a bystander in it; afterwards the bystander must still be a member, and alone as one."""
    with no_descriptor_left():
        bystander = veteran.client.join("bystander", "torch")
        yield veteran

        def states(status: m.Status) -> tuple[str | None, set[str]]:
            others = {job.job: job.state for job in status.jobs}
            return others.pop(bystander.job, None), set(others.values())

        # The broker may hear this client's question before it hears that the last attacker has gone.
        veteran.until(lambda status: states(status) in (("running", set()), ("running", {"leaving"})), ANSWER_S)
        close_all(bystander)
        veteran.client.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Give the process that light jobs are forked from."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def deaths(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Kill processes all along each operation of the module's ``VICTIMS``; returns what was found, per operation."""
    module = request.module
    argv = [sys.executable, "-m", module.VICTIMS, str(module.TRIALS)]
    environ = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=module.DEATHS_S)
    if NO_PTRACE in done.stderr:
        pytest.skip("this system does not let a process trace its children")
    assert done.returncode == 0, done.stderr
    return {found["operation"]: found for found in map(json.loads, done.stdout.splitlines())}
