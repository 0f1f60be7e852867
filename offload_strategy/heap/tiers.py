"""Tiers: where tickets may be, fastest first."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload_strategy.storage import Extent, Space
from offload_strategy.transfer import PathQueue


@dataclass(eq=False)
class HostTier:
    """Host memory: a ticket here stays where it is (or in a host buffer, when it was on a device).

    Args:
        name: from the config.
        capacity: bytes that tickets may hold here.
    """

    name: str
    capacity: int
    used_bytes: int = field(default=0, init=False)

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more would fit."""
        return self.used_bytes + nbytes <= self.capacity

    def claim(self, nbytes: int) -> bool:
        """Take `nbytes` of the capacity, if they are there."""
        if not self.has_room(nbytes):
            return False
        self.used_bytes += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """Give `nbytes` of the capacity back."""
        self.used_bytes -= nbytes


@dataclass(eq=False)
class PathTier:
    """A directory on a disk, with the queue that moves bytes to and from it."""

    name: str
    space: Space
    queue: PathQueue

    @property
    def capacity(self) -> int:
        """Bytes at most."""
        return self.space.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes in extents."""
        return self.space.used_bytes

    def claim(self, nbytes: int) -> Extent | None:
        """An extent for `nbytes`, or None when the tier is full."""
        return self.space.allocate(nbytes)


Tier = HostTier | PathTier
