"""Several paths as one tier, room made in a host tier, ranges of foreign files."""

from __future__ import annotations

import pytest
import torch

from offload_strategy.errors import CorruptDataError, StorageError, TierFullError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import ExternalFile
from offload_strategy.store import tiers
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import TicketState
from offload_strategy.store.tiers import PathTier, Quota
from offload_strategy.telemetry import Recorder
from offload_strategy.units import KiB, MiB
from tests.store.rig import CLIENT, PAGE, noise

# ---------------------------------------------------------------------- several paths
#: Parts of striped tickets are multiples of this here.
UNIT = 64 * KiB


@pytest.fixture(autouse=True)
def _small_stripes(monkeypatch):
    monkeypatch.setattr(tiers, "STRIPE_BYTES", 8 * UNIT)
    monkeypatch.setattr(tiers, "STRIPE_UNIT", UNIT)


@pytest.fixture
def pair(make_rig):
    """Two paths; the first is twice as fast."""
    rig = make_rig(paths=2, disk_bytes=96 * UNIT)
    rig.queues[0].bandwidth.seed(read=2e9, write=2e9)
    rig.queues[1].bandwidth.seed(read=1e9, write=1e9)
    return rig


def test_a_large_ticket_lies_on_all_paths_in_proportion_to_their_speed_now(pair):
    first, payload = pair.queues[0], noise(24 * UNIT + 7)
    ticket = pair.stored(payload)
    parts = {stripe.queue: stripe.nbytes for stripe in ticket.entry.stripes}
    assert parts[first] == pytest.approx(16 * UNIT, abs=1 * UNIT)
    assert sum(parts.values()) == ticket.nbytes
    assert pair.bytes_on_disk(ticket) == payload.numpy().tobytes()
    assert sorted(r.nbytes for r in pair.recorder.moves) == sorted(parts.values())
    assert pair.count("written") == ticket.nbytes
    first.bandwidth.seed(read=1e8, write=1e8)  # the first slows down: it gets nothing
    after = pair.stored(noise(24 * UNIT))
    assert first not in {stripe.queue for stripe in after.entry.stripes}
    pair.at_once()
    assert torch.equal(pair.store.get(ticket), payload)


def test_a_full_path_leaves_the_rest_to_the_others(pair):
    tickets = [pair.put(noise(24 * UNIT, seed)) for seed in range(7)]
    assert pair.regions[0].free_bytes < 24 * UNIT
    with pytest.raises(TierFullError, match="no tier has room for 2 MiB"):
        pair.put(noise(32 * UNIT))
    assert pair.disk.used_bytes == 7 * 24 * UNIT  # what did not fit left nothing behind
    pair.at_once()
    for seed, ticket in enumerate(tickets):
        assert torch.equal(pair.store.get(ticket), noise(24 * UNIT, seed))
        pair.store.evict(ticket)


def test_each_stripe_begins_on_a_page_when_a_path_is_full(pair):
    # A read may fill its last page: what another stripe has there would be overwritten.
    pair.regions[1].allocate(pair.regions[1].free_bytes)
    ticket = pair.put(noise(24 * UNIT + 7))
    assert not any(stripe.begin % PAGE for stripe in ticket.entry.stripes)
    pair.complete()


def test_one_capacity_over_several_paths(pair):
    quota = Quota(40 * UNIT)
    tier = PathTier("nvme", pair.queues, dict.fromkeys(pair.queues, quota))
    assert tier.capacity == 40 * UNIT
    other = PathTier("pfs", pair.queues[1:], {pair.queues[0]: quota})
    assert other.capacity == pair.regions[1].capacity, "the quota of a path that is not its own"
    first = tier.claim_extents(30 * UNIT)
    assert first is not None
    assert tier.claim_extents(20 * UNIT) is None
    assert quota.used_bytes == 30 * UNIT
    tier.release_extents(first)
    assert quota.used_bytes == 0


def test_a_ticket_on_two_paths_needs_both(pair):
    payload, broken = noise(24 * UNIT), OSError(5, "Input/output error")
    stored, ticket = pair.stored(payload), pair.put(payload)
    pair.backends[1].complete(error=broken)
    pair.at_once()
    assert torch.equal(pair.store.get(ticket), payload)  # kept in memory
    with pytest.raises(StorageError, match=r"'nvme'.*could not write 1.5 MiB of activations"):
        pair.put(noise(16))
    pair.backends[1].error = broken
    with pytest.raises(StorageError, match=r"'nvme'.*could not read 1.5 MiB of activations"):
        pair.store.get(stored)
    pair.store.free(stored)
    assert pair.disk.used_bytes == 0


def test_a_path_that_cannot_grow_takes_nothing_of_the_others_along(pair, monkeypatch):
    def refuse(nbytes):
        raise StorageError("the file cannot grow")

    monkeypatch.setattr(pair.regions[1], "allocate", refuse)
    with pytest.raises(StorageError, match="cannot grow"):
        pair.put(noise(24 * UNIT))
    assert pair.regions[0].used_bytes == pair.store.live_tickets == 0


# ---------------------------------------------------------------------- checksums
def test_a_flipped_bit_is_found_and_named(make_rig):
    rig = make_rig(checksum="full", paths=2)
    payload = noise(10 * UNIT + 3)
    ticket = rig.stored(payload)
    rig.at_once()
    assert torch.equal(rig.store.get(ticket), payload)
    rig.store.evict(ticket)
    for index in (0, 5 * UNIT, 10 * UNIT + 2):
        rig.flip(ticket, index)
        with pytest.raises(CorruptDataError, match=r"'nvme'.*not what was written there"):
            rig.store.get(ticket)
        rig.flip(ticket, index)
        assert torch.equal(rig.store.get(ticket), payload)
        rig.store.evict(ticket)


