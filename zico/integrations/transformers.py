"""Hugging Face Trainer: a callback that adds to each log what the job has used of its pool."""

from __future__ import annotations

from typing import Any

from zico.integrations import first_of
from zico.integrations.figures import figures

TESTED_VERSION = "5.24"

transformers = first_of(("transformers",), "Hugging Face Transformers", "zico-memory[transformers]")


class ZicoCallback(transformers.TrainerCallback):  # type: ignore[misc,name-defined]  # known when this runs
    """Add ``zico_peak_bytes``, ``zico_waited_s`` and the bytes moved to each log of a Trainer.

    They stand in ``trainer.state.log_history`` and in what callbacks behind this one get. Each is
    that of this process since it joined the pool. Outside a pool the callback does nothing.
    """

    @classmethod
    def add_to(cls, trainer: Any) -> None:  # noqa: ANN401 - a transformers.Trainer
        """Add the callback before all others of a Trainer, so that reporters such as TensorBoard get the figures.

        ``Trainer(callbacks=[ZicoCallback()])`` puts it behind the reporters of ``report_to``.
        """
        trainer.callback_handler.callbacks.insert(0, cls())

    def on_log(
        self,
        args: Any,  # noqa: ANN401, ARG002 - as Transformers'
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401, ARG002
        logs: dict[str, Any] | None = None,
        **_: Any,  # noqa: ANN401
    ) -> None:
        """Add the figures so far."""
        found = figures()
        if found is None:
            return
        if logs is not None:
            logs.update(found.named())
        if state.log_history:  # the Trainer has copied the log there before
            state.log_history[-1].update(found.named())
