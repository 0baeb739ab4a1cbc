"""How tiers are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from zico.base.errors import ConfigError
from zico.base.units import GIB, MIB
from zico.tiers.destinations import TierWish, parse_tiers, spill_directory


def test_kinds_and_sizes_in_order(tmp_path: Path) -> None:
    """Each part is a kind with a size, in the order in which they are asked."""
    wishes = parse_tiers(" Memory:512MiB , file: 1.5MiB", str(tmp_path))
    assert wishes == (TierWish("memory", 512 * MIB), TierWish("file", 3 * MIB // 2))


def test_without_a_size_there_is_a_share_of_what_is_free(tmp_path: Path) -> None:
    """Memory is at most half of the machine's, a file at most what its disk has; percentages are of the whole."""
    memory, file = parse_tiers("memory,file", str(tmp_path))
    half, all_of_it = parse_tiers("memory:50%,file:100%", str(tmp_path))
    assert 0 < memory.size_bytes <= half.size_bytes
    assert 0 < file.size_bytes <= all_of_it.size_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a tier: give up to 4 of memory, file"),
        ("tape:1GiB", "'tape:1GiB' is not a tier"),
        ("memory:1GiB,", "'' is not a tier"),
        ("memory:much", "tier 'memory:much': 'much' is not a size"),
        ("file:", "tier 'file:': '' is not a size"),
        ("memory:0", "more than zero"),
        ("memory:900TiB", "more than"),
        ("file:1MiB,file:2MiB", "names a tier twice"),
    ],
)
def test_what_cannot_be_is_said(text: str, said: str, tmp_path: Path) -> None:
    """A wrong wish is refused with what is wrong in it."""
    with pytest.raises(ConfigError) as refused:
        parse_tiers(text, str(tmp_path))
    assert said in str(refused.value)


def test_files_are_where_somebody_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument wins over ``ZICO_SPILL_DIR``, that over the place for large temporary files."""
    monkeypatch.setenv("ZICO_SPILL_DIR", str(tmp_path))
    assert spill_directory("/elsewhere") == "/elsewhere"
    assert spill_directory() == str(tmp_path)
    monkeypatch.delenv("ZICO_SPILL_DIR")
    assert Path(spill_directory()).is_dir()


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Asking for a file where none can be names the directory and what to set."""
    with pytest.raises(ConfigError, match=r"no file can be in '.*gone'.*Set ZICO_SPILL_DIR"):
        parse_tiers(f"file:{GIB}", str(tmp_path / "gone"))
