"""Enable an adapter as soon as the framework it is for has been imported.

Theory of operation
    ``install`` puts a finder first on ``sys.meta_path``. For the few modules in ``WATCHED`` it asks
    the other finders for the module's spec, and replaces the spec's loader. The new loader first
    puts the real one back, and lets it run the module's code. Then it imports the adapter and calls
    its function. All that happens under the import system's lock for that module, so no other
    thread sees the framework before it is shared.

Guarantees
    * The framework's code sees its real loader, and so does everything that looks at the module
      later.
    * What the import raises, the importer gets, unchanged; the next attempt is watched again.
    * An adapter that fails costs one line on stderr, and the framework works as without Zico.
    * An adapter is enabled once per process, however often its module is imported or reloaded.
    * Nothing is imported here but what every Python has loaded when it starts, and one module of a
      few lines. This runs in each Python process of a job, also in those that never see a
      framework.

Known limitations
    * A namespace package (a folder without ``__init__.py``) and a loader without ``exec_module``
      are not watched.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from zico.base.saying import inform

TYPE_CHECKING = False  # type checkers take it for the one of typing, whose import would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Module -> "adapter module:function without arguments", as entry points are written.
WATCHED: Mapping[str, str] = {
    "torch": "zico.adapters.torch:enable",
    "tensorflow": "zico.adapters.tensorflow:enable",
    "keras": "zico.adapters.keras:enable",
    "deepspeed": "zico.adapters.deepspeed:enable",
    "jax": "zico.adapters.jax:enable",
    "cupy": "zico.adapters.cupy:enable_on_gpu",
    "numba.cuda": "zico.adapters.numba:enable_on_gpu",
    "accelerate.utils.memory": "zico.adapters.batch_finders:enable",
    "lightning.pytorch.tuner.batch_size_scaling": "zico.adapters.batch_finders:enable",
    "pytorch_lightning.tuner.batch_size_scaling": "zico.adapters.batch_finders:enable",
}
_ALLOCATES_NOTHING = frozenset(
    ("keras", *(name for name, adapter in WATCHED.items() if adapter.startswith("zico.adapters.batch_finders")))
)
OF_DESCENDANTS: Mapping[str, str] = {name: WATCHED[name] for name in ("torch", "deepspeed")}
"""What is watched in descendants of a job, which join only where they train."""


importing: list[str] = []
"""The watched modules whose import is under way, the outermost first."""


def framework_of(enabled: str) -> str:
    """Return the framework that a job is one of when the adapter of ``enabled`` joins.

    TensorFlow imports JAX where that is installed, and is the framework then. Keras and finders of
    batch sizes allocate nothing, so the framework is what they import.
    """
    return next((name for name in importing if name not in _ALLOCATES_NOTHING), enabled).partition(".")[0]


class Finder:
    """A meta path finder that finds nothing itself, but wraps the loaders of the watched modules."""

    def __init__(self, watched: Mapping[str, str]) -> None:
        """Watch the given modules, named as in ``WATCHED``."""
        self.watched = dict(watched)
        self._pending = dict(watched)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a watched module's spec with its loader wrapped, None for all other modules."""
        if fullname not in self._pending:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)  # Python 3.11 still tolerates finders without it
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]  # a stand-in for one
                return spec
        return None

    def enable(self, name: str) -> None:
        """Enable the adapter of a module that has been imported; does nothing the second time.

        Changes whatever the adapter's function changes. Never raises for a failing adapter: it says
        so on stderr, and the framework works as without Zico.
        """
        adapter = self._pending.pop(name, None)  # one atomic step, so that only one thread gets it
        if adapter is None:
            return
        module, _, function = adapter.partition(":")
        try:
            getattr(import_module(module), function)()
        except Exception as error:  # noqa: BLE001 - the user's import must go on, whatever is wrong with us
            not_shared(name, error)


class _Loader:
    """A stand-in for a module's loader until the module's code runs."""

    def __init__(self, real: Any, finder: Finder) -> None:  # noqa: ANN401 - loaders have no common base
        self._real = real
        self._finder = finder

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the real one has
        """Delegate everything else: ``get_code``, ``is_package``, ``path``, resource readers..."""
        if name == "_real":  # not there yet while being copied or unpickled: without this, endless recursion
            raise AttributeError(name)
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as the real loader does."""
        create = getattr(self._real, "create_module", None)
        module: ModuleType | None = None if create is None else create(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the snapshot, run the module's code, then enable its adapter."""
        name = module.__name__
        for owner, attribute in ((module.__spec__, "loader"), (module, "__loader__")):
            if getattr(owner, attribute, None) is self:
                setattr(owner, attribute, self._real)
        importing.append(name)
        try:
            self._real.exec_module(module)
        finally:
            importing.remove(name)
        self._finder.enable(name)


def activate() -> None:
    """Watch for frameworks if this process is a job's; does nothing where something does so already.

    Python calls this when it starts, by ``zico.pth`` of the installed package and by the
    ``sitecustomize`` of ``zico run``: either may be out of its reach.
    """
    if not os.environ.get("ZICO_SOCKET") or any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    is_descendant = os.environ.get("ZICO_OWNER_PID") not in (None, "", str(os.getpid()))
    install(OF_DESCENDANTS if is_descendant else WATCHED)


def install(watched: Mapping[str, str] = WATCHED) -> Finder:
    """Watch imports, and enable at once the adapters of modules that are already imported.

    Changes ``sys.meta_path``. Modules that an earlier call watches are left to that one, so that no
    adapter is enabled twice.

    Args:
        watched: Module -> ``"adapter module:function"``.

    Returns:
        What was put on ``sys.meta_path``; removing it there ends the watch.
    """
    known = {name for finder in sys.meta_path if isinstance(finder, Finder) for name in finder.watched}
    finder = Finder({name: adapter for name, adapter in watched.items() if name not in known})
    sys.meta_path.insert(0, finder)
    for name in finder.watched:
        if sys.modules.get(name) is not None:  # None there means: must not be imported
            finder.enable(name)
    return finder


def not_shared(framework: str, error: BaseException) -> None:
    """Say at the terminal, and to the broker for the run's report, that a framework's memory is not shared, and why."""
    complain(f"{framework} is not shared", error)
    try:
        from zico.job.telling import tell

        tell(framework, reason_of(error))
    except Exception:  # noqa: BLE001, S110 - whatever is wrong with us, the line above has told the person
        pass


def reason_of(error: BaseException) -> str:
    """Return what an error says, as one line; of a package that this environment lacks also what to do."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        return f"{reason}: {sys.prefix}/bin/python -m pip install zico-memory"
    return reason


def complain(what: str, error: BaseException) -> None:
    """Write one line to stderr, for the one reader there is at this point: the person at the terminal."""
    inform(f"{what}: {reason_of(error)}")
