"""The scripts of docs/trainers.md with the real libraries: what they log is what the broker reports."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import optuna
import pytest
from support.harness import MIB, PATIENCE_S
from support.scripts import alone, zico_run

from zico.integrations.figures import LOGGED, PREFIX

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
TRAINERS = {"lightning": "Lightning", "transformers": "Hugging Face Trainer", "keras": "Keras"}
ITERATIONS = 8
LIMIT = 56 * MIB
"""Of Lightning: below its peak, so that what exceeds it is spilled and the others wait."""
BUDGET = 120 * MIB
SEARCH_BUDGET = 160 * MIB
NEEDED_BYTES = 256 * MIB
"""What a trial of the largest width needs at least: two activations."""


REPORTER = """

class Reporter(__import__("transformers").TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        reported.update(logs)


logged, reported = trainer.state.log_history[-2], {}
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Reporter()])
ZicoCallback.add_to(trainer)
trainer.log({"loss": 0.0})
print((logged, reported))
"""
"""Behind the script of the Hugging Face Trainer: what a reporter gets that was there before the callback."""


def write_script(heading: str, path: Path) -> Path:
    """Write the script under a heading of the page to a file."""
    section = re.split(rf"^## {heading}$", PAGE.read_text(), flags=re.MULTILINE)[1]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    path.write_text(code)
    return path


def last_value(output: str) -> Any:  # noqa: ANN401 - a Python literal
    """Return what a script prints in the end."""
    return ast.literal_eval(output.strip().splitlines()[-1])


def run(directory: Path, scripts: dict[str, Path], *options: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Run scripts by ``zico run``; returns the figures of each job and its output by its name."""
    commands = {name: (path,) for name, path in scripts.items()}
    report, done = zico_run(directory, *options, commands=commands)
    jobs = {job["name"]: job for job in report["jobs"]}
    lines = [line.partition("| ") for line in done.stdout.splitlines()]
    return jobs, {name: "\n".join(text for who, _, text in lines if who.strip() == name) for name in scripts}


@pytest.mark.timeout(3 * PATIENCE_S)
def test_trainers_log_what_the_broker_reports(tmp_path: Path) -> None:
    """Invariant 6: each logs the figures of its job; Lightning's losses are those alone, where nothing is logged."""
    scripts = {name: write_script(heading, tmp_path / f"{name}_script.py") for name, heading in TRAINERS.items()}
    scripts["transformers"].write_text(scripts["transformers"].read_text() + REPORTER)
    options = ("--budget", str(BUDGET), "--limit", f"lightning={LIMIT}")
    jobs, outputs = run(tmp_path, scripts, *options)
    logged = {name: last_value(output) for name, output in outputs.items()}
    logged["transformers"], reported = logged["transformers"]
    assert set(reported) >= {f"{PREFIX}{name}" for name in LOGGED}
    for name, job in jobs.items():
        found = {key.removeprefix(PREFIX): value for key, value in logged[name].items() if key.startswith(PREFIX)}
        assert set(found) == set(LOGGED), name
        assert found["peak_bytes"] == job["peak_bytes"] > 0, name
        assert found["spilled_bytes"] == job["spilled_bytes"], name
        assert found["waited_s"] == pytest.approx(job["waited_s"], rel=1e-6), name
        assert job["iterations"] == ITERATIONS, name
    assert jobs["lightning"]["peak_bytes"] <= LIMIT
    assert logged["lightning"]["zico_spilled_bytes"] > 0
    assert sum(job["waited_s"] for job in jobs.values()) > 0
    with alone(scripts["lightning"], fresh=True) as process:
        done = process.finish()
    assert last_value(done.stdout) == {"loss": logged["lightning"]["loss"]}, done.stderr


@pytest.mark.timeout(2 * PATIENCE_S)
def test_trials_out_of_memory_are_pruned_and_tried_once_more(tmp_path: Path) -> None:
    """Two processes over one storage: the trial that is too large tells what it needs, and its retry does with less."""
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "trials.log"))
    study = optuna.create_study(study_name="widths", storage=optuna.storages.JournalStorage(backend))
    for width in (8192, 512, 512, 1024):
        study.enqueue_trial({"width": width})
    script = write_script("Optuna", tmp_path / "search.py")
    options = ("--budget", str(SEARCH_BUDGET), "--save", "none")
    jobs, _ = run(tmp_path, {"first": script, "second": script}, *options)
    assert all(job["iterations"] for job in jobs.values())
    trials = [trial for trial in study.get_trials() if trial.state.is_finished()]
    assert len(trials) == 6
    large = trials[0]
    assert large.state is optuna.trial.TrialState.PRUNED
    assert NEEDED_BYTES <= large.user_attrs["zico_needed_bytes"] <= 2 * NEEDED_BYTES
    (retry,) = [trial for trial in study.get_trials() if trial.user_attrs.get("zico_retry_of") == 0]
    assert retry.params == large.params
    assert retry.user_attrs["zico_needed_bytes"] == large.user_attrs["zico_needed_bytes"]
    completed = [trial for trial in trials if trial.state is optuna.trial.TrialState.COMPLETE]
    assert retry in completed
    assert len(completed) >= 4
    # Each by itself, although a process trains several of them, the large one first.
    assert all(0 < trial.user_attrs["zico_peak_bytes"] < large.user_attrs["zico_peak_bytes"] / 2 for trial in completed)
    assert all({"zico_waited_s", "zico_moved_bytes"} <= set(trial.user_attrs) for trial in trials)
    waited_s = sum(trial.user_attrs["zico_waited_s"] for trial in trials)
    assert waited_s <= sum(job["waited_s"] for job in jobs.values()) + 1e-6
