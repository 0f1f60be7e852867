"""Every transition of [Note: states of a ticket], limits, and how tickets and stores end."""

import errno
import gc
import os
import threading
import weakref
from concurrent.futures import wait
from operator import attrgetter

import pytest
import torch

from offload_strategy.errors import OffloadError, StorageError, TierFullError
from offload_strategy.io.queues.moves import Latch
from offload_strategy.store import error_messages
from offload_strategy.store.ticket import TicketState
from offload_strategy.units import KiB, MiB
from tests.store.rig import PAGE, meanwhile, noise
from tests.support import raising

BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))
IN_MEMORY, LOADING, STORED = TicketState.IN_MEMORY, TicketState.LOADING, TicketState.STORED


# ---------------------------------------------------------------------- put
def test_what_a_host_tier_has_room_for_stays_where_it_is(make_rig):
    rig, payload = make_rig(host_bytes=1 * MiB), noise(10 * KiB)
    ticket = rig.put(payload)
    assert rig.store.get(ticket).data_ptr() == payload.data_ptr()
    assert rig.host.used_bytes == 10 * KiB
    assert rig.store.prefetch(ticket)
    rig.store.evict(ticket)
    assert ticket.state is IN_MEMORY
    assert not rig.backend.waiting
    assert rig.count("written") == rig.count("forwarded") == rig.count("read") == 0


def test_what_goes_to_a_disk_is_in_memory_until_its_last_block_is_written(make_rig):
    rig, payload = make_rig(block_size=PAGE), noise(3 * PAGE - 5)
    content, reference = payload.numpy().tobytes(), weakref.ref(payload)
    ticket = rig.put(payload)
    for blocks in (1, 2, 3):
        assert ticket.state is TicketState.WRITING
        assert rig.store.get(ticket).data_ptr() == payload.data_ptr()
        assert rig.store.prefetch(ticket)
        assert rig.count("forwarded") == blocks * len(payload)
        rig.backend.complete()
    del payload
    assert ticket.state is STORED
    rig.store.wait_for_writes()  # memory goes with the next call, on the caller's thread
    assert reference() is None
    assert rig.bytes_on_disk(ticket) == content
    assert (rig.count("written"), rig.count("read")) == (3 * PAGE - 5, 0)


def test_full_tiers_spill_into_the_next_and_the_last_one_says_so(make_rig):
    rig = make_rig(host_bytes=10 * KiB, disk_bytes=16 * KiB)
    tickets = [rig.put(noise(4 * KiB)) for _ in range(6)]
    assert [ticket.entry.tier.name for ticket in tickets] == ["host"] * 2 + ["nvme"] * 4
    with pytest.raises(TierFullError) as refused:
        rig.put(noise(4 * KiB))
    for figure in ("4 KiB", "activations", "host: 8 KiB of 10 KiB", "nvme: 16 KiB of 16 KiB"):
        assert figure in str(refused.value)
    assert rig.store.registry.live == 6
    # A smaller one still fits into the first.
    assert rig.put(noise(2 * KiB)).entry.tier.name == "host"
    rig.complete()
    del tickets[3]
    assert rig.put(noise(3 * KiB)).entry.tier.name == "nvme"
    rig.complete()


# ---------------------------------------------------------------------- failing to write
def test_a_failed_write_keeps_the_bytes_and_is_told_at_the_next_put(make_rig):
    rig, payload = make_rig(block_size=PAGE), noise(3 * PAGE)
    ticket, other = rig.put(payload), rig.put(noise(PAGE, seed=1))
    rig.backend.complete()
    rig.backend.complete(error=BROKEN)
    assert [request.nbytes for request in rig.backend.waiting] == [PAGE], "of the other alone"
    assert ticket.state is IN_MEMORY
    assert torch.equal(rig.store.get(ticket), payload)
    with pytest.raises(StorageError) as told:
        rig.put(noise(10))
    for part in ("'nvme'", "could not write 12 KiB", "activations", str(rig.region.path), "Input"):
        assert part in str(told.value)
    assert told.value.__cause__ is BROKEN
    rig.complete()
    with pytest.raises(StorageError, match="could not write"):
        rig.store.wait_for_writes()
    assert other.state is STORED
    assert rig.count("written") == PAGE
    # Its place on the disk is free again, the bytes are still there to be saved.
    assert rig.region.used_bytes == PAGE
    rig.store.evict(ticket)
    assert torch.equal(rig.store.take(ticket), payload)


def test_a_pause_waits_for_the_end_of_a_write(make_rig, monkeypatch):
    rig = make_rig()
    tickets = [rig.put(noise(PAGE)) for _ in range(2)]
    ends = [ticket.entry.move.ended for ticket in tickets]
    waited = []
    monkeypatch.setattr(Latch, "wait", lambda end, seconds: waited.append(end))
    rig.store.registry.pause()
    assert waited[0] in ends
    monkeypatch.undo()
    rig.complete()
    rig.store.wait_for_writes()


