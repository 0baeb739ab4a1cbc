"""The environment of a job: the user's own, and what switches Zico on in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import zico.launch
from zico.broker import saving, shares
from zico.broker.messages import DEFAULT_SHARE, Share
from zico.broker.saving import DEFAULT_WISH, Wish
from zico.config import SOCKET_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE = Path(zico.launch.__file__).parent.parent
INJECT = PACKAGE / "inject"
# Of a surrounding `zico run`: here they would make a process believe that it is part of that one's job.
_NOT_INHERITED = ("ZICO_OWNER_PID", "ZICO_JOB", *shares.VARIABLES.values(), *saving.VARIABLES.values())


def job_environment(
    environ: Mapping[str, str], socket: Path, name: str, share: Share = DEFAULT_SHARE, wish: Wish = DEFAULT_WISH
) -> dict[str, str]:
    """Return ``environ`` with what makes a Python process in it join the broker at ``socket`` as ``name``."""
    job = {key: value for key, value in environ.items() if key not in _NOT_INHERITED}
    # An empty entry in PYTHONPATH means the current directory: add none.
    entries = [str(INJECT), *filter(None, [environ.get("PYTHONPATH")])]
    job |= {
        SOCKET_VARIABLE: str(socket),
        "ZICO_JOB": name,
        "ZICO_PACKAGE_PATH": str(PACKAGE.parent),
        "PYTHONPATH": os.pathsep.join(entries),
        "PYTHONUNBUFFERED": "1",
        **shares.variables_of(share),
        **saving.variables_of(wish),
    }
    return job
