"""Lightning: a callback that logs at the end of each epoch what the job has used of its pool."""

from __future__ import annotations

from typing import Any

from zico.integrations import first_of
from zico.integrations.figures import figures

TESTED_VERSION = "2.6"

pytorch = first_of(("lightning.pytorch", "pytorch_lightning"), "Lightning", "zico-memory[lightning]")


class ZicoCallback(pytorch.Callback):  # type: ignore[misc,name-defined]  # the module is known when this runs
    """Log ``zico_peak_bytes``, ``zico_waited_s`` and the bytes moved at the end of each training epoch.

    They go where ``log_dict`` goes: to loggers and into ``trainer.callback_metrics``. Each is that
    of this process since it joined the pool; of several ranks, loggers get those of the first.
    Outside a pool the callback does nothing.
    """

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401, ARG002 - as Lightning's
        """Log the figures so far."""
        found = figures()
        if found is not None:
            values = {name: float(value) for name, value in found.named().items()}
            # Both together: ranks exchange nothing, since some may be in no pool, and Lightning does not ask for it.
            pl_module.log_dict(values, sync_dist=True, rank_zero_only=True)
