"""A store that is closed: what stays readable, who is told, what may still be freed."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from offload_strategy.errors import OffloadError
from offload_strategy.store.ticket import TicketState
from offload_strategy.units import KiB
from tests.store.rig import PAGE, meanwhile, noise


def test_closing_gives_up_writes_and_keeps_their_bytes_readable(make_rig):
    rig = make_rig(host_bytes=4 * KiB)
    kept, first, second = (rig.put(noise(4 * KiB, seed)) for seed in range(3))
    closing = meanwhile(rig.store.close)
    rig.backend.complete()  # the block that was under way
    closing.result(30)
    assert torch.equal(rig.store.get(kept), noise(4 * KiB, 0))
    assert torch.equal(rig.store.get(second), noise(4 * KiB, 2))
    assert first.state in (TicketState.STORED, TicketState.IN_MEMORY)
    for use in (lambda: rig.put(noise(10)), rig.store.wait_for_writes):
        with pytest.raises(OffloadError, match="closed"):
            use()
    rig.store.close()


def test_closing_gives_up_loads_and_says_what_is_gone(make_rig):
    rig = make_rig(block_size=PAGE)
    loading, stored = rig.stored(noise(3 * PAGE)), rig.stored(noise(PAGE))
    rig.store.prefetch(loading)
    closing = meanwhile(rig.store.close)
    rig.backend.complete()
    closing.result(30)
    assert not rig.backend.waiting
    for ticket, size in ((loading, "12 KiB"), (stored, "4 KiB")):
        for use in (rig.store.get, rig.store.prefetch):
            with pytest.raises(OffloadError, match=rf"{size} of activations are gone.*closed"):
                use(ticket)


def test_tickets_that_outlive_the_heap_can_still_be_freed(rig):
    tickets = [rig.stored(noise(PAGE)), rig.put(noise(PAGE))]
    rig.complete()
    rig.close()
    rig.store.free(tickets[0])
    del tickets
    assert rig.store.live_tickets == 0
    assert rig.region.used_bytes == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_that_the_heap_is_its_parents(make_rig):
    rig = make_rig(host_bytes=8 * KiB)
    # A host buffer does not exist in the child: touching it would end the process.
    kept = rig.put(rig.store.borrow("optimizer", 8 * KiB).copy_(noise(8 * KiB)))
    stored = rig.stored(noise(4 * KiB))
    child = os.fork()
    if child == 0:
        try:
            told = 0
            uses = (rig.store.get, rig.store.take, rig.store.private, rig.store.prefetch)
            for use in (*uses, lambda ticket: rig.put(noise(10))):
                for ticket in (kept, stored):
                    try:
                        use(ticket)
                    except OffloadError as error:
                        told += "forked process" in str(error)
            rig.store.close()
            del kept, stored, ticket
            gc.collect()
            os._exit(0 if told == 10 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    rig.at_once()
    assert torch.equal(rig.store.get(kept), noise(8 * KiB))
    assert torch.equal(rig.store.get(stored), noise(4 * KiB))
