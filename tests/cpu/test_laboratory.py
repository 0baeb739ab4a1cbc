"""A Zico without its laboratory: what is asked of it by name is refused in one sentence, and its own work goes on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from zico.base.errors import ConfigError
from zico.base.laboratory import part
from zico.planning.saving.registry import save_planner
from zico.scheduler.policies import POLICIES, PUBLISHED, policy_named

if TYPE_CHECKING:
    from collections.abc import Callable


class Missing:
    """A finder of modules, asked first, for which the laboratory is not there."""

    @staticmethod
    def find_spec(name: str, _path: object, _target: object = None) -> None:
        """Find nothing; raise as Python does where nobody finds it."""
        if name == "zico.lab":
            message = f"No module named {name!r}"
            raise ModuleNotFoundError(message, name=name)


@pytest.fixture
def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of the laboratory be found."""
    for name in [name for name in sys.modules if f"{name}.".startswith("zico.lab.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])


@pytest.mark.usefixtures("_without")
@pytest.mark.parametrize(
    ("ask", "asked"),
    [
        (lambda: policy_named("salus"), "the policy salus"),
        (lambda: save_planner("autotm"), "the planner autotm"),
        (lambda: save_planner("capuchin"), "the planner capuchin"),
        (lambda: part("packing.files", "csv_text", "zico trace show --csv"), "zico trace show --csv"),
    ],
)
def test_what_is_not_installed_is_said_in_one_sentence(ask: Callable[[], object], asked: str) -> None:
    """It names what was asked for, the package, and the remedy."""
    with pytest.raises(ConfigError) as raised:
        ask()
    assert str(raised.value) == f"{asked} is of zico.lab, which is not installed: install all of Zico"


@pytest.mark.usefixtures("_without")
def test_our_policies_need_no_laboratory() -> None:
    """Each policy that is no published system's is there."""
    assert [policy_named(name).name for name in POLICIES if name not in PUBLISHED] == [
        name for name in POLICIES if name not in PUBLISHED
    ]


def test_a_fault_of_the_laboratorys_own_is_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that a part of it lacks is named as such."""
    monkeypatch.delitem(sys.modules, "zico.lab.packing.files", raising=False)
    monkeypatch.setitem(sys.modules, "csv", None)
    with pytest.raises(ModuleNotFoundError, match="csv"):
        part("packing.files", "csv_text", "zico trace show --csv")
