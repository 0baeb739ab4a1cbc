"""What an observer changes while jobs run: the budget, and what single jobs get.

A budget that is lowered takes effect at the next request, and the memory comes back at the jobs'
own pace; nobody is stopped. One that is raised wakes whoever waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from zico.base.errors import ConfigError
from zico.base.units import format_bytes
from zico.broker.shares import check
from zico.pool.layout import Paused, SaveMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.broker.members import Member
    from zico.broker.protocol.messages import Change, Share
    from zico.broker.views import Record
    from zico.pool.table import PoolTable

_OF_SHARE = ("weight", "priority", "slo")


def refusal(wanted: Change, header: Any, jobs: Record, members: Sequence[Member]) -> str:  # noqa: ANN401 - a record
    """Return why the change cannot be made, in a sentence; empty if it can."""
    region_bytes = int(header["region_bytes"])
    refused = ""
    if wanted.budget_bytes is not msgspec.UNSET:
        shared_bytes = int(header["shared"]) * region_bytes
        most_bytes = int(header["n_regions"]) * region_bytes
        refused = _refused_budget(wanted.budget_bytes, region_bytes, most_bytes, shared_bytes)
    refused = refused or _refused_for_job(wanted, region_bytes, jobs, members)
    return refused or _refused_pause(wanted, members, jobs, on_gpu=bool(header["on_timeline"]))


def _refused_budget(budget_bytes: int, region_bytes: int, most_bytes: int, shared_bytes: int) -> str:
    if budget_bytes < region_bytes:
        return f"a budget of {format_bytes(budget_bytes)} is below one region of {format_bytes(region_bytes)}"
    if budget_bytes < shared_bytes + region_bytes:
        return (
            f"a budget of {format_bytes(budget_bytes)} has no room beside the {format_bytes(shared_bytes)} of frozen "
            "memory that jobs share until they end: give more"
        )
    if budget_bytes > most_bytes:
        return (
            f"a budget of {format_bytes(budget_bytes)} is above the {format_bytes(most_bytes)} that this pool was made "
            "for: give at most that, or begin the run with a larger --most"
        )
    return ""


def _refused_for_job(wanted: Change, region_bytes: int, jobs: Record, members: Sequence[Member]) -> str:
    if wanted.job is msgspec.UNSET:
        for_job = any(getattr(wanted, field) is not msgspec.UNSET for field in ("limit_bytes", "paused", *_OF_SHARE))
        return "a limit, a weight, a priority, a guarantee or a pause is of one job: name it" if for_job else ""
    if not any(_is_meant(wanted, member) for member in members):
        if wanted.pid is not msgspec.UNSET:
            return f"no process {wanted.pid} of {wanted.job} is in the pool: zico status shows who is"
        there = ", ".join(dict.fromkeys(member.name for member in members))
        return f"no job is called {wanted.job!r}: " + (f"there are {there}" if there else "none has joined yet")
    if wanted.limit_bytes is not msgspec.UNSET and 0 < wanted.limit_bytes < region_bytes:
        return f"a limit of {format_bytes(wanted.limit_bytes)} is below one region of {format_bytes(region_bytes)}"
    try:
        places = _places_of(wanted, jobs, members)
        changed_last = sorted(members, key=lambda member: member.job in places)  # processes of one name may differ
        check({member.name: _share_after(wanted, member, places) for member in changed_last})
    except ConfigError as error:
        return str(error)
    return ""


def _refused_pause(wanted: Change, members: Sequence[Member], jobs: Record, *, on_gpu: bool) -> str:
    if wanted.paused is msgspec.UNSET:
        return "only what a job keeps that is paused can be moved: pause it" if wanted.move else ""
    name = wanted.job if wanted.pid is msgspec.UNSET else f"{wanted.job}/{wanted.pid}"
    those = [member for member in members if _is_meant(wanted, member) and not member.leaving]
    if not those:
        return f"{name} is ending, and begins no iteration any more"
    now = [int(jobs[member.job]["paused"]) for member in those]
    if not wanted.paused:
        return "" if any(now) else f"{name} is not paused"
    if wanted.move and on_gpu and any(jobs[member.job]["save"] == SaveMode.PAGE for member in those):
        return (
            f"{name} cannot move what it keeps, because its memory is the driver's to move (--save page): "
            "pause it without --move"
        )
    holds = wanted.move and any(jobs[member.job]["held"] for member in those)  # it may try again
    if not holds and all(how >= (Paused.MOVES if wanted.move else Paused.STAYS) for how in now):
        return f"{name} is paused already: zico resume {name} lets it go on"
    return ""


def _is_meant(wanted: Change, member: Member) -> bool:
    return member.name == wanted.job and wanted.pid in (msgspec.UNSET, member.pid)


def _share_after(wanted: Change, member: Member, places: set[int]) -> Share:
    """Return what a member is to get once the change is made, for those at these places."""
    if member.job not in places:
        return member.share
    given = {field: getattr(wanted, field) for field in _OF_SHARE}
    return msgspec.structs.replace(
        member.share, **{field: value for field, value in given.items() if value is not msgspec.UNSET}
    )


def carry_out(wanted: Change, table: PoolTable, members: Sequence[Member]) -> None:
    """Make a change that ``refusal`` has nothing against."""
    if wanted.budget_bytes is not msgspec.UNSET:
        table.set_budget(wanted.budget_bytes // table.region_bytes)
    places = _places_of(wanted, table.jobs, members)
    for member in members:
        member.share = _share_after(wanted, member, places)
        if _is_meant(wanted, member) and wanted.limit_bytes is not msgspec.UNSET:
            table.jobs[member.job]["auto"] = 0
            # No more than the pool has: the table's profiles have 32 bits for regions.
            regions = min(wanted.limit_bytes // table.region_bytes, int(table.header["n_regions"]))
            table.set_limit(member.job, regions)
    if wanted.paused is not msgspec.UNSET:
        for place in places:
            if wanted.paused:
                table.pause(place, move=wanted.move)
            else:
                table.resume(place)


def _places_of(wanted: Change, jobs: Record, members: Sequence[Member]) -> set[int]:
    """Return the places of the processes that a change names, and of all ranks that begin iterations with them."""
    own = {member.job for member in members if _is_meant(wanted, member)}
    groups = {int(jobs[place]["group"]) for place in own} - {0}
    return own | {one.job for one in members if int(jobs[one.job]["group"]) in groups}


def concerned(wanted: Change, jobs: Record, members: Sequence[Member]) -> int:
    """Return how many processes of jobs a change is for: a limit is each process's own, ranks share the rest."""
    if any(getattr(wanted, field) is not msgspec.UNSET for field in ("paused", *_OF_SHARE)):
        return len(_places_of(wanted, jobs, members))
    return sum(_is_meant(wanted, member) for member in members)
