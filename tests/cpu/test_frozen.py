"""What the broker knows of memory that jobs have in common: counted once, and gone with its last job."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import pytest
from cpu.support.broker_messages import no_descriptor_left
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness import MIB

from zico.base.errors import RemoteProtocolError
from zico.broker import frozen
from zico.broker.frozen import FrozenMemory
from zico.broker.notes import NOT_SEEN
from zico.broker.pool_manager import PoolManager
from zico.broker.protocol import messages as m
from zico.device.host import map_privately
from zico.pool.table import PoolTable
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REGIONS = 8
MEMBERS = (1, 2, 3)
KEYS = [f"{number:032x}" for number in range(3)]
SIZES = dict(zip(KEYS, (MIB // 2, 3 * MIB, 6 * MIB - 1), strict=True))


@pytest.fixture
def table() -> Iterator[PoolTable]:
    """Give a pool of eight regions of a MiB; no descriptor may stay."""
    with no_descriptor_left(), made() as pool:
        yield pool


def made() -> PoolTable:
    """Return such a pool."""
    return PoolTable.create(budget_bytes=REGIONS * MIB, region_bytes=MIB, use_claims=False, self_admit=False)


def fill(shared: FrozenMemory, member: int, key: str) -> int:
    """Ask for a content that is not there, fill it, and return its descriptor."""
    found, fd = shared.ask(member, key, SIZES[key])
    assert (found, fd is None) == ("fill", False)
    os.pwrite(fd, key.encode(), 0)
    assert shared.filled(member, key) == "here"
    return fd


def test_a_content_is_filled_by_one_and_given_to_all(table: PoolTable) -> None:
    """Who asks while it is being filled is told so; what is sealed nobody can write, and mappings are private."""
    shared = FrozenMemory(table)
    key = KEYS[0]
    found, fd = shared.ask(1, key, SIZES[key])
    assert found == "fill"
    assert shared.ask(2, key, SIZES[key]) == ("busy", None)
    os.pwrite(fd, b"frozen", 0)
    assert shared.filled(1, key) == "here"
    assert shared.ask(2, key, SIZES[key]) == ("here", fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZES[key])
    with map_privately(fd, SIZES[key]) as one, map_privately(fd, SIZES[key]) as other:
        ctypes.memmove(one.handle, b"mine", 4)
        assert ctypes.string_at(other.handle, 6) == b"frozen"
        assert ctypes.string_at(one.handle, 6) == b"mineen"
    assert dict(shared.bytes_of) == {1: SIZES[key], 2: SIZES[key]}
    assert shared.size_bytes == SIZES[key]
    shared.close()


def test_it_counts_once_and_leaves_with_the_last_job(table: PoolTable) -> None:
    """Invariant 12: the budget has it once, whoever of those that have it dies first."""
    shared = FrozenMemory(table)
    fill(shared, 1, KEYS[1])
    shared.ask(2, KEYS[1], SIZES[KEYS[1]])
    assert (table.header["shared"], table.header["budget_regions"]) == (3, REGIONS - 3)
    shared.depart(1)
    assert table.header["shared"] == 3
    assert shared.ask(3, KEYS[1], SIZES[KEYS[1]])[0] == "here"
    shared.depart(2)
    shared.depart(3)
    assert (table.header["shared"], table.header["budget_regions"]) == (0, REGIONS)


def test_who_dies_while_filling_leaves_nothing(table: PoolTable) -> None:
    """Invariant 12: the next one who asks fills it."""
    shared = FrozenMemory(table)
    shared.ask(1, KEYS[0], SIZES[KEYS[0]])
    assert table.header["shared"] == 1
    shared.depart(1)
    assert table.header["shared"] == 0
    assert shared.ask(2, KEYS[0], SIZES[KEYS[0]])[0] == "fill"
    shared.close()


def test_the_budget_has_room_or_it_is_not_shared(table: PoolTable) -> None:
    """Invariant 1: what is granted and what is shared never exceed the budget by a sharing."""
    shared = FrozenMemory(table)
    table.header["granted"] = 4
    assert shared.ask(1, KEYS[2], SIZES[KEYS[2]]) == ("full", None)
    assert table.header["shared"] == 0
    fill(shared, 1, KEYS[1])
    assert table.header["peak_granted"] == 7
    table.set_budget(6)
    assert (table.header["budget_regions"], table.header["shared"]) == (3, 3)
    table.set_budget(REGIONS)
    assert table.header["budget_regions"] == 5
    table.header["granted"] = 0
    shared.close()


def test_memory_that_somebody_could_write_is_not_shared(table: PoolTable) -> None:
    """The kernel does not seal what is mapped to be written, and then it is nobody's."""
    shared = FrozenMemory(table)
    _, fd = shared.ask(1, KEYS[0], SIZES[KEYS[0]])
    with mmap.mmap(fd, SIZES[KEYS[0]]):
        assert shared.filled(1, KEYS[0]) == "full"
    assert (shared.size_bytes, table.header["shared"]) == (0, 0)


def test_what_a_job_may_not_say(table: PoolTable) -> None:
    """A known key has one size, and only who was to fill it says that it has."""
    shared = FrozenMemory(table)
    shared.ask(1, KEYS[0], SIZES[KEYS[0]])
    assert [shared.filled(2, key) for key in KEYS[:2]] == ["full", "full"]
    with pytest.raises(RemoteProtocolError, match=r"asked for 5 bytes of a content that has 524288"):
        shared.ask(2, KEYS[0], 5)
    shared.give_back(7, KEYS[0])
    shared.give_back(7, KEYS[1])
    assert shared.filled(1, KEYS[0]) == "here"
    shared.close()


