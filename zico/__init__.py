"""Let several training jobs share one device's memory inside one byte budget.

A script needs none of this under ``zico run``. A custom loop marks its iterations::

    for batch in data:
        with zico.iteration():
            train_on(batch)

Without ``zico run`` a script says which framework it shares, first of all, or ``zico.join()``::

    import zico.adapters.torch

Importing this module loads nothing else: it runs in every Python process below ``zico run``.
"""

import os
import sys

TYPE_CHECKING = False  # type checkers take it for the one of typing, whose import would cost milliseconds
if TYPE_CHECKING:
    from zico.base.logged import log
    from zico.job.joining import join, leave
    from zico.job.session import iteration, share, status, step
    from zico.job.status import JobStatus
    from zico.launch.client import Pool, run

__version__ = "0.2.0"

_HOMES = {
    "log": "zico.base.logged",
    **dict.fromkeys(("join", "leave"), "zico.job.joining"),
    "JobStatus": "zico.job.status",
    **dict.fromkeys(("iteration", "share", "status", "step"), "zico.job.session"),
    **dict.fromkeys(("Pool", "run"), "zico.launch.client"),
}
__all__ = ["JobStatus", "Pool", "__version__", "iteration", "join", "leave", "log", "run", "share", "status", "step"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _check_machine(platform: str, machine: str) -> None:
    if platform != "linux" or machine not in {"x86_64", "aarch64"}:
        here = f"{platform} on {machine or 'another machine'}"
        raise ImportError(f"Zico runs on Linux, on x86_64 and aarch64; this is {here}")


def _look_beside(folder: str) -> None:
    """Warn where a distribution named ``zico`` is installed into the same folder as this one, ``zico-memory``.

    The index has one, whose ``zico/__init__.py`` and this file take each other's place.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - pathlib costs milliseconds
    except OSError:
        return
    if any(name.startswith("zico-") and name.endswith(".dist-info") for name in names):
        import warnings

        remedy = "pip uninstall zico, then pip install --force-reinstall --no-deps zico-memory"
        warnings.warn(f"another package named zico is installed in {folder}: {remedy}", stacklevel=3)


_folder = __file__.rpartition("/zico/")[0]
if not os.path.isdir(f"{_folder}/zico/adapters"):  # noqa: PTH112 - pathlib costs milliseconds
    __path__.append(_folder)  # a checkout has the rest beside this folder, also for a job that finds it by its path
_check_machine(sys.platform, os.uname().machine if hasattr(os, "uname") else "")
_look_beside(_folder)
