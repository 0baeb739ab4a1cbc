"""The settings of a job's process: what its environment says, read once, checked, for all that need it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Any

from zico.base.errors import ConfigError
from zico.base.settings import (
    JOB_VARIABLE,
    OPS_VARIABLE,
    PARTS_VARIABLE,
    PLAN_VARIABLE,
    PROFILES_VARIABLE,
    RING_VARIABLE,
    RUN_VARIABLE,
    Setting,
    job_name,
    parsed,
)
from zico.base.units import format_bytes, parse_size
from zico.broker.protocol.messages import DEFAULT_SHARE, MAX_NAME_CHARS, MAX_RUN_CHARS, MAX_WAIT_S, Share, visible
from zico.broker.saving import DEFAULT_WISH, Wish, wish_in
from zico.broker.shares import share_in
from zico.heap.layout import GRANULE_BYTES
from zico.paging.layout import MOST_DEGREE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_RUN = re.compile(f"[0-9a-f]{{1,{MAX_RUN_CHARS}}}")


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """What the environment of a job's process says, but for whose process it is."""

    name: str = "job"
    run: str = ""
    """The ``zico run`` that started it, empty: none."""
    share: Share = DEFAULT_SHARE
    wish: Wish = DEFAULT_WISH
    heap: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the heap's parameters those that were given: ``threshold_bytes``, ``wait_limit_s``, ``spill_directory``."""
    spacing_bytes: int | None = None
    """On a GPU: freed on a stream between two marks; ``None``: by who else is there."""
    paging: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Of ``zico.paging.pager.PagedMemory``'s parameters those that were given: ``flags``, ``degree``."""
    window: str = ""
    """On a GPU: how large the window of a job that pages is; empty: by what is free."""
    ring: str = ""
    """The file to record events into, if any."""
    ops: bool = False
    """Whether operations are recorded too."""
    plans: bool = True
    """Whether the heap follows plans."""
    remembers: bool = True
    """Whether the job expects what it did in an earlier run, and keeps what it does in this one."""
    moves_context: bool = False
    """On a GPU: whether the CUDA context goes, too, where ``zico pause --move`` moves what the job keeps."""


def job_settings(environ: Mapping[str, str], script: str = "") -> JobSettings:
    """Return the settings of a job's process.

    Args:
        environ: Of the process.
        script: By whose name the job is called where none is given.

    Raises:
        ConfigError: One of them cannot be used; the message names the variable and the value.
    """
    parsers: dict[str, tuple[str, Callable[[str], Any]]] = {
        "threshold_bytes": ("ZICO_THRESHOLD", _parse_threshold),
        "wait_limit_s": ("ZICO_WAIT_LIMIT_S", _parse_wait_limit),
        "spill_directory": ("ZICO_SPILL_DIR", str),
        "spacing_bytes": ("ZICO_SPACING", _parse_spacing),
        "paging": (PARTS_VARIABLE, _parse_paging),
        "name": (JOB_VARIABLE, _parse_name),
        "run": (RUN_VARIABLE, _parse_run),
    }
    given = {
        field: parsed(Setting(environ[variable], variable), parse).value
        for field, (variable, parse) in parsers.items()
        if environ.get(variable)
    }
    return JobSettings(
        name=given.pop("name", None) or job_name(environ, script),
        run=given.pop("run", ""),
        share=share_in(environ),
        wish=wish_in(environ),
        spacing_bytes=given.pop("spacing_bytes", None),
        paging=given.pop("paging", {}),
        heap=given,
        window=environ.get("ZICO_PAGED_BYTES", ""),
        ring=environ.get(RING_VARIABLE, ""),
        ops=bool(environ.get(OPS_VARIABLE)),
        plans=environ.get(PLAN_VARIABLE) != "off",
        remembers=environ.get(PROFILES_VARIABLE) != "off",
        moves_context=environ.get("ZICO_MOVE_CONTEXT") == "on",
    )


def _parse_threshold(text: str) -> int:
    threshold_bytes = parse_size(text, whole_bytes=sys.maxsize)
    if threshold_bytes < GRANULE_BYTES:
        raise ConfigError(f"{text!r} is below what the pool can place: give {format_bytes(GRANULE_BYTES)} or more")
    return threshold_bytes


def _parse_name(text: str) -> str:
    name = visible(text)
    if len(name.encode()) > MAX_NAME_CHARS:
        raise ConfigError(f"{name!r} takes more than {MAX_NAME_CHARS} bytes: give a shorter name")
    return name


def _parse_run(text: str) -> str:
    if not _RUN.fullmatch(text):
        raise ConfigError(f"{text!r} is not what zico run gives its jobs: leave the variable out")
    return text


def _parse_spacing(text: str) -> int:
    return 0 if text.strip() == "0" else parse_size(text, whole_bytes=sys.maxsize)


def _parse_wait_limit(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) <= MAX_WAIT_S:
            return seconds
    raise ConfigError(f"{text!r} is not a number of seconds from 0 to {MAX_WAIT_S:g}: give one such as 600")


def _parse_paging(text: str) -> dict[str, int]:
    with contextlib.suppress(ValueError):
        given = dict(zip(("flags", "degree"), [int(number, 0) for number in text.split(":", 1)], strict=False))
        if 1 <= given.get("degree", 1) <= MOST_DEGREE:
            return given
    wanted = f"a number, or two as FLAGS:DEGREE with a degree from 1 to {MOST_DEGREE}"
    raise ConfigError(f"{text!r} is not {wanted}: give flags such as 0x7 or 0x7:32")