# ---------------------------------------------------------------------- host tiers
def test_what_is_needed_last_makes_room(make_rig):
    rig = make_rig(host_bytes=3 * PAGE)
    late, soon, later = (rig.put(noise(PAGE, use), next_use=use) for use in (8, 2, 9))
    unknown = rig.put(noise(PAGE, 5))  # no time given: nobody leaves for it
    assert unknown.state is TicketState.WRITING
    newest = rig.put(noise(PAGE, 1), next_use=1)
    assert newest.state is TicketState.IN_MEMORY
    assert later.state is TicketState.WRITING
    assert (late.state, soon.state) == (TicketState.IN_MEMORY,) * 2
    assert rig.host.used_bytes == 3 * PAGE
    rig.at_once()
    for ticket, seed in ((late, 8), (soon, 2), (later, 9), (unknown, 5), (newest, 1)):
        assert torch.equal(rig.store.get(ticket), noise(PAGE, seed))


def test_nobody_leaves_when_that_would_not_make_room(make_rig):
    rig = make_rig(host_bytes=3 * PAGE)
    first, second = rig.put(noise(PAGE), next_use=9), rig.put(noise(2 * PAGE), next_use=1)
    third = rig.put(noise(3 * PAGE), next_use=2)
    assert third.state is TicketState.WRITING
    assert (first.state, second.state) == (TicketState.IN_MEMORY,) * 2
    rig.complete()


def test_a_full_disk_keeps_all_in_the_host_tier(make_rig):
    rig = make_rig(host_bytes=PAGE, disk_bytes=PAGE)
    first = rig.put(noise(PAGE, 1), next_use=9)
    on_disk = rig.store.put(noise(PAGE, 2), CLIENT, [rig.disk])
    with pytest.raises(TierFullError):
        rig.put(noise(PAGE, 3), next_use=1)
    assert first.state is TicketState.IN_MEMORY
    assert rig.host.used_bytes == PAGE
    rig.complete()
    assert on_disk.state is TicketState.STORED


def test_the_budget_holds_by_dropping_what_was_loaded_for_later(make_rig):
    rig = make_rig(budget=4 * MiB)
    tickets = [rig.stored(noise(1 * MiB, seed)) for seed in range(6)]
    rig.at_once()
    for ticket in tickets[:4]:
        assert rig.store.prefetch(ticket)
    assert not rig.store.prefetch(tickets[4])
    got = rig.store.get(tickets[5])
    assert torch.equal(got, noise(1 * MiB, 5))
    assert rig.pool.usage().peak_bytes == 4 * MiB
    # The latest to be loaded is the last to be needed.
    assert [ticket.state for ticket in tickets[:4]] == [TicketState.IN_MEMORY] * 3 + [
        TicketState.STORED
    ]


# ---------------------------------------------------------------------- foreign files
@pytest.fixture
def shard(tmp_path):
    file = tmp_path / "shard.safetensors"
    file.write_bytes(noise(3 * MiB + 77).numpy().tobytes())
    return file


@pytest.fixture(params=["direct", "buffered"])
def library(request, shard):
    recorder, pool = Recorder(), BufferPool(16 * MiB)
    store = TensorStore(pool, recorder, write_behind=16 * MiB)
    backend = create_backend("posix", threads=2, block_size=256 * KiB)
    foreign = ExternalFile(shard, "shards", direct=request.param == "direct")
    yield store, PathQueue(foreign, backend, recorder)
    store.close()
    backend.close()
    foreign.close()
    pool.close()


@pytest.mark.parametrize(
    ("begin", "nbytes"),
    [(0, 3 * MiB + 77), (0, 1), (8, 100), (4096, 4096), (4095, 2), (3 * MiB + 70, 7), (10, 0)],
)
def test_a_range_of_a_foreign_file_is_a_ticket(library, begin, nbytes):
    store, queue = library
    expected = noise(3 * MiB + 77)[begin : begin + nbytes]
    ticket = store.adopt(queue, begin, nbytes, "parameters")
    got = store.get(ticket)
    assert torch.equal(got, expected)
    assert nbytes == 0 or got.data_ptr() % 64 == 0 or begin % 64 == 0
    del got
    store.evict(ticket)
    assert torch.equal(store.get(ticket), expected)
    store.free(ticket)
    assert store.live_tickets == 0


def test_a_foreign_file_is_never_written(library, shard):
    store, queue = library
    ticket = store.adopt(queue, 100, 5000, "parameters")
    store.take(ticket).zero_()
    assert shard.read_bytes() == noise(3 * MiB + 77).numpy().tobytes()


def test_a_file_that_is_too_short_is_refused(library):
    store, queue = library
    with pytest.raises(StorageError, match="It may be truncated"):
        store.adopt(queue, 3 * MiB, 78, "parameters")


def test_a_file_that_was_cut_meanwhile_is_an_error(library, shard):
    store, queue = library
    ticket = store.adopt(queue, 0, 3 * MiB, "parameters")
    with shard.open("r+b") as file:
        file.truncate(1 * MiB)
    with pytest.raises(StorageError, match=r"'shards'.*could not read 3 MiB of parameters"):
        store.get(ticket)
