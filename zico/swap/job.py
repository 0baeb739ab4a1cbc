"""The job whose memory is saved, as those see it who plan and move: one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zico.swap.learning import Ended
    from zico.swap.mover import Figures
    from zico.swap.observed import Observed
    from zico.tiers.layout import Rates


class Job(Protocol):
    """What the job holds as it is now, and what it is told. Any thread asks; nothing here waits."""

    def cap_bytes(self) -> int:
        """Return what it may hold."""

    def live_bytes(self) -> int:
        """Return what its tensors take."""

    def has_room(self, size_bytes: int) -> bool:
        """Tell whether so much can be had without waiting.

        What nobody needs yet comes back only then: an allocation that waits for long takes memory
        that is not the job's to have.
        """

    def peak_regions(self) -> int:
        """Return the most regions that it has ever held."""

    def tick(self) -> int:
        """Return how many allocations and frees there have been."""

    def iteration(self) -> int:
        """Return how many iterations have ended."""

    def ended(self) -> Ended | None:
        """Return what the iteration that ended last did to memory; ``None``: that is not known."""

    def waited_ns(self) -> int:
        """Return for how long it has waited for memory."""

    def rates(self) -> Rates:
        """Return those of its tier, now."""

    def be_patient(self, thread: int) -> None:
        """Note which thread allocates for later, 0: what it allocates is needed now."""

    def publish(self, figures: Figures) -> None:
        """Note what has been moved, each time that changes; no two threads tell of it at a time."""

    def prepare(self, planner: str) -> None:
        """Get ready for a planner, ahead of the first iteration that is observed for it."""

    def follow(self, planner: str, note: str) -> None:
        """Note whose choice the next iterations follow.

        Args:
            planner: The planner's name.
            note: Why that is not the planner asked for, or plans for more than the job may hold;
                empty: neither.
        """

    def tell(self, seen: Observed) -> None:
        """Take in an iteration that plans are made for, once the margin of its plan stays."""
