"""The checks of ``torch_checks.py`` as a build of PyTorch sees them that imports no C allocator."""

from __future__ import annotations

import runpy
from pathlib import Path

from zico.base.errors import HookError
from zico.job.session import Session


def refuse(_joined: Session, library_prefix: str, names: tuple[str, ...]) -> None:
    """Fail as where a library imports none of the functions."""
    message = f"{library_prefix} imports none of {', '.join(names)}"
    raise HookError(message)


Session.redirect = refuse  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("torch_checks.py")), run_name="__main__")
