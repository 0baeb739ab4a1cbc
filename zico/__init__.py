"""Let several training jobs share one device's memory inside one byte budget.

A script needs none of this under ``zico run``. A custom loop marks its iterations::

    for batch in data:
        with zico.iteration():
            train_on(batch)

Importing this module loads nothing else: it runs in every Python process below ``zico run``.
"""

TYPE_CHECKING = False  # type checkers take it for the one of typing, whose import would cost milliseconds
if TYPE_CHECKING:
    from zico.job.session import iteration, status, step

__version__ = "0.1.0"

__all__ = ["__version__", "iteration", "status", "step"]


def __getattr__(name: str) -> object:
    """Load the session's functions when they are first used."""
    if name in __all__:
        from zico.job import session

        return getattr(session, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
