"""A heap over one ssd tier whose disk obeys the test, and what is asked of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload_strategy.heap import Heap, HostTier, PathTier, Ticket, Tier
from offload_strategy.memory import BufferPool
from offload_strategy.storage import Space
from offload_strategy.telemetry import Recorder
from offload_strategy.transfer import PathQueue
from offload_strategy.units import PAGE_BYTES, MiB
from tests.transfer.backends import ManualBackend, plain_space

CLIENT = "activations"


class ObedientBackend(ManualBackend):
    """Completes requests at once when `at_once` is set, with `error` if there is one."""

    def __init__(self, depth: int = 1, block_size: int = 1 * MiB) -> None:
        super().__init__(depth, block_size)
        self.at_once = False
        self.error: BaseException | None = None

    def submit(self, request: object) -> None:
        super().submit(request)  # type: ignore[arg-type]
        if self.at_once:
            self.complete(self.error, at=len(self.waiting) - 1)


@dataclass
class Rig:
    """A heap and everything below it."""

    directory: Path
    disk_bytes: int = 64 * MiB
    host_bytes: int = 0
    budget: int = 64 * MiB
    write_behind: int = 64 * MiB
    block_size: int = 1 * MiB
    recorder: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.pool = BufferPool(self.budget)
        self.heap = Heap(self.pool, self.recorder, self.write_behind)
        self.space: Space = plain_space(self.directory, self.disk_bytes)
        self.backend = ObedientBackend(block_size=self.block_size)
        self.queue = PathQueue(self.space, self.backend, self.recorder)
        self.disk = PathTier("nvme", [self.queue])
        self.host = HostTier("host", self.host_bytes)
        self.tiers: Sequence[Tier] = [self.host, self.disk] if self.host_bytes else [self.disk]

    def put(self, payload: torch.Tensor) -> Ticket:
        return self.heap.put(payload, CLIENT, self.tiers)

    def stored(self, payload: torch.Tensor) -> Ticket:
        """A ticket whose bytes are on the disk only."""
        ticket = self.put(payload)
        self.complete()
        return ticket

    def complete(self) -> None:
        self.backend.complete_all()

    def at_once(self) -> None:
        """From now on the disk answers before it is asked twice."""
        self.complete()
        self.backend.at_once = True

    def bytes_on_disk(self, ticket: Ticket) -> bytes:
        """What the file holds, read without the heap."""
        (stripe,) = ticket.entry.stripes
        return os.pread(self.space.fd, ticket.nbytes, stripe.extent.offset)

    def count(self, verb: str) -> int:
        return self.recorder.client_bytes(CLIENT, verb)

    def close(self) -> None:
        self.heap.close()
        self.backend.close()
        self.space.close()
        self.pool.close()


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, in memory of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


MakeRig = Callable[..., Rig]
PAGE = PAGE_BYTES
