"""How many descriptors may be open: the soft limit follows the need, the hard one is refused with both numbers."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from zico.base.errors import ConfigError

_RUN = """
import resource, sys
from zico.broker.transport import make_room
from zico.base.errors import ConfigError
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    make_room({n_fds}, "a pool of {n_fds} regions")
except ConfigError as error:
    print(error)
else:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(soft: int, hard: int, n_fds: int) -> str:
    """Return what a process of these limits has after it asked for room, or why it was refused."""
    code = _RUN.format(soft=soft, hard=hard, n_fds=n_fds)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_the_soft_limit_is_raised_as_far_as_needed() -> None:
    """A soft limit that is too low becomes what is open, twice what is wanted and some to spare; the hard one stays."""
    soft, hard = map(int, limits_after(100, 1024, 200).split())
    assert 464 <= soft < 480
    assert hard == 1024


def test_what_is_needed_is_enough_where_the_hard_limit_allows_no_more() -> None:
    """Room for each descriptor once is granted below a hard limit that has none for twice."""
    assert limits_after(100, 300, 200) == "300 300"


def test_a_soft_limit_that_is_enough_grows_by_what_is_kept() -> None:
    """A program can open as many descriptors as before, up to the hard limit; for no descriptors nothing is changed."""
    assert limits_after(1000, 2000, 300) == "1300 2000"
    assert limits_after(1000, 1024, 300) == "1024 1024"
    assert limits_after(20, 1024, 0) == "20 1024"


def test_a_hard_limit_that_is_too_low_is_named_with_what_is_needed() -> None:
    """The refusal has both numbers and what to do, and leaves the limit as it was."""
    refusal = limits_after(100, 200, 1000)
    assert refusal.startswith("a pool of 1000 regions needs 10")
    assert "the limit is 200: raise it (ulimit -Hn 10" in refusal
    assert "--region" in refusal


def test_an_infinite_limit_is_room_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hard limit any number is granted; without a soft one nothing is changed."""
    from zico.broker import transport

    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, both: changed.append(both))
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (100, resource.RLIM_INFINITY))
    transport.make_room(10**6, "a pool")
    assert changed[0][0] > 10**6
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    transport.make_room(10**6, "a pool")
    assert len(changed) == 1
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (100, 200))
    with pytest.raises(ConfigError):
        transport.make_room(10**6, "a pool")
