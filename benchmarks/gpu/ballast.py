"""A process that holds so much of a GPU's memory that others find just what they may have.

``Ballast`` starts one and talks to it by lines: ``leave N`` holds what is free but N bytes, and
``release`` gives everything back. It holds no context before the first line. Its memory is that of
plain allocations, whole granules of the driver; it runs no kernel, and so takes no slice of time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import driver_facts

from zico.base.errors import DriverError
from zico.base.units import GIB, MIB
from zico.broker.outside import use_of
from zico.device.cuda import CudaDriver
from zico.device.cuda.facts import device_uuids

if TYPE_CHECKING:
    from typing import IO, Self

    from zico.broker.outside import DeviceUse

ANSWER_S = 20.0
"""For one line."""
PIECES = (GIB, 64 * MIB, 2 * MIB)
"""What the memory is taken in, the largest first."""
CLOSE_S = 5.0


def device_use() -> DeviceUse | None:
    """Return how the first GPU is used, by whomever, without a context; ``None`` where nobody knows."""
    return use_of(device_uuids()[0])


# -- the process that holds the memory -------------------------------------------------------------


class Holder:
    """Holds memory of the first GPU."""

    def __init__(self) -> None:
        """Hold nothing, not even a context."""
        self._driver: CudaDriver | None = None
        self._held = contextlib.ExitStack()
        self._held_bytes = 0

    def leave(self, free_bytes: int) -> dict[str, int]:
        """Hold what is free beyond so many bytes; returns what is held and free then."""
        self._held.close()
        self._held_bytes = 0
        if self._driver is None:
            self._driver = CudaDriver(0)
            self._driver.context.retain()
        for piece_bytes in PIECES:
            with contextlib.suppress(DriverError):  # another has been faster: smaller pieces may still be there
                while self._free_bytes() - piece_bytes >= free_bytes:
                    self._held.enter_context(self._driver.create_memory(piece_bytes, "ballast"))
                    self._held_bytes += piece_bytes
        return self._told()

    def release(self) -> dict[str, int]:
        """Give everything back but the context."""
        self._held.close()
        self._held_bytes = 0
        return self._told()

    def _free_bytes(self) -> int:
        return cast("CudaDriver", self._driver).free_bytes() or 0

    def _told(self) -> dict[str, int]:
        return {"held_bytes": self._held_bytes, "free_bytes": self._free_bytes() if self._driver else 0}


def main() -> None:
    """Do what each line says, and answer it by one line of JSON, until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--twin", action="store_true", help="hold memory of the driver's software twin")
    if parser.parse_args().twin:
        driver_facts.use_twin()
    holder = Holder()
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        answer = holder.leave(int(number)) if word == "leave" else holder.release()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


# -- the process that has it held ------------------------------------------------------------------


class Ballast:
    """Such a process, until the block ends."""

    def __init__(self, *, twin: bool = False) -> None:
        """Start it; it is ready when it answers the first line."""
        argv = [sys.executable, __file__, *["--twin"] * twin]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def leave(self, free_bytes: int) -> dict[str, int]:
        """Have everything held but so many bytes; waits for ``ANSWER_S`` at most, and returns what is held and free.

        Raises:
            RuntimeError: There was no answer.
        """
        return self._ask(f"leave {free_bytes}")

    def release(self) -> dict[str, int]:
        """Have everything given back; waits and raises as ``leave``."""
        return self._ask("release")

    def _ask(self, line: str) -> dict[str, int]:
        pipes = cast("tuple[IO[str], IO[str]]", (self._process.stdin, self._process.stdout))
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
            pipes[0].write(f"{line}\n")
            pipes[0].flush()
            selector.register(pipes[1], selectors.EVENT_READ)
            if selector.select(ANSWER_S):
                with contextlib.suppress(ValueError):
                    answer: dict[str, int] = json.loads(pipes[1].readline())
                    return answer
        message = f"the ballast did not answer {line!r} within {ANSWER_S:.0f} s"
        raise RuntimeError(message)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it; its memory is free then."""
        self._process.kill()
        self._process.wait(CLOSE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                cast("IO[str]", pipe).close()


if __name__ == "__main__":
    main()
