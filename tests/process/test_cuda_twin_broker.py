"""A broker and jobs on a CUDA device, each in a process of its own, with the driver's software twin under them."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from process.support.cuda_twin import Process, environment
from process.support.cuda_twin_broker import MIB, N_REGIONS, REGION_BYTES, SETTINGS, Broker

from zico.broker.client import BrokerClient

if TYPE_CHECKING:
    from collections.abc import Iterator


FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"


@contextlib.contextmanager
def started(more: str = "", *options: str) -> Iterator[Broker]:
    """Give a broker that may not be ready yet, or never."""
    with tempfile.TemporaryDirectory(prefix="zt-") as directory:
        broker = Broker(Path(directory), environment(Path(directory) / "site", more, **SETTINGS), *options)
        with broker.process, broker.client:
            yield broker


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Give a broker that serves all tests which leave nothing in it."""
    with started(FEW_FILES.format(soft=100, hard=4096)) as made:
        assert made.process.line() == "ready"
        yield made


def test_jobs_share_every_region_in_the_same_order(broker: Broker) -> None:
    """What one job writes into a region another reads from it, from the first to the last batch of descriptors."""
    regions = (0, 1, 125, 126, 127, 253, 254, N_REGIONS - 1)
    with broker.job("a") as (writer, said), broker.job("b") as (reader, _):
        assert said.split()[1:3] == ["cuda:0", str(N_REGIONS)]
        for region in regions:
            assert writer.ask(f"write {region} {1000 + region}") == "written"
        assert [reader.ask(f"read {region}") for region in regions] == [str(1000 + region) for region in regions]


def test_status_and_limits_are_the_devices(broker: Broker) -> None:
    """The broker tells its device, its memory is there from the beginning, and everybody's soft limit was raised."""
    with broker.job("a") as (_, said):
        status = broker.client.status()
        assert (status.device, status.physical_bytes) == ("cuda:0", N_REGIONS * REGION_BYTES)
        assert N_REGIONS < int(said.split()[3]) <= 4096


def test_a_killed_jobs_regions_come_back_within_a_second(broker: Broker) -> None:
    """Invariant 5: what a killed job held on the device is free again as soon as its process is gone."""
    with broker.job("victim") as (victim, _):
        assert victim.ask("hold 7") == "1"
        assert broker.client.status().granted_bytes == 7 * REGION_BYTES
        victim.process.kill()
        assert broker.status(lambda status: not status.jobs, within_s=1).granted_bytes == 0


def test_regions_do_not_come_back_while_the_process_lives(broker: Broker) -> None:
    """A closed connection ends no device work, so the regions stay granted until the process is gone."""
    with broker.job("a") as (job, _):
        assert job.ask("hold 3") == "1"
        assert job.ask("leave") == "left"
        status = broker.status(lambda status: status.jobs[0].state == "leaving", within_s=5)
        assert status.granted_bytes == 3 * REGION_BYTES
        job.process.send_signal(signal.SIGSTOP)
        assert broker.client.status().granted_bytes == 3 * REGION_BYTES
        job.process.kill()
        assert broker.status(lambda status: not status.jobs, within_s=1).granted_bytes == 0


@pytest.mark.parametrize(
    ("hard", "needs"),
    [(200, "needs 3"), (500, "needs 9")],
    ids=["before the memory is created", "when it is exported"],
)
def test_too_few_files_are_refused_with_both_numbers(hard: int, needs: str) -> None:
    """Where the hard limit is too low the broker says what it needs and what it has, and ends with 2."""
    with started(FEW_FILES.format(soft=100, hard=hard)) as broker:
        code, errors = broker.process.finish()
        assert (code, broker.socket.exists()) == (2, False)
    assert f"a pool of {N_REGIONS} regions {needs}" in errors
    assert f"the limit is {hard}: raise it (ulimit -Hn " in errors
    assert len(errors.splitlines()) == 1


def test_a_budget_that_the_device_cannot_give_leaves_nothing() -> None:
    """More than the device has ends the broker with 1 and a sentence that says how much there was."""
    with started("", "--budget-bytes", str(2048 * MIB)) as broker:
        code, errors = broker.process.finish()
        assert (code, broker.socket.exists()) == (1, False)
    assert "1 GiB of 2 GiB could be had on cuda:0" in errors


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--device", "cuda:1"), 2, "there is no device cuda:1: this process may use 1"),
        (("--region-bytes", str(3 * MIB)), 2, "3145728 bytes does not work"),
        (("--region-bytes", str(1 * MIB)), 2, "1048576 bytes does not work"),
    ],
)
def test_what_the_device_cannot_do_is_refused(options: tuple[str, str], code: int, says: str) -> None:
    """A device that is not there, and regions that are no power-of-two multiple of its granularity, are refused."""
    with started("", *options) as broker:
        found, errors = broker.process.finish()
    assert found == code
    assert says in errors


def test_a_broker_in_a_terminal_serves_a_gpu() -> None:
    """``zico broker --device cuda`` is the same broker."""
    with tempfile.TemporaryDirectory(prefix="zt-") as directory:
        environ = environment(Path(directory) / "site", **SETTINGS)
        socket = Path(directory) / "s"
        command = ("-m", "zico", "broker", "--device", "cuda", "--budget", "256MiB", "--region", "2MiB", "--jobs", "7")
        environ["ZICO_RESERVE"] = "128MiB"
        with Process(*command, "--socket", str(socket), **environ) as broker, BrokerClient(socket, 20) as client:
            assert broker.line() == "ready"
            assert (client.status().device, client.status().budget_bytes) == ("cuda:0", 256 * MIB)
            broker.process.terminate()
            code, errors = broker.finish()
    assert code == 0
    assert "device cuda:0 (--device)" in errors
    assert "reserve 128 MiB a job (ZICO_RESERVE), jobs 7 (--jobs)" in errors
    assert "zico: warning: --budget: 256 MiB leave 768 MiB of the device" in errors
