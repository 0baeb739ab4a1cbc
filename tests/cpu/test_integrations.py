"""Figures for trainers without processes; the pool's side and real trainings are in tests/framework."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from zico.base.errors import ConfigError
from zico.integrations import figures as of_figures
from zico.integrations import first_of
from zico.integrations import optuna as integration
from zico.integrations.figures import LOGGED, Figures, Part, figures
from zico.job import session

if TYPE_CHECKING:
    from pathlib import Path

NONE = dict.fromkeys(("peak_bytes", *of_figures.COUNTED, "refusals", "needed_bytes"), 0)


class Told:
    """A stand-in for ``Part`` in a pool: the figures are those given."""

    def __init__(self, **given: int) -> None:
        """Tell zeros but for what is given."""
        self._given: dict[str, Any] = NONE | given

    def __call__(self) -> Told:
        """Begin a part."""
        return self

    def so_far(self) -> Figures:
        """Return the figures."""
        return Figures(**self._given)


def study_of(objective: Any, n_trials: int = 1) -> optuna.Study:  # noqa: ANN401 - what ``measured`` returns
    """Optimize in this process."""
    study = optuna.create_study()
    study.optimize(objective, n_trials=n_trials)
    return study


def test_there_are_no_figures_outside_a_pool() -> None:
    """Neither of the process nor of a part, and an objective runs as it is, without attributes."""
    assert figures() is None
    assert Part().so_far() is None
    (trial,) = study_of(integration.measured(lambda trial: trial.suggest_float("x", 1, 1))).trials
    assert (trial.value, trial.user_attrs) == (1, {})


def test_figures_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the one that ``zico.status`` calls so, and those for loggers have a prefix."""
    told = {name: number for number, name in enumerate(NONE, start=1)} | {"device": "host"}
    monkeypatch.setattr(session, "status", lambda: told)
    monkeypatch.setattr(session, "current_here", object)
    found = figures()
    assert found is not None
    assert {name: getattr(found, name) for name in NONE} == {name: told[name] for name in NONE}
    assert found.named() == {f"zico_{name}": told[name] for name in LOGGED}


def test_a_child_forked_from_a_job_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even though it has its parent's session."""
    monkeypatch.setattr(session, "status", lambda: NONE)
    monkeypatch.setattr(session, "current_here", lambda: None)
    assert figures() is None


def test_a_missing_library_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install; what is missing within a library that is there goes through."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "half_a_library.py").write_text("import nowhere_at_all")
    with pytest.raises(
        ImportError, match=r"needs Nowhere, which is not installed: pip install 'zico-memory\[nowhere\]'"
    ):
        first_of(("nowhere.at_all", "nowhere_else"), "Nowhere", "zico-memory[nowhere]")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        first_of(("half_a_library", "json"), "Half", "zico-memory[half]")
    assert first_of(("nowhere.at_all", "json"), "Nowhere", "zico-memory[nowhere]") is sys.modules["json"]


def test_trials_tell_their_figures_however_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completed, failed and pruned by the objective itself; an error that is none of memory goes through."""
    monkeypatch.setattr(integration, "Part", Told(peak_bytes=7, moved_out_bytes=2, moved_in_bytes=3, refusals=1))

    @integration.measured
    def objective(trial: optuna.Trial) -> float:
        if trial.number == 1:
            raise optuna.TrialPruned
        if trial.number == 2:
            raise ValueError("a wrong shape")
        return 0.0

    study = optuna.create_study()
    study.optimize(objective, n_trials=3, catch=ValueError)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "FAIL"]
    assert all(
        trial.user_attrs == {"zico_peak_bytes": 7, "zico_waited_s": 0, "zico_moved_bytes": 5} for trial in study.trials
    )


@pytest.mark.parametrize(("refusals", "state"), [(1, "PRUNED"), (0, "FAIL")])
def test_only_what_the_budget_refused_is_pruned(monkeypatch: pytest.MonkeyPatch, refusals: int, state: str) -> None:
    """Out of memory for another reason is an error as without Zico."""
    monkeypatch.setattr(integration, "Part", Told(refusals=refusals, needed_bytes=9))

    @integration.measured
    def objective(trial: optuna.Trial) -> float:
        raise MemoryError(trial.number)

    study = optuna.create_study()
    study.optimize(objective, n_trials=1, catch=MemoryError)
    assert [trial.state.name for trial in study.trials] == [state]
    assert study.trials[0].user_attrs.get("zico_needed_bytes") == (9 if refusals else None)


def test_a_trial_is_tried_once_more_and_no_oftener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry has the same parameters and knows what was needed; when it fails, too, nothing is enqueued."""
    monkeypatch.setattr(integration, "Part", Told(refusals=1, needed_bytes=9))

    @integration.measured(out_of_memory="enqueue")
    def objective(trial: optuna.Trial) -> float:
        raise MemoryError(trial.suggest_int("width", 1, 1 << 30))

    trials = study_of(objective, n_trials=3).trials
    assert len(trials) == 4  # the third is another one, whose retry waits
    assert [trial.user_attrs.get("zico_retry_of") for trial in trials] == [None, 0, None, 2]
    assert trials[0].params == trials[1].params != trials[2].params
    assert trials[1].user_attrs["zico_needed_bytes"] == trials[3].user_attrs["zico_needed_bytes"] == 9


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), True),
        (type("ResourceExhaustedError", (Exception,), {})("when allocating"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: allocating 9 bytes"), True),
        (ValueError("no room in the zoom"), False),
    ],
)
def test_out_of_memory_is_known_by_type_or_text(error: Exception, *, is_one: bool) -> None:
    """Of PyTorch, TensorFlow, JAX and Python; also where another error was raised from it."""
    outer = KeyError("wrapped")
    outer.__cause__ = error
    assert integration.is_out_of_memory(error) is integration.is_out_of_memory(outer) is is_one


def test_another_way_than_the_two_is_refused() -> None:
    """One sentence says which there are."""
    with pytest.raises(ConfigError, match="out_of_memory is 'again': choose 'prune' or 'enqueue'"):
        integration.measured(out_of_memory="again")  # type: ignore[arg-type]


def import_with(monkeypatch: pytest.MonkeyPatch, ray: ModuleType | None) -> ModuleType:
    """Import the integration of Ray as where Ray is this module, or is missing."""
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delitem(sys.modules, "zico.integrations.ray", raising=False)
    return importlib.import_module("zico.integrations.ray")


def test_ray_that_is_missing_or_not_tested_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Ray the import says what to install; another version is used, and a line says which one was tested."""
    with pytest.raises(ImportError, match=r"needs Ray, which is not installed: pip install 'zico-memory\[ray\]'"):
        import_with(monkeypatch, None)
    stand_in: Any = ModuleType("ray")
    stand_in.__version__ = "2.600.1"
    tested = import_with(monkeypatch, stand_in).TESTED_VERSION
    assert f"zico: Ray 2.600.1 is not what this was tested with ({tested}): if it does" in capsys.readouterr().err
    stand_in.__version__ = f"{tested}.9"
    import_with(monkeypatch, stand_in)
    assert capsys.readouterr().err == ""
