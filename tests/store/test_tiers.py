"""Paths as one tier, room in a host tier, whole pages, writes under way, and foreign files."""

import ctypes
import errno
import os
from concurrent.futures import wait

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_strategy.errors import ConfigError, StorageError, TierFullError
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import ExternalFile
from offload_strategy.store import tiers
from offload_strategy.store.ticket import TicketState
from offload_strategy.store.tiers import STRIPE_BYTES, STRIPE_UNIT, PathTier, Quota, deal
from offload_strategy.telemetry import Direction
from offload_strategy.units import GiB, KiB, MiB
from tests.store.rig import CLIENT, PAGE, meanwhile, noise
from tests.support import raising

IN_MEMORY, STORED, WRITING = TicketState.IN_MEMORY, TicketState.STORED, TicketState.WRITING

# ---------------------------------------------------------------------- several paths
#: Parts of striped tickets are multiples of this here.
UNIT = 64 * KiB


@pytest.fixture
def pair(make_rig, monkeypatch):
    """Two paths; the first is twice as fast."""
    monkeypatch.setattr(tiers, "STRIPE_BYTES", 8 * UNIT)
    monkeypatch.setattr(tiers, "STRIPE_UNIT", UNIT)
    rig = make_rig(paths=2, disk_bytes=96 * UNIT)
    rig.queues[0].bandwidth.seed(dict.fromkeys(Direction, 2e9))
    rig.queues[1].bandwidth.seed(dict.fromkeys(Direction, 1e9))
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
    first.bandwidth.seed(dict.fromkeys(Direction, 1e8))  # the first slows down: it gets nothing
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
    assert tier.claim_extents(20 * UNIT) is None
    assert quota.used_bytes == 30 * UNIT
    tier.release_extents(first)
    assert quota.used_bytes == 0


rates = st.lists(st.floats(1.0, 10_000.0), min_size=1, max_size=6)


@settings(deadline=None)
@given(nbytes=st.integers(1, 2 * GiB), rates=rates, alive=st.lists(st.integers(0, 4 * GiB)))
def test_every_byte_is_dealt_once(nbytes, rates, alive):
    parts = deal(nbytes, (alive + [0] * 6)[: len(rates)], rates)
    assert sum(parts) == nbytes
    assert min(parts) >= 0
    assert sum(part % STRIPE_UNIT > 0 for part in parts) <= 1


@pytest.mark.parametrize("nbytes", [64 * MiB, STRIPE_BYTES - 1])
@settings(deadline=None)
@given(rates=rates, tickets=st.integers(1, 100))
def test_what_is_alive_is_in_proportion_to_bandwidth_and_small_tickets_stay_whole(
    nbytes, rates, tickets
):
    alive = [0] * len(rates)
    for _ in range(tickets):
        parts = deal(nbytes, alive, rates)
        alive = [before + part for before, part in zip(alive, parts, strict=True)]
        assert nbytes >= STRIPE_BYTES or max(parts) == nbytes
    # Each other path may have a unit more than its share, which the largest one lacks.
    units = max(2, len(rates) - 1)
    tolerance = units * STRIPE_UNIT if nbytes >= STRIPE_BYTES else len(rates) * nbytes
    for nbytes_alive, rate in zip(alive, rates, strict=True):
        assert abs(nbytes_alive - sum(alive) * rate / sum(rates)) <= tolerance


# ---------------------------------------------------------------------- host tiers
def test_what_is_needed_last_makes_room(make_rig):
    rig = make_rig(host_bytes=3 * PAGE)
    late, soon, later = (rig.put(noise(PAGE, use), next_use=use) for use in (8, 2, 9))
    unknown = rig.put(noise(PAGE, 5))  # no time given: nobody leaves for it
    assert unknown.state is WRITING
    newest = rig.put(noise(PAGE, 1), next_use=1)
    assert newest.state is IN_MEMORY
    assert later.state is WRITING
    assert (late.state, soon.state, rig.host.used_bytes) == (IN_MEMORY, IN_MEMORY, 3 * PAGE)
    rig.at_once()
    for ticket, seed in ((late, 8), (soon, 2), (later, 9), (unknown, 5), (newest, 1)):
        assert torch.equal(rig.store.get(ticket), noise(PAGE, seed))


def test_nobody_leaves_when_that_would_not_make_room(make_rig):
    rig = make_rig(host_bytes=3 * PAGE)
    first, second = rig.put(noise(PAGE), next_use=9), rig.put(noise(2 * PAGE), next_use=1)
    third = rig.put(noise(3 * PAGE), next_use=2)
    assert third.state is WRITING
    assert (first.state, second.state) == (IN_MEMORY,) * 2
    rig.complete()


