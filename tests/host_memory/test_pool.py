"""Host buffers: any size within a budget, from one stretch of memory if they are large."""

import ctypes
import gc
import mmap
import sys
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_strategy.host_memory import buffers
from offload_strategy.host_memory import pool as pool_module
from offload_strategy.host_memory.arena import BLOCK_BYTES
from offload_strategy.host_memory.idle_memory import resident_bytes
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.units import PAGE_BYTES, KiB, MiB, round_up
from tests.store.rig import meanwhile
from tests.support import run_forked

needs_arena = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def acquire(pool, nbytes, **options):
    buffer = pool.acquire(nbytes, **options)
    assert buffer is not None
    return buffer


def mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split(" ")[0].split("-"))
        if low <= address < high:
            return True
    return False


@pytest.mark.parametrize("nbytes", [0, 1, 100, 4095, 4096, 4097, 3 * MiB + 5])
def test_a_buffer_has_the_size_that_was_asked_for_in_whole_pages(nbytes):
    pool = BufferPool(64 * MiB)
    buffer = acquire(pool, nbytes)
    assert buffer.dtype is torch.uint8
    assert buffer.shape == (nbytes,)
    assert buffer.is_contiguous()
    assert buffer.data_ptr() % PAGE_BYTES == 0 or nbytes == 0
    pages = max(1, -(-nbytes // PAGE_BYTES))
    usage = pool.usage()
    assert usage.lent_bytes == pages * PAGE_BYTES
    assert usage.held_bytes == usage.peak_bytes == round_up(pages * PAGE_BYTES, 2 * MiB)
    assert usage.requested_bytes == nbytes
    assert usage.fragmentation == pytest.approx(1 - nbytes / (pages * PAGE_BYTES))
    buffer.fill_(7)
    assert bytes(buffer.numpy()) == b"\7" * nbytes


ALIASES = {
    "a view": lambda buffer: buffer[100:200],
    "another dtype": lambda buffer: buffer.view(torch.float32),
    "a detached tensor": lambda buffer: buffer.detach(),
    "the storage": lambda buffer: buffer.untyped_storage(),
    "an array": lambda buffer: buffer.numpy(),
    "a tensor over the storage": lambda buffer: torch.empty(0, dtype=torch.int64).set_(
        buffer.untyped_storage(), 2, (3, 4), (4, 1)
    ),
    "what autograd saved": lambda buffer: (
        buffer.view(torch.float32) * torch.ones(1, requires_grad=True)
    ),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_a_buffer_comes_back_when_its_last_alias_is_gone(kind):
    pool = BufferPool(64 * MiB)
    buffer = acquire(pool, 8 * KiB)
    address = buffer.data_ptr()
    alias = ALIASES[kind](buffer)
    del buffer
    assert pool.usage().lent_bytes == 8 * KiB
    other = acquire(pool, 8 * KiB)
    assert other.data_ptr() != address
    del alias
    assert pool.usage().lent_bytes == 8 * KiB
    assert acquire(pool, 8 * KiB).data_ptr() == address


def test_a_loan_may_end_in_a_collection_while_the_pool_is_locked():
    pool = BufferPool(64 * MiB)

    class Cycle:
        def __init__(self):
            self.me = self
            self.buffer = acquire(pool, 4 * KiB)

    def collect_inside():
        Cycle()
        with pool._lock:
            gc.collect()

    meanwhile(collect_inside).result(10)  # TimeoutError: deadlock
    assert pool.usage().lent_bytes == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="needs fork and MADV_DONTFORK")
@pytest.mark.parametrize("budget", [0, 64 * MiB], ids=["mappings", "arena"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_sees_nor_unmaps_the_parents_buffers(budget):
    pool = BufferPool(budget)
    acquired = [acquire(pool, 4 * MiB, beyond_budget=True).fill_(5) for _ in range(4)]
    addresses = [buffer.data_ptr() for buffer in acquired]
    acquired.pop()  # one of them is idle

    def child():
        unseen = not any(mapped(address) for address in addresses)
        # The child's own memory takes the addresses over; unmapping would hit that.
        own = [mmap.mmap(-1, 1 * MiB) for _ in range(64)]
        for memory in own:
            memory[:] = b"c" * (1 * MiB)
        acquired.clear()
        pool.trim()
        pool.close()
        gc.collect()
        return unseen and all(memory[:] == b"c" * (1 * MiB) for memory in own)

    run_forked(child)
    assert all(bool((buffer == 5).all()) for buffer in acquired)


@pytest.mark.parametrize("size", [256 * KiB, 2 * MiB])
def test_idle_memory_is_bounded_and_more_stays_for_who_asks_for_it_again(monkeypatch, size):
    # The default of an argument would not see a new limit.
    monkeypatch.setattr(pool_module, "IDLE_BYTES", 2 * MiB)
    pool = BufferPool(64 * MiB)

    def idle_after_use():
        acquired = [acquire(pool, size) for _ in range(16 * MiB // size)]
        assert pool.usage().held_bytes == 16 * MiB
        del acquired
        return pool.usage().held_bytes

    assert idle_after_use() == 2 * MiB
    pool.keep_idle_beyond(8 * MiB)
    assert idle_after_use() == 10 * MiB
    pool.keep_idle_beyond(4 * MiB)  # of another client
    assert idle_after_use() == 10 * MiB
    pool.keep_idle(0)
    assert pool.usage().held_bytes == 0
    pool.keep_idle_beyond(8 * MiB)  # memory is scarce all the same
    assert idle_after_use() == 0


# ---------------------------------------------------------------------- the arena
@needs_arena
def test_memory_comes_and_goes_by_blocks_and_is_the_systems_again():
    pool = BufferPool(256 * MiB)
    acquired = acquire(pool, 5 * MiB)
    assert pool.usage().held_bytes == 6 * MiB
    beside = acquire(pool, 1 * MiB)  # in the same block as the end of the first
    assert pool.usage().held_bytes == 6 * MiB
    del acquired
    pool.trim()
    assert pool.usage().held_bytes == 2 * MiB
    del beside
    acquired = acquire(pool, 200 * MiB).fill_(1)
    most = resident_bytes()
    assert most is not None
    del acquired
    assert pool._idle_bytes() == 200 * MiB
    assert resident_bytes() > most - 20 * MiB, "what is idle stays"
    pool.trim(keep=150 * MiB)
    assert most - 80 * MiB < resident_bytes() < most - 40 * MiB
    assert pool._idle_bytes() == 150 * MiB
    pool.trim()
    assert pool.usage().held_bytes == 0
    assert resident_bytes() < most - 180 * MiB
    assert bool((acquire(pool, 200 * MiB) == 0).all()), "fresh memory"


@needs_arena
def test_memory_that_the_system_does_not_take_back_stays_with_one_warning(caplog):
    buffers._warn_of_memory_that_stays.cache_clear()
    pool, libc = BufferPool(16 * MiB), ctypes.CDLL(None)
    acquired = acquire(pool, 4 * MiB)
    page = ctypes.c_void_p(acquired.data_ptr())
    assert libc.mlock(page, PAGE_BYTES) == 0, "more than a page may be locked"
    del acquired
    pool.trim()
    assert caplog.text.count("did not take idle host memory back (Invalid argument)") == 1
    assert acquire(pool, 16 * MiB).fill_(3).sum() == 3 * 16 * MiB
    assert libc.munlock(page, PAGE_BYTES) == 0


@needs_arena
def test_idle_memory_elsewhere_makes_room_within_the_budget():
    pool = BufferPool(16 * MiB)
    low, middle, high = (acquire(pool, size * MiB).fill_(7) for size in (6, 4, 6))
    del low, high
    large = acquire(pool, 10 * MiB).fill_(9)  # neither gap would do
    assert pool.usage().held_bytes == pool.usage().peak_bytes == 16 * MiB
    assert pool.acquire(4 * MiB) is None
    assert acquire(pool, 2 * MiB).fill_(3).sum() == 6 * MiB
    assert bool((large == 9).all())
    assert bool((middle == 7).all())


@needs_arena
@pytest.mark.parametrize("budget", [8 * PAGE_BYTES, 16 * MiB], ids=["mappings", "arena"])
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["lend", "must", "drop", "drop", "trim", "keep"]), st.integers(0, 3000)
        ),
        max_size=60,
    )
)
def test_memory_never_overlaps_and_figures_hold(budget, steps):
    pool, small = BufferPool(budget), budget < MiB
    acquired = []
    for serial, (action, amount) in enumerate(steps):
        mark, nbytes = serial % 251, amount * (budget // 4096) - amount % 7
        if action == "drop":
            if acquired:
                tensor, value = acquired.pop(amount % len(acquired))
                assert int(tensor[0]) == int(tensor[-1]) == value
                del tensor
        elif action == "trim":
            pool.trim(nbytes)
        elif action == "keep":
            pool.keep_idle(nbytes)
        else:
            nbytes = max(1, nbytes)
            wanted = pool.usage().lent_bytes + round_up(nbytes, PAGE_BYTES)
            buffer = pool.acquire(nbytes, beyond_budget=action == "must")
            if buffer is not None:
                assert action == "must" or not small or wanted <= budget
                buffer[0] = buffer[-1] = mark
                acquired.append((buffer, mark))
            else:
                assert action == "lend"
                # No more is lost than the rest of a block at each end of what is lent.
                slack = 0 if small else 2 * BLOCK_BYTES * (len(acquired) + 1)
                assert wanted > budget - slack
            del buffer
        usage = pool.usage()
        asked = [round_up(tensor.numel(), PAGE_BYTES) for tensor, _ in acquired]
        assert usage.lent_bytes == sum(asked)
        assert usage.requested_bytes == sum(tensor.numel() for tensor, _ in acquired)
        assert usage.lent_bytes <= usage.held_bytes <= usage.peak_bytes
        assert 0 <= pool._idle_bytes() <= usage.held_bytes - usage.lent_bytes
        if small or not any(step[0] == "must" for step in steps[: serial + 1]):
            assert usage.held_bytes <= max(budget, usage.lent_bytes)
    begins = sorted((tensor.data_ptr(), tensor.numel()) for tensor, _ in acquired)
    for (begin, nbytes), (following, _) in pairwise(begins):
        assert begin + round_up(nbytes, PAGE_BYTES) <= following
    assert all(int(tensor[0]) == value == int(tensor[-1]) for tensor, value in acquired)
    acquired.clear()
    pool.trim()
    assert pool.usage().held_bytes == 0
    pool.close()


@needs_arena
def test_an_arena_has_no_more_addresses_than_the_budget_where_mere_addresses_count(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "2\n")
    pool = BufferPool(64 * MiB)
    assert len(pool._arena.addresses) <= 64 * MiB + BLOCK_BYTES
    acquired = [acquire(pool, 4 * MiB) for _ in range(16)]
    assert pool.usage().held_bytes == sum(buffer.numel() for buffer in acquired)


@pytest.mark.parametrize("why", ["the system", "no addresses"])
def test_without_an_arena_buffers_are_mapped_one_by_one(monkeypatch, why):
    if why == "the system":
        monkeypatch.setattr(sys, "platform", "another")
    pool = BufferPool(16 * MiB if why == "the system" else 1 << 62)
    monkeypatch.setattr(pool, "budget", 16 * MiB)
    acquired = [acquire(pool, 3 * MiB) for _ in range(5)]
    assert pool.usage().held_bytes == 15 * MiB
    assert pool.acquire(3 * MiB) is None
    acquired.pop()
    assert pool.usage().held_bytes == 12 * MiB
    assert acquire(pool, 3 * MiB) is not None
    acquired.clear()
    assert pool.usage().held_bytes == 0


@needs_arena
@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_a_pool_that_ends_leaves_its_loans_their_memory(end):
    pool = BufferPool(64 * MiB)
    acquired = [acquire(pool, 4 * MiB).fill_(number) for number in range(4)]
    places = [acquired.pop(0).data_ptr(), acquired[0].data_ptr()]  # idle, in use
    again = None
    if end == "closed":
        pool.close()
        assert pool.usage().held_bytes == 0
        again = acquire(pool, 8 * MiB).fill_(9)  # it may lend again
    else:
        reference = weakref.ref(pool)
        del pool
        gc.collect()
        assert reference() is None
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(acquired, start=1))
    acquired.clear()
    gc.collect()
    assert not any(mapped(place) for place in places)
    assert again is None or bool((again == 9).all())
