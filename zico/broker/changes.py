"""What an observer changes while jobs run: the budget, and what single jobs get.

A budget that is lowered takes effect at the next request, and the memory comes back at the jobs' own pace; nobody is
stopped. One that is raised wakes whoever waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from zico.broker.shares import check
from zico.errors import ConfigError
from zico.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.broker.members import Member
    from zico.broker.messages import Change, Share
    from zico.pool.table import PoolTable

_OF_SHARE = ("weight", "priority", "slo")


def refusal(wanted: Change, header: Any, members: Sequence[Member]) -> str:  # noqa: ANN401 - the table's header
    """Return why the change cannot be made, in a sentence; empty if it can."""
    region_bytes = int(header["region_bytes"])
    refused = ""
    if wanted.budget_bytes is not msgspec.UNSET:
        refused = _refused_budget(wanted.budget_bytes, region_bytes, int(header["n_regions"]) * region_bytes)
    return refused or _refused_for_job(wanted, region_bytes, members)


def _refused_budget(budget_bytes: int, region_bytes: int, most_bytes: int) -> str:
    if budget_bytes < region_bytes:
        return f"a budget of {format_bytes(budget_bytes)} is below one region of {format_bytes(region_bytes)}"
    if budget_bytes > most_bytes:
        return (
            f"a budget of {format_bytes(budget_bytes)} is above the {format_bytes(most_bytes)} that this pool was made "
            "for: give at most that, or begin the run with a larger --most"
        )
    return ""


def _refused_for_job(wanted: Change, region_bytes: int, members: Sequence[Member]) -> str:
    if wanted.job is msgspec.UNSET:
        for_job = any(getattr(wanted, field) is not msgspec.UNSET for field in ("limit_bytes", *_OF_SHARE))
        return "a limit, a weight, a priority or a guarantee is of one job: name it" if for_job else ""
    if not any(member.name == wanted.job for member in members):
        there = ", ".join(dict.fromkeys(member.name for member in members))
        return f"no job is called {wanted.job!r}: " + (f"there are {there}" if there else "none has joined yet")
    if wanted.limit_bytes is not msgspec.UNSET and 0 < wanted.limit_bytes < region_bytes:
        return f"a limit of {format_bytes(wanted.limit_bytes)} is below one region of {format_bytes(region_bytes)}"
    try:
        check({member.name: _share_after(wanted, member) for member in members})
    except ConfigError as error:
        return str(error)
    return ""


def _share_after(wanted: Change, member: Member) -> Share:
    """Return what a member is to get once the change is made."""
    if member.name != wanted.job:
        return member.share
    given = {field: getattr(wanted, field) for field in _OF_SHARE}
    return msgspec.structs.replace(
        member.share, **{field: value for field, value in given.items() if value is not msgspec.UNSET}
    )


def carry_out(wanted: Change, table: PoolTable, members: Sequence[Member]) -> None:
    """Make a change that ``refusal`` has nothing against."""
    if wanted.budget_bytes is not msgspec.UNSET:
        table.set_budget(wanted.budget_bytes // table.region_bytes)
    for member in members:
        if member.name != wanted.job:
            continue
        if wanted.limit_bytes is not msgspec.UNSET:
            table.jobs[member.job]["auto"] = 0
            # No more than the pool has: the table's profiles have 32 bits for regions.
            regions = min(wanted.limit_bytes // table.region_bytes, int(table.header["n_regions"]))
            table.set_limit(member.job, regions)
        member.share = _share_after(wanted, member)
