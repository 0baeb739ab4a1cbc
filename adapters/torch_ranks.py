"""PyTorch's processes: which of them trains, and which of them are ranks of one job.

How it works
    ``init_process_group`` tells that this process is a rank. The ranks agree on a number by the
    store in which they have met: the first one to ask sets it. That number is the group's name in
    the pool (``zico.pool.groups``), until ``destroy_process_group``.

    A descendant of a job stays outside the pool: it may be a loader's worker. It joins when it
    makes an optimizer or becomes a rank, since then it trains. So does a forked child, if its
    parent has had no tensor in the pool.

    A process that calls ``torch.multiprocessing.spawn`` before it has taken any memory is a
    launcher. It leaves the pool to those that it starts.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

from zico.job import session
from zico.job.autoload import not_shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.job.session import Session

_KEY = "zico/group"

_is_watching = False
_refused_in = 0
"""The process that could not join although it trains."""


def watch(enable: Callable[[], Session | None]) -> None:
    """Notice what this process turns out to be: a rank, a launcher, or a descendant that trains.

    Changes functions of PyTorch, once per process.

    Args:
        enable: Joins the pool, if this process may.
    """
    global _is_watching  # noqa: PLW0603 - functions of PyTorch are changed once per process
    if _is_watching:
        return
    _is_watching = True
    import torch
    from torch.optim.optimizer import Optimizer

    Optimizer.__init__ = _before(Optimizer.__init__, lambda: _train(enable))
    if torch.distributed.is_available():
        c10d: Any = torch.distributed.distributed_c10d
        init = _after(c10d.init_process_group, lambda: _join_group(enable))
        destroy = _after(c10d.destroy_process_group, _leave_group)
        for module in (c10d, torch.distributed):
            module.init_process_group, module.destroy_process_group = init, destroy
    spawning: Any = sys.modules.get("torch.multiprocessing.spawn")
    if spawning is not None:
        start = _before(spawning.start_processes, session.step_aside)
        spawning.start_processes = torch.multiprocessing.start_processes = start


def _before(function: Callable[..., Any], call: Callable[[], object]) -> Callable[..., Any]:
    """Wrap a function: something else is called before it."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        call()
        return function(*args, **kwargs)

    return wrapped


def _after(function: Callable[..., Any], call: Callable[[], object]) -> Callable[..., Any]:
    """Wrap a function: something else is called once it has done its work."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        result = function(*args, **kwargs)
        call()
        return result

    return wrapped


def _train(enable: Callable[[], Session | None]) -> Session | None:
    """Join the pool although an ancestor is a job of it, since this process trains; says once why it cannot."""
    global _refused_in  # noqa: PLW0603 - of the process
    if (session.is_descendant() or session.is_forked()) and _refused_in != os.getpid():
        session.claim_to_train()
        try:
            enable()
        except Exception as error:  # noqa: BLE001 - the user's training must go on, whatever is wrong with us
            _refused_in = os.getpid()
            not_shared("torch", error)
    return session.current_here()


def _join_group(enable: Callable[[], Session | None]) -> None:
    """Become a rank of the job whose processes have met, if there are several."""
    import torch

    if torch.distributed.get_world_size() == 1:
        return
    joined = _train(enable)
    if joined is not None:
        joined.pool.join_group(_group_of(torch.distributed.distributed_c10d))


def _leave_group() -> None:
    """Be a job of its own again, once the default group has ended."""
    import torch

    joined = session.current_here()
    if joined is not None and not torch.distributed.is_initialized():
        joined.pool.join_group(0)


def _group_of(c10d: Any) -> int:  # noqa: ANN401 - a module of PyTorch's
    """Return a number that the ranks of this job have in common, and no other job has."""
    try:
        store = c10d._get_default_store()  # noqa: SLF001 - where else the ranks have met depends on how
        said = store.compare_set(_KEY, "", secrets.token_hex(8))
    except RuntimeError:  # this kind of store cannot compare: all ranks get here, and have the same address
        said = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}".encode()
    return int.from_bytes(hashlib.sha256(said).digest()[:7], "little") | 1
