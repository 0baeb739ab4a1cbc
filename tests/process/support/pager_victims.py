"""Pagers killed at chosen instructions of what they do with one block (``single_steps.py``).

Then another pager takes over, and every block must be what it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cpu.support.paged_window import PagedWindow
from process.support import single_steps
from process.support.single_steps import stop_here

from zico.base.compiled import entry
from zico.paging import blocks
from zico.paging import blocks as room
from zico.paging.loop import take_over
from zico.paging.page_table import NO_TICKET, PAGER, State
from zico.paging.pager import Pager

Record = Any
DEADLINE_S = 900
BLOCK_BYTES = 8192
FRAMES = 4
N_BLOCKS = 8


@entry(PAGER, int, int)
def leave(pager: Record, block: int, stop: int) -> None:
    """Let a block leave."""
    stop_here(stop)
    blocks.put_out(pager, block)
    stop_here(stop)


@entry(PAGER, int, int)
def copy_ahead(pager: Record, block: int, stop: int) -> None:
    """Copy a block that stays."""
    stop_here(stop)
    blocks.copy_ahead(pager, block)
    stop_here(stop)


@entry(PAGER, int, int)
def come(pager: Record, block: int, stop: int) -> None:
    """Bring a block in to be read."""
    stop_here(stop)
    blocks.bring_in(pager, block, False, BLOCK_BYTES // 2)  # noqa: FBT003 - compiled
    stop_here(stop)


@entry(PAGER, int, int)
def come_for_writing(pager: Record, block: int, stop: int) -> None:
    """Bring a block in to be written to."""
    stop_here(stop)
    blocks.bring_in(pager, block, True, 0)  # noqa: FBT003 - compiled
    stop_here(stop)


@entry(PAGER, int, int)
def unprotect(pager: Record, block: int, stop: int) -> None:
    """Let a block be written to."""
    stop_here(stop)
    blocks.let_write(pager, block)
    stop_here(stop)


@entry(PAGER, int, int)
def return_region(pager: Record, _block: int, stop: int) -> None:
    """Give a region back to the pool."""
    stop_here(stop)
    room.give_region_back(pager)
    stop_here(stop)


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


class Trial(single_steps.Trial):
    """A window of which half is out, in all the states that last, and a pager that is to die."""

    def __init__(self, operation: str) -> None:
        """Make it: blocks 0 to 3 are out, 4 is unchanged since it came, 5 and 6 are written, 7 is not used yet."""
        super().__init__()
        self.operation, self.state = OPERATIONS[operation]
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
        take_over(self.pager.record[0])
        if self.state in (State.OUT, State.ABSENT) and self.operation is not return_region:
            room.make_room(self.pager.record[0], FRAMES - 1, False)  # noqa: FBT003 - a fact
        self.operation(self.pager.record[0], self.block, stop)

    def check(self) -> None:
        """Invariant 5: whoever takes over has every block as it was, within what is held, and the tier has no other."""
        window = self.window
        self.left = {State(int(window.array("states_address")[self.block])).name: 1}
        window.begin_pager()
        for turn in range(2):
            for block, value in self.model.items():
                assert (window.blocks[block] == value + turn).all(), f"block {block} in turn {turn}"
                window.blocks[block] = value + turn + 1
                assert window.resident <= FRAMES, "invariant 1"
        window.end_pager()
        window.pool.snapshot()  # enters the mutex: whoever does so next ends what the dead one had begun
        held = int(window.page_table["acquired"] - window.page_table["returned"])
        tickets = window.array("tickets_address")
        (use,) = window.tiers.usage()
        assert use.used_bytes == (tickets != NO_TICKET).sum() * BLOCK_BYTES, "the tier has what is in use, and no more"
        owned = (window.pool.regions["owner"] == window.job).sum()
        assert owned == window.pool.jobs[window.job]["held"] >= held, "regions that stand for nothing stay the job's"


if __name__ == "__main__":
    single_steps.main(Trial, OPERATIONS, DEADLINE_S, {})
