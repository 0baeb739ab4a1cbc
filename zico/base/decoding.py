"""What decoding of what others wrote can raise: the one list for all who read files and frames."""

from __future__ import annotations

import msgspec

WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""It is damaged, of other types, no UTF-8, or nested too deeply. A number of too many digits is the first."""
