"""Whole pages, writes that are stopped, memory that is freed, and moves of one block at a time."""

import ctypes

import pytest
import torch

from offload_strategy.store.ticket import TicketState
from offload_strategy.units import KiB
from tests.store.rig import CLIENT, PAGE, noise


def _into_a_page(nbytes: int, shift: int) -> torch.Tensor:
    """Random bytes that begin so far into a page, in memory that reaches further either way."""
    whole = noise(nbytes + 3 * PAGE)
    start = -whole.data_ptr() % PAGE + shift
    return whole[start : start + nbytes]


def _bytes_before(tensor: torch.Tensor, count: int) -> bytes:
    return ctypes.string_at(tensor.data_ptr() - count, count)


@pytest.mark.parametrize(
    ("shift", "nbytes", "along", "options"),
    [
        pytest.param(64, 64 * KiB, 64, {"checksum": "sampled"}, id="begin of a page"),
        pytest.param(PAGE - 64, 100 * KiB + 8, PAGE - 64, {"checksum": "full"}, id="end of a page"),
        pytest.param(0, 64 * KiB, 0, {}, id="whole pages"),
        pytest.param(8, 128 * KiB, 0, {"checksum": "sampled"}, id="not where tensors begin"),
        pytest.param(64, 8 * KiB, 0, {}, id="small"),
        pytest.param(64, 20_000_000, 64, {"paths": 2}, id="striped"),
    ],
)
def test_a_tensor_leaves_with_what_lies_before_it_in_its_page(
    make_rig, shift, nbytes, along, options
):
    rig, payload = make_rig(**options), _into_a_page(nbytes, shift)
    ticket = rig.store.put(payload, CLIENT, rig.tiers, whole_pages=True)
    rig.at_once()
    assert ticket.state is TicketState.STORED
    assert ticket.entry.begin == along
    assert len(ticket.entry.stripes) == rig.paths
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
        rig.store.put_all([payload], CLIENT, rig.tiers, [-number], (True, False))[0]
        for number, payload in enumerate(payloads)
    ]
    rig.at_once()
    assert [t.state for t in tickets] == [TicketState.STORED] * 2 + [TicketState.IN_MEMORY]
    assert [ticket.entry.begin for ticket in tickets] == [64, 128, 0]
    assert all(map(torch.equal, map(rig.store.get, tickets), payloads))


def test_a_write_that_is_stopped_leaves_the_bytes_in_memory(make_rig):
    rig, payload = make_rig(block_size=PAGE), noise(3 * PAGE)
    ticket = rig.put(payload)
    rig.store.cancel_write(ticket)
    assert rig.store.writing_bytes == 3 * PAGE  # one block is under way
    rig.complete()
    assert ticket.state is TicketState.IN_MEMORY
    assert rig.store.writing_bytes == 0
    assert torch.equal(rig.store.get(ticket), payload)
    assert rig.count("written") == 0
    stored = rig.stored(noise(PAGE))
    for other in (ticket, stored):  # nothing to stop
        rig.store.cancel_write(other)
    assert stored.state is TicketState.STORED


def test_waiting_for_writes_ends_when_few_are_left_or_time_is_up(make_rig):
    rig = make_rig(block_size=PAGE)
    tickets = [rig.put(noise(PAGE)) for _ in range(2)]
    rig.store.await_writes(CLIENT, PAGE, 0.02)
    assert rig.store.writing_bytes == 2 * PAGE
    rig.complete()
    rig.store.await_writes(CLIENT, 0, 60.0)
    assert rig.store.writing_bytes == 0
    assert {ticket.state for ticket in tickets} == {TicketState.STORED}


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


def test_a_host_tier_that_is_never_full_forgets_what_was_freed(make_rig):
    rig = make_rig(host_bytes=64 * KiB, disk_bytes=64 * KiB)
    kept = [rig.put(noise(PAGE, number), next_use=number) for number in range(3)]
    for step in range(2000):
        rig.store.free(rig.put(noise(8), next_use=-step))
    assert len(rig.host._residents) < 600
    # And it still knows whom to send away: what is needed last.
    rig.at_once()
    large = rig.put(noise(60 * KiB), next_use=-1.0)
    rig.store.wait_for_writes()
    assert [ticket.state for ticket in kept].count(TicketState.STORED) == 2
    assert kept[0].state is large.state is TicketState.IN_MEMORY
