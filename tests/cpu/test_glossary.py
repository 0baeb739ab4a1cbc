"""The glossary's old words stand nowhere, and a word has one meaning (docs/design/README.md)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from cpu.support.source_texts import ROOT, texts

if TYPE_CHECKING:
    from collections.abc import Iterator

GLOSSARY = "docs/design/README.md"
OLD = {
    "relief": r"relie(?:f|ve[sd]?|ving)",
    "lend": r"lend(?:s|ing)?",
    "guest": r"guests?",
    "resting": r"resting",
    "torus": r"torus",
    "savings": r"savings",
    "less": r"less_(?:limit|ns|in_regions)",
}
"""Old word -> what it looks like, in any letters, as a word or as a part of a name."""
OLD_IN: dict[str, tuple[tuple[str, ...], str]] = {
    "cells": (("zico/heap/",), r"cells?"),
    "way": (("zico/broker/", "zico/pool/", "zico/swap/", "lab/"), r"class \w*Ways?"),
}
"""Words with another meaning elsewhere -> the folders where they are old words, and what they look like."""


def found_in(text: str, form: str) -> list[str]:
    """Return the lines of a text in which a form stands as a word, or as a word of a name."""
    pattern = re.compile(rf"(?<![A-Za-z])(?i:{form})(?![a-z])")
    if not pattern.search(text):
        return []
    return [line.strip() for line in text.splitlines() if pattern.search(line)]


def read() -> Iterator[tuple[str, str]]:
    """Yield all texts but this one and the table of old words."""
    for name, text in texts():
        if name != "tests/cpu/test_glossary.py":
            yield name, text.partition("\n### Old words\n")[0] if name == GLOSSARY else text


@pytest.mark.parametrize("word", OLD)
def test_an_old_word_stands_nowhere(word: str) -> None:
    """No code, test or page has it, but for records and the glossary's table."""
    assert [f"{name}: {line}" for name, text in read() for line in found_in(text, OLD[word])] == []


@pytest.mark.parametrize("word", OLD_IN)
def test_a_word_has_one_meaning(word: str) -> None:
    """Where it would mean something else, it does not stand."""
    folders, form = OLD_IN[word]
    some = [(name, text) for name, text in read() if name.startswith(folders)]
    assert [f"{name}: {line}" for name, text in some for line in found_in(text, form)] == []


def test_an_old_word_is_found() -> None:
    """The check sees a word in prose and in names, and not inside another word."""
    lines = ["It asks for relief.", "def relieve(self):", "has_relief = 1", "RELIEF_S = 1"]
    assert found_in("\n".join([*lines, "a belief in reliefless calendars"]), OLD["relief"]) == lines
    assert found_in("a calendar\nit lends\nblender\nlend_to", OLD["lend"]) == ["it lends", "lend_to"]
    found = ["was Resting", "RESTING", "class RestingState:"]
    assert found_in("\n".join(["interesting", *found]), OLD["resting"]) == found


def test_the_glossary_says_what_to_write_instead() -> None:
    """Each old word has its row."""
    table = (ROOT / GLOSSARY).read_text().partition("\n### Old words\n")[2]
    rows = [row.partition("|")[2].partition("|")[0] for row in table.splitlines() if row.startswith("|")]
    assert [word for word in (*OLD, *OLD_IN) if not any(word.lower() in row for row in rows)] == []
