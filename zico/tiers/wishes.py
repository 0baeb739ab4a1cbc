"""Which tiers somebody wants: ``memory:2GiB,file:20GiB`` is memory first and a file for what does not fit there."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from zico.driver.host import HostDriver
from zico.errors import ConfigError
from zico.tiers.layout import FILE, KIND_NAMES, MAX_TIERS
from zico.units import parse_size

ACCEPTED = f"up to {MAX_TIERS} of {', '.join(KIND_NAMES)}, the fastest first, each with a size or without"
_MEMORY_SHARE = 2
"""Without a size memory is at most half of what is free: running out of it kills somebody."""


@dataclasses.dataclass(frozen=True, slots=True)
class TierWish:
    """One tier: its kind, one of ``KIND_NAMES``, and what it may hold."""

    kind: str
    size_bytes: int


def spill_directory(wanted: str | None = None) -> str:
    """Return where files of tiers are: as wanted, else ``ZICO_SPILL_DIR``, else the place for large temporary files."""
    large = "/var/tmp"  # noqa: S108 - the file system hierarchy standard, 5.15
    return wanted or os.environ.get("ZICO_SPILL_DIR") or (large if Path(large).is_dir() else "/tmp")  # noqa: S108


def parse_tiers(text: str, directory: str | None = None) -> tuple[TierWish, ...]:
    """Return the tiers that ``text`` names, in order.

    Args:
        text: Kinds, separated by commas, each with ``:SIZE`` or without. Without a size memory is half of what is free
            on the machine now, a file what is free on its disk. A percentage is one of the machine's memory or of the
            disk.
        directory: Where files are to be; ``None``: see ``spill_directory``.

    Raises:
        ConfigError: There is no such kind or size, a kind comes twice, or the directory cannot be looked at.
    """
    wishes = tuple(_parse_one(part.strip(), spill_directory(directory)) for part in text.split(","))
    kinds = [wish.kind for wish in wishes]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"{text!r} names a tier twice: give {ACCEPTED}")
    return wishes


def _parse_one(text: str, directory: str) -> TierWish:
    kind, colon, size = text.partition(":")
    kind = kind.strip().lower()
    if kind not in KIND_NAMES:
        raise ConfigError(f"{text!r} is not a tier: give {ACCEPTED}, such as memory:2GiB,file:20GiB")
    whole_bytes, free_bytes = _room(kind, directory)
    if not colon:
        return TierWish(kind, free_bytes)
    try:
        return TierWish(kind, parse_size(size, whole_bytes=whole_bytes))
    except ConfigError as error:
        raise ConfigError(f"tier {text!r}: {error}") from error


def _room(kind: str, directory: str) -> tuple[int, int]:
    """Return what there is for tiers of a kind, and what one gets without a size, in bytes."""
    if kind == KIND_NAMES[FILE]:
        try:
            disk = shutil.disk_usage(directory)
        except OSError as error:
            raise ConfigError(f"no file can be in {directory!r}: {error.strerror}. Set ZICO_SPILL_DIR") from error
        return disk.total, disk.free
    machine = HostDriver()
    total = machine.total_bytes()
    free = machine.free_bytes()
    return total, (total if free is None else free) // _MEMORY_SHARE