def test_a_write_that_failed_on_the_thread_that_trains_keeps_no_memory(rig, monkeypatch):
    def train():
        rig.put(rig.store.borrow("activations", 4 * KiB))

    monkeypatch.setattr(rig.backend, "submit", raising(RuntimeError("can't start new thread")))
    train()
    assert rig.store.registry.live == rig.pool.usage().requested_bytes == 0
    with pytest.raises(StorageError, match="can't start new thread"):
        train()


def test_of_a_write_that_fails_on_two_paths_no_error_keeps_the_frames_that_wrote(
    make_rig, monkeypatch
):
    rig, used = make_rig(paths=2, block_size=2 * MiB), []

    def submit(requests):
        rig.backends[0].complete(error=BROKEN)
        raise RuntimeError("can't start new thread")

    def train():
        local = noise(PAGE)
        used.append(weakref.ref(local))
        rig.put(rig.store.borrow("activations", 8 * MiB))

    monkeypatch.setattr(rig.backends[1], "submit", submit)
    # The thread that has seen the first error is about to cancel the rest.
    monkeypatch.setattr(rig.queues[1], "cancel", lambda part: None)
    gc.disable()
    try:
        train()
        rig.complete()
        assert used[0]() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- loading
def test_a_get_waits_for_a_load_that_is_under_way_and_hurries_it(make_rig, monkeypatch):
    rig = make_rig(block_size=PAGE)
    tickets = [rig.stored(noise(2 * PAGE, seed=index)) for index in range(3)]
    assert all(map(rig.store.prefetch, tickets))
    hurried, raise_priority = threading.Event(), rig.queue.raise_priority

    def hurry(part):
        raise_priority(part)
        hurried.set()

    monkeypatch.setattr(rig.queue, "raise_priority", hurry)
    reading = meanwhile(rig.store.get, tickets[2])
    assert hurried.wait(30)
    for _ in range(3):  # one block was under way before
        rig.backend.complete()
    assert torch.equal(reading.result(30), noise(2 * PAGE, seed=2))
    assert [ticket.state for ticket in tickets[:2]] == [LOADING] * 2
    assert rig.recorder.stall_seconds["activations"] > 0
    rig.complete()


def test_a_failed_read_is_told_and_may_be_tried_again(rig):
    ticket = rig.stored(noise(5000))
    rig.at_once()
    rig.backend.error = BROKEN
    for read in (rig.store.get, rig.store.private):
        with pytest.raises(StorageError) as told:
            read(ticket)
        for part in ("'nvme'", "could not read 4.9 KiB", "activations", str(rig.region.path)):
            assert part in str(told.value)
        assert told.value.__cause__ is BROKEN
        assert ticket.state is STORED
    rig.store.prefetch(ticket)
    del told
    BROKEN.__traceback__ = None  # its frames have the buffers
    gc.collect()
    assert rig.pool.usage().requested_bytes == 0
    rig.backend.error = None
    assert torch.equal(rig.store.get(ticket), noise(5000))


def test_evicting_frees_memory_but_not_what_a_reader_has(rig):
    ticket = rig.stored(noise(4 * KiB))
    rig.at_once()
    loaded = rig.store.get(ticket)
    rig.store.evict(ticket)
    assert ticket.state is STORED
    again = rig.store.get(ticket)
    assert again.data_ptr() != loaded.data_ptr()
    assert torch.equal(loaded, again)
    # What was loaded is handed over without another copy.
    assert rig.store.private(ticket).data_ptr() == again.data_ptr()
    assert ticket.state is STORED
    del loaded, again
    assert (rig.pool.usage().lent_bytes, rig.count("read")) == (0, 8 * KiB)


def test_taking_cancels_a_write_that_waits_and_waits_for_one_that_is_under_way(rig):
    first, second = rig.put(noise(4 * KiB)), rig.put(noise(8 * KiB))
    assert torch.equal(rig.store.take(second), noise(8 * KiB))
    taking = meanwhile(rig.store.take, first)
    assert not taking.done()
    rig.backend.complete()
    assert torch.equal(taking.result(30), noise(4 * KiB))
    assert not rig.backend.waiting
    assert first.state is second.state is TicketState.FREED
    assert rig.store.registry.live == rig.region.used_bytes == 0


