"""Let several training jobs share one device's memory inside one byte budget.

A script needs none of this under ``zico run``. A custom loop marks its iterations::

    for batch in data:
        with zico.iteration():
            train_on(batch)

Without ``zico run`` a script says which framework it shares, first of all, or ``zico.join()``::

    import zico.adapters.torch

Importing this module loads nothing else: it runs in every Python process below ``zico run``.
"""

TYPE_CHECKING = False  # type checkers take it for the one of typing, whose import would cost milliseconds
if TYPE_CHECKING:
    from zico.job.joining import join, leave
    from zico.job.session import iteration, status, step

__version__ = "0.1.0"

__all__ = ["__version__", "iteration", "join", "leave", "status", "step"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from zico.job import joining, session

        return getattr(joining if name in {"join", "leave"} else session, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
