"""What a disk may do to a block, and which checksum notices it."""

import os
import threading
from contextlib import ExitStack

import pytest
import torch

from offload_strategy.errors import CorruptDataError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.queues import checksums
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.tiers import PathTier
from offload_strategy.telemetry import Recorder
from offload_strategy.units import KiB, MiB
from tests.io.backends import ManualBackend, plain_region
from tests.store.rig import CLIENT, PAGE, noise

UNIT = 512 * KiB
#: Of three digests, the last one of 70 pages and a part of one.
NBYTES = 2 * UNIT + 70 * PAGE + 100


def damaged(now: bytes, old: bytes) -> dict[str, bytes]:
    """What may be on the disk instead of `now`, where `old` was before."""

    def partly_old(begin: int, end: int) -> bytes:
        return now[:begin] + old[begin:end] + now[end:]

    pages = (0, 64, UNIT // PAGE - 1, UNIT // PAGE, NBYTES // PAGE - 1, NBYTES // PAGE)
    flipped = bytearray(now)
    flipped[1000::PAGE] = bytes(byte ^ 1 for byte in flipped[1000::PAGE])
    return {
        **{f"page {page} was lost": partly_old(page * PAGE, (page + 1) * PAGE) for page in pages},
        "a write was torn": partly_old(NBYTES // 2 // PAGE * PAGE, NBYTES),
        "a write was lost": old,
        "two writes changed places": now[UNIT : 2 * UNIT] + now[:UNIT] + now[2 * UNIT :],
        "a bit of every page was flipped": bytes(flipped),
    }


@pytest.mark.parametrize("checksum", ["full", "sampled", "off"])
def test_bytes_that_were_not_written_there_are_noticed(make_rig, monkeypatch, checksum):
    monkeypatch.setattr(checksums, "DIGESTED_BYTES", UNIT)
    rig, payload = make_rig(checksum=checksum, block_size=2 * MiB), noise(NBYTES, 1)
    before, ticket = rig.stored(noise(NBYTES, 0)), rig.stored(payload)
    rig.at_once()
    now = rig.bytes_on_disk(ticket)
    for damage, image in damaged(now, rig.bytes_on_disk(before)).items():
        rig.overwrite(ticket, image)
        if checksum == "off":
            assert not torch.equal(rig.store.get(ticket), payload), damage
        else:
            with pytest.raises(CorruptDataError, match=r"'nvme'.*not what was written there"):
                pytest.fail(f"{damage}: read {rig.store.get(ticket).nbytes} bytes")
        rig.store.evict(ticket)
    rig.overwrite(ticket, now)
    assert torch.equal(rig.store.get(ticket), payload)


@pytest.mark.parametrize(
    ("lead", "nbytes"), [(0, 130 * PAGE), (4032, 129 * PAGE + 70), (64, 70000)]
)
def test_a_sample_has_a_line_of_every_page_and_other_lines_in_every_write(lead, nbytes):
    checksum, memory = create_checksum("sampled", ManualBackend()), noise(131 * PAGE)
    assert checksum is not None
    lines = set()
    for seed in range(5):

        def is_noticed(begin, end, seed=seed):
            part = memory[max(begin, lead) : min(end, lead + nbytes)]
            block = (memory.data_ptr() + lead, nbytes, seed)
            expected = checksum.digest(*block)
            part.bitwise_not_()
            noticed = checksum.digest(*block) != expected
            part.bitwise_not_()
            return noticed

        pages = range(0, lead + nbytes, PAGE)
        assert [page for page in pages if not is_noticed(page, page + PAGE)] == []
        in_one = [at for at in range(2 * PAGE, 3 * PAGE, 64) if is_noticed(at, at + 64)]
        assert 1 <= len(in_one) <= 2
        lines.update(in_one)
    assert len(lines) >= 5


def test_small_tickets_share_a_request_and_are_verified_one_by_one(tmp_path, monkeypatch):
    shared: set[bool] = set()
    all_wait = threading.Event()
    move, move_adjacent = PosixBackend.move, PosixBackend.move_adjacent

    def move_late(self, request):
        all_wait.wait(60)
        move(self, request)

    def note(self, requests):
        shared.add(requests[0].write)
        return move_adjacent(self, requests)

    monkeypatch.setattr(PosixBackend, "move", move_late)
    monkeypatch.setattr(PosixBackend, "move_adjacent", note)
    backend, pool, recorder = PosixBackend(threads=1, block_size=MiB), BufferPool(MiB), Recorder()
    region = plain_region(tmp_path, MiB)
    queue = PathQueue(region, backend, recorder, checksum=create_checksum("auto", backend))
    store, tier = TensorStore(pool, recorder, MiB), PathTier("nvme", [queue])
    with ExitStack() as close:
        for part in (pool, region, backend, store):
            close.callback(part.close)
        memory = store.borrow(CLIENT, 32 * PAGE)
        memory.copy_(noise(32 * PAGE))
        pages = memory.split(PAGE)
        tickets = store.put_all(pages, CLIENT, [tier], [None] * 32, (True, False))
        all_wait.set()
        store.wait_for_writes()
        all_wait.clear()
        (stripe,) = tickets[5].entry.stripes
        os.pwrite(region.fd, b"other", stripe.extent.offset + 77)
        for ticket in tickets:
            store.evict(ticket)
        for ticket in tickets:
            store.prefetch(ticket)
        all_wait.set()
        with pytest.raises(CorruptDataError):
            store.get(tickets.pop(5))
        assert all(map(torch.equal, map(store.get, tickets), pages[:5] + pages[6:]))
    assert shared == {True, False}, "writes and reads were joined"
