"""Large buffers: any size out of one stretch of memory, which stays or goes by whole blocks."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_strategy.errors import OffloadError
from offload_strategy.host_memory import arena
from offload_strategy.host_memory import pool as pool_module
from offload_strategy.host_memory.arena import BLOCK_BYTES, Arena
from offload_strategy.host_memory.idle_memory import resident_bytes
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.units import PAGE_BYTES, MiB, round_up
from tests.host_memory.test_pool import acquire, mapped

pytestmark = pytest.mark.skipif(
    not arena.can_be_used(), reason="needs Linux, without strict counting of addresses"
)


def _places(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return sorted((t.data_ptr(), t.data_ptr() + round_up(t.numel(), PAGE_BYTES)) for t in tensors)


def test_memory_comes_and_goes_by_blocks_and_is_the_systems_again() -> None:
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
    assert pool.idle_bytes() == 200 * MiB
    assert resident_bytes() > most - 20 * MiB, "what is idle stays"
    pool.trim(keep=150 * MiB)
    assert most - 80 * MiB < resident_bytes() < most - 40 * MiB
    assert pool.idle_bytes() == 150 * MiB
    pool.trim()
    assert pool.usage().held_bytes == 0
    assert resident_bytes() < most - 180 * MiB
    assert bool((acquire(pool, 200 * MiB) == 0).all()), "fresh memory"


def test_idle_memory_elsewhere_makes_room_within_the_budget() -> None:
    pool = BufferPool(16 * MiB)
    low, middle, high = (acquire(pool, size * MiB).fill_(7) for size in (6, 4, 6))
    del low, high
    large = acquire(pool, 10 * MiB).fill_(9)  # neither gap would do
    assert pool.usage().held_bytes == pool.usage().peak_bytes == 16 * MiB
    assert pool.acquire(4 * MiB) is None
    assert acquire(pool, 2 * MiB).fill_(3).sum() == 6 * MiB
    assert bool((large == 9).all())
    assert bool((middle == 7).all())


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
def test_memory_never_overlaps_and_figures_hold(budget: int, steps: list[tuple[str, int]]) -> None:
    pool, small = BufferPool(budget), budget < MiB
    acquired: list[tuple[torch.Tensor, int]] = []
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
        # Ranges are as asked; an idle small buffer also serves for one up to an eighth smaller.
        spare = sum(nbytes for nbytes in asked if nbytes < MiB) / 8
        assert sum(asked) <= usage.lent_bytes <= sum(asked) + spare
        assert usage.requested_bytes == sum(tensor.numel() for tensor, _ in acquired)
        assert usage.lent_bytes <= usage.held_bytes <= usage.peak_bytes
        assert 0 <= pool.idle_bytes() <= usage.held_bytes - usage.lent_bytes
        if small or not any(step[0] == "must" for step in steps[: serial + 1]):
            assert usage.held_bytes <= max(budget, usage.lent_bytes)
    places = _places([tensor for tensor, _ in acquired])
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    assert all(int(tensor[0]) == value == int(tensor[-1]) for tensor, value in acquired)
    acquired.clear()
    pool.trim()
    assert pool.usage().held_bytes == 0
    pool.close()


@pytest.mark.parametrize("why", ["the system", "no addresses"])
def test_without_an_arena_buffers_are_mapped_one_by_one(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "the system":
        monkeypatch.setattr(pool_module, "can_be_used", lambda: False)
    else:

        def refuse(self: Arena, budget: int) -> None:
            raise OffloadError("could not map 64 MiB of host memory")

        monkeypatch.setattr(Arena, "__init__", refuse)
    pool = BufferPool(16 * MiB)
    acquired = [acquire(pool, 3 * MiB) for _ in range(5)]
    assert pool.usage().held_bytes == 15 * MiB
    assert pool.acquire(3 * MiB) is None
    address = acquired.pop().data_ptr()
    assert acquire(pool, 3 * MiB).data_ptr() == address
    acquired.clear()
    pool.trim()
    assert pool.usage().held_bytes == 0


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_a_pool_that_ends_leaves_its_loans_their_memory(end: str) -> None:
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
