"""Every transition of [Note: states of a ticket], one after the other."""

from __future__ import annotations

import errno
import gc
import os
import weakref

import pytest
import torch

from offload_strategy.errors import StorageError, TierFullError
from offload_strategy.store.ticket import TicketState
from offload_strategy.units import KiB, MiB
from tests.store.rig import PAGE, meanwhile, noise

BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


# ---------------------------------------------------------------------- put
def test_what_a_host_tier_has_room_for_stays_where_it_is(make_rig):
    rig = make_rig(host_bytes=1 * MiB)
    payload = noise(10 * KiB)
    ticket = rig.put(payload)
    assert ticket.state is TicketState.IN_MEMORY
    assert rig.store.get(ticket).data_ptr() == payload.data_ptr()
    assert rig.host.used_bytes == 10 * KiB
    assert rig.store.prefetch(ticket)
    rig.store.evict(ticket)
    assert ticket.state is TicketState.IN_MEMORY
    assert not rig.backend.waiting
    assert rig.count("written") == rig.count("forwarded") == rig.count("read") == 0


def test_what_goes_to_a_disk_is_in_memory_until_its_last_block_is_written(make_rig):
    rig = make_rig(block_size=PAGE)
    payload = noise(3 * PAGE - 5)
    content = payload.numpy().tobytes()
    reference = weakref.ref(payload)
    ticket = rig.put(payload)
    del payload
    for _ in range(3):
        assert ticket.state is TicketState.WRITING
        assert reference() is not None
        rig.backend.complete()
    assert ticket.state is TicketState.STORED
    rig.store.wait_for_writes()  # memory goes with the next call, on the caller's thread
    assert reference() is None
    assert rig.bytes_on_disk(ticket) == content
    assert rig.count("written") == 3 * PAGE - 5


def test_full_tiers_spill_into_the_next_and_the_last_one_says_so(make_rig):
    rig = make_rig(host_bytes=10 * KiB, disk_bytes=16 * KiB)
    tickets = [rig.put(noise(4 * KiB)) for _ in range(6)]
    assert [ticket.entry.tier.name for ticket in tickets] == ["host"] * 2 + ["nvme"] * 4
    with pytest.raises(TierFullError) as refused:
        rig.put(noise(4 * KiB))
    for figure in ("4 KiB", "activations", "host: 8 KiB of 10 KiB", "nvme: 16 KiB of 16 KiB"):
        assert figure in str(refused.value)
    assert rig.store.live_tickets == 6
    # A smaller one still fits into the first.
    assert rig.put(noise(2 * KiB)).entry.tier.name == "host"
    rig.complete()
    del tickets[3]
    assert rig.put(noise(3 * KiB)).entry.tier.name == "nvme"
    rig.complete()


# ---------------------------------------------------------------------- forwarding
def test_reading_what_is_being_written_returns_the_bytes_in_memory(rig):
    payload = noise(10 * KiB)
    ticket = rig.put(payload)
    assert rig.store.get(ticket).data_ptr() == payload.data_ptr()
    assert rig.store.prefetch(ticket)
    assert ticket.state is TicketState.WRITING
    assert rig.count("forwarded") == 10 * KiB
    assert rig.count("read") == 0
    rig.complete()
    assert ticket.state is TicketState.STORED


# ---------------------------------------------------------------------- failing to write
def test_a_failed_write_keeps_the_bytes_and_is_told_at_the_next_put(make_rig):
    rig = make_rig(block_size=PAGE)
    payload = noise(3 * PAGE)
    ticket, other = rig.put(payload), rig.put(noise(PAGE, seed=1))
    rig.backend.complete()
    rig.backend.complete(error=BROKEN)
    assert ticket.state is TicketState.IN_MEMORY
    assert torch.equal(rig.store.get(ticket), payload)
    with pytest.raises(StorageError) as told:
        rig.put(noise(10))
    message = str(told.value)
    for part in ("'nvme'", "could not write 12 KiB", "activations", str(rig.region.path), "Input"):
        assert part in message
    assert told.value.__cause__ is BROKEN
    rig.complete()
    with pytest.raises(StorageError, match="could not write"):
        rig.store.wait_for_writes()
    assert other.state is TicketState.STORED
    # Its place on the disk is free again, the bytes are still there to be saved.
    assert rig.region.used_bytes == PAGE
    rig.store.evict(ticket)
    assert torch.equal(rig.store.take(ticket), payload)


