"""Gang admission: in which order distributed jobs may begin iterations where they share several pools.

Theory of operation
    A *gang* is a job whose ranks are in several pools. Each pool alone is safe (the banker's rule),
    but pools do not see each other. Two gangs in two pools can therefore wait in a circle::

        pool 0    A0 holds 2 of 3, and waits in a collective for A1    B0 waits for a region of A0
        pool 1    B1 holds 2 of 3, and waits in a collective for B0    A1 waits for a region of B1

    So ranks begin an iteration only when their gang has its turn, and there is one order of turns
    for all pools. A gang asks when all its ranks have ended an iteration. It begins when two things
    hold: no gang inside has a rank in one of its pools, and no gang that has asked before has.

Guarantees
    * At most one gang is inside in each pool. Jobs with one pool end their iterations whatever gangs
      do, by the banker's rule. So the gang inside gets all that it claims, in every pool.
    * No gang overtakes another one that shares a pool with it, so each has its turn.
    * A gang that dies, or whose pool is lost, leaves its turn to others.

An uneven program has a rank that takes a step more, for which others wait in a collective. So a rank
that has waited ``patience_s`` for the others of its gang to end begins without asking: the gang is
still inside.

An order that is new knows nothing of gangs that another one has let in. So a gang that does not ask
for its first iteration counts as inside until all its ranks have asked.

Nothing here waits, and no clock is read.
"""

from __future__ import annotations

import dataclasses

from zico.base.errors import ConfigError

PATIENCE_S = 5.0
MOST_RANKS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank that asks: who it is, and where."""

    gang: int
    number: int
    world: int
    """How many ranks the gang has."""
    pool: str
    pid: int


@dataclasses.dataclass
class _Gang:
    """What is known of a gang."""

    world: int
    ranks: dict[int, Rank] = dataclasses.field(default_factory=dict)
    asks: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    """Ranks that have ended an iteration and have not begun the next: which one they ask for, and since when."""
    begun: dict[int, int] = dataclasses.field(default_factory=dict)
    """The last iteration that each rank has begun."""
    left: set[int] = dataclasses.field(default_factory=set)
    """Ranks that will not ask any more."""
    inside: bool = False

    @property
    def pools(self) -> set[str]:
        return {rank.pool for rank in self.ranks.values()}

    @property
    def has_ended(self) -> bool:
        """Whether all ranks are known, and each has ended its iteration."""
        return len(self.asks) + len(self.left) == self.world

    def begin(self, number: int) -> None:
        """Let a rank begin what it has asked for."""
        self.begun[number], _ = self.asks.pop(number)


class GangOrder:
    """All gangs of a cluster, and whose turn it is."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        """Know no gang.

        Args:
            patience_s: So long a rank waits for others of its gang to end their iterations.
        """
        self._patience_s = patience_s
        self._gangs: dict[int, _Gang] = {}
        self._queue: list[int] = []
        """Gangs that have asked, in the order of their turns."""

    def ask(self, rank: Rank, iteration: int, now_s: float) -> None:
        """Note that a rank has ended its iteration, or is new, and that it is to begin another one.

        Args:
            rank: Who asks. Once it has its turn, ``is_waiting`` is false.
            iteration: The number of that one, from 0 on. To ask again for the same changes nothing.
            now_s: The time, of any clock that only goes forward.

        Raises:
            ConfigError: The rank is none of a gang of that size.
        """
        gang = self._gangs.get(rank.gang) or _Gang(rank.world, inside=iteration > 0)
        if not (0 <= rank.number < rank.world <= MOST_RANKS and rank.world == gang.world):
            raise ConfigError(
                f"rank {rank.number} of {rank.world} is no rank of gang {rank.gang}, which has {gang.world}: "
                "give each gang a number of its own, and its ranks numbers from 0"
            )
        self._gangs[rank.gang] = gang
        gang.ranks[rank.number] = rank
        if iteration > gang.begun.get(rank.number, -1):
            gang.left.discard(rank.number)
            gang.asks.setdefault(rank.number, (iteration, now_s))
            self.settle(now_s)

    def is_waiting(self, rank: Rank) -> bool:
        """Tell whether a rank that has asked does not have its turn yet."""
        gang = self._gangs.get(rank.gang)
        return gang is not None and gang.ranks.get(rank.number) == rank and rank.number in gang.asks

    def has_begun(self, rank: Rank, iteration: int) -> bool:
        """Tell whether a rank has had its turn; if it neither waits nor has begun, it was forgotten, and asks again."""
        gang = self._gangs.get(rank.gang)
        return gang is not None and gang.ranks.get(rank.number) == rank and gang.begun.get(rank.number, -1) >= iteration

    def leave(self, rank: Rank, now_s: float) -> None:
        """Note that a rank begins no iteration any more. A gang whose ranks have all left is forgotten."""
        gang = self._gangs.get(rank.gang)
        if gang is None or gang.ranks.get(rank.number) != rank:
            return
        gang.asks.pop(rank.number, None)
        gang.left.add(rank.number)
        if len(gang.left) == gang.world:
            self._forget(rank.gang)
        self.settle(now_s)

    def lives(self, pool: str, pids: set[int], now_s: float) -> None:
        """Forget gangs with a rank in a pool that is none of the living processes there.

        Args:
            pool: The pool. Of one that is lost, give no process.
            pids: The processes that are jobs of it.
            now_s: As for ``ask``.
        """
        dead = [
            number
            for number, gang in self._gangs.items()
            if any(rank.pool == pool and rank.pid not in pids for rank in gang.ranks.values())
        ]
        for number in dead:
            self._forget(number)
        self.settle(now_s)

    def settle(self, now_s: float) -> None:
        """Let begin whoever has the turn now; call it also when ``due_s`` has come."""
        for number, gang in self._gangs.items():
            if gang.inside and gang.has_ended:
                gang.inside = False
            if gang.has_ended and number not in self._queue:
                self._queue.append(number)
            if gang.inside:
                for rank, (_, since_s) in tuple(gang.asks.items()):
                    if now_s - since_s >= self._patience_s:
                        gang.begin(rank)
        taken = {pool for gang in self._gangs.values() if gang.inside for pool in gang.pools}
        for number in tuple(self._queue):
            gang = self._gangs[number]
            if not taken & gang.pools:
                self._queue.remove(number)
                gang.inside = True
                for rank in tuple(gang.asks):
                    gang.begin(rank)
            taken |= gang.pools

    def due_s(self) -> float | None:
        """Return when ``settle`` has something to do if nobody asks before, ``None`` if it has not."""
        since_s = [since for gang in self._gangs.values() if gang.inside for _, since in gang.asks.values()]
        return min(since_s) + self._patience_s if since_s else None

    def inside(self) -> dict[str, int]:
        """Return for each pool the gang that is inside there."""
        return {pool: number for number, gang in self._gangs.items() if gang.inside for pool in gang.pools}

    def _forget(self, gang: int) -> None:
        del self._gangs[gang]
        self._queue = [other for other in self._queue if other != gang]
