"""What keeps a job from being paged, or its pages from coming back: said in one sentence, and no data made up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.harness import PATIENCE_S, TESTS
from support.light_job import can_page

from zico.device.userfault import REMEDY


def run(which: str) -> subprocess.CompletedProcess[str]:
    """Run one of the cases to its end."""
    argv = [sys.executable, "-m", "process.support.paging_refusals", which]
    environ = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)


def test_a_job_that_may_not_page_says_so_and_goes_on() -> None:
    """Where the kernel refuses userfaultfd, one line says what to set, and the job works as any other."""
    done = run("refused")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("zico: this job is not paged: ")
    assert line.endswith(REMEDY)


def test_a_job_without_privileges_pages_what_it_touches_itself() -> None:
    """With faults in user mode alone, contents come back, and a system call fails with EFAULT and harms nothing."""
    done = run("user_mode")
    assert done.returncode == 0, done.stderr
    if done.stdout:
        pytest.skip(done.stdout.strip())


@pytest.mark.skipif(not can_page(), reason="this user may not serve page faults")
@pytest.mark.parametrize("which", ["broken_tier", "broken_tier_on_an_older_kernel"])
def test_invariant_7_what_a_tier_cannot_give_back_ends_the_job(which: str) -> None:
    """Invariant 7: whoever touches what a broken file had gets SIGBUS, one line says why, and nothing is made up."""
    done = run(which)
    assert done.returncode == -signal.SIGBUS, (done.stdout, done.stderr)
    assert "found" not in done.stdout
    assert "ends by SIGBUS: memory that it touches cannot be brought back from where it went (file " in done.stderr
