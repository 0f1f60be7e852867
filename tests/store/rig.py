"""A store over one ssd tier whose disk obeys the test, and what is asked of it."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, Tier
from offload_strategy.store.tiers import HostTier, PathTier
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.backends import ManualBackend, plain_region

CLIENT = "activations"


@dataclass
class Rig:
    directory: Path
    disk_bytes: int = 64 * MiB
    host_bytes: int = 0
    budget: int = 64 * MiB
    write_behind: int = 64 * MiB
    block_size: int = 1 * MiB
    paths: int = 1
    checksum: Literal["full", "sampled", "off"] = "off"
    encryption: bool = False
    recorder: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.pool = BufferPool(self.budget)
        self.store = TensorStore(self.pool, self.recorder, self.write_behind)
        cipher: Any = BlockCipher(self.block_size) if self.encryption else None
        self.regions = [plain_region(self.directory, self.disk_bytes) for _ in range(self.paths)]
        self.backends = [ManualBackend(block_size=self.block_size) for _ in range(self.paths)]
        self.check = cipher or create_checksum(self.checksum, self.backends[0])
        self.queues = [
            PathQueue(region, backend, self.recorder, checksum=self.check)
            for region, backend in zip(self.regions, self.backends, strict=True)
        ]
        # Most tests have one path.
        self.region, self.backend, self.queue = self.regions[0], self.backends[0], self.queues[0]
        self.disk = PathTier("nvme", self.queues)
        self.host = HostTier("host", self.host_bytes)
        self.tiers: Sequence[Tier] = [self.host, self.disk] if self.host_bytes else [self.disk]

    def put(self, payload: torch.Tensor, next_use: float | None = None) -> Ticket:
        [ticket] = self.store.put_all([payload], CLIENT, self.tiers, [next_use], False)
        return ticket

    def stored(self, payload: torch.Tensor) -> Ticket:
        """A ticket whose bytes are on the disk only."""
        ticket = self.put(payload)
        self.complete()
        return ticket

    def complete(self) -> None:
        while any(backend.waiting for backend in self.backends):
            for backend in self.backends:
                backend.complete_all()

    def at_once(self) -> None:
        """From now on the disk answers before it is asked twice."""
        self.complete()
        for backend in self.backends:
            backend.at_once = True

    def bytes_on_disk(self, ticket: Ticket) -> bytes:
        """What the files hold, read without the store."""
        return b"".join(
            os.pread(stripe.queue.region.fd, stripe.nbytes, stripe.extent.offset)
            for stripe in sorted(ticket.entry.stripes, key=lambda stripe: stripe.begin)
        )

    def overwrite(self, ticket: Ticket, image: bytes) -> None:
        """Change all bytes of a stored ticket behind the store's back."""
        for stripe in ticket.entry.stripes:
            part = image[stripe.begin : stripe.begin + stripe.nbytes]
            os.pwrite(stripe.queue.region.fd, part, stripe.extent.offset)

    def count(self, verb: str) -> int:
        return self.recorder.client_bytes[CLIENT, verb]

    def close(self) -> None:
        self.store.close()
        for backend in self.backends:
            backend.close()
        for region in self.regions:
            region.close()
        self.pool.close()
        for queue in self.queues:
            queue.close()


def meanwhile(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Make a call on another thread, which does not keep the process alive."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes in memory of their own, which begins with a page."""
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    generator = torch.Generator().manual_seed(seed)
    return memory[begin : begin + nbytes].random_(0, 256, generator=generator)


PAGE = PAGE_BYTES
