"""What decoding JSON that others wrote can raise: the one list for all who read files."""

from __future__ import annotations

import msgspec

WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""It is damaged, of other types, no UTF-8, or nested too deeply. A number of too many digits is the first."""
