"""What a job's process is called where nobody has named it."""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

from zico.base.settings import JOB_VARIABLE, fitting_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_KERNEL = "ipykernel_launcher"
"""The script of every notebook's process."""
_SESSION_VARIABLE = "JPY_SESSION_NAME"
"""Jupyter's server, from 2.0 on, tells a kernel its notebook's path in this variable."""
_VSCODE_NAME = "__vsc_ipynb_file__"
"""Visual Studio Code tells the same by this one of a notebook's own variables."""
_NO_SCRIPT = ("-c", "-m")


def job_name(environ: Mapping[str, str], script: str) -> str:
    """Return the name of a job's process: the given one, else its notebook's or its script's."""
    if environ.get(JOB_VARIABLE):
        return environ[JOB_VARIABLE]
    if PurePath(script).stem == _KERNEL:
        # The server of Visual Studio Code has sessions with paths of its own.
        script = _vscode_notebook() or environ.get(_SESSION_VARIABLE) or "notebook"
    return "job" if script in _NO_SCRIPT else fitting_name(PurePath(script).stem)


def _vscode_notebook() -> str:
    """Return the path of the notebook that runs in this process, if Visual Studio Code has told it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    path = getattr(shell, "user_ns", {}).get(_VSCODE_NAME)
    return path if isinstance(path, str) else ""
