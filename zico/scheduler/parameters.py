"""What a policy or a device model can be told, as ``NAME:KEY=VALUE,KEY=VALUE``: declared as data."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING

from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TIMES_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}


class Unit(enum.Enum):
    """What a value is, in the words of an error."""

    TIME = "time: give a number and one of ns, us, ms, s, min"
    SHARE = "share: give a number from 0 to 1, or a percentage"
    COUNT = "count: give a whole number from 0 on"
    CHOICE = "choice"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One thing that can be told."""

    name: str
    default: str
    unit: Unit
    meaning: str
    choices: tuple[str, ...] = ()
    least: str = ""
    """No value below this one; nothing: 0."""

    def parse(self, text: str) -> float:
        """Return the value that machine code reads: nanoseconds, a share, a count or the number of a choice.

        Raises:
            ConfigError: The text is no such value.
        """
        if self.unit is Unit.CHOICE:
            if text not in self.choices:
                raise ConfigError(
                    f"{self.name}={text} is not a {self.unit.value}: give one of {', '.join(self.choices)}"
                )
            return float(self.choices.index(text))
        value = _number(text, self.unit)
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{self.name}={text} is not a {self.unit.value}, as in {self.name}={self.default}")
        if self.least and value < _number(self.least, self.unit):
            raise ConfigError(f"{self.name}={text} is too little: give {self.least} or more")
        return value


def _number(text: str, unit: Unit) -> float:
    """Return the value of a text in nanoseconds, a share or a count; NaN if it is none."""
    try:
        match unit:
            case Unit.TIME:
                suffix = next((name for name in ("ns", "us", "ms", "min", "s") if text.endswith(name)), "")
                return float(text.removesuffix(suffix)) * _TIMES_NS[suffix]
            case Unit.SHARE:
                share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
                return share if share <= 1 else math.nan
            case _:
                return float(int(text))
    except (ValueError, KeyError):
        return math.nan


def split(text: str) -> tuple[str, dict[str, str]]:
    """Return a name and what it is told.

    Raises:
        ConfigError: What follows the name is not of the form ``KEY=VALUE,KEY=VALUE``, or names a
            key twice.
    """
    name, _colon, rest = text.partition(":")
    told: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"{name}: {part!r} is not a parameter: give KEY=VALUE, as in {name}:KEY=VALUE,KEY=VALUE")
        if key in told:
            raise ConfigError(f"{name}: {key} is given twice, as {told[key]} and as {value}: give it once")
        told[key] = value
    return name, told


def values(name: str, parameters: Sequence[Parameter], told: Mapping[str, str]) -> tuple[float, ...]:
    """Return all parameters' values in their order, the defaults of those that nothing is said of.

    Raises:
        ConfigError: There is no such parameter, or a value cannot be used; the message starts with
            the name.
    """
    unknown = [key for key in told if key not in {parameter.name for parameter in parameters}]
    if unknown:
        known = ", ".join(f"{parameter.name}={parameter.default}" for parameter in parameters)
        those = f"it has {known}" if known else "it has none"
        raise ConfigError(f"{name} has no parameter {unknown[0]!r}: {those}")
    try:
        return tuple(parameter.parse(told.get(parameter.name, parameter.default)) for parameter in parameters)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
