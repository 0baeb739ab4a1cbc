"""Ray Train: ranks of one job on several nodes begin each iteration when their gang has its turn.

How it works
    ``in_gang`` wraps a training loop. Before a rank ends an iteration, it closes its gate
    (``zico.pool.groups``) and asks the order of gangs (``zico.integrations.gangs``) for its turn. A
    thread waits for the answer and opens the gate. So the rank stands at its boundary meanwhile,
    holds what it keeps between iterations, and claims nothing.

    If the order of gangs does not answer, the gate opens by itself after ``GATE_S``. The rank then
    goes on by the rules of its own pool.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from zico.integrations.gangs import Rank
from zico.integrations.ray import NAMESPACE, ray
from zico.integrations.ray_actors import ORDER_NAME, pool_name
from zico.job import autoload, session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.job.session import Session

ASK_S = 10.0
"""Seconds that one question may wait at the order of gangs."""
GATE_S = 60.0
"""Seconds that a gate stays closed without an answer."""
CLOSE_S = 5.0


def in_gang(train_loop: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a training loop of ``TorchTrainer``, so that its ranks begin iterations by the order of gangs.

    Outside a pool, and with one rank, the loop runs as it is.
    """

    @functools.wraps(train_loop)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the loop's own
        with turns():
            return train_loop(*args, **kwargs)

    return run


@contextlib.contextmanager
def turns() -> Iterator[None]:
    """Begin iterations by the order of gangs within the body; the process group is there already."""
    import torch

    joined = session.current_here()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if joined is None or not distributed or torch.distributed.get_world_size() == 1:
        yield
        return
    context = ray.get_runtime_context()
    rank = Rank(
        gang=int(joined.record["group"]),
        number=torch.distributed.get_rank(),
        world=torch.distributed.get_world_size(),
        pool=pool_name(context.get_node_id(), joined.device),
        pid=os.getpid(),
    )
    gate = _Gate(joined, rank)
    joined.watchers.append(gate)
    try:
        joined.mark()
        yield
    finally:
        joined.watchers.remove(gate)
        gate.end()


class _Gate(session.Watcher):
    """The gate of one rank: closed by the thread that trains, opened by a thread that has asked for the turn."""

    def __init__(self, joined: Session, rank: Rank) -> None:
        self._joined = joined
        self._rank = rank
        self._iteration = 0
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._said = False
        self._thread = threading.Thread(target=self._ask, name="zico-gang", daemon=True)
        self._thread.start()

    def before_boundary(self) -> None:
        """Keep the rank at the boundary to which it comes now until it has its turn."""
        self._keep_closed()
        self._asked.put(self._iteration)
        self._iteration += 1

    def end(self) -> None:
        """Ask for no more turns."""
        self._asked.put(None)
        self._thread.join(CLOSE_S)
        self._joined.pool.set_gate(0)

    def _keep_closed(self) -> None:
        self._joined.pool.set_gate(time.monotonic_ns() + round(GATE_S * 1e9))

    def _ask(self) -> None:
        while (iteration := self._asked.get()) is not None:
            try:
                order = ray.get_actor(ORDER_NAME, NAMESPACE)
                while not ray.get(order.begin.remote(self._rank, iteration, ASK_S), timeout=GATE_S):
                    self._keep_closed()
            except (ray.exceptions.RayError, ValueError) as error:
                if not self._said:
                    autoload.complain("this rank begins iterations without an order of gangs", error)
                    self._said = True
            self._joined.pool.set_gate(0)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.get_actor(ORDER_NAME, NAMESPACE).leave.remote(self._rank)
