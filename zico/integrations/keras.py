"""Keras, with any backend: a callback that adds to each epoch's logs what the job has used of its pool."""

from __future__ import annotations

from typing import Any

from zico.integrations import first_of
from zico.integrations.figures import figures

TESTED_VERSION = "3.15"

keras = first_of(("keras",), "Keras", "zico-memory[tensorflow]")


class ZicoCallback(keras.callbacks.Callback):  # type: ignore[misc,name-defined]  # the module is known when this runs
    """Add ``zico_peak_bytes``, ``zico_waited_s`` and the bytes moved to each epoch's logs.

    They stand in the history that ``fit`` returns, and in what callbacks behind this one get. Each
    is that of this process since it joined the pool. Outside a pool the callback does nothing.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - as Keras'
        """Add the figures so far."""
        found = figures()
        if found is not None and logs is not None:
            logs.update(found.named())
