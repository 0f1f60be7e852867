"""What waits when there is too much to do, and how it ends."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest
import torch

from offload_strategy.store import error_messages
from offload_strategy.store.ticket import TicketState
from offload_strategy.units import KiB
from tests.store.rig import meanwhile, noise


@pytest.fixture
def reported(monkeypatch):
    """An event that is set when a wait is reported, which is soon here."""
    event, module = threading.Event(), "offload_strategy.store.error_messages"
    monkeypatch.setattr(f"{module}.PATIENCE_SECONDS", 0.02)
    warning = error_messages.logger.warning

    def report(*args):
        warning(*args)
        event.set()

    monkeypatch.setattr(f"{module}.logger.warning", report)
    return event


def test_a_put_waits_and_says_where_when_too_much_is_waiting_to_be_written(
    make_rig, reported, caplog
):
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


def test_borrowing_waits_for_writes_to_give_memory_back(make_rig):
    rig = make_rig(budget=8 * KiB)
    ticket = rig.put(rig.store.borrow("optimizer", 8 * KiB).copy_(noise(8 * KiB)))
    borrowing = meanwhile(rig.store.borrow, "optimizer", 8 * KiB)
    assert not wait([borrowing], 0.1).done
    rig.complete()
    assert borrowing.result(30).numel() == 8 * KiB
    assert rig.pool.usage().peak_bytes == 8 * KiB
    assert ticket.state is TicketState.STORED


def test_borrowing_goes_beyond_the_budget_when_nothing_will_come_back(make_rig):
    rig = make_rig(budget=8 * KiB)
    acquired = [rig.store.borrow("optimizer", 8 * KiB) for _ in range(2)]
    assert rig.pool.usage().held_bytes == 16 * KiB
    del acquired


def test_an_interrupted_wait_gives_its_place_back(make_rig, monkeypatch):
    rig = make_rig(write_behind=8 * KiB)
    first = rig.put(noise(8 * KiB))

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("offload_strategy.store.ticket_registry.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.put(noise(4 * KiB))
    assert rig.region.used_bytes == 8 * KiB
    assert rig.store.live_tickets == 1
    monkeypatch.undo()
    rig.complete()
    assert first.state is TicketState.STORED


def test_a_disk_that_does_not_answer_is_reported(rig, reported, caplog):
    ticket = rig.stored(noise(4 * KiB))
    reading = meanwhile(rig.store.get, ticket)
    assert reported.wait(30)
    assert f"waiting for {rig.directory} to read 4 KiB for 0 s" in caplog.text
    rig.complete()
    assert torch.equal(reading.result(30), noise(4 * KiB))
