"""Recording PyTorch's operations costs its share of the time, and leaves modes of the program's own alone."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch_ops = pytest.importorskip("zico.adapters.torch_ops")

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


class Mode(TorchDispatchMode):  # type: ignore[misc] # torch has no types
    """A mode that is entered and left, and does nothing."""


class Program:
    """Iterations of a made-up length on a made-up clock."""

    def __init__(self, patch: pytest.MonkeyPatch, dearer: float) -> None:
        """Let an iteration that is recorded take so many times as long as another."""
        self.now_s = 0.0
        self.dearer = dearer
        patch.setattr(torch_ops.time, "perf_counter", lambda: self.now_s)
        self.mode = Mode()
        self.sampling = torch_ops.Sampling(self.mode)
        self.recorded: list[bool] = []

    def run(self, iterations: int) -> None:
        """Run so many iterations."""
        for _ in range(iterations):
            self.recorded.append(_get_current_dispatch_mode() is self.mode)
            self.now_s += self.dearer if self.recorded[-1] else 1.0
            self.sampling.at_boundary()


@pytest.fixture(autouse=True)
def no_modes_are_left() -> Iterator[None]:
    """Take what a test has entered off the stack again."""
    yield
    while (mode := _get_current_dispatch_mode()) is not None:
        mode.__exit__(None, None, None)


@given(dearer=st.floats(1, 4))
def test_recording_costs_its_share(dearer: float) -> None:
    """In the long run at most ``COST`` more, beside the first iterations and one turn whose price is not known yet."""
    with pytest.MonkeyPatch.context() as patch:
        program = Program(patch, dearer)
        program.run(1000)
        if program.sampling.is_on:
            program.mode.__exit__(None, None, None)
    more = program.now_s - len(program.recorded)
    unknown = (torch_ops.FIRST + torch_ops.TOGETHER) * (dearer - 1)
    assert more <= torch_ops.COST * len(program.recorded) + unknown
    runs = [len(list(run)) for is_on, run in itertools.groupby(program.recorded) if is_on]
    assert runs[0] == torch_ops.FIRST
    assert set(runs[1:-1]) == {torch_ops.TOGETHER}


def test_a_mode_of_the_programs_own_stays_where_it_is() -> None:
    """While one is entered on top of ours, or after ours has been left, neither is touched; then turns go on."""
    with pytest.MonkeyPatch.context() as patch:
        program = Program(patch, 1.2)
        with Mode() as own:
            program.run(3 * torch_ops.FEWEST)
            assert _get_current_dispatch_mode() is own
        assert _get_current_dispatch_mode() is program.mode
        program.run(1)
        with Mode() as own:
            program.run(3 * torch_ops.FEWEST)
            assert _get_current_dispatch_mode() is own
        assert _get_current_dispatch_mode() is None
        program.run(2)
        assert _get_current_dispatch_mode() is program.mode
