"""Random work on a heap must agree with a dictionary of what was put."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload_strategy.errors import TierFullError
from offload_strategy.heap import Heap, HostTier, PathTier, Ticket, TicketState
from offload_strategy.memory import BufferPool
from offload_strategy.storage import Space, create_backend
from offload_strategy.telemetry import Recorder
from offload_strategy.transfer import PathQueue
from offload_strategy.units import KiB, MiB
from tests.heap.rig import PAGE, Rig, noise


class HeapAgainstADictionary(RuleBasedStateMachine):
    """The disk completes its blocks when this machine says so, in any order between operations."""

    @initialize(host=st.sampled_from([0, 3 * PAGE]), block=st.sampled_from([PAGE, 4 * PAGE]))
    def start(self, host: int, block: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.rig = Rig(
            Path(self.folder.name),
            disk_bytes=16 * PAGE,
            host_bytes=host,
            budget=8 * PAGE,
            block_size=block,
        )
        self.content: dict[Ticket, torch.Tensor] = {}
        self.seed = 0

    def chosen(self, index: int) -> Ticket:
        return list(self.content)[index % len(self.content)]

    def eager_disk(self) -> None:
        """Operations that wait need a disk that answers."""
        self.rig.at_once()

    @rule(nbytes=st.integers(1, 5 * PAGE))
    def put(self, nbytes: int) -> None:
        self.seed += 1
        payload = noise(nbytes, self.seed)
        fits = nbytes <= self.rig.host.capacity - self.rig.host.used_bytes
        room = self.rig.space.free_bytes
        try:
            ticket = self.rig.put(payload.clone())
        except TierFullError:
            assert not fits
            assert room < 16 * PAGE  # fragments may be too short, an empty disk is not
            return
        self.content[ticket] = payload

    @precondition(lambda self: self.content)
    @rule(index=st.integers(0, 99))
    def prefetch(self, index: int) -> None:
        self.rig.heap.prefetch(self.chosen(index))

    @precondition(lambda self: self.rig.backend.waiting)
    @rule()
    def one_block_ends(self) -> None:
        self.rig.backend.complete()

    @precondition(lambda self: self.rig.backend.waiting)
    @rule()
    def one_block_fails_to_be_read(self) -> None:
        if not self.rig.backend.waiting[0].write:
            self.rig.backend.complete(error=OSError("broken"))

    @precondition(lambda self: self.content)
    @rule(index=st.integers(0, 99), how=st.sampled_from(["get", "private", "take"]))
    def read(self, index: int, how: str) -> None:
        ticket = self.chosen(index)
        self.eager_disk()
        got = getattr(self.rig.heap, how)(ticket)
        self.rig.backend.at_once = False
        assert torch.equal(got, self.content[ticket])
        if how != "get":
            got.zero_()
        if how == "take":
            del self.content[ticket]

    @precondition(lambda self: self.content)
    @rule(index=st.integers(0, 99))
    def evict(self, index: int) -> None:
        self.rig.heap.evict(self.chosen(index))

    @precondition(lambda self: self.content)
    @rule(index=st.integers(0, 99), how=st.sampled_from(["free", "drop"]))
    def free(self, index: int, how: str) -> None:
        ticket = self.chosen(index)
        del self.content[ticket]
        if how == "free":
            self.rig.heap.free(ticket)

    @invariant()
    def figures_agree(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        assert rig.heap.live_tickets == len(self.content)
        on_host = [t.nbytes for t in self.content if t.entry.tier is rig.host]
        assert rig.host.used_bytes == sum(on_host)
        if not rig.backend.waiting:
            extents = [s.extent for t in self.content for s in t.entry.stripes]
            assert rig.space.used_bytes == sum(extent.nbytes for extent in extents)
            states = {t.state for t in self.content}
            assert not states & {TicketState.WRITING, TicketState.LOADING, TicketState.FREED}

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.content.clear()
        self.rig.at_once()
        assert self.rig.heap.live_tickets == 0
        self.rig.close()
        assert self.rig.space.used_bytes == 0
        assert self.rig.pool.usage().held_bytes == 0
        self.folder.cleanup()


HeapAgainstADictionary.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestHeapAgainstADictionary = HeapAgainstADictionary.TestCase


def test_threads_that_put_read_and_drop_at_once_get_their_own_bytes(disk: Path) -> None:
    recorder, pool = Recorder(), BufferPool(1 * MiB)
    heap = Heap(pool, recorder, write_behind=256 * KiB)
    space = Space(disk, "nvme", 8 * MiB)
    backend = create_backend("posix", threads=3, block_size=8 * KiB)
    tiers = [
        HostTier("host", 64 * KiB),
        PathTier("nvme", [PathQueue(space, backend, recorder)]),
    ]
    problems: list[str] = []

    def work(worker: int) -> None:
        mine: list[tuple[Ticket, torch.Tensor]] = []
        for step in range(60):
            payload = noise(
                1 + (worker * 7919 + step * 104729) % (30 * KiB), seed=worker + 97 * step
            )
            mine.append((heap.put(payload.clone(), "optimizer", tiers), payload))
            ticket, expected = mine[(step * 31) % len(mine)]
            action = (step + worker) % 5
            if action == 0:
                heap.prefetch(ticket)
            elif action == 1:
                heap.evict(ticket)
            elif action == 2:
                got = heap.private(ticket)
                if not torch.equal(got, expected):
                    problems.append(f"{worker}.{step}: private")
                got.zero_()
            elif action == 3:
                if not torch.equal(heap.get(ticket), expected):
                    problems.append(f"{worker}.{step}: get")
            else:
                mine.remove((ticket, expected))
                if not torch.equal(heap.take(ticket), expected):
                    problems.append(f"{worker}.{step}: take")
            if len(mine) > 12:
                mine.pop(0)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert problems == []
    assert heap.live_tickets == 0
    heap.close()
    backend.close()
    assert space.used_bytes == 0
    space.close()
    pool.close()
    assert pool.usage().held_bytes == 0
