"""Numbers as people write them: byte sizes, and back, and whole numbers."""

from __future__ import annotations

import re

from zico.base.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

# As in `docker --memory`, `ulimit` and `dd`: a bare letter, with or without "iB"/"B", is a power of
# 1024.
_FACTORS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<percent>%)|(?P<prefix>[KMGT]?)(?:i?B)?)", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
"""A number of at most 18 digits. Longer ones are beyond every range, and ``int`` refuses thousands."""
ACCEPTED_SIZES = "a size such as 512MiB, 2G or 1.5GiB, a share of the device's memory such as 50%, or none"


def parse_size(text: str, *, whole_bytes: int) -> int:
    """Return the bytes that ``text`` names.

    Args:
        text: A number with ``K``, ``M``, ``G`` or ``T``, a percentage of ``whole_bytes``, or
            ``none`` for all of it. Letters are powers of 1024; ``iB`` or ``B`` may follow.
        whole_bytes: The device's memory, in bytes.

    Raises:
        ConfigError: The text is none of these, is not positive, or exceeds ``whole_bytes``.
    """
    cleaned = text.strip()
    if cleaned.lower() == "none":
        return whole_bytes
    match = _SIZE.fullmatch(cleaned)
    if match is None:
        raise ConfigError(f"{text!r} is not a size: give {ACCEPTED_SIZES}")
    number = float(match["number"])
    scaled = whole_bytes * number / 100 if match["percent"] else number * _FACTORS[match["prefix"].upper()]
    if scaled > whole_bytes:  # before it becomes an integer: enough digits make an infinity
        raise ConfigError(
            f"{text!r} is {format_bytes(scaled)}, more than the device's {format_bytes(whole_bytes)}: "
            f"give {ACCEPTED_SIZES}"
        )
    size_bytes = int(scaled)
    if size_bytes <= 0:
        raise ConfigError(f"{text!r} is {size_bytes} bytes: give more than zero, {ACCEPTED_SIZES}")
    return size_bytes


def unit_of(size_bytes: float) -> tuple[int, str]:
    """Return the largest power of 1024 that leaves at least one of a size, and what it is called."""
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next((pair for pair in units if abs(size_bytes) >= pair[0]), (1, "B"))


def format_bytes(size_bytes: float) -> str:
    """Return ``size_bytes`` in the largest power of 1024 that leaves at least one, as ``1.5 GiB``."""
    factor, unit = unit_of(size_bytes)
    value = size_bytes / factor
    is_whole = factor == 1 or value >= 100 or value == int(value)  # noqa: PLR2004
    return f"{value:.0f} {unit}" if is_whole else f"{value:.1f} {unit}"


_TIME = re.compile(r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s?)?", re.ASCII)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
MAX_TIME_S = 366 * 86400


def parse_time(text: str) -> float:
    """Return the seconds that ``text`` names: ``8h``, ``90m``, ``1h30m``, ``2d``, or seconds as they are.

    Raises:
        ConfigError: The text is none of these, is not positive, or is more than a year.
    """
    match = _TIME.fullmatch(text.strip().lower())
    parts = match.groupdict(default="") if match is not None else {}
    seconds = sum(int(number[:12]) * _SECONDS[unit] for unit, number in parts.items() if number)
    if not 0 < seconds <= MAX_TIME_S:
        raise ConfigError(f"{text!r} is not a time: give more than zero and at most a year, such as 8h, 90m or 1h30m")
    return float(seconds)


def parse_whole(text: str, least: int, most: int) -> int | None:
    """Return the whole number that a text is, ``None`` if it is none from ``least`` to ``most``."""
    if _WHOLE.fullmatch(text) is None:
        return None
    number = int(text)
    return number if least <= number <= most else None