def test_a_full_disk_keeps_all_in_the_host_tier(make_rig):
    rig = make_rig(host_bytes=PAGE, disk_bytes=PAGE)
    first = rig.put(noise(PAGE, 1), next_use=9)
    on_disk = rig.store.put(noise(PAGE, 2), CLIENT, [rig.disk])
    with pytest.raises(TierFullError):
        rig.put(noise(PAGE, 3), next_use=1)
    assert first.state is IN_MEMORY
    assert rig.host.used_bytes == PAGE
    rig.complete()
    assert on_disk.state is STORED


def test_the_budget_holds_by_dropping_what_was_loaded_for_later(make_rig):
    rig = make_rig(budget=4 * MiB)
    tickets = [rig.stored(noise(1 * MiB, seed)) for seed in range(6)]
    rig.at_once()
    assert all(map(rig.store.prefetch, tickets[:4]))
    assert not rig.store.prefetch(tickets[4])
    got = rig.store.get(tickets[5])
    assert torch.equal(got, noise(1 * MiB, 5))
    assert rig.pool.usage().peak_bytes == 4 * MiB
    # The latest to be loaded is the last to be needed.
    assert [ticket.state for ticket in tickets[:3]] == [IN_MEMORY] * 3
    assert tickets[3].state is STORED


def test_a_host_tier_that_is_never_full_forgets_what_was_freed(make_rig):
    rig = make_rig(host_bytes=64 * KiB, disk_bytes=64 * KiB)
    kept = [rig.put(noise(PAGE, number), next_use=number) for number in range(3)]
    for step in range(2000):
        rig.store.free(rig.put(noise(8), next_use=-step))
    assert len(rig.host._residents) == 3
    # And it still knows whom to send away: what is needed last.
    rig.at_once()
    large = rig.put(noise(60 * KiB), next_use=-1.0)
    rig.store.wait_for_writes()
    assert [ticket.state for ticket in kept].count(STORED) == 2
    assert kept[0].state is large.state is IN_MEMORY


# ---------------------------------------------------------------------- whole pages
def _into_a_page(nbytes, shift):
    """Random bytes that begin so far into a page, in memory that reaches further either way."""
    whole = noise(nbytes + 3 * PAGE)
    start = -whole.data_ptr() % PAGE + shift
    return whole[start : start + nbytes]


def _bytes_before(tensor, count):
    return ctypes.string_at(tensor.data_ptr() - count, count)


@pytest.mark.parametrize(
    ("shift", "nbytes", "along", "more"),
    [
        pytest.param(64, 64 * KiB, 64, {"checksum": "sampled"}, id="begin of a page"),
        pytest.param(PAGE - 64, 100 * KiB + 8, PAGE - 64, {"checksum": "full"}, id="end of a page"),
        pytest.param(0, 64 * KiB, 0, {}, id="whole pages"),
        pytest.param(8, 128 * KiB, 0, {"checksum": "sampled"}, id="not where tensors begin"),
        pytest.param(64, 8 * KiB, 0, {}, id="small"),
        pytest.param(64, 20_000_000, 64, {"paths": 2}, id="striped"),
    ],
)
def test_a_tensor_leaves_with_what_is_before_it_in_its_page(make_rig, shift, nbytes, along, more):
    rig, payload = make_rig(**more), _into_a_page(nbytes, shift)
    ticket = rig.store.put(payload, CLIENT, rig.tiers)
    rig.at_once()
    assert ticket.state is STORED
    assert (ticket.entry.begin, len(ticket.entry.stripes)) == (along, rig.paths)
    loaded = rig.store.get(ticket)
    assert torch.equal(loaded, payload)
    assert loaded.data_ptr() % 64 == 0
    assert _bytes_before(loaded, along) == _bytes_before(payload, along)
    assert ticket.entry.load_times is not None
    if along:  # what is not the ticket's is not verified
        rig.store.evict(ticket)
        rig.overwrite(ticket, bytes(along) + rig.bytes_on_disk(ticket)[along:])
        assert torch.equal(rig.store.get(ticket), payload)


def test_what_is_evicted_from_host_memory_leaves_in_whole_pages(make_rig):
    rig = make_rig(host_bytes=150 * KiB)
    payloads = [_into_a_page(100 * KiB, 64 * number) for number in (1, 2, 3)]
    tickets = [
        rig.store.put_all([payload], CLIENT, rig.tiers, [-number], False)[0]
        for number, payload in enumerate(payloads)
    ]
    rig.at_once()
    assert [t.state for t in tickets] == [STORED] * 2 + [IN_MEMORY]
    assert [ticket.entry.begin for ticket in tickets] == [64, 128, 0]
    assert all(map(torch.equal, map(rig.store.get, tickets), payloads))


