"""What can be swapped: memory that nobody reaches for between two uses."""

from __future__ import annotations

import abc
import enum


class Place(enum.IntEnum):
    """Where the contents are."""

    HERE = 0
    LEAVING = 1
    """Here, and being copied to the tier."""
    AWAY = 2
    """In the tier only; the memory is the pool's again."""
    COMING = 3
    """In the tier, and somebody is to bring them back."""


class Idle(abc.ABC):
    """A piece of memory that may be away between two uses; an adapter says what it is to its framework.

    All methods are called with the mover's lock held, but for ``settle``.
    """

    def __init__(self, size_bytes: int) -> None:
        """Describe memory that is here."""
        self.size_bytes = size_bytes
        self.ordinal = -1
        """Its number among those of its iteration, in the order in which they became idle."""
        self.place = Place.HERE
        self.ticket = -1
        """Of its contents in the tier, -1: none."""
        self.stays = False
        """The tier had no room for it."""
        self.departures = 0
        """Times it was sent, so that a copy is known to be of the last one."""
        self.is_begun = False
        """Somebody is bringing it back at this moment."""

    @abc.abstractmethod
    def lend(self) -> int:
        """Return its address if nobody else can reach it, so that it cannot be read or written meanwhile; else 0."""

    @abc.abstractmethod
    def let_go(self) -> None:
        """Free the memory."""

    @abc.abstractmethod
    def settle(self) -> int:
        """Get memory for the contents, which are not there yet; returns its address. May wait for memory."""

    @abc.abstractmethod
    def arrive(self) -> None:
        """Take over what ``settle`` got: the contents are there."""
