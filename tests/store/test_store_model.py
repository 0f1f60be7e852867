"""Random work on a store must agree with a dictionary of what was put."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload_strategy.errors import CorruptDataError, StorageError, TierFullError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.bandwidth.estimator import BandwidthEstimator
from offload_strategy.io.queues import encryption
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import ExternalFile, Region
from offload_strategy.store import tiers as dealing
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.store.tiers import HostTier, PathTier
from offload_strategy.telemetry import Recorder
from offload_strategy.units import KiB, MiB
from tests.store.rig import CLIENT, PAGE, Rig, meanwhile, noise

#: What notices wrong bytes; encryption where its package is installed.
CHECKS = ["off", "sampled", "full", *(["encryption"] if find_spec("cryptography") else [])]


class HeapAgainstADictionary(RuleBasedStateMachine):
    """The disk completes its blocks when this machine says so, in any order between operations."""

    @initialize(
        host=st.sampled_from([0, 3 * PAGE]),
        block=st.sampled_from([PAGE, 4 * PAGE]),
        paths=st.integers(1, 3),
        check=st.sampled_from(CHECKS),
    )
    def start(self, host: int, block: int, paths: int, check: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        # Tickets of a few pages are striped here.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(dealing, "STRIPE_BYTES", 2 * PAGE)
        self.patch.setattr(dealing, "STRIPE_UNIT", PAGE)
        self.patch.setattr(encryption, "DIGESTED_BYTES", PAGE)  # several in a request
        # Shares that follow the clock would deal a replay otherwise than the run before.
        self.patch.setattr(BandwidthEstimator, "completed", lambda *args, **options: None)
        self.foreign_bytes = noise(5 * PAGE + 123, seed=12345)
        shard = Path(self.folder.name, "shard")
        shard.write_bytes(self.foreign_bytes.numpy().tobytes())
        self.rig = Rig(
            Path(self.folder.name),
            disk_bytes=16 * PAGE,
            host_bytes=host,
            budget=8 * PAGE,
            block_size=block,
            paths=paths,
            checksum="off" if check == "encryption" else check,
            encryption=check == "encryption",
        )
        self.foreign = ExternalFile(shard, "shards", direct=False)
        self.shards = PathQueue(self.foreign, self.rig.backend, self.rig.recorder)
        self.content: dict[Ticket, torch.Tensor] = {}
        self.seed = 0

    def chosen(self, index: int) -> Ticket:
        return list(self.content)[index % len(self.content)]

    @property
    def broken(self) -> bool:
        """Whether a write has failed by now, after which nothing more is taken."""
        return self.rig.store._writer.failure is not None

    @contextmanager
    def eager_disk(self) -> Iterator[None]:
        """Operations that wait need a disk that answers."""
        self.rig.at_once()
        yield
        for backend in self.rig.backends:
            backend.at_once = False

    @rule(nbytes=st.integers(0, 5 * PAGE), next_use=st.none() | st.integers(0, 9))
    def put(self, nbytes: int, next_use: int | None) -> None:
        self.seed += 1
        payload = noise(nbytes, self.seed)
        fits = nbytes <= self.rig.host.capacity - self.rig.host.used_bytes
        room = min(region.free_bytes for region in self.rig.regions)
        try:
            ticket = self.rig.put(payload.clone(), next_use)
        except TierFullError:
            assert not fits
            assert room < 16 * PAGE  # fragments may be too short, an empty disk is not
            return
        except StorageError:
            assert self.broken
            return
        assert not self.broken
        self.content[ticket] = payload

    @rule(begin=st.integers(0, 5 * PAGE), nbytes=st.integers(0, 2 * PAGE))
    def adopt(self, begin: int, nbytes: int) -> None:
        try:
            ticket = self.rig.store.adopt(self.shards, begin, nbytes, CLIENT)
        except StorageError:
            assert self.broken or begin + nbytes > self.foreign.nbytes
            return
        self.content[ticket] = self.foreign_bytes[begin : begin + nbytes]

    @precondition(lambda self: self.content)
    @rule(index=st.integers(0, 99))
    def prefetch(self, index: int) -> None:
        self.rig.store.prefetch(self.chosen(index))

    @precondition(lambda self: self.rig.waiting)
    @rule(path=st.integers(0, 9), fault=st.sampled_from(["", "", "", "read", "write"]))
    def one_block_ends(self, path: int, fault: str) -> None:
        busy = [backend for backend in self.rig.backends if backend.waiting]
        backend = busy[path % len(busy)]
        write = backend.waiting[0].write
        fails = fault == ("write" if write else "read")
        backend.complete(error=OSError("broken") if fails else None)

    @precondition(lambda self: self.content and self.rig.check)
    @rule(index=st.integers(0, 99), byte=st.integers(0, 5 * PAGE))
    def a_bit_flips(self, index: int, byte: int) -> None:
        ticket = self.chosen(index)
        if ticket.state is not TicketState.STORED or ticket.entry.tier is None:
            return
        self.rig.flip(ticket, byte % ticket.nbytes)
        with self.eager_disk(), pytest.raises(CorruptDataError, match="not what was written"):
            self.rig.store.get(ticket)
        self.rig.flip(ticket, byte % ticket.nbytes)
        gc.collect()  # this disk answers on the caller's stack, which the error's traceback keeps

    @precondition(lambda self: self.content)
    @rule(index=st.integers(0, 99), how=st.sampled_from(["get", "private", "take"]))
    def read(self, index: int, how: str) -> None:
        ticket = self.chosen(index)
        with self.eager_disk():
            got = getattr(self.rig.store, how)(ticket)
        assert torch.equal(got, self.content[ticket])
        if how != "get":
            got.zero_()
        if how == "take":
            del self.content[ticket]

    @precondition(lambda self: self.content)
    @rule(index=st.integers(0, 99))
    def evict(self, index: int) -> None:
        self.rig.store.evict(self.chosen(index))

    @precondition(lambda self: self.content)
    @rule(index=st.integers(0, 99), how=st.sampled_from(["free", "drop"]))
    def free(self, index: int, how: str) -> None:
        ticket = self.chosen(index)
        del self.content[ticket]
        if how == "free":
            self.rig.store.free(ticket)

    @invariant()
    def figures_agree(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        assert len(set(rig.nonces)) == len(rig.nonces), "one nonce for two blocks"
        assert rig.store.live_tickets == len(self.content)
        on_host = [t.nbytes for t in self.content if t.entry.tier is rig.host]
        assert rig.host.used_bytes == sum(on_host)
        assert rig.host.used_bytes <= rig.host.capacity
        if not rig.waiting:
            ours = [t for t in self.content if t.entry.tier is not None]
            extents = [s.extent for t in ours for s in t.entry.stripes]
            assert rig.disk.used_bytes == sum(extent.nbytes for extent in extents)
            states = {t.state for t in self.content}
            assert not states & {TicketState.WRITING, TicketState.LOADING, TicketState.FREED}

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.content.clear()
        self.rig.at_once()
        assert self.rig.store.live_tickets == 0
        self.rig.close()
        self.foreign.close()
        self.patch.undo()
        assert self.rig.disk.used_bytes == 0
        assert self.rig.pool.usage().held_bytes == 0
        self.folder.cleanup()


HeapAgainstADictionary.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None
)
TestHeapAgainstADictionary = HeapAgainstADictionary.TestCase


def test_threads_that_put_read_and_drop_at_once_get_their_own_bytes(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "STRIPE_BYTES", 8 * KiB)
    monkeypatch.setattr(dealing, "STRIPE_UNIT", PAGE)
    recorder, pool = Recorder(), BufferPool(1 * MiB)
    store = TensorStore(pool, recorder, write_behind=256 * KiB)
    regions = [Region(disk, "nvme", 8 * MiB) for _ in range(2)]
    backend = create_backend("posix", threads=3, block_size=8 * KiB)
    tiers = [
        HostTier("host", 64 * KiB),
        PathTier("nvme", [PathQueue(region, backend, recorder) for region in regions]),
    ]

    def work(worker: int) -> None:
        mine: list[tuple[Ticket, torch.Tensor]] = []
        for step in range(60):
            nbytes = 1 + (worker * 7919 + step * 104729) % (30 * KiB)
            payload = noise(nbytes, seed=worker + 97 * step)
            mine.append((store.put(payload.clone(), CLIENT, tiers), payload))
            ticket, expected = mine[(step * 31) % len(mine)]
            how = ("prefetch", "evict", "private", "get", "take")[(step + worker) % 5]
            got = getattr(store, how)(ticket)
            if isinstance(got, torch.Tensor):
                assert torch.equal(got, expected), f"{worker}.{step}: {how}"
            if how == "private":
                got.zero_()
            if how == "take" or len(mine) > 12:
                mine.remove((ticket, expected))

    for working in [meanwhile(work, worker) for worker in range(4)]:
        working.result(60)
    assert store.live_tickets == 0
    store.close()
    backend.close()
    for region in regions:
        assert region.used_bytes == 0
        region.close()
    pool.close()
    assert pool.usage().held_bytes == 0
