"""Actors of Ray: the one that keeps a node's broker, and the one that knows the order of gangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from zico.base.errors import BrokerError, ZicoError
from zico.base.rundir import base_directory
from zico.integrations.gangs import GangOrder, Rank
from zico.integrations.kept_broker import READY_S, KeptBroker
from zico.integrations.ray import NAMESPACE, RAYLET_VARIABLE, socket_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LOOK_S = 0.25
"""Seconds between two looks at a broker."""
LOST_S = 10.0
"""A pool that has not been heard of for so long is lost, with the gangs that have ranks there."""
ANSWER_S = 30.0
ORDER_NAME = "gang-order"
_log = logging.getLogger(__name__)


class BrokerActor:
    """Keeps the broker of one device of the node that it is pinned to, and tells the order of gangs who lives there."""

    def __init__(self, node: str, device: str, options: Mapping[str, str]) -> None:
        """Start the broker, or find it: an actor that Ray has started again goes on where the last one was."""
        raylet = os.environ[RAYLET_VARIABLE]
        self._pool = pool_name(node, device)
        self._kept = KeptBroker(socket_on(base_directory(), raylet, device), options, until=int(raylet))
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._kept.look()
        threading.Thread(target=self._watch, name="zico-broker", daemon=True).start()

    def status(self) -> tuple[int, int, int]:
        """Return the budget in bytes, the number of jobs, and the bytes that they hold.

        Raises:
            BrokerError: There is no broker, and none can be started.
        """
        with self._kept_now() as kept:
            found = kept.look()
        return found.budget_bytes, len(found.jobs), found.granted_bytes

    def peaks(self) -> dict[str, int]:
        """Return the most bytes that one process of each job's name has held in the pool.

        Raises:
            BrokerError: As ``status``.
        """
        with self._kept_now() as kept:
            return kept.peaks()

    def end(self) -> None:
        """End the broker, and look after it no more."""
        self._ended.set()
        with self._lock:
            self._kept.end()

    @contextlib.contextmanager
    def _kept_now(self) -> Iterator[KeptBroker]:
        with self._lock:
            if self._ended.is_set():
                raise BrokerError("the broker was stopped")
            yield self._kept

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                with self._lock:
                    if self._ended.is_set():
                        return
                    self._kept.look()
                    pids = self._kept.pids
                order = ray.get_actor(ORDER_NAME, NAMESPACE)
                order.lives.remote(self._pool, pids)
            except (ZicoError, OSError, ValueError, ray.exceptions.RayError) as error:
                _log.warning("%s: %s", self._pool, error)


class OrderActor:
    """The order of gangs, which ranks ask before each iteration."""

    def __init__(self) -> None:
        """Know no gang. After a restart, gangs are known again when they ask."""
        self._order = GangOrder()
        self._heard_s: dict[str, float] = {}
        self._changed = asyncio.Event()

    async def begin(self, rank: Rank, iteration: int, within_s: float) -> bool:
        """Tell whether a rank has its turn within a time; ask again if not."""
        end_s = time.monotonic() + within_s
        self._order.ask(rank, iteration, time.monotonic())
        self._notify()
        while self._order.is_waiting(rank):
            now_s = time.monotonic()
            if now_s >= end_s:
                return False
            due_s = min(end_s, now_s + LOST_S, self._order.due_s() or end_s)
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, due_s - now_s) + 1e-3)
            except TimeoutError:
                self._settle()
        return self._order.has_begun(rank, iteration)

    async def leave(self, rank: Rank) -> None:
        """Note that a rank begins no iteration any more."""
        self._order.leave(rank, time.monotonic())
        self._notify()

    async def lives(self, pool: str, pids: set[int]) -> None:
        """Note which processes are jobs of a pool."""
        self._heard_s[pool] = time.monotonic()
        self._order.lives(pool, pids, time.monotonic())
        self._settle()

    async def inside(self) -> dict[str, int]:
        """Return for each pool the gang that is inside there."""
        return self._order.inside()

    def _settle(self) -> None:
        now_s = time.monotonic()
        for pool, heard_s in tuple(self._heard_s.items()):
            if now_s - heard_s > LOST_S:
                del self._heard_s[pool]
                self._order.lives(pool, set(), now_s)
        self._order.settle(now_s)
        self._notify()

    def _notify(self) -> None:
        """Let all ranks that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()


# -- their handles ---------------------------------------------------------------------------------

_KEPT: dict[str, Any] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": -1,
    "get_if_exists": True,
}


def pool_name(node: str, device: str) -> str:
    """Return what the pool of a node's device is called."""
    return f"{node}/{device}"


def broker(node: str, device: str, options: Mapping[str, str]) -> Any:  # noqa: ANN401 - a handle of an actor
    """Return the actor that keeps the broker of a node's device; makes it where there is none. Waits for nothing."""
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    return (
        ray.remote(BrokerActor)
        .options(name=f"broker-{pool_name(node, device)}", scheduling_strategy=pinned, max_concurrency=4, **_KEPT)
        .remote(node, device, dict(options))
    )


def known_broker(node: str, device: str) -> Any | None:  # noqa: ANN401 - a handle of an actor
    """Return the actor that keeps the broker of a node's device, if there is one."""
    return _known(f"broker-{pool_name(node, device)}")


def _known(name: str) -> Any | None:  # noqa: ANN401 - a handle of an actor
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def gang_order() -> Any:  # noqa: ANN401 - a handle of an actor
    """Return the actor that knows the order of gangs; makes it where there is none."""
    return ray.remote(OrderActor).options(name=ORDER_NAME, **_KEPT).remote()


def answer(reference: Any, within_s: float = READY_S) -> Any:  # noqa: ANN401 - whatever was asked for
    """Return what an actor answers.

    Raises:
        RayError: It is dead, has raised, or does not answer in time.
    """
    return ray.get(reference, timeout=within_s)


def end(brokers: Sequence[Any]) -> None:
    """End brokers with their actors, and the order of gangs."""
    asked = [actor.end.remote() for actor in brokers]
    ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S) if asked else None
    for actor in (*brokers, _known(ORDER_NAME)):
        if actor is not None:
            ray.kill(actor)
