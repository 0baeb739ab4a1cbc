"""Start Zico in a Python process of a job, if it is one.

``zico run`` puts this file's folder first on ``PYTHONPATH``; Python imports ``sitecustomize`` at
start. The folder is no package: it holds this file only, so that nothing else of ours can be
imported by a bare name. Zico or not, the process gets the ``sitecustomize`` that it would have
without us. It runs before ours, since it may set up what ours needs, and what it raises goes to
Python as usual.

Read from the environment:
    ZICO_SOCKET: Where the broker listens. Without it nothing happens.
    ZICO_OWNER_PID: The process that is the job. Its descendants (data loader workers, say) stay
        outside; only PyTorch is watched in them, since one that trains joins after all.
    ZICO_PACKAGE_PATH: The folder that holds ``zico``, for environments in which it is not
        installed.

A command may set ``PYTHONPATH`` itself, which hides this file. Where Zico is installed,
``zico/job/zico.pth`` lies in site-packages and does the same, once per process.

Nothing may be imported here that is slow: this runs in every Python process below ``zico run``.
"""

import os
import sys


def _chain() -> None:
    """Import the ``sitecustomize`` that comes after this one, as if this one were not there.

    Takes this folder off ``sys.path``, for good, so that the process sees the path that it would
    have without Zico. Its children find us by ``PYTHONPATH`` as it did.
    """
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs milliseconds
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100
    ours = sys.modules.pop(__name__)
    try:
        # The next one: ours has just left sys.path.
        import sitecustomize  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = ours  # the import system looks for it when this file has run


def _activate() -> None:
    """Watch for frameworks, if this process is a job's; never raises."""
    if not os.environ.get("ZICO_SOCKET"):
        return
    try:
        _make_importable()
        from zico.job.autoload import activate

        activate()
    except Exception as error:  # noqa: BLE001 - the user's process must go on, whatever is wrong with us
        reason = " ".join(str(error).split()) or type(error).__name__
        import contextlib

        with contextlib.suppress(Exception):  # as zico.base.saying, which may be what cannot be imported
            sys.stderr.write(f"zico: not active: {reason}\n")


def _make_importable() -> None:
    """Put the ``zico`` that ``zico run`` belongs to on ``sys.path`` unless the user's environment has one."""
    try:
        import zico.job.autoload  # noqa: F401 - only where it is needed
    except ImportError:
        path = os.environ.get("ZICO_PACKAGE_PATH")
        if not path:
            raise
        sys.path.append(path)  # last: what else is there must not hide anything of the user's


try:
    _chain()
finally:
    _activate()
