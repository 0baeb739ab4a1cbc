"""``zico plan SCRIPT:function``: what functions of PyTorch and JAX keep between their passes."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest

from zico.cli import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor and JAX import warns
PATIENCE_S = 300
LAYERS, ROWS, WIDTH = 4, 64, 16
KEPT_BYTES = ROWS * WIDTH * 4
"""The result of one layer."""
TORCH = f"""
import torch
from torch import nn

def build():
    layers = [nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.Tanh()) for _ in range({LAYERS})]
    return nn.Sequential(*layers), (torch.randn({ROWS}, {WIDTH}),)

def step():
    return None

def frozen():
    return nn.Linear(1, 1).requires_grad_(False), (torch.randn(1, 1),)
"""
JAX = f"""
import jax
import jax.numpy as jnp

def loss(layers, x):
    for layer in layers:
        x = jnp.tanh(x @ layer)
    return x.mean()

def build():
    layers = [jax.ShapeDtypeStruct(({WIDTH}, {WIDTH}), jnp.float32)] * {LAYERS}
    return loss, (layers, jax.ShapeDtypeStruct(({ROWS}, {WIDTH}), jnp.float32))

def vector():
    return jnp.tanh, (jax.ShapeDtypeStruct((2,), jnp.float32),)
"""


def planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *options: str, function: str = "build"
) -> tuple[int, Any]:
    """Return the exit code, and what is said of a function of a script: JSON, or why not."""
    script = tmp_path / "script.py"
    script.write_text(text)
    code = main(["plan", f"{script}:{function}", *options, "--json", "-"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


@pytest.mark.timeout(PATIENCE_S)
def test_a_compiled_function_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone it keeps each layer's result; for half of that it computes some of its products again."""
    code, report = planned(tmp_path, capsys, TORCH, "--save", "checkmate", "--limit", "50%")
    alone, own, planner = report["rows"]
    assert (code, report["framework"]) == (0, "torch")
    assert [alone["name"], own["name"], planner["name"]] == ["torch.compile", "dp (PyTorch)", "checkmate"]
    assert alone["saved_bytes"] == LAYERS * KEPT_BYTES
    assert 0 < planner["saved_bytes"] <= report["limit_bytes"] == LAYERS * KEPT_BYTES // 2
    product = 2 * ROWS * WIDTH * WIDTH
    assert alone["again_flops"] < product <= planner["again_flops"] < LAYERS * product


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_policies_of_jax_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is saved depends on the policy; without anything saved, each product is computed again."""
    code, report = planned(tmp_path, capsys, JAX, "--limit", "1%")
    rows = {row["name"]: row for row in report["rows"]}
    assert (code, report["framework"]) == (0, "jax")
    assert rows["(as it is)"]["saved_bytes"] >= LAYERS * KEPT_BYTES
    assert rows["dots_saveable"]["saved_bytes"] == LAYERS * KEPT_BYTES
    assert rows["nothing_saveable"]["saved_bytes"] == 0
    product = 2 * ROWS * WIDTH * WIDTH
    assert rows["dots_saveable"]["again_flops"] < product
    assert LAYERS * product <= rows["nothing_saveable"]["again_flops"] < (LAYERS + 1) * product
    code, said = planned(tmp_path, capsys, JAX, function="vector")
    assert code == 3
    assert "return one that returns its loss" in said
    code, said = planned(tmp_path, capsys, JAX, "--save", "zico", "--limit", "50%")
    assert code == 3
    assert "policies of jax.checkpoint are the script's" in said


@pytest.mark.parametrize(
    ("options", "function", "said"),
    [
        (("--save", "swdoa", "--limit", "50%"), "build", "--save swdoa cannot plan compiled graphs"),
        (("--save", "chen"), "build", "give --save NAME and --limit SIZE"),
        (("--save", "chen", "--limit", "50%", "--bandwidth", "1GiB"), "build", "--bandwidth needs a trace"),
        ((), "step", "return a function and a tuple of its arguments"),
        ((), "missing", "has no function 'missing'"),
        ((), "frozen", "no graph of the function has a backward pass"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], function: str, said: str
) -> None:
    """Each in one sentence, before anything is planned."""
    code, found = planned(tmp_path, capsys, TORCH, *options, function=function)
    assert code == 3
    assert said in found
