"""Tests that need a GPU: without one they fail and say so, and here nothing may be skipped.

``--twin`` rehearses them on the driver's software twin, which shows that the tests themselves work,
and no more.

A driver that hangs cannot be interrupted, neither by a signal nor by an exception. So a timer of
faulthandler's, which needs neither Python nor the lock of Python, ends the whole run with the stack
of every thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gpu.support.pool_job import Job

from zico.base.errors import ZicoError
from zico.device.cuda.driver import CudaDriver
from zico.device.cuda.facts import require
from zico.heap.cuda import on_stream
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

RESCUE_S = 240.0
"""More than pytest-timeout gives a test, which ends that test alone where the driver lets it."""
TWIN = "ZICO_TEST_ON_TWIN"
"""In the environment of the tests and of the processes that they start: the twin stands in for the driver."""
_TWIN_BYTES = 8 << 30
stderr_fd = pytest.StashKey[int]()


def use_twin() -> None:
    """Let a software twin, with kernels that are written in Python, be the driver of this process."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from twin.meanings import register
    from twin.twin import Twin

    from zico.device.cuda import bindings

    twin = Twin(total_bytes=_TWIN_BYTES, host_bytes=_TWIN_BYTES)
    register(twin)
    bindings.use(twin)


if TWIN in os.environ:
    use_twin()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the rehearsal."""
    parser.addoption("--twin", action="store_true", help="rehearse on the driver's software twin")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error from before tests' output is caught."""
    config.stash[stderr_fd] = os.dup(2)
    if config.getoption("--twin"):
        os.environ[TWIN] = "1"
        use_twin()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the timer, before any fixture."""
    faulthandler.dump_traceback_later(RESCUE_S, exit=True, file=item.config.stash[stderr_fd])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Stop the timer, behind all fixtures."""
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure: a test that did not run has shown nothing."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which no test here may be: {report.longrepr}"
    return report


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Fail with the driver's own sentence where there is no GPU that Zico can share."""
    try:
        require(0)
    except ZicoError as error:
        pytest.fail(f"the tests in tests/gpu need a GPU: {error}", pytrace=False)


class CudaDevice:
    """A GPU, read and written by copies."""

    def __init__(self) -> None:
        """Open the first device."""
        self.driver = CudaDriver(0)

    def read(self, address: int, size_bytes: int) -> bytes:
        """Copy from the device."""
        data = ctypes.create_string_buffer(size_bytes)
        with self.driver.context.current():
            self.driver.call("cuMemcpyDtoH", ctypes.addressof(data), address, size_bytes)
        return data.raw

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device."""
        source = ctypes.create_string_buffer(data, len(data))
        with self.driver.context.current():
            self.driver.call("cuMemcpyHtoD", address, ctypes.addressof(source), len(data))

    def is_open(self, address: int) -> bool:
        """Tell whether a byte can be copied from there; the driver refuses a copy from unmapped addresses."""
        try:
            self.read(address, 1)
        except ZicoError:
            return False
        return True


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    """Return the first GPU."""
    device = CudaDevice()
    yield device
    device.driver.close()


# -- jobs of a pool --------------------------------------------------------------------------------

REGIONS = 4
MIB = 1 << 20


@pytest.fixture
def two_jobs() -> Iterator[tuple[Job, Job]]:
    """Return two jobs of a pool of a few regions."""
    with contextlib.ExitStack() as undo:
        driver = CudaDriver(0)
        undo.callback(driver.close)
        region_bytes = max(driver.granularity_bytes, 2 * MIB)
        sizes = {"budget_bytes": REGIONS * region_bytes, "region_bytes": region_bytes}
        pool = undo.enter_context(PoolTable.create(**sizes, use_claims=False, self_admit=True, driver=driver))
        both = tuple(Job(pool, undo, wait_limit_s=0.05) for _ in range(2))
        yield both
        for one in both:
            one.driver.synchronize(one.stream)
            on_stream.settle(one.record[0])
