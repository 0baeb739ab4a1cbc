"""A process of its own that kills pagers at chosen instructions of what they do with one block.

Run as a script: ``pager_victims.py TRIALS [OPERATION ...]``. As ``pool_victims`` does: each trial forks a victim, lets
it run one operation to a chosen machine instruction by single steps of ptrace(2), and kills it there. Then another
pager takes over, and every block must be what it was. Prints a line of JSON for each operation.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from numba import types

sys.path.append(str(Path(__file__).parents[1] / "cpu"))  # run as a script, outside pytest

from paged_window import PagedWindow
from pool_victims import NO_PTRACE, PTRACE_TRACEME, _kill, _libc, step

from zico.compiled import compiled
from zico.paging import pager_blocks as blocks
from zico.paging import pager_room as room
from zico.paging.pager import Pager
from zico.paging.sheet import NO_TICKET, State

Record = Any
DEADLINE_S = 900
BLOCK_BYTES = 8192
FRAMES = 4
N_BLOCKS = 8

_raise = types.ExternalFunction("raise", types.int32(types.int32))


@compiled
def leave(pager: Record, block: int, stop: int) -> None:
    """Let a block leave."""
    _raise(stop)
    blocks.put_out(pager, block)
    _raise(stop)


@compiled
def copy_ahead(pager: Record, block: int, stop: int) -> None:
    """Copy a block that stays."""
    _raise(stop)
    blocks.copy_ahead(pager, block)
    _raise(stop)


@compiled
def come(pager: Record, block: int, stop: int) -> None:
    """Bring a block in to be read."""
    _raise(stop)
    blocks.bring_in(pager, block, False)  # noqa: FBT003 - compiled
    _raise(stop)


@compiled
def come_for_writing(pager: Record, block: int, stop: int) -> None:
    """Bring a block in to be written to."""
    _raise(stop)
    blocks.bring_in(pager, block, True)  # noqa: FBT003 - compiled
    _raise(stop)


@compiled
def unprotect(pager: Record, block: int, stop: int) -> None:
    """Let a block be written to."""
    _raise(stop)
    blocks.let_write(pager, block)
    _raise(stop)


@compiled
def return_region(pager: Record, _block: int, stop: int) -> None:
    """Give a region back to the pool."""
    _raise(stop)
    room.give_region_back(pager)
    _raise(stop)


OPERATIONS = {
    "leave": (leave, State.WRITTEN),
    "leave_unchanged": (leave, State.CLEAN),
    "leave_for_good": (leave, State.WRITTEN),
    "copy_ahead": (copy_ahead, State.WRITTEN),
    "come": (come, State.OUT),
    "come_for_writing": (come_for_writing, State.OUT),
    "come_anew": (come, State.ABSENT),
    "unprotect": (unprotect, State.CLEAN),
    "return_region": (return_region, State.OUT),
}


class Trial:
    """A window of which half is out, in all the states that last, and a pager that is to die."""

    def __init__(self, operation: str) -> None:
        """Make it: blocks 0 to 3 are out, 4 is unchanged since it came, 5 and 6 are written, 7 is not used yet."""
        self.operation, self.state = OPERATIONS[operation]
        self.stack = contextlib.ExitStack()
        self.window = PagedWindow(FRAMES, blocks=N_BLOCKS, block_bytes=BLOCK_BYTES, flags=4)
        self.stack.callback(self.window.__exit__)
        self.window.begin_pager()
        self.model = {block: block * 100 for block in range(N_BLOCKS - 1)}
        for block in (4, 0, 1, 2, 3, 5, 6):
            self.window.blocks[block] = self.model[block]
        assert self.window.blocks[4, 0] == self.model[4]  # comes back, unchanged
        self.window.end_pager()
        states = self.window.array("states_address")
        self.block = int(np.flatnonzero(states == self.state)[0])
        if operation == "leave_for_good":
            self.window.free(self.block)
            del self.model[self.block]
        if operation == "return_region":
            self.window.pool.set_limit(self.window.job, FRAMES - 1)
        self.pager = Pager(self.window.memory.export(), self.window.member)
        self.stack.callback(self.pager.close)

    def run(self, stop: int) -> None:
        """Take over and do the operation; room has been made as the loop would."""
        blocks.take_over(self.pager.record[0])
        if self.state in (State.OUT, State.ABSENT) and self.operation is not return_region:
            room.make_room(self.pager.record[0], FRAMES - 1)
        self.operation(self.pager.record[0], self.block, stop)

    def start(self) -> int:
        """Fork a victim that stops right before the operation."""
        pid = os.fork()
        if pid == 0:
            if _libc.ptrace(PTRACE_TRACEME, 0, None, None) == 0:
                self.run(signal.SIGSTOP)
            os._exit(3)
        return pid

    def check(self) -> None:
        """Invariant 5: whoever takes over has every block as it was, within what is held, and the tier has no other."""
        window = self.window
        window.begin_pager()
        for turn in range(2):
            for block, value in self.model.items():
                assert (window.blocks[block] == value + turn).all(), f"block {block} in turn {turn}"
                window.blocks[block] = value + turn + 1
                assert window.resident <= FRAMES, "invariant 1"
        window.end_pager()
        held = int(window.sheet["acquired"] - window.sheet["returned"])
        tickets = window.array("tickets_address")
        (use,) = window.tiers.usage()
        assert use.used_bytes == (tickets != NO_TICKET).sum() * BLOCK_BYTES, "the tier has what is in use, and no more"
        owned = (window.pool.regions["owner"] == window.job).sum()
        assert owned == window.pool.jobs[window.job]["held"] >= held, "regions that stand for nothing stay the job's"


def length_of(operation: str, status: Record) -> int:
    """Return how many instructions the operation takes."""
    trial = Trial(operation)
    with trial.stack:
        pid = trial.start()
        _, stopped = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(stopped):
            raise SystemExit(NO_PTRACE)
        n = int(step(pid, 1 << 22, status))
        _kill(pid)
        if n < 0:
            raise SystemExit(NO_PTRACE)
        trial.check()
        return n


def kill_all_along(operation: str, trials: int) -> dict[str, Any]:
    """Kill as many victims; returns what was done, or the fault that was found."""
    warm = Trial(operation)
    with warm.stack:
        warm.run(0)
    status = np.zeros(1, "i4")
    step(0, 0, status)
    length = length_of(operation, status)
    left: dict[str, int] = {}
    for at in np.unique(np.linspace(0, length - 1, trials).astype(int)).tolist():
        trial = Trial(operation)
        with trial.stack:
            pid = trial.start()
            os.waitpid(pid, 0)
            step(pid, at, status)
            _kill(pid)
            name = State(int(trial.window.array("states_address")[trial.block])).name
            left[name] = left.get(name, 0) + 1
            try:
                trial.check()
            except (AssertionError, OSError):
                return {"fault": f"killed after {at} of {length} instructions, {name}: {traceback.format_exc()}"}
    return {"fault": None, "instructions": length, "left": left}


def main(trials: int, names: list[str]) -> None:
    """Do the named operations, or all."""
    signal.alarm(DEADLINE_S)
    for name in names or OPERATIONS:
        print(json.dumps({"operation": name, **kill_all_along(name, trials)}), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