def test_who_takes_too_long_to_fill_is_not_waited_for(table: PoolTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another member fills it then, and the late one is told that it has nothing."""
    now = [0.0]
    monkeypatch.setattr(frozen.time, "monotonic", lambda: now[0])
    shared = FrozenMemory(table)
    shared.ask(1, KEYS[0], SIZES[KEYS[0]])
    now[0] = frozen.FILL_S - 1
    assert shared.ask(2, KEYS[0], SIZES[KEYS[0]]) == ("busy", None)
    now[0] = frozen.FILL_S + 1
    assert shared.ask(2, KEYS[0], SIZES[KEYS[0]])[0] == "fill"
    assert (shared.filled(1, KEYS[0]), shared.filled(2, KEYS[0])) == ("full", "here")
    assert dict(shared.bytes_of) == {2: SIZES[KEYS[0]]}
    shared.close()


def test_a_job_is_promised_what_it_does_not_share(table: PoolTable) -> None:
    """What exceeds the budget together with what a job shares is refused; who joins later may hold all but that."""
    manager = PoolManager(table, [], policy_named("none"))
    hello = m.Hello(version=m.PROTOCOL_VERSION, name="a", pid=7, framework="torch")
    member = manager.join(hello, process=NOT_SEEN, pidfd=None)
    fill(manager.shared, member.index, KEYS[1])
    manager.note_shared(member)
    assert table.jobs[member.job]["promised"] == REGIONS - 3
    assert table.jobs[manager.join(hello, process=NOT_SEEN, pidfd=None).job]["promised"] == REGIONS
    assert "no room beside the 3 MiB of frozen memory" in manager.change(m.Change(budget_bytes=3 * MIB)).refused
    assert not manager.change(m.Change(budget_bytes=4 * MIB)).refused
    manager.shared.close()


def test_the_next_broker_keeps_it_in_the_budget_until_no_job_is_left(table: PoolTable) -> None:
    """Jobs of a broker that has died have it mapped; a content of the new one's counts besides."""
    fill(before := FrozenMemory(table), 1, KEYS[1])
    before.close()
    shared = FrozenMemory(table)
    fill(shared, 2, KEYS[0])
    assert table.header["shared"] == 4
    shared.depart(2)
    assert table.header["shared"] == 3
    shared.forget_before()
    assert (table.header["shared"], table.header["budget_regions"]) == (0, REGIONS)


class Model:
    """Who has what, who is filling it, and what the budget has room for."""

    def __init__(self, table: PoolTable) -> None:
        """Begin with nothing."""
        self.table = table
        self.shared = FrozenMemory(table)
        self.having: dict[str, set[int]] = {}
        self.filling: dict[str, int] = {}
        self.budget = REGIONS

    def ask(self, member: int, key: str) -> None:
        """Ask; the answer is what the model says."""
        found, fd = self.shared.ask(member, key, SIZES[key])
        fits = regions_of({*self.filling, *self.having, key}) <= self.budget
        expected = "fill" if fits else "full"
        if key in self.filling or key in self.having:
            expected = "busy" if key in self.filling else "here"
        assert (found, fd is not None) == (expected, expected in {"here", "fill"})
        if found == "here":
            self.having[key].add(member)
        elif found == "fill":
            self.filling[key] = member

    def filled(self, member: int, key: str) -> None:
        """Have it filled, if the member is to fill it."""
        if self.filling.get(key) == member:
            assert self.shared.filled(member, key) == "here"
            del self.filling[key]
            self.having[key] = {member}

    def give_back(self, member: int, key: str) -> None:
        """Give one back, or stop filling it."""
        self.shared.give_back(member, key)
        self._forget(member, key)

    def depart(self, member: int, _key: str) -> None:
        """Die."""
        self.shared.depart(member)
        for key in KEYS:
            self._forget(member, key)

    def set_budget(self, member: int, _key: str) -> None:
        """Change the budget to one of three."""
        self.budget = 4 + member
        self.table.set_budget(self.budget)

    def check(self) -> None:
        """Compare all figures."""
        there = {*self.filling, *self.having}
        assert self.shared.size_bytes == sum(SIZES[key] for key in there)
        assert self.table.header["shared"] == regions_of(there)
        assert self.table.header["budget_regions"] == max(0, self.budget - regions_of(there))
        for member in MEMBERS:
            own = [SIZES[key] for key, those in self.having.items() if member in those]
            assert self.shared.bytes_of[member] == sum(own)

    def _forget(self, member: int, key: str) -> None:
        self.having.get(key, set()).discard(member)
        if self.filling.get(key) == member:
            del self.filling[key]
        if not self.having.get(key):
            self.having.pop(key, None)


def regions_of(keys: set[str]) -> int:
    """Return the regions that these contents take together."""
    return -(-sum(SIZES[key] for key in keys) // MIB)


STEPS = st.tuples(
    st.sampled_from((Model.ask, Model.filled, Model.give_back, Model.depart, Model.set_budget)),
    st.sampled_from(MEMBERS),
    st.sampled_from(KEYS),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_whatever_jobs_do_it_adds_up(steps: list[tuple[Callable[[Model, int, str], None], int, str]]) -> None:
    """Invariants 1 and 12 against a model: who has what, who is filling it, and what the budget says."""
    with no_descriptor_left(), made() as pool:
        model = Model(pool)
        for step, member, key in steps:
            step(model, member, key)
            model.check()
        model.shared.close()
