"""What Zico says inside a user's process: one line on stderr, whatever has become of that."""

import sys


def inform(line: str) -> None:
    """Write one line to stderr, if that can be; never raises.

    Not logging: the user's program has not configured it yet, and Zico must not do it for them.
    """
    import contextlib  # only where something is said: this module is loaded by each Python process of a job

    with contextlib.suppress(Exception):  # there is none, nobody reads it, or it is an object of the user's
        sys.stderr.write(f"zico: {line}\n")