# ---------------------------------------------------------------------- limits
@pytest.fixture
def reported(monkeypatch):
    """An event that is set when a wait is reported, which is soon here."""
    event, warning = threading.Event(), error_messages.logger.warning

    def report(*args):
        warning(*args)
        event.set()

    monkeypatch.setattr(error_messages, "PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(error_messages.logger, "warning", report)
    return event


def test_a_put_waits_and_says_where_when_too_much_waits_to_be_written(make_rig, reported, caplog):
    rig = make_rig(write_behind=8 * KiB)
    rig.put(noise(100 * KiB))  # one is always let through
    second = meanwhile(rig.put, noise(4 * KiB))
    assert reported.wait(30)
    assert f"100 KiB have been waiting to be written to {rig.directory} for 0 s" in caplog.text
    assert not second.done()
    rig.complete()
    assert second.result(30).state is not TicketState.FREED
    assert rig.recorder.stall_seconds["activations"] > 0.02
    rig.complete()


def test_a_disk_that_does_not_answer_is_reported(rig, reported, caplog):
    ticket = rig.stored(noise(4 * KiB))
    reading = meanwhile(rig.store.get, ticket)
    assert reported.wait(30)
    assert f"waiting for {rig.directory} to read 4 KiB for 0 s" in caplog.text
    rig.complete()
    assert torch.equal(reading.result(30), noise(4 * KiB))


def test_borrowing_waits_for_writes_to_give_memory_back(make_rig):
    rig = make_rig(budget=8 * KiB)
    ticket = rig.put(rig.store.borrow("optimizer", 8 * KiB).copy_(noise(8 * KiB)))
    borrowing = meanwhile(rig.store.borrow, "optimizer", 8 * KiB)
    assert not wait([borrowing], 0.1).done
    rig.complete()
    assert (borrowing.result(30).numel(), rig.pool.usage().peak_bytes) == (8 * KiB, 8 * KiB)
    assert ticket.state is STORED


# ---------------------------------------------------------------------- freeing
@pytest.mark.parametrize("how", ["free", "drop"])
@pytest.mark.parametrize("where", ["host", "queued", "stored", "loaded", "failed"])
def test_a_ticket_may_be_freed_in_every_state(make_rig, where, how):
    rig = make_rig(host_bytes=1 * MiB if where == "host" else 0)
    others = [rig.put(noise(10))] if where == "queued" else []
    ticket = rig.put(noise(4 * KiB))
    if where == "failed":
        rig.backend.complete(error=BROKEN)
    elif where in ("stored", "loaded"):
        rig.complete()
    if where == "loaded":
        rig.store.prefetch(ticket)
        rig.complete()
    if how == "free":
        rig.store.free(ticket)
        rig.store.free(ticket)
        for use in (rig.store.get, rig.store.prefetch, rig.store.take, rig.store.private):
            with pytest.raises(OffloadError, match=r"4 KiB of activations were freed"):
                use(ticket)
    del ticket
    assert (rig.store.registry.live, rig.region.used_bytes) == (len(others), PAGE * len(others))
    assert rig.host.used_bytes == 0
    rig.complete()
    assert rig.count("written") <= 4 * KiB
    assert rig.pool.usage().lent_bytes == 0


@pytest.mark.parametrize(
    "lock", ["store.registry.lock", "queue._lock", "recorder._lock", "pool._lock"]
)
@pytest.mark.parametrize("host_bytes", [1 * MiB, 0], ids=["in memory", "on their way to the disk"])
def test_tickets_may_be_collected_in_the_middle_of_anything(make_rig, lock, host_bytes):
    rig = make_rig(host_bytes=host_bytes)

    def collect():
        for seed in range(5):
            cycle = [rig.put(noise(4 * KiB, seed))]
            cycle.append(cycle)
        del cycle
        with attrgetter(lock)(rig):
            gc.collect()

    meanwhile(collect).result(30)  # TimeoutError: deadlock
    assert rig.store.registry.live == 0
    rig.complete()
    assert rig.region.used_bytes == rig.host.used_bytes == 0


# ---------------------------------------------------------------------- closing
def test_closing_keeps_the_bytes_of_writes_that_it_gives_up_and_says_what_else_is_gone(make_rig):
    rig = make_rig(host_bytes=PAGE, block_size=PAGE)
    kept = rig.put(noise(PAGE, 0))
    loading, stored = rig.stored(noise(3 * PAGE)), rig.stored(noise(2 * PAGE))
    rig.store.prefetch(loading)
    written, waiting = rig.put(noise(PAGE, 1)), rig.put(noise(PAGE, 2))
    closing = meanwhile(rig.store.close)
    for _ in range(2):
        rig.backend.complete()  # the blocks that were under way
    closing.result(30)
    assert not rig.backend.waiting
    assert torch.equal(rig.store.get(kept), noise(PAGE, 0))
    assert torch.equal(rig.store.get(waiting), noise(PAGE, 2))
    assert written.state in (STORED, IN_MEMORY)
    for ticket, size in ((loading, "12 KiB"), (stored, "8 KiB")):
        for use in (rig.store.get, rig.store.prefetch):
            with pytest.raises(OffloadError, match=rf"{size} of activations are gone.*closed"):
                use(ticket)
    for use in (lambda: rig.put(noise(10)), rig.store.wait_for_writes):
        with pytest.raises(OffloadError, match="closed"):
            use()
    rig.store.free(loading)
    del ticket, stored, kept, written, waiting
    assert rig.store.registry.live == rig.region.used_bytes == rig.host.used_bytes == 0
