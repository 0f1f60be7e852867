"""This package's store with everything below it, put together as the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from offload_strategy.config import OffloadConfig
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket
from offload_strategy.store.tiers import PathTier
from offload_strategy.telemetry import MoveRecord, Recorder
from offload_strategy.units import GiB

CLIENT = "optimizer"


class OurStore:
    """A store over one ssd tier, with the threads and block size that the config has by default.

    Args:
        directories: the paths of the tier.
        budget: bytes of host buffers.
        write_behind: bytes that may wait to be written.
        capacity: bytes of each path, or None for what is free.
        with_path_lock: whether reads take the path lock, which processes share.
        encryption: whether what is on the paths is encrypted.
        checksum: as `io.checksum` of the config.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        budget: int = 4 * GiB,
        write_behind: int = 4 * GiB,
        capacity: int | None = None,
        with_path_lock: bool = False,
        encryption: bool = False,
        checksum: Literal["auto", "full", "sampled", "off"] = "auto",
    ) -> None:
        io = OffloadConfig().io
        self._undo = ExitStack()
        with ExitStack() as undo:
            self.recorder = Recorder()
            self.pool = BufferPool(budget)
            undo.callback(self.pool.close)
            self.store = TensorStore(self.pool, self.recorder, write_behind=write_behind)
            cipher = BlockCipher(io.block_size) if encryption else None
            queues = []
            for directory in directories:
                region = Region(directory, "disk", capacity, direct=True)
                undo.callback(region.close)
                path_lock = PathLock(region.path) if with_path_lock else None
                if path_lock is not None:
                    undo.callback(path_lock.close)
                backend = create_backend(
                    io.backend, threads=io.threads_to_use(), block_size=io.block_size
                )
                undo.callback(backend.close)
                check = cipher or create_checksum(checksum, backend)
                queue = PathQueue(
                    region, backend, self.recorder, path_lock=path_lock, checksum=check
                )
                undo.callback(queue.close)
                queues.append(queue)
                if len(directories) > 1:
                    measured = probe(region, backend)
                    queue.bandwidth.seed({way: one.rate for way, one in measured.items()})
            self.tier = PathTier("disk", queues)
            undo.callback(self.store.close)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def buffers(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """Page-aligned buffers whose memory is there and whose bytes tell them apart."""
        made = [self.store.borrow(CLIENT, nbytes) for _ in range(count)]
        for number, buffer in enumerate(made):
            buffer.fill_(number % 251 + 1)
        return made

    def write(self, buffers: Sequence[torch.Tensor]) -> list[Ticket]:
        """Put buffers and wait until their bytes are on the path."""
        tickets = [self.store.put(buffer, CLIENT, [self.tier]) for buffer in buffers]
        self.store.wait_for_writes()
        return tickets

    def read(
        self,
        tickets: Sequence[Ticket],
        *,
        ahead: int,
        expected: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Get tickets in order and free each; as many as `ahead` are being loaded at a time.

        Args:
            tickets: what to read.
            ahead: how many loads are under way at most.
            expected: what must come back, byte by byte.
        """
        for ticket in tickets[:ahead]:
            self.store.prefetch(ticket)
        for number, ticket in enumerate(tickets):
            loaded = self.store.get(ticket)
            self.store.free(ticket)
            if expected is not None and not torch.equal(loaded, expected[number]):
                raise RuntimeError(f"ticket {number} came back with other bytes")
            del loaded
            if number + ahead < len(tickets):
                self.store.prefetch(tickets[number + ahead])

    def moves(self, since: float) -> list[MoveRecord]:
        """What moved since a time of `time.perf_counter()`."""
        return [move for move in list(self.recorder.moves) if move.queued_at >= since]
