"""Who enlarges a batch until memory ends comes to an end on the host, too."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from cpu.support.zico_process import ZicoRun
from support.harness import compile_once

if TYPE_CHECKING:
    from pathlib import Path

BUDGET = "64MiB"
ACCELERATE = """
import torch
from accelerate.utils import find_executable_batch_size

@find_executable_batch_size(starting_batch_size=1024)
def train(batch_size):
    tried.append(batch_size)
    sum(torch.ones(batch_size, 1 << 16) for _ in range(2))  # three of them at once
    return print

tried = []
assert train() is print  # what the user's function returns is left alone, also if it can be called
print("tried", tried[0], tried[-1])
"""
TRAINER = """
import torch, transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1 << 14)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).mean()}

tried = []
class Note(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        tried.append(state.train_batch_size)

data = [{"x": torch.ones(1), "labels": 0}] * 4096
arguments = transformers.TrainingArguments(
    "trained", per_device_train_batch_size=2048, auto_find_batch_size=True, max_steps=1, report_to=[],
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)
transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[Note()]).train()
print("tried", tried[0], tried[-1])
"""
LIGHTNING = """
import lightning, torch
from lightning.pytorch.callbacks import BatchSizeFinder

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.batch_size = torch.nn.Linear(1, 1 << 14), 64
    def training_step(self, batch):
        return self.layer(batch[0]).mean()
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(1 << 16, 1)), self.batch_size)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

model = Model()
lightning.Trainer(
    max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    callbacks=[BatchSizeFinder(init_val=64, steps_per_trial=1, max_trials=12)],
).fit(model)
print("tried", 64, model.batch_size)
"""


@pytest.mark.parametrize(
    ("source", "least", "most"),
    [
        pytest.param(ACCELERATE, 30, 86, id="accelerate"),
        pytest.param(TRAINER, 128, 1023, id="transformers"),
        pytest.param(LIGHTNING, 128, 1023, id="lightning"),
    ],
)
def test_a_finder_finds_what_fits(tmp_path: Path, source: str, least: int, most: int) -> None:
    """The size that it ends with has its tensors inside the budget: nothing lies in the next tier."""
    compile_once()
    script = tmp_path / "find.py"
    script.write_text(source)
    report = tmp_path / "report.json"
    with ZicoRun("--json", str(report), "--budget", BUDGET, f"{sys.executable} {script}") as run:
        assert run.finish() == 0, run.stderr
    (job,) = json.loads(report.read_text())["jobs"]
    found = int(run.stdout.partition("tried ")[2].split()[1])
    assert least <= found <= most, run.stdout + run.stderr
    assert job["spilled_bytes"] == 0