def test_a_write_that_failed_on_the_thread_that_trains_keeps_no_memory(rig, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    def train():
        rig.put(rig.store.borrow("activations", 4 * KiB))

    monkeypatch.setattr(rig.backend, "submit", refuse)
    train()
    assert rig.store.live_tickets == rig.pool.usage().requested_bytes == 0
    with pytest.raises(StorageError, match="can't start new thread"):
        train()


# ---------------------------------------------------------------------- loading
def test_a_get_waits_for_a_load_that_is_under_way_and_hurries_it(make_rig):
    rig = make_rig(block_size=PAGE)
    tickets = [rig.stored(noise(2 * PAGE, seed=index)) for index in range(3)]
    for ticket in tickets:
        assert rig.store.prefetch(ticket)
    hurried = rig.hurried()
    reading = meanwhile(rig.store.get, tickets[2])
    assert hurried.wait(30)
    rig.backend.complete()  # was under way before
    for _ in range(2):
        rig.backend.complete()
    assert torch.equal(reading.result(30), noise(2 * PAGE, seed=2))
    assert [ticket.state for ticket in tickets[:2]] == [TicketState.LOADING] * 2
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
        assert ticket.state is TicketState.STORED
    rig.store.prefetch(ticket)
    del told
    BROKEN.__traceback__ = None  # its frames have the buffers
    gc.collect()
    assert rig.pool.usage().requested_bytes == 0
    rig.backend.error = None
    assert torch.equal(rig.store.get(ticket), noise(5000))


def test_a_prefetch_without_memory_does_nothing_and_a_get_goes_beyond(make_rig):
    rig = make_rig(budget=8 * KiB)
    ticket = rig.stored(noise(4 * KiB))
    acquired = [rig.store.borrow("optimizer", 4 * KiB) for _ in range(2)]
    assert not rig.store.prefetch(ticket)
    assert ticket.state is TicketState.STORED
    rig.at_once()
    assert torch.equal(rig.store.get(ticket), noise(4 * KiB))
    assert rig.pool.usage().held_bytes == 12 * KiB
    del acquired


# ---------------------------------------------------------------------- evicting, taking
def test_evicting_frees_memory_but_not_what_a_reader_has(rig):
    ticket = rig.stored(noise(4 * KiB))
    rig.at_once()
    loaded = rig.store.get(ticket)
    rig.store.evict(ticket)
    assert ticket.state is TicketState.STORED
    again = rig.store.get(ticket)
    assert again.data_ptr() != loaded.data_ptr()
    assert torch.equal(loaded, again)
    # What was loaded is handed over without another copy.
    assert rig.store.private(ticket).data_ptr() == again.data_ptr()
    assert ticket.state is TicketState.STORED
    del loaded, again
    assert rig.pool.usage().lent_bytes == 0
    assert rig.count("read") == 8 * KiB


def test_taking_waits_for_the_block_that_is_being_written(rig):
    ticket = rig.put(noise(4 * KiB))
    taking = meanwhile(rig.store.take, ticket)
    assert not taking.done()
    rig.backend.complete()
    assert torch.equal(taking.result(30), noise(4 * KiB))
    assert ticket.state is TicketState.FREED
    assert rig.store.live_tickets == rig.region.used_bytes == 0


def test_taking_what_waits_to_be_written_cancels_the_write(rig):
    first, second = rig.put(noise(4 * KiB)), rig.put(noise(8 * KiB))
    payload = rig.store.take(second)
    assert torch.equal(payload, noise(8 * KiB))
    rig.complete()
    assert first.state is TicketState.STORED
    assert rig.count("written") == 4 * KiB
