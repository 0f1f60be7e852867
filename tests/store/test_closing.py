"""A store that is closed: what stays readable, who is told, what may still be freed."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from offload_strategy.errors import OffloadError
from offload_strategy.store.ticket import TicketState
from offload_strategy.units import KiB
from tests.store.rig import PAGE, MakeRig, Rig, noise


# ---------------------------------------------------------------------- closing
def test_closing_gives_up_writes_and_keeps_their_bytes_readable(make_rig: MakeRig) -> None:
    rig = make_rig(host_bytes=4 * KiB)
    kept = rig.put(noise(4 * KiB, seed=1))
    first, second = rig.put(noise(4 * KiB, seed=2)), rig.put(noise(4 * KiB, seed=3))
    closer = threading.Thread(target=rig.store.close)
    closer.start()
    rig.backend.complete()  # the block that was under way
    closer.join(30)
    assert not closer.is_alive()
    for seed, ticket in enumerate((kept, second), start=1):
        seed = 1 if ticket is kept else 3
        assert torch.equal(rig.store.get(ticket), noise(4 * KiB, seed=seed))
    assert first.state in (TicketState.STORED, TicketState.IN_MEMORY)
    with pytest.raises(OffloadError, match="closed"):
        rig.put(noise(10))
    with pytest.raises(OffloadError, match="closed"):
        rig.store.wait_for_writes()
    rig.store.close()


def test_closing_gives_up_loads_and_says_what_is_gone(make_rig: MakeRig) -> None:
    rig = make_rig(block_size=PAGE)
    loading, stored = rig.stored(noise(3 * PAGE)), rig.stored(noise(PAGE))
    rig.store.prefetch(loading)
    closer = threading.Thread(target=rig.store.close)
    closer.start()
    rig.backend.complete()
    closer.join(30)
    assert not closer.is_alive()
    assert not rig.backend.waiting
    for ticket, size in ((loading, "12 KiB"), (stored, "4 KiB")):
        with pytest.raises(OffloadError, match=rf"{size} of activations are gone.*closed"):
            rig.store.get(ticket)
        with pytest.raises(OffloadError, match="gone"):
            rig.store.prefetch(ticket)


def test_whoever_waits_for_a_load_is_told_of_the_closing(rig: Rig) -> None:
    ticket = rig.stored(noise(PAGE))
    errors: list[BaseException] = []
    waits = threading.Event()
    raise_priority = rig.queue.raise_priority

    def note(*args: object) -> None:
        raise_priority(*args)  # type: ignore[arg-type]
        waits.set()

    rig.queue.raise_priority = note  # type: ignore[method-assign]

    def read() -> None:
        try:
            rig.store.get(ticket)
        except OffloadError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert waits.wait(30)
    closer = threading.Thread(target=rig.store.close)
    closer.start()
    while closer.is_alive():
        if rig.backend.waiting:
            rig.backend.complete()
        closer.join(0.01)
    reader.join(30)
    assert not reader.is_alive()
    # Either the block that was under way was the last and brought everything, or it is gone.
    assert all("gone" in str(error) for error in errors)


def test_tickets_that_outlive_the_heap_can_still_be_freed(rig: Rig) -> None:
    tickets = [rig.stored(noise(PAGE)), rig.put(noise(PAGE))]
    rig.complete()
    rig.close()
    rig.store.free(tickets[0])
    del tickets
    assert rig.store.live_tickets == 0
    assert rig.region.used_bytes == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_that_the_heap_is_its_parents(make_rig: MakeRig) -> None:
    rig = make_rig(host_bytes=8 * KiB)
    # A host buffer does not exist in the child: touching it would end the process.
    kept = rig.put(rig.store.borrow("optimizer", 8 * KiB).copy_(noise(8 * KiB)))
    stored = rig.stored(noise(4 * KiB))
    child = os.fork()
    if child == 0:
        try:
            told = 0
            for use in (rig.store.get, rig.store.take, rig.store.private, rig.store.prefetch):
                for ticket in (kept, stored):
                    try:
                        use(ticket)
                    except OffloadError as error:
                        told += "forked process" in str(error)
            try:
                rig.put(noise(10))
            except OffloadError as error:
                told += "forked process" in str(error)
            rig.store.close()
            del kept, stored, ticket
            gc.collect()
            os._exit(0 if told == 9 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    rig.at_once()
    assert torch.equal(rig.store.get(kept), noise(8 * KiB))
    assert torch.equal(rig.store.get(stored), noise(4 * KiB))
