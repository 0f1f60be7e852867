"""Disks that fail below the store: its bytes, its tickets and its buffers afterwards."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.disks import LoopDisk, Throttle, loop_disk, throttle
from benchmarks.faults.scenes import cut, fill
from offload_strategy.errors import StorageError, TierFullError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.queues.path_queue import PathQueue, create_checksum
from offload_strategy.io.regions.region import Region
from offload_strategy.store import tiers as dealing
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.store.tiers import PathTier
from offload_strategy.telemetry import Recorder
from offload_strategy.units import KiB, MiB
from tests.store.rig import CLIENT, noise

#: Without capacity a space takes what is free but 64 MiB.
DISK_BYTES = 96 * MiB


class Store:
    """A store over real disks, each a tier of its own, and all of them as one tier."""

    def __init__(
        self, *directories: Path, write_behind: int = 64 * MiB, checksum: bool = False
    ) -> None:
        self.pool, self.recorder = BufferPool(64 * MiB), Recorder()
        self.store = TensorStore(self.pool, self.recorder, write_behind)
        self.backend = create_backend("posix", threads=2, block_size=64 * KiB)
        self.regions = [Region(path, f"nvme{i}", 16 * MiB) for i, path in enumerate(directories)]
        check = create_checksum() if checksum else None
        self.queues = [
            PathQueue(region, self.backend, self.recorder, checksum=check)
            for region in self.regions
        ]
        self.tiers = [PathTier(queue.tier, [queue]) for queue in self.queues]
        self.together = PathTier("+".join(queue.tier for queue in self.queues), self.queues)

    def stored(self, seed: int, nbytes: int = 1 * MiB) -> Ticket:
        ticket = self.store.put(noise(nbytes, seed), CLIENT, self.tiers)
        self.store.wait_for_writes()
        assert ticket.state is TicketState.STORED
        return ticket

    def holds(self, ticket: Ticket, seed: int) -> bool:
        return torch.equal(self.store.get(ticket), noise(ticket.nbytes, seed))

    def used(self) -> int:
        return sum(region.used_bytes for region in self.regions)

    def close(self) -> None:
        self.store.close()
        self.backend.close()
        for region in self.regions:
            region.close()
        self.pool.close()


Disks = Callable[[], LoopDisk]
MakeStore = Callable[..., Store]


@pytest.fixture
def disks(place: Path) -> Iterator[Disks]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(loop_disk(place, DISK_BYTES))


@pytest.fixture
def make_store(disks: Disks) -> Iterator[MakeStore]:
    """Stores are closed before their disks."""
    made: list[Store] = []

    def make(*paths: Path, **options: Any) -> Store:
        made.append(Store(*paths, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


# ---------------------------------------------------------------------- EIO


def test_a_ticket_on_two_disks_needs_both(
    disks: Disks, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "STRIPE_BYTES", 1)
    good, bad = disks(), disks()
    store = make_store(good.directory, bad.directory)
    ticket = store.store.put(noise(4 * MiB, 1), CLIENT, [store.together])
    store.store.wait_for_writes()
    assert {stripe.queue for stripe in ticket.entry.stripes} == set(store.queues)
    cut(bad)
    with pytest.raises(StorageError, match=r"'nvme0' and 'nvme1': could not read 4 MiB"):
        store.store.get(ticket)
    second = store.store.put(noise(4 * MiB, 2), CLIENT, [store.together])
    with pytest.raises(StorageError, match="could not write 4 MiB"):
        store.store.wait_for_writes()
    assert store.holds(second, 2)
    store.store.free(ticket)
    assert store.used() == 0
    assert store.holds(second, 2)


def test_a_path_that_cannot_grow_takes_nothing_of_the_others_along(
    disks: Disks, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "STRIPE_BYTES", 1)
    good, bad = disks(), disks()
    bad.mount("remount", "errors=remount-ro")
    store = make_store(good.directory, bad.directory)
    Path("/sys/fs/ext4", bad.device.name, "trigger_fs_error").write_text("tried")
    with pytest.raises(StorageError, match=rf"'nvme1': cannot grow the file in {bad.directory}"):
        store.store.put(noise(4 * MiB), CLIENT, [store.together])
    assert store.used() == 0
    assert store.store.live_tickets == 0


# ---------------------------------------------------------------------- full
def test_what_does_not_fit_any_more_goes_to_the_next_disk(
    disks: Disks, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_strategy.io.regions.region.GROWTH_BYTES", 1 * MiB)
    first, second = disks(), disks()
    store = make_store(first.directory, second.directory)
    tickets = [store.stored(1)]
    fill(first)
    tickets.append(store.stored(2))
    assert [ticket.entry.tier for ticket in tickets] == store.tiers
    fill(second)
    with pytest.raises(TierFullError) as full:
        store.store.put(noise(4 * MiB), CLIENT, store.tiers)
    for disk in (first, second):
        assert f"{disk.directory} has 0 B available" in str(full.value)
    assert all(store.holds(ticket, seed) for seed, ticket in enumerate(tickets, start=1))


# ---------------------------------------------------------------------- stalls
@pytest.fixture
def slow(disks: Disks) -> Iterator[tuple[LoopDisk, Throttle]]:
    disk = disks()
    with throttle() as limits, limits.entered():
        yield disk, limits
        limits.limit(disk)


def test_closing_while_writes_stall_waits_for_what_is_under_way_only(
    slow: tuple[LoopDisk, Throttle], make_store: MakeStore
) -> None:
    disk, limits = slow
    store = make_store(disk.directory)
    limits.limit(disk, read=64 * KiB, write=64 * KiB)
    tickets = [store.store.put(noise(4 * MiB, seed), CLIENT, store.tiers) for seed in range(3)]
    begin = time.perf_counter()
    store.close()
    # Two blocks of 64 KiB are under way; all of it would take three minutes.
    assert time.perf_counter() - begin < 15
    assert len(tickets) == 3


@pytest.mark.alone
def test_too_many_stalled_writes_say_where_and_how_long(
    slow: tuple[LoopDisk, Throttle],
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("offload_strategy.store.error_messages.PATIENCE_SECONDS", 0.6)
    disk, limits = slow
    store = make_store(disk.directory, write_behind=1 * MiB)
    limits.limit(disk, read=64 * KiB, write=64 * KiB)
    first = store.store.put(noise(1 * MiB, 1), CLIENT, store.tiers)
    lift = threading.Timer(1.0, limits.limit, (disk,))
    lift.start()
    with caplog.at_level(logging.WARNING, "offload_strategy"):
        second = store.store.put(noise(1 * MiB, 2), CLIENT, store.tiers)
    lift.join()
    assert f"have been waiting to be written to {disk.directory} for 1 s" in caplog.text
    assert store.holds(first, 1)
    assert store.holds(second, 2)
