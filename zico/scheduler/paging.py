"""Managed memory in the simulator: more is granted than there is, and what is touched and elsewhere is brought in.

Theory of operation
    Frameworks keep what they once had, so a tenant holds its peak; so many of those regions are resident. An iteration
    touches what it keeps once forward and once backward, and every other region when it is filled and when it is used
    for the last time: where the profile rises, and where it falls. Of the regions touched in a step the tenant's share
    that is not resident faults; for those that come others go, first of tenants that yield, then of those that do not
    work, the longest ago first, then of all that work, in proportion.

Guarantees
    * Resident regions never exceed the budget once a step has begun since it was lowered.

Known limitations
    * Which of a tenant's regions are resident is not known, only how many. A driver that evicts the least recently
      used of a loop larger than memory loses more.
    * A region is filled or used by a step as a whole, and computing goes on while nothing is brought in: a kernel that
      reads while it writes, or prefetching, is not told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled, keep_out_of_line
from zico.scheduler.grants import hold
from zico.scheduler.tenants import FOREVER, present_in, profile_of, step_ends_ns, tenant_of

if TYPE_CHECKING:
    from zico.scheduler.tenants import RunRecord

_NOTHING = 1e-9  # regions


@compiled
def page_step(run: RunRecord, number: int) -> None:
    """Let a tenant have all that its step holds, and take the time for what has to be brought in."""
    keep_out_of_line()
    tenant = tenant_of(run, number)
    profile = profile_of(tenant)
    last = profile.n_steps - 1
    level = profile.level[tenant.step]
    before = profile.level[tenant.step - 1] if tenant.step > 0 else tenant.keeps
    after = profile.level[tenant.step + 1] if tenant.step < last else tenant.keeps
    share = float(step_ends_ns(tenant) - profile.step_ns[tenant.step]) / float(max(1, profile.duration_ns))
    touched = max(0, level - before) + max(0, level - after) + 2.0 * tenant.keeps * share
    grown = max(0, level - tenant.held)
    old = min(max(0.0, touched - grown), float(tenant.held))
    missing = old * (1.0 - tenant.resident / tenant.held) if tenant.held > 0 else 0.0
    if grown > 0:
        hold(run, number, level)
    evicted = _bring_in(run, number, missing + grown)
    run.faulted += missing
    tenant.delay_ns += round(missing * run.fault_ns + evicted * run.copy_ns)
    tenant.worked_ns = run.now_ns


@compiled
def page_out_all(run: RunRecord, number: int) -> None:
    """Forget a tenant's pages."""
    keep_out_of_line()
    tenant = tenant_of(run, number)
    run.resident -= tenant.resident
    tenant.resident = 0.0


@compiled
def _bring_in(run: RunRecord, number: int, regions: float) -> float:
    """Make so many more regions of a tenant resident; returns how many others had to go."""
    tenant = tenant_of(run, number)
    regions = min(regions, float(run.budget))
    evicted = min(run.resident, max(0.0, regions - (run.budget - run.resident)))
    if evicted > _NOTHING:
        _evict(run, number, evicted)
    regions = min(regions, tenant.held - tenant.resident)
    tenant.resident += regions
    run.resident += regions
    return evicted


@compiled
def _evict(run: RunRecord, number: int, regions: float) -> None:
    """Send so many regions out, those of whom they are missed least first."""
    for stays in range(2):
        while regions > _NOTHING:
            idle = _longest_idle(run, number, 1 - stays)
            if idle < 0:
                break
            regions -= _send_out(run, idle, regions)
        regions -= _send_out_alike(run, 1 - stays, regions)


@compiled
def _longest_idle(run: RunRecord, number: int, yields: int) -> int:
    """Return who has pages and has not worked for the longest, of all but one; below 0: nobody."""
    found, since_ns = -1, FOREVER
    for other in present_in(run):
        tenant = tenant_of(run, other)
        idle = other != number and not tenant.busy and tenant.yields == yields and tenant.resident > _NOTHING
        if idle and tenant.worked_ns < since_ns:
            found, since_ns = other, tenant.worked_ns
    return found


@compiled
def _send_out(run: RunRecord, number: int, regions: float) -> float:
    """Send out so many of a tenant's regions, or all; returns how many."""
    tenant = tenant_of(run, number)
    gone = min(regions, tenant.resident)
    tenant.resident -= gone
    run.resident -= gone
    return gone


@compiled
def _send_out_alike(run: RunRecord, yields: int, regions: float) -> float:
    """Send out so many regions of all, each in proportion to what it has; returns how many."""
    there = 0.0
    for other in present_in(run):
        tenant = tenant_of(run, other)
        there += tenant.resident if tenant.yields == yields else 0.0
    if regions <= _NOTHING or there <= _NOTHING:
        return 0.0
    share = min(1.0, regions / there)
    for other in present_in(run):
        tenant = tenant_of(run, other)
        if tenant.yields == yields:
            _send_out(run, other, tenant.resident * share)
    return share * there
