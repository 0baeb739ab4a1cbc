"""The check of links over a built site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from site_check import dead_links

if TYPE_CHECKING:
    from pathlib import Path


def test_dead_links_are_found(tmp_path: Path) -> None:
    """Files and anchors that are missing are told, by page; links elsewhere are left alone."""
    (tmp_path / "a").mkdir()
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / "index.html").write_text(
        '<a href="a/#there"></a><a href="data.json"></a><a href="https://example.org/x"></a>'
        '<a href="a/#gone"></a><img src="no.png"><a href="mailto:a@example.org"></a>'
    )
    inner = '<h1 id="there"></h1><a href="../nothing.json"></a><a href="#there"></a>'
    (tmp_path / "a" / "index.html").write_text(inner)
    dead = ["a/index.html: ../nothing.json", "index.html: a/#gone", "index.html: no.png"]
    assert sorted(dead_links(tmp_path)) == dead
