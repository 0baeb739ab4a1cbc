"""What a job does when its own peak exceeds what it may hold, as people write it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, get_args

from zico.base.errors import ConfigError
from zico.base.settings import Setting, parse_switch, parsed
from zico.base.units import format_bytes, parse_size
from zico.broker.protocol.messages import MAX_SIZE_BYTES, SaveMode
from zico.broker.shares import values_by_name
from zico.planning.saving.registry import DEVICE_PLANNERS, OF_FILES, PAGERS
from zico.planning.saving.registry import JOB_PLANNERS as PLANNERS

if TYPE_CHECKING:
    from collections.abc import Mapping

MODES: tuple[SaveMode, ...] = get_args(SaveMode)
"""In the order of ``zico.pool.layout.SaveMode``."""
VARIABLES = {
    "save": "ZICO_JOB_SAVE",
    "limit": "ZICO_JOB_LIMIT",
    "tier": "ZICO_TIER",
    "share_frozen": "ZICO_JOB_SHARE_FROZEN",
}
"""Where a job finds its own."""

SWAPPING = frozenset({"torch"})
"""Frameworks whose adapters can let tensors leave and come back."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """How one job is to go on with less memory than it would take alone."""

    save: SaveMode | None = None
    """``None``: nothing was said; the job saves from when it runs out of memory, if its framework can swap."""
    limit_bytes: int = 0
    """What it may hold, 0: as much as the budget has."""
    tier: str = ""
    """Where memory goes, as ``zico.tiers.destinations`` reads it; empty: what is usual."""
    planner: str = ""
    """Who chooses what leaves: one of ``PLANNERS`` for a job that swaps, of ``PAGERS`` for one that pages.

    Empty: who usually does.
    """
    share_frozen: bool = False
    """Whether its frozen memory is held once together with other jobs' that is equal."""


DEFAULT_WISH = Wish()


def parse_way(text: str) -> str:
    """Return the name of a mode, of a planner for jobs that swap, or of a system as which jobs page.

    Raises:
        ConfigError: There is none of that name.
    """
    if text in {*MODES, *PLANNERS, *PAGERS}:
        return text
    raise ConfigError(
        f"{text!r} is not a way to save memory: give one of {', '.join(MODES)}, "
        f"a planner for swap: {', '.join(PLANNERS)}, or a system for page: {', '.join(PAGERS)}"
    )


def _wish(way: str, limit_bytes: int, tier: str, origin: str, *, share_frozen: bool) -> Wish:
    """Return the wish of a job that is to go on in some way; an empty one: nothing was said. The tier has an origin."""
    if way == OF_FILES and tier and not any(part.strip().startswith("file") for part in tier.split(",")):
        raise ConfigError(f"{origin}: {tier!r} has no file, and {way} pages files: leave it out, or give file")
    mode = next((mode for mode in MODES if way == mode), None)
    if mode is None and way:
        return Wish("page" if way in PAGERS else "swap", limit_bytes, tier, planner=way, share_frozen=share_frozen)
    return Wish(mode, limit_bytes, tier, share_frozen=share_frozen)


def served_on(kind: str, save: SaveMode, framework: str) -> SaveMode:
    """Return what a job does that wishes to save so, on a device of a kind (``host`` or ``cuda``).

    On a GPU a job pages, or swaps where its framework can, or waits.
    """
    return save if kind == "host" or save == "page" or framework in SWAPPING else "none"


def check_device(kind: str, wishes: Mapping[str, Wish], origins: Mapping[str, str]) -> None:
    """Refuse what a device's jobs cannot do.

    Raises:
        ConfigError: A job on a GPU is to follow a planner that encodes tensors. Or it is to page as
            a published system does.
    """
    origin = origins["save"]
    for name, wish in wishes.items():
        if kind != "host" and wish.planner in PAGERS:
            raise ConfigError(
                f"{origin}: {name} cannot page as {wish.planner} does on a GPU, whose faults no program sees: give page"
            )
        if kind != "host" and wish.planner and wish.planner not in DEVICE_PLANNERS:
            raise ConfigError(
                f"{origin}: {name} cannot follow {wish.planner} on a GPU, where nothing is encoded: "
                f"give one of {', '.join(DEVICE_PLANNERS)}"
            )


