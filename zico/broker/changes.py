"""What an observer changes while jobs run: the budget, and what single jobs get.

A budget that is lowered takes effect at the next request, and the memory comes back at the jobs' own pace; nobody is
stopped. One that is raised wakes whoever waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from zico.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.broker.members import Member
    from zico.broker.messages import Change
    from zico.pool.table import PoolTable

_OF_SHARE = ("weight", "priority", "slo")


def refusal(wanted: Change, header: Any, members: Sequence[Member]) -> str:  # noqa: ANN401 - the table's header
    """Return why the change cannot be made, in a sentence; empty if it can."""
    region_bytes = int(header["region_bytes"])
    most_bytes = int(header["n_regions"]) * region_bytes
    if wanted.budget_bytes is not msgspec.UNSET:
        if wanted.budget_bytes < region_bytes:
            return (
                f"a budget of {format_bytes(wanted.budget_bytes)} is below one region of {format_bytes(region_bytes)}"
            )
        if wanted.budget_bytes > most_bytes:
            return (
                f"a budget of {format_bytes(wanted.budget_bytes)} is above the {format_bytes(most_bytes)} that this "
                "pool was made for: give at most that, or begin the run with a larger --most"
            )
    changes_job = any(getattr(wanted, field) is not msgspec.UNSET for field in ("limit_bytes", *_OF_SHARE))
    if wanted.job is msgspec.UNSET:
        return "a limit, a weight, a priority or a guarantee is of one job: name it" if changes_job else ""
    if not any(member.name == wanted.job for member in members):
        there = ", ".join(dict.fromkeys(member.name for member in members))
        return f"no job is called {wanted.job!r}: " + (f"there are {there}" if there else "none has joined yet")
    if wanted.limit_bytes is not msgspec.UNSET and 0 < wanted.limit_bytes < region_bytes:
        return f"a limit of {format_bytes(wanted.limit_bytes)} is below one region of {format_bytes(region_bytes)}"
    return ""


def carry_out(wanted: Change, table: PoolTable, members: Sequence[Member]) -> None:
    """Make a change that ``refusal`` has nothing against."""
    if wanted.budget_bytes is not msgspec.UNSET:
        table.set_budget(wanted.budget_bytes // table.region_bytes)
    for member in members:
        if member.name != wanted.job:
            continue
        if wanted.limit_bytes is not msgspec.UNSET:
            table.set_limit(member.job, wanted.limit_bytes // table.region_bytes)
        given = {field: getattr(wanted, field) for field in _OF_SHARE}
        kept = {field: value for field, value in given.items() if value is not msgspec.UNSET}
        member.share = msgspec.structs.replace(member.share, **kept)
