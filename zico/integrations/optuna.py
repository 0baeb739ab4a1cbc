"""Optuna: each trial says what it used of the pool; one that runs out of memory is pruned, or is tried once more.

How it works
    ``measured`` wraps an objective. A trial ran out of memory if the budget refused a request of it
    and it ended by an out-of-memory error. Whether an exception is one its type or its text says,
    since each framework has its own. All goes through the study's storage, so processes that share
    a storage need nothing else.

Known limitations
    * With ``n_jobs`` above 1, trials are threads of one job. Then figures are those of the whole
      job while a trial ran. Several processes over one storage do not have this problem.
"""

from __future__ import annotations

import functools
import gc
import re
from typing import TYPE_CHECKING, Any, Literal

from zico.base.errors import ConfigError
from zico.base.units import format_bytes
from zico.integrations import first_of
from zico.integrations.figures import PREFIX, Figures, Part

if TYPE_CHECKING:
    from collections.abc import Callable

TESTED_VERSION = "5.0"

PEAK_BYTES = f"{PREFIX}peak_bytes"
WAITED_S = f"{PREFIX}waited_s"
MOVED_BYTES = f"{PREFIX}moved_bytes"
NEEDED_BYTES = f"{PREFIX}needed_bytes"
RETRY_OF = f"{PREFIX}retry_of"

_SAYS = re.compile(r"out of ?memory|\bOOM\b|can't allocate memory|RESOURCE_?EXHAUSTED|MemoryError", re.IGNORECASE)

optuna = first_of(("optuna",), "Optuna", "zico-memory[optuna]")


def measured(
    objective: Callable[[Any], Any] | None = None, *, out_of_memory: Literal["prune", "enqueue"] = "prune"
) -> Callable[..., Any]:
    """Wrap an objective so that its trials say what they used of the pool, and survive being out of memory.

    Each trial gets the user attributes ``zico_peak_bytes``, ``zico_waited_s`` and
    ``zico_moved_bytes`` (out of the budget and back), however it ends. A trial that runs out of
    memory is pruned and gets ``zico_needed_bytes``: the least that would have gone further. Outside
    a pool the objective runs as it is.

    Args:
        objective: What ``study.optimize`` would get; left out where this is a decorator with
            arguments.
        out_of_memory: ``enqueue``: besides, a trial with the same parameters is enqueued, once. It
            has ``zico_needed_bytes`` and ``zico_retry_of`` (a trial's number) as user attributes
            from its beginning, for an objective that can do with less. Any process of the study may
            take it.

    Raises:
        ConfigError: ``out_of_memory`` is neither.
    """
    if out_of_memory not in ("prune", "enqueue"):
        raise ConfigError(f"out_of_memory is {out_of_memory!r}: choose 'prune' or 'enqueue'")
    if objective is None:
        return functools.partial(measured, out_of_memory=out_of_memory)

    @functools.wraps(objective)
    def run(trial: Any) -> Any:  # noqa: ANN401 - an optuna.Trial; what the objective returns
        part = Part()
        try:
            value = objective(trial)
        except Exception as error:
            found = part.so_far()
            _tell(trial, found)
            if found is None or not found.refusals or not is_out_of_memory(error):
                raise
        else:
            _tell(trial, part.so_far())
            return value
        # Here and not above: the exception would keep the failed trial's tensors.
        gc.collect()
        raise optuna.TrialPruned(_explained(trial, found, enqueue=out_of_memory == "enqueue"))

    return run


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception, or one that it was raised from, is a framework's out-of-memory error."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if isinstance(one, MemoryError) or _SAYS.search(f"{type(one).__name__}: {one}"):
            return True
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return False


def _tell(trial: Any, found: Figures | None) -> None:  # noqa: ANN401 - an optuna.Trial
    if found is not None:
        trial.set_user_attr(PEAK_BYTES, found.peak_bytes)
        trial.set_user_attr(WAITED_S, found.waited_s)
        trial.set_user_attr(MOVED_BYTES, found.moved_out_bytes + found.moved_in_bytes)


def _explained(trial: Any, found: Figures, *, enqueue: bool) -> str:  # noqa: ANN401 - an optuna.Trial
    """Write down what a trial that ran out of memory needed, enqueue its retry, and return what is to be said."""
    trial.set_user_attr(NEEDED_BYTES, found.needed_bytes)
    what = f"out of memory: it needed at least {format_bytes(found.needed_bytes)}"
    if not enqueue or RETRY_OF in trial.user_attrs:
        return what
    attributes = {NEEDED_BYTES: found.needed_bytes, RETRY_OF: trial.number}
    trial.study.enqueue_trial(trial.params, user_attrs=attributes)
    return f"{what}; enqueued once more"
