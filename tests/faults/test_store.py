"""Disks that fail below the store: its bytes, its tickets and its buffers afterwards."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.disks import LoopDisk, Throttle, loop_disk, throttle
from benchmarks.faults.scenes import answers, cut, fill, kill_worker
from benchmarks.faults.subject import threads
from offload_strategy.errors import CorruptDataError, StorageError, TierFullError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.store import tiers as dealing
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.store.tiers import PathTier
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES, KiB, MiB
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
def test_a_write_that_failed_leaves_the_bytes_in_memory(
    disks: Disks, make_store: MakeStore
) -> None:
    disk = disks()
    store = make_store(disk.directory)
    before = store.stored(1)
    cut(disk)
    ticket = store.store.put(noise(1 * MiB, 2), CLIENT, store.tiers)
    with pytest.raises(StorageError, match=f"'nvme0': could not write 1 MiB .*{disk.directory}"):
        store.store.wait_for_writes()
    assert ticket.state is TicketState.IN_MEMORY
    assert store.holds(ticket, 2)
    with pytest.raises(StorageError, match="could not write 1 MiB"):
        store.store.put(noise(10, 3), CLIENT, store.tiers)
    assert store.used() == before.nbytes, "the extent of the failed write was not given back"


def test_a_read_that_failed_fails_each_time_and_lends_no_buffer(
    disks: Disks, make_store: MakeStore
) -> None:
    disk = disks()
    store = make_store(disk.directory)
    ticket = store.stored(1)
    held = store.pool.usage().requested_bytes
    cut(disk)
    out = torch.empty(ticket.nbytes, dtype=torch.uint8)
    for read in (store.store.get, store.store.private, lambda t: store.store.read_into(t, out)):
        with pytest.raises(StorageError, match="'nvme0': could not read 1 MiB") as failed:
            read(ticket)
        assert isinstance(failed.value.__cause__, OSError)
        assert failed.value.__cause__.errno == errno.EIO
        del failed
        assert ticket.state is TicketState.STORED
    assert store.store.prefetch(ticket)
    with pytest.raises(StorageError, match="could not read"):
        store.store.get(ticket)
    assert store.pool.usage().requested_bytes == held
    store.store.free(ticket)
    assert store.used() == 0


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


# ---------------------------------------------------------------------- wrong bytes, odd answers
def test_only_the_ticket_with_the_flipped_byte_is_refused(
    disks: Disks, make_store: MakeStore
) -> None:
    pytest.importorskip("xxhash")
    store = make_store(disks().directory, checksum=True)
    tickets = [store.stored(seed) for seed in range(3)]
    (stripe,) = tickets[1].entry.stripes
    fd, place = store.regions[0].fd, stripe.extent.offset + 512 * KiB
    with mmap.mmap(-1, PAGE_BYTES) as page:
        os.preadv(fd, [page], place)
        page[77] ^= 1
        os.pwritev(fd, [page], place)
    with pytest.raises(
        CorruptDataError, match=r"'nvme0' at /.*: 64 KiB at offset \d+ are not .*checksum"
    ):
        store.store.get(tickets[1])
    assert tickets[1].state is TicketState.STORED
    assert store.holds(tickets[0], 0)
    assert store.holds(tickets[2], 2)


def test_threads_that_die_lose_no_request(disks: Disks, make_store: MakeStore) -> None:
    store = make_store(disks().directory)
    tickets = [store.stored(seed) for seed in range(4)]
    refused = []
    with answers(_slowly):
        for _ in range(5):
            assert all(store.store.prefetch(ticket) for ticket in tickets)
            time.sleep(0.002)
            for thread in threads():
                kill_worker(thread)
            for seed, ticket in enumerate(tickets):
                try:
                    assert store.holds(ticket, seed)
                except StorageError as error:
                    refused.append(str(error))
                store.store.evict(ticket)
    assert refused, "no thread died while it moved a block"
    assert [text for text in refused if "SystemExit" not in text] == []
    assert all(store.holds(ticket, seed) for seed, ticket in enumerate(tickets))
    ticket = store.stored(9)
    assert store.holds(ticket, 9)


def _slowly(call: Callable[..., int], fd: int, views: list[memoryview], offset: int) -> int:
    """A call after which the thread is in Python for a moment, where it can be ended."""
    done = call(fd, views, offset)
    time.sleep(0.001)
    return done
