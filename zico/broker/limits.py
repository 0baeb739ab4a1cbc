"""How many descriptors this process may open: the soft limit is raised to what is needed, the hard one is not ours."""

from __future__ import annotations

import os
import resource

from zico.errors import ConfigError

SPARE_FDS = 64
"""Descriptors left for everything else: files, pipes, libraries."""


def make_room(n_fds: int, whose: str, spare: int = SPARE_FDS) -> None:
    """Let this process open ``n_fds`` descriptors besides those that it has open, and some to spare.

    Changes the soft limit of the process if that is too low (``RLIMIT_NOFILE``), for good: its children inherit it.
    Where the hard limit allows there is room for twice as many, since a driver may keep one of its own for each. Does
    nothing for no descriptors.

    Raises:
        ConfigError: The hard limit is too low, which only an administrator can change; nothing has been changed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + n_fds + spare  # noqa: PTH208 - only their number counts
    wanted = needed + n_fds
    if n_fds == 0 or soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{whose} needs {needed} open files here and the limit is {hard}: raise it (ulimit -Hn {needed}, or "
            "LimitNOFILE in systemd), or use larger regions (--region)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
