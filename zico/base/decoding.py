"""Structs: what decoding those of others can raise, what one takes over from another, and how people read them."""

from __future__ import annotations

from typing import Any

import msgspec

WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""It is damaged, of other types, no UTF-8, or nested too deeply. A number of too many digits is the first."""


def fields_for(kind: type[msgspec.Struct], source: object) -> dict[str, Any]:
    """Return the fields of a struct of ``kind`` that ``source`` has, too."""
    return {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}


def to_json(found: object) -> bytes:
    """Return a struct, or what has structs in it, as indented JSON with a line end."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
