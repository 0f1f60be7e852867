"""A ticket may be freed, or die, in every state and in the middle of anything."""

from __future__ import annotations

import errno
import gc
import os

import pytest

from offload_strategy.errors import OffloadError
from offload_strategy.units import KiB, MiB
from tests.store.rig import PAGE, meanwhile, noise

BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


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
    assert rig.store.live_tickets == len(others)
    assert rig.region.used_bytes == PAGE * len(others)
    assert rig.host.used_bytes == 0
    rig.complete()
    assert rig.count("written") <= 4 * KiB
    assert rig.pool.usage().lent_bytes == 0


@pytest.mark.parametrize("lock", ["store", "queue", "recorder", "pool"])
@pytest.mark.parametrize("host", [True, False], ids=["on the host", "on their way to the disk"])
def test_tickets_may_be_collected_in_the_middle_of_anything(make_rig, lock, host):
    rig = make_rig(host_bytes=1 * MiB if host else 0)
    locks = {
        "store": rig.store._registry.lock,
        "queue": rig.queue._lock,
        "recorder": rig.recorder._lock,
        "pool": rig.pool._lock,
    }

    class Cycle:
        def __init__(self, seed):
            self.me = self
            self.ticket = rig.put(noise(4 * KiB, seed=seed))

    def collect():
        for seed in range(5):
            Cycle(seed)
        with locks[lock]:
            gc.collect()

    meanwhile(collect).result(30)  # TimeoutError: deadlock
    assert rig.store.live_tickets == 0
    rig.complete()
    assert rig.region.used_bytes == rig.host.used_bytes == 0
