"""Tickets of other processes on this machine, whose bytes are read where those processes have them.

A process opens the files of another by their descriptors in /proc, which needs the same user and
the same namespace of process numbers. The file stays as long as somebody has it open, also if its
own process ends before. What a process has told others of, it must not free before they are done
with it: its extent would get other bytes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.io.queues.checksums import Digests
from offload_strategy.io.queues.encryption import Tags
from offload_strategy.io.queues.moves import Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Extent, ExternalFile, Region
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket


class FileIdentity(NamedTuple):
    """An open file of a process; device and inode tell whether its descriptor is still that one."""

    process: int
    descriptor: int
    device: int
    inode: int
    tier: str
    path: str


class SharedStripe(NamedTuple):
    """A part of a ticket, in the file of this number; see `Stripe`."""

    file: int
    extent: Extent
    begin: int
    nbytes: int
    digests: Digests | Tags | None


class SharedTicket(NamedTuple):
    """Where the bytes of another process's ticket are: `nbytes` from `begin` on of its stripes."""

    begin: int
    nbytes: int
    stripes: tuple[SharedStripe, ...]


class SharedFile(ExternalFile):
    """The region of another process, which writes it while its extents are read here.

    Raises ConfigError if it cannot be opened.
    """

    def __init__(self, identity: FileIdentity) -> None:
        super().__init__(Path(f"/proc/{identity.process}/fd/{identity.descriptor}"), identity.tier)
        self.path = Path(identity.path)
        if (self._status.st_dev, self._status.st_ino) != (identity.device, identity.inode):
            self.close()
            raise ConfigError(f"process {identity.process} has closed its file in {self.path}")

    def check_unchanged(self) -> None:
        """Nothing: the process that has it does not change what others read."""


class SharedFiles:
    """The files of this process that others may read, and those of others, by rank.

    Args:
        store: has this process's tickets.
        regions: which may have tickets of streamed weights.
        open_file: returns the queue of another process's file; a ConfigError if it has none.
    """

    def __init__(
        self,
        store: TensorStore,
        regions: Sequence[Region],
        open_file: Callable[[FileIdentity], PathQueue],
    ) -> None:
        self._store = store
        self._regions = list(regions)
        self._open_file = open_file
        self._queues: dict[FileIdentity, PathQueue] = {}

    def identities(self) -> list[FileIdentity]:
        """Return the files of this process; none if there is one that others cannot open."""
        found = []
        for region in self._regions:
            try:
                status = os.fstat(region.fd)
            except OSError:  # its next transfer says more
                return []
            if not stat.S_ISREG(status.st_mode):
                return []
            place = (status.st_dev, status.st_ino, region.tier, str(region.path))
            found.append(FileIdentity(os.getpid(), region.fd, *place))
        return found

    def open(self, identities: Sequence[FileIdentity]) -> bool:
        """Open files of another process; return whether all of them can be read."""
        with suppress(OffloadError, OSError):
            for identity in identities:
                if identity not in self._queues:
                    self._queues[identity] = self._open_file(identity)
            return True
        return False

    def share(self, ticket: Ticket) -> SharedTicket | None:
        """Return where others find the bytes of a ticket, once written; None if on no path.

        Raises StorageError if they could not be written.
        """
        self._store.wait_for_writes(ticket)
        entry = ticket.entry
        stripes = []
        for stripe in entry.stripes:
            if stripe.queue.region not in self._regions:
                return None
            file = self._regions.index(stripe.queue.region)
            place = (stripe.extent, stripe.begin, stripe.nbytes, stripe.digests)
            stripes.append(SharedStripe(file, *place))
        return SharedTicket(entry.begin, entry.nbytes, tuple(stripes)) if stripes else None

    def adopt(
        self, identities: Sequence[FileIdentity], shared: SharedTicket, device: torch.device
    ) -> Ticket:
        """Return a ticket for bytes of a weight in opened files of another process."""
        stripes = [
            Stripe(self._queues[identities[each.file]], *each[1:]) for each in shared.stripes
        ]
        return self._store.adopt_stripes(stripes, shared.begin, shared.nbytes, "parameters", device)
