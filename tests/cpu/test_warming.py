"""Which programs ``python -m zico.base.warming`` compiles."""

from __future__ import annotations

import pytest

from zico.base import warming


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the list of what is asked for; nothing is compiled."""
    asked: list[str] = []
    monkeypatch.setattr(warming, "compile_all", lambda *names: asked.extend(names))
    return asked


def test_without_a_kind_everything_is_compiled(compiled: list[str]) -> None:
    """Tests and images need all of it."""
    warming.main([])
    assert compiled == list(warming.ALL)


def test_what_the_host_calls_has_nothing_of_cuda(compiled: list[str]) -> None:
    """A demo on the host does not wait for it."""
    warming.main(["host"])
    assert set(compiled) == {*warming.BROKERS, *warming.JOBS}


@pytest.mark.parametrize("words", [["gpu"], ["host", "cuda"], ["--help"]])
def test_another_word_is_refused(compiled: list[str], words: list[str]) -> None:
    """Nothing is compiled that was not asked for."""
    with pytest.raises(SystemExit, match="is no kind of a device: host, cuda"):
        warming.main(words)
    assert compiled == []


def test_what_only_jobs_call_that_save_is_compiled_with_all_else_alone() -> None:
    """A first start does not wait for it; an image, and whoever runs the tests, has it."""
    assert not set(warming.LATER) & {*warming.called("host", paging=True), *warming.called("cuda")}
    assert set(warming.LATER) < set(warming.ALL)
