"""Cut a job's output into lines: bytes in, whole lines out, with nothing decoded and so nothing damaged.

A progress bar redraws one line by carriage returns; of such redraws the latest is let through about once a second,
as a line of its own. Text without an end of line is let through when nothing has followed it for a while.
"""

from __future__ import annotations

import re

REDRAW_S = 1.0
"""A line that is being redrawn is passed on at most this often."""
RETURN_S = 0.1
"""A carriage return at the end of what was read may be half of a line's end for this long."""
PARTIAL_S = 2.0
"""A line without an end is passed on after this long."""
MAX_LINE_BYTES = 64 * 1024
"""A longer line is cut, so that no job can fill our memory."""

_END = re.compile(rb"\r\n|\n|\r")
# Cursor movements and erasures (ECMA-48 CSI with these final bytes) would draw over other jobs' lines. Colours stay.
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]")


class LineSplitter:
    """Turn chunks of one stream into lines without their ends. Keeps no clock: times in seconds are given."""

    def __init__(self) -> None:
        """Begin with nothing held back."""
        self._partial = b""
        self._partial_since_s = 0.0
        self._redrawn: bytes | None = None
        self._passed_s = float("-inf")

    def feed(self, chunk: bytes, now_s: float) -> list[bytes]:
        """Return the lines that ``chunk`` completes."""
        if not self._partial:
            self._partial_since_s = now_s
        text = self._partial + chunk
        # A carriage return at the very end may be the first half of "\r\n": keep it until more is known.
        held_return = text.endswith(b"\r")
        lines = self._cut(text[:-1] if held_return else text, now_s)
        if held_return:
            self._partial += b"\r"
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._take_partial())
        return lines

    def expire(self, now_s: float) -> list[bytes]:
        """Return what has been held back for long enough."""
        lines = []
        if self._partial.endswith(b"\r") and now_s - self._partial_since_s >= RETURN_S:
            self._redrawn = self._take_partial()
        if self._redrawn is not None and now_s - self._passed_s >= REDRAW_S:
            lines.append(self._take_redrawn(now_s))
        if self._partial and now_s - self._partial_since_s >= PARTIAL_S:
            lines.append(self._take_partial())
        return lines

    def finish(self) -> list[bytes]:
        """Return all that is still held back: the stream has ended."""
        rest = [line for line in (self._redrawn, self._take_partial()) if line]
        self._redrawn = None
        return rest

    def _cut(self, text: bytes, now_s: float) -> list[bytes]:
        """Return the complete lines of ``text`` and keep the rest."""
        lines, start = [], 0
        for end in _END.finditer(text):
            line = _CURSOR.sub(b"", text[start : end.start()])
            start = end.end()
            if end[0] != b"\r":
                # An empty end of a redrawn line: what stands there is its last state.
                lines.append(line or self._redrawn or b"")
                self._redrawn = None
            elif line:
                self._redrawn = line
                if now_s - self._passed_s >= REDRAW_S:
                    lines.append(self._take_redrawn(now_s))
        if start:
            self._partial_since_s = now_s
        self._partial = text[start:]
        return lines

    def _take_partial(self) -> bytes:
        partial, self._partial = self._partial, b""
        return _CURSOR.sub(b"", partial.rstrip(b"\r"))

    def _take_redrawn(self, now_s: float) -> bytes:
        line, self._redrawn, self._passed_s = self._redrawn or b"", None, now_s
        return line
