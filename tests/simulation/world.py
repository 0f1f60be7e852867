"""A store on simulated disks, in which a few pages are a lot, and what may happen to it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch

from offload_strategy.activations import saved_tensor_hooks
from offload_strategy.activations.forward_records import ForwardRecord, Trace
from offload_strategy.activations.planned_budget import MemoryLimit
from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.host_memory import arena, idle_memory, pool
from offload_strategy.io.backends import posix, thread_pool
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.store import error_messages, tensor_store, tiers, writer
from offload_strategy.telemetry import Recorder, get_logger
from offload_strategy.units import PAGE_BYTES as PAGE
from tests.simulation.disks import FAULTS, SimulatedFile, SimulatedRegion, SimulatedSystem
from tests.simulation.scheduler import Abandoned, OrderedSet, Scheduler, Shim, simulated_threads
from tests.store.rig import noise

CONTENT = noise(256 * 1024, seed=1)
POISON = 0xDB


class Memory:
    """Page-aligned memory that is poisoned when it is freed."""

    def __init__(self) -> None:
        self._map, self._at = mmap.mmap(-1, 8 << 20), 0

    def tensor(self, nbytes: int, shift: int) -> torch.Tensor:
        exporter = (ctypes.c_char * nbytes).from_buffer(self._map, self._at + shift)
        weakref.finalize(exporter, self._poison, self._at + shift, nbytes).atexit = False
        self._at += (shift + nbytes + PAGE) // PAGE * PAGE
        return torch.frombuffer(exporter, dtype=torch.uint8)

    def _poison(self, begin: int, nbytes: int) -> None:
        self._map[begin : begin + nbytes] = bytes([POISON]) * nbytes


class _PathLock:
    """A path lock that another process has now and then."""

    works = True

    def __init__(self, world: World) -> None:
        self._world = world

    def others(self) -> int:
        return 1

    def acquire(self) -> None:
        self._world.scheduler.sleep(self._world.random.choice((0.0001, 0.01, 0.1)))

    def release(self) -> None:
        pass


class World:
    """A store and all below it, as the random numbers want it."""

    def __init__(self, random: Random) -> None:
        pick = random.choice
        self.random, self.memory, self.recorder = random, Memory(), Recorder()
        self.scheduler = Shim.scheduler
        system = self.scheduler.system = SimulatedSystem(self.scheduler)
        self.pool = pool.BufferPool(pick((24, 12, 8, 5)) * PAGE)
        self._acquire = self.pool.acquire
        self.pool.acquire = self._poisoned  # type: ignore[method-assign]
        # Threads that seldom end, or as soon as they have nothing to do.
        thread_pool.IDLE_SECONDS = pick((1.0, 0.001))
        options = {"threads": pick((1, 2)), "block_size": pick((4, 1)) * PAGE}
        self.backends = [posix.PosixBackend(**options) for _ in range(pick((1, 3)))]
        check = create_checksum(pick(("off", "off", "full", "sampled")), self.backends[0])
        count = pick((1, 2, 3))
        self.regions = [SimulatedRegion(system, pick((16, 8, 4)) * PAGE) for _ in range(count)]
        self.queues = []
        for number, region in enumerate(self.regions):
            lock: Any = _PathLock(self) if random.randrange(4) == 3 else None
            backend = self.backends[number % len(self.backends)]
            queue = PathQueue(region, backend, self.recorder, path_lock=lock, checksum=check)
            self.queues.append(queue)
        self.file = SimulatedFile(system, CONTENT[: 5 * PAGE + 123].numpy().tobytes())
        self.shards = PathQueue(self.file, self.backends[0], self.recorder)
        self.disk = tiers.PathTier("nvme", self.queues)
        self.host = tiers.HostTier("host", pick((0, 3, 6)) * PAGE)
        self.tiers = [self.host, self.disk] if self.host.capacity else [self.disk]
        self.write_behind = pick((64, 8, 2)) * PAGE
        self.open_store()
        #: Whether something was made to fail, checksums are kept, and there is one client.
        self.faulty, self.checks, self.alone = False, check is not None, True
        self.log: list[str] = []

    def _poisoned(self, nbytes: int, **options: Any) -> torch.Tensor | None:
        tensor = self._acquire(nbytes, **options)
        return None if tensor is None else tensor.fill_(POISON)

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            self.scheduler.fail(message)

    def open_store(self) -> None:
        self.store = tensor_store.TensorStore(self.pool, self.recorder, self.write_behind)
        self.store.registry.moving = OrderedSet()  # type: ignore[assignment]
        self.activations = ActivationOffload(
            self.store,
            self.tiers,
            lambda tensor: False,
            before_forward=lambda: None,
            min_size=1,
            budget=self.random.choice((None, 0.5, 3 * PAGE, "auto")),
            prefetch_bytes=self.random.choice((None, 2 * PAGE, 100 * PAGE)),
            most_backlog=4 * PAGE,
            memory=MemoryLimit(None, 1),
        )

    def close_store(self) -> None:
        gc.collect()  # the frames of errors
        self.store.close()
        for _ in range(10):  # another thread may be about to free what was dropped
            if self.store.registry.live:
                self.scheduler.sleep(0.01)
        live = self.store.registry.live
        self.require(live == 0, f"{live} tickets are left")

    def close(self) -> None:
        """Close everything, and look for what is left."""
        self.close_store()
        for closing in (*self.queues, *self.backends):
            closing.close()
        self.require(len(self.scheduler.strands) == 1, "threads are left")
        registry, usage = self.store.registry, self.pool.usage()
        self.pool.close()
        figures = {
            "bytes to be written": registry.writing_bytes + sum(registry.writing_bytes_of.values()),
            "transfers": len(registry.moving),
            "copies": len(registry._copies),
            "bytes in host memory": self.host.used_bytes,
            "bytes on the disks": self.disk.used_bytes + sum(self.disk._live.values()),
            "requests": sum(q._reads.in_flight + q._writes.in_flight for q in self.queues),
            "buffers": usage.lent_bytes + usage.requested_bytes + self.pool.usage().held_bytes,
        }
        left = {name: count for name, count in figures.items() if count}
        self.require(not left, f"something is left: {left}")

    # ------------------------------------------------------------------ faults
    def something_happens(self) -> None:
        random, kind = self.random, self.random.randrange(10)
        disk = random.choice((*self.regions, self.file)).disk
        self.log.append(f"fault {kind}")
        if kind < 4:
            disk.seconds = [(0.0,), (0.0, 0.001), (0.0001, 0.05), (0.0, 0.0, 0.3)][kind]
        elif kind < 7:
            fault = random.choice(FAULTS)
            self.faulty = self.faulty or fault not in ("again", "short")
            disk.faults += [fault] * random.choice((1, 1, 3))
        elif kind == 7:
            random.choice(self.regions).refuses.append(random.choice(("full", "broken")))
            self.faulty = True
        elif kind == 8:
            self.scheduler.refuses_threads = self.faulty = True
        else:
            disk.dead = self.faulty = True

    def heal(self) -> None:
        """Let the disks answer, and everything that is under way end."""
        for disk in [place.disk for place in (*self.regions, self.file)]:
            disk.faults.clear()
            disk.dead, disk.seconds = False, (0.0,)
        self.scheduler.refuses_threads = False
        while self.store.registry.moving:
            self.scheduler.sleep(0.01)


def _record(serial: int) -> ForwardRecord:
    # A default value of a dataclass is not replaced with the clock.
    return ForwardRecord(serial, Trace(Shim.scheduler.now))


class _System:
    def __getattr__(self, name: str) -> Any:
        return getattr(Shim.scheduler.system, name)


@contextmanager
def tiny_world() -> Iterator[None]:
    """Within this, a few pages are a lot."""
    changes: list[tuple[Any, str, Any]] = [
        (tiers, "STRIPE_BYTES", 2 * PAGE),
        (tiers, "STRIPE_UNIT", PAGE),
        (writer, "_WORTH_BYTES", PAGE),
        (arena, "BLOCK_BYTES", 2 * PAGE),
        (thread_pool, "IDLE_SECONDS", 1.0),
        (tensor_store, "_COLLECT_BYTES", 4 * PAGE),
        (error_messages, "PATIENCE_SECONDS", 0.1),
        (posix, "os", _System()),
        (saved_tensor_hooks, "ForwardRecord", _record),
        (idle_memory, "resident_bytes", lambda *_: Shim.scheduler.random.randrange(50, 60) * PAGE),
    ]
    logger = get_logger("offload_strategy")
    level = logger.level
    gc.collect()
    gc.freeze()  # collections look at what a world made, and not at all of torch
    gc.disable()  # worlds must not differ by when it runs
    with pytest.MonkeyPatch.context() as patch, simulated_threads():
        for change in changes:
            patch.setattr(*change)
        logger.setLevel("CRITICAL")
        yield
    logger.setLevel(level)
    gc.enable()


@contextmanager
def scheduled(random: Random, log: list[str]) -> Iterator[Scheduler]:
    """A scheduler for this context; AssertionError if what ran there failed."""
    scheduler = Shim.scheduler = Scheduler(random, random.choice((30, 10, 3, 100)))
    try:
        yield scheduler
    except Abandoned:
        pass
    finally:
        scheduler.end()
    if scheduler.failure is not None:
        raise AssertionError("\n".join((*log[-60:], scheduler.failure)))