# ---------------------------------------------------------------------- writes under way
def test_a_write_that_is_stopped_leaves_the_bytes_in_memory(make_rig):
    rig, payload = make_rig(block_size=PAGE), noise(3 * PAGE)
    ticket = rig.put(payload)
    rig.store.cancel_write(ticket)
    assert rig.store.registry.writing_bytes == 3 * PAGE  # one block is under way
    rig.complete()
    assert ticket.state is IN_MEMORY
    assert rig.store.registry.writing_bytes == 0
    assert torch.equal(rig.store.get(ticket), payload)
    assert rig.count("written") == 0
    stored = rig.stored(noise(PAGE))
    for other in (ticket, stored):  # nothing to stop
        rig.store.cancel_write(other)
    assert stored.state is STORED


def test_waiting_for_writes_ends_when_few_are_left_or_time_is_up(make_rig):
    rig = make_rig(block_size=PAGE)
    tickets = [rig.put(noise(PAGE)) for _ in range(2)]
    rig.store.await_writes(CLIENT, PAGE, 0.02)
    assert rig.store.registry.writing_bytes == 2 * PAGE
    waiting = meanwhile(rig.store.wait_for_writes)
    assert not wait([waiting], 0.1).done
    rig.complete()
    waiting.result(30)
    rig.store.await_writes(CLIENT, 0, 60.0)
    assert (rig.store.registry.writing_bytes, {ticket.state for ticket in tickets}) == (0, {STORED})


def test_calm_moves_have_one_block_under_way_unless_many_wait(make_rig):
    rig = make_rig(block_size=PAGE)
    rig.backend.depth = 4

    def put(calm):
        return rig.store.put(noise(2 * PAGE), CLIENT, rig.tiers, one_block_at_a_time=calm)

    tickets = [put(True)]
    assert len(rig.backend.waiting) == 1
    tickets += [put(True) for _ in range(9)]
    assert len(rig.backend.waiting) == 4
    rig.complete()
    tickets.append(put(False))
    assert len(rig.backend.waiting) == 2


# ---------------------------------------------------------------------- foreign files
@pytest.fixture
def shard(tmp_path):
    file = tmp_path / "shard.safetensors"
    file.write_bytes(noise(3 * MiB + 77).numpy().tobytes())
    return file


@pytest.fixture(params=["direct", "buffered"])
def foreign(request, rig, shard, monkeypatch):
    backend = create_backend("posix", threads=2, block_size=256 * KiB)
    if request.param == "buffered":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    file = ExternalFile(shard, "shards")
    yield PathQueue(file, backend, rig.recorder)
    backend.close()
    file.close()


@pytest.mark.parametrize(
    ("begin", "nbytes"),
    [(0, 3 * MiB + 77), (0, 1), (8, 100), (4096, 4096), (4095, 2), (3 * MiB + 70, 7), (10, 0)],
)
def test_a_range_of_a_foreign_file_is_read_and_never_written(rig, foreign, shard, begin, nbytes):
    store = rig.store
    expected = noise(3 * MiB + 77)[begin : begin + nbytes]
    ticket = store.adopt(foreign, begin, nbytes, "parameters")
    got = store.get(ticket)
    assert torch.equal(got, expected)
    assert nbytes == 0 or got.data_ptr() % 64 == 0 or begin % 64 == 0
    del got
    store.evict(ticket)
    taken = store.take(ticket)
    assert torch.equal(taken, expected)
    taken.zero_()
    assert shard.read_bytes()[begin : begin + nbytes] == expected.numpy().tobytes()
    assert store.registry.live == 0


def test_a_foreign_file_that_fails_leaves_no_descriptor(shard, monkeypatch):
    fails = raising(OSError(errno.EIO, "the disk fails"))
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fails)
        with pytest.raises(ConfigError, match="the disk fails"):
            ExternalFile(shard, "shards")
    file, close = ExternalFile(shard, "shards"), os.close
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lambda fd: (close(fd), fails()))
        file.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_foreign_file_that_is_too_short_or_was_cut_meanwhile_is_an_error(rig, foreign, shard):
    store = rig.store
    with pytest.raises(StorageError, match="It may be truncated"):
        store.adopt(foreign, 3 * MiB, 78, "parameters")
    ticket = store.adopt(foreign, 0, 3 * MiB, "parameters")
    os.truncate(shard, 1 * MiB)
    with pytest.raises(StorageError, match=r"'shards'.*could not read 3 MiB of parameters"):
        store.get(ticket)
