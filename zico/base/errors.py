"""The error tree: every exception that Zico raises on purpose derives from ``ZicoError``.

Data sits in attributes, so that a caller never has to parse a message, and every error survives
``pickle`` (they cross process borders).
"""

from __future__ import annotations


class ZicoError(Exception):
    """Base of all errors that Zico raises on purpose."""


class ConfigError(ZicoError):
    """Reject a setting: the message names the value, what is accepted and where it came from."""


class HookError(ZicoError):
    """Report that a framework's allocator could not be redirected; nothing has been changed."""


class ProblemError(ZicoError):
    """Reject a problem that no planner could work on: the message names the tensor, its value and the remedy."""


class TraceError(ZicoError):
    """Reject a trace: the message names the file, the line or byte, what is wrong there and the remedy."""

    def __init__(self, path: str, line: int, what: str) -> None:
        """Keep where it is and what it is; line 0 means the file as a whole."""
        super().__init__(path, line, what)
        self.path = path
        self.line = line
        self.what = what

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}" if self.line else f"{self.path}: {self.what}"


class OutOfMemory(ZicoError):  # noqa: N818 - the field's name for it (torch.OutOfMemoryError)
    """Report that a request can never be met inside the budget, or the job's own limit."""

    def __init__(self, requested_bytes: int, held_bytes: int, budget_bytes: int, limit_bytes: int = 0) -> None:
        """Keep the quantities that decide, in bytes; ``limit_bytes`` is the job's own where more is refused, else 0."""
        super().__init__(requested_bytes, held_bytes, budget_bytes, limit_bytes)
        self.requested_bytes = requested_bytes
        self.held_bytes = held_bytes
        self.budget_bytes = budget_bytes
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        """Name the request, what is held, the budget or limit, and what to do."""
        from zico.base.units import format_bytes

        needs = f"needs {format_bytes(self.requested_bytes)} more while holding {format_bytes(self.held_bytes)}, "
        budget, both_bytes = format_bytes(self.budget_bytes), self.requested_bytes + self.held_bytes
        at_least = f"to at least {format_bytes(both_bytes)}, use a smaller batch, or try --save auto"
        if both_bytes > self.budget_bytes:
            return f"{needs}and the whole budget is {budget}: raise --budget {at_least}"
        if 0 < self.limit_bytes < both_bytes:
            return f"{needs}and its limit is {format_bytes(self.limit_bytes)}: raise --limit {at_least}"
        return (
            f"{needs}its limit or other jobs keep it from the rest of the budget of {budget}, and the next tier has no "
            "room: raise --limit or --budget or, on the host, free space on the disk of ZICO_SPILL_DIR"
        )


class DriverError(ZicoError):
    """Report a failed driver operation; what the failed scope had done is undone."""

    def __init__(self, operation: str, status: int, detail: str = "") -> None:
        """Keep the operation's name and the status (``errno`` on the host device)."""
        super().__init__(operation, status, detail)
        self.operation = operation
        self.status = status
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.operation} failed with status {self.status}" + (f": {self.detail}" if self.detail else "")


class SwapError(ZicoError):
    """A tensor's contents cannot be brought back to the pool."""


class LocalProtocolError(ZicoError):
    """Report that this side tried something that the protocol does not allow."""


class RemoteProtocolError(ZicoError):
    """Report that the peer broke the protocol; the connection cannot go on."""


class BrokerError(ZicoError):
    """Report that the broker refused, went away or did not answer within its deadline."""


class CommandError(ZicoError):
    """End a command with a message and an exit code."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        """Keep the message for stderr and the process's exit code."""
        super().__init__(message, exit_code)
        self.message = message
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.message


def sentence_of(error: OSError) -> str:
    """Return an error of the operating system as one line says it: which file, and what is wrong with it."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"
