"""The Python processes that Zico starts for itself: how they are started, and how they begin.

How it works
    Such a process runs the ``zico`` of the process that starts it, and no other. Python alone would
    look for a package of that name in the current directory, in ``PYTHONPATH`` and in the user's
    site packages. So the process starts isolated (``-I``) and without ``site`` (``-S``). It runs this
    file, by its path, and gets the places of ``zico`` and of packages as its last argument. Its
    path for modules is the standard library, then what the path of its starter has beside that,
    then its own site packages. This file then runs the module or the code that Python would have run.

Guarantees
    * Nothing of the current directory is imported, and no ``sitecustomize`` of ``PYTHONPATH``.
    * No module of the user's replaces one of the standard library, or one of Zico's.
    * The process finds NumPy, Numba and the like where its starter finds them. That holds for a
      wheel, for an editable install, for a path in ``PYTHONPATH``, and in virtual environments.

What needs the standard library only is started by ``bare``.

Known limitations
    * Environment variables of Python's, such as ``PYTHONWARNINGS`` and ``PYTHONHOME``, have no effect in it.

This file imports nothing but the standard library where it begins a process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

_NAME = "zico"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Libraries would start a thread for each processor, and nothing here multiplies matrices."""


def bare(*words: str) -> list[str]:
    """Return the command that runs a file, or code behind ``-c``, with the standard library and nothing else."""
    flags = ("-I", "-S", "-B") if sys.dont_write_bytecode else ("-I", "-S")
    return [sys.executable or "", *flags, *words]


def command(*words: str) -> list[str]:
    """Return the command of a process with the ``zico`` of this one; as it stands, without further words.

    Args:
        words: What would follow ``python``: ``-m`` and a module, or ``-c`` and code, and arguments.
    """
    # The places come last: who lists processes sees first what they do.
    here = Path(__file__).absolute()
    return bare(str(here), *words, json.dumps({"package": str(here.parents[1]), "path": _path()}))


def _path() -> list[str]:
    """Return where this process looks for modules, without the current directory and the folder of its script.

    Python puts one of them first. What lies there is the user's own.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    own = {os.path.realpath(place) for place in (os.curdir, os.path.dirname(script or ""))}  # noqa: PTH120
    entries = (entry for entry in sys.path if isinstance(entry, str) and Path(entry).is_absolute())
    return [entry for entry in entries if os.path.realpath(entry) not in own]


def at_limit(error: BaseException) -> str:
    """Return the sentence for an error that says that no process or thread can be started; empty for all others."""
    no_process = isinstance(error, BlockingIOError) and not hasattr(error, "characters_written")
    no_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if not (no_process or no_thread):
        return ""
    return (
        "no further process or thread can be started here: a limit is reached, the user's (ulimit -u) or that of the "
        "container or control group (pids.max): end other processes, or raise it"
    )


# -- in the process that was started ---------------------------------------------------------------


def main() -> None:
    """Prepare this process, and run what it was started for."""
    _, how, what, *arguments, places = sys.argv
    os.environ.update(_ONE_THREAD)
    found = json.loads(places)
    _set_path(found["path"])
    _set_package(found["package"])
    sys.argv = [how, *arguments]
    if how == "-m":
        import runpy

        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as ``python -c`` does


def _set_path(path: list[str]) -> None:
    """Look in the standard library, then where the starter looks, then in this interpreter's own site packages."""
    import site

    library = list(sys.path)
    site.main()
    # ``zico.pth`` takes a process with a job's environment for a job's. This one watches no
    # imports.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__.partition(".")[0] != _NAME]
    sys.path[:] = dict.fromkeys([*library, *path, *sys.path])


def _set_package(folder: str) -> None:
    """Let ``zico`` be the package in a folder."""
    file = f"{folder}/__init__.py"
    # Something in this interpreter's site packages may have imported it, or another one.
    loaded = sys.modules.get(_NAME)
    if loaded is not None and loaded.__file__ == file:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(_NAME, file, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(file)
    sys.modules[_NAME] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
