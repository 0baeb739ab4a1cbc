"""What a job gets beside the others, as people write it: weight, priority, how much slower it may be, processors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from zico.base.errors import ConfigError, ProblemError
from zico.broker.protocol.messages import MAX_PRIORITY, MAX_SLO, MAX_WEIGHT, Share
from zico.scheduler import shares as rules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Value = TypeVar("Value")

VARIABLES = {
    "weight": "ZICO_JOB_WEIGHT",
    "priority": "ZICO_JOB_PRIORITY",
    "slo": "ZICO_JOB_SLO",
    "compute": "ZICO_JOB_COMPUTE",
}
"""Where a job finds its own, by the fields of ``Share``."""
NO_SLO = "none"


def parse_weight(text: str) -> float:
    """Return a weight.

    Raises:
        ConfigError: It is no number, or out of bounds.
    """
    weight = _number(text)
    if not 0 < weight <= MAX_WEIGHT:
        raise ConfigError(f"{text!r} is not a weight: give a number above 0, at most {MAX_WEIGHT:g}, such as 2")
    return weight


def parse_priority(text: str) -> int:
    """Return a priority.

    Raises:
        ConfigError: It is no whole number, or out of bounds.
    """
    priority = _number(text)
    if not abs(priority) <= MAX_PRIORITY or priority != int(priority):
        raise ConfigError(
            f"{text!r} is not a priority: give a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, such as 1"
        )
    return int(priority)


def parse_slo(text: str) -> float | None:
    """Return by how much a job may be slower than alone, ``None`` for ``none``: nothing is promised.

    Raises:
        ConfigError: It is no share, or out of bounds.
    """
    if text.strip().lower() == NO_SLO:
        return None
    slo = _of_one(text)
    if not 0 < slo <= MAX_SLO:
        raise ConfigError(f"{text!r} is not a guarantee: give how much slower than alone the job may be, such as 10%")
    return slo


def parse_compute(text: str) -> float:
    """Return the most that a job may use of its device's processors; 1 is all.

    Raises:
        ConfigError: It is no share, or out of bounds.
    """
    compute = _of_one(text)
    if not 0 < compute <= 1:
        raise ConfigError(f"{text!r} is not a share of the processors: give one above 0%, at most 100%, such as 30%")
    return compute


def _of_one(text: str) -> float:
    """Return a share that is written as such or in percent; no number if it is neither."""
    cleaned = text.strip()
    return _number(cleaned.removesuffix("%")) / (100 if cleaned.endswith("%") else 1)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


_PARSERS = {"weight": parse_weight, "priority": parse_priority, "slo": parse_slo, "compute": parse_compute}


def share_in(environ: Mapping[str, str]) -> Share:
    """Return what the variables of a job say of it.

    Raises:
        ConfigError: One of them says what cannot be.
    """
    found = {}
    for field, variable in VARIABLES.items():
        if text := environ.get(variable):
            try:
                found[field] = _PARSERS[field](text)
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error}") from None
    return Share(**found)  # type: ignore[arg-type] # each field by its own parser


def variables_of(share: Share) -> dict[str, str]:
    """Return the variables that say this of a job; what is as usual is left out."""
    fields = {field: getattr(share, field) for field in VARIABLES}
    usual = Share()
    return {VARIABLES[field]: repr(value) for field, value in fields.items() if value != getattr(usual, field)}


def shares_of(texts: Mapping[str, str], origins: Mapping[str, str], names: tuple[str, ...]) -> dict[str, Share]:
    """Return the share of each job.

    Args:
        texts: By the fields of ``Share``: ``NAME=VALUE`` for some of the jobs, separated by commas.
        origins: Where each text came from.
        names: Of all jobs.

    Raises:
        ConfigError: A text is no such list, names no job, has a value that cannot be, or
            contradicts another.
    """
    found: dict[str, dict[str, object]] = {name: {} for name in names}
    for field, text in texts.items():
        for name, value in values_by_name(text, origins[field], names, _PARSERS[field]).items():
            found[name][field] = value
    shares = {name: Share(**fields) for name, fields in found.items()}  # type: ignore[arg-type] # as above
    check(shares)
    return shares


def values_by_name(text: str, origin: str, names: tuple[str, ...], parse: Callable[[str], Value]) -> dict[str, Value]:
    """Return what a list of ``NAME=VALUE``, separated by commas, says of some of the jobs called ``names``.

    Raises:
        ConfigError: It is no such list, names no job, has a value that ``parse`` refuses, or gives
            a job two. The message begins with the text's origin.
    """
    found: dict[str, Value] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            _read_part(part, names, parse, found)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
    return found


def check(shares: Mapping[str, Share]) -> None:
    """See that what jobs are given can be granted together.

    Raises:
        ConfigError: It cannot, by the rules of ``zico.scheduler.shares``.
    """
    try:
        rules.check([_Asked(name, share) for name, share in shares.items()])
    except ProblemError as error:
        raise ConfigError(str(error)) from None


class _Asked:
    """A job as the scheduler's rules see it."""

    def __init__(self, name: str, share: Share) -> None:
        self.name = name
        self.weight = share.weight
        self.priority = share.priority
        self.floor = 0.0 if share.slo is None else rules.floor_of(share.slo)


def _read_part(part: str, names: tuple[str, ...], parse: Callable[[str], Value], found: dict[str, Value]) -> None:
    name, equals, text = part.rpartition("=")
    if not equals:
        raise ConfigError(f"{part!r} is not NAME=VALUE: give the job's name too, such as {names[0]}={part}")
    if name not in names:
        raise ConfigError(f"no job is called {name!r}: there are {', '.join(names)}")
    value = parse(text)
    if found.get(name, value) != value:
        raise ConfigError(f"{name} is given {found[name]} and {value}: give one")
    found[name] = value