def wish_in(environ: Mapping[str, str]) -> Wish:
    """Return what the variables of a job say of it.

    Raises:
        ConfigError: One of them says what cannot be.
    """
    texts = {field: environ.get(variable, "") for field, variable in VARIABLES.items()}
    try:
        way = parse_way(texts["save"]) if texts["save"] else ""
    except ConfigError as error:
        raise ConfigError(f"{VARIABLES['save']}: {error}") from None
    try:
        limit_bytes = _own_limit(texts["limit"])
    except ConfigError as error:
        raise ConfigError(f"{VARIABLES['limit']}: {error}") from None
    if texts["tier"]:
        _check_tier(texts["tier"], VARIABLES["tier"])
    shares = _switched(texts["share_frozen"], VARIABLES["share_frozen"])
    return _wish(way, limit_bytes, texts["tier"], VARIABLES["tier"], share_frozen=shares)


def _switched(text: str, origin: str) -> bool:
    return parsed(Setting(text, origin), parse_switch).value


def _own_limit(text: str) -> int:
    """Return what a job may hold by its own variable, 0: as much as the budget has."""
    if text.strip().lower() in {"", "none"}:
        return 0
    if "%" in text:
        raise ConfigError(f"{text!r} is a share, and a job does not know of what: give a size such as 2GiB")
    return parse_size(text, whole_bytes=MAX_SIZE_BYTES)


def variables_of(wish: Wish) -> dict[str, str]:
    """Return the variables that say this of a job; what is as usual is left out."""
    texts = {
        "save": wish.planner or wish.save or "",
        "limit": f"{wish.limit_bytes}B" if wish.limit_bytes else "",
        "tier": wish.tier,
        "share_frozen": "1" if wish.share_frozen else "",
    }
    return {VARIABLES[field]: text for field, text in texts.items() if text}


def wishes_of(
    texts: Mapping[str, str],
    origins: Mapping[str, str],
    names: tuple[str, ...],
    budget_bytes: int,
    largest: tuple[str, int] | None = None,
) -> dict[str, Wish]:
    """Return the wish of each job on one device.

    Args:
        texts: ``save``: a mode for all jobs, or ``NAME=MODE`` for some of them, separated by
            commas; ``limit``: ``NAME=SIZE`` likewise; ``tier`` and ``share_frozen``: for all jobs.
        origins: Where each text came from.
        names: Of all jobs.
        budget_bytes: What a limit in percent is a share of.
        largest: Of several devices the one with the largest budget, and that budget: a limit is not
            above it. ``None``: there is one device.

    Raises:
        ConfigError: A text is no such list, names no job, or has a value that cannot be.
    """
    everybody = texts.get("save", "")
    if everybody and "=" not in everybody:
        modes = _of_all(everybody, origins["save"], names)
    else:
        modes = values_by_name(everybody, origins.get("save", ""), names, parse_way)
    limits = values_by_name(
        texts.get("limit", ""), origins.get("limit", ""), names, lambda text: _limit(text, budget_bytes, largest)
    )
    tier = texts.get("tier", "")
    if tier:
        _check_tier(tier, origins["tier"])
    origin = origins.get("tier", "")
    shares = _switched(texts.get("share_frozen", ""), origins.get("share_frozen", ""))
    return {name: _wish(modes.get(name, ""), limits.get(name, 0), tier, origin, share_frozen=shares) for name in names}


def _of_all(text: str, origin: str, names: tuple[str, ...]) -> dict[str, str]:
    try:
        return dict.fromkeys(names, parse_way(text.strip()))
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _check_tier(text: str, origin: str) -> None:
    from zico.tiers.destinations import parse_tiers  # needs NumPy

    try:
        parse_tiers(text)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _limit(text: str, budget_bytes: int, largest: tuple[str, int] | None) -> int:
    is_share = text.strip().endswith("%") or text.strip().lower() == "none"
    size_bytes = parse_size(text, whole_bytes=budget_bytes if largest is None or is_share else MAX_SIZE_BYTES)
    if largest is not None and size_bytes > largest[1]:
        raise ConfigError(
            f"{text!r} is {format_bytes(size_bytes)}, more than any device has: the largest budget is "
            f"{format_bytes(largest[1])}, of {largest[0]}: give no more"
        )
    if size_bytes == 0:
        raise ConfigError(f"a limit of {text} is nothing: give what the job may hold, such as 2GiB or 60%")
    return size_bytes
