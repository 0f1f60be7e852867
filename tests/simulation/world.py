"""A store on simulated disks, its clients' random work, and a dictionary of what they put."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import pytest
import torch

from offload_strategy.activations import saved_tensor_hooks
from offload_strategy.activations.forward_records import ForwardRecord, Trace
from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.errors import CorruptDataError, OffloadError, StorageError, TierFullError
from offload_strategy.host_memory import arena, idle_memory, pool
from offload_strategy.io.backends import posix, thread_pool
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.store import error_messages, tensor_store, tiers, writer
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.telemetry import Recorder, get_logger
from offload_strategy.units import PAGE_BYTES as PAGE
from tests.simulation.disks import FAULTS, SimulatedFile, SimulatedRegion, SimulatedSystem
from tests.simulation.scheduler import (
    Abandoned,
    OrderedSet,
    Scheduler,
    Shim,
    SimulatedThread,
    simulated_threads,
)
from tests.store.rig import noise

CONTENT = noise(256 * 1024, seed=1)
_POISON = 0xDB


class _Memory:
    """Page-aligned memory that is poisoned when it is freed."""

    def __init__(self) -> None:
        self._map, self._at = mmap.mmap(-1, 8 << 20), 0

    def tensor(self, nbytes: int, shift: int) -> torch.Tensor:
        exporter = (ctypes.c_char * nbytes).from_buffer(self._map, self._at + shift)
        weakref.finalize(exporter, self._poison, self._at + shift, nbytes).atexit = False
        self._at += (shift + nbytes + PAGE) // PAGE * PAGE
        return torch.frombuffer(exporter, dtype=torch.uint8)

    def _poison(self, begin: int, nbytes: int) -> None:
        self._map[begin : begin + nbytes] = bytes([_POISON]) * nbytes


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
        self.random, self.memory, self.recorder = random, _Memory(), Recorder()
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
        return None if tensor is None else tensor.fill_(_POISON)

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            self.scheduler.fail(message)

    def open_store(self) -> None:
        self.store = tensor_store.TensorStore(self.pool, self.recorder, self.write_behind)
        self.store._registry.moving = OrderedSet()  # type: ignore[assignment]
        self.activations = ActivationOffload(
            self.store,
            self.tiers,
            lambda tensor: False,
            before_forward=lambda: None,
            min_size=1,
            budget=self.random.choice((None, 0.5, 3 * PAGE, "auto")),
            prefetch_bytes=self.random.choice((None, 2 * PAGE, 100 * PAGE)),
            most_backlog=4 * PAGE,
        )

    def close_store(self) -> None:
        gc.collect()  # the frames of errors
        self.store.close()
        for _ in range(10):  # another thread may be about to free what was dropped
            if self.store.live_tickets:
                self.scheduler.sleep(0.01)
        live = self.store.live_tickets
        self.require(live == 0, f"{live} tickets are left")

    def close(self) -> None:
        """Close everything, and look for what is left."""
        self.close_store()
        for closing in (*self.queues, *self.backends):
            closing.close()
        self.require(len(self.scheduler.strands) == 1, "threads are left")
        registry, usage = self.store._registry, self.pool.usage()
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
        while self.store._registry.moving:
            self.scheduler.sleep(0.01)


class _Sine(torch.autograd.Function):
    """A sine whose result begins at an address that is the same in each run."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, memory: _Memory) -> torch.Tensor:
        ctx.save_for_backward(values)
        return memory.tensor(values.nbytes, 64).view(torch.float32).copy_(torch.sin(values))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * torch.cos(*ctx.saved_tensors), None


class Client:
    """Does random work, and knows what must come of it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        #: What was put: where in CONTENT it begins, and its bytes.
        self.mine: dict[Ticket, tuple[int, int]] = {}
        self.graphs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._bag: list[str] = []
        for weight, names in (
            (1, "put_many adopt wait reserve restart evict cancel_write flip"),
            (2, "forward backward replace"),
            (3, "prefetch let_go"),
            (4, "read"),
            (6, "put"),
        ):
            self._bag += weight * names.split()

    def step(self) -> None:
        world = self.world
        name = world.random.choice(self._bag)
        world.log.append(f"{self.name}: {name}")
        try:
            if name in ("read", "prefetch", "let_go", "evict", "cancel_write", "flip", "replace"):
                if self.mine:
                    ticket = world.random.choice(list(self.mine))
                    world.log.append(str(ticket))
                    getattr(self if hasattr(self, name) else world.store, name)(ticket)
            else:
                getattr(self, name)()
        except KeyboardInterrupt:
            world.log.append("Ctrl-C")
        except (OffloadError, RuntimeError, MemoryError) as error:
            expected = world.faulty or isinstance(error, TierFullError)
            world.require(expected, f"unexpected: {error!r}")
            _forget(error)

    # ------------------------------------------------------------------ putting
    def _payload(self) -> tuple[torch.Tensor, tuple[int, int]]:
        world, random = self.world, self.world.random
        nbytes = random.choice((PAGE, 2 * PAGE, 4 * PAGE, 1, PAGE + 8, 3 * PAGE - 64, 0))
        begin = random.randrange(200) * 1000
        if random.randrange(2):
            payload = world.memory.tensor(max(1, nbytes), random.choice((0, 64, 8)))[:nbytes]
        else:
            payload = world.store.borrow("optimizer", nbytes)
        return payload.copy_(CONTENT[begin : begin + nbytes]), (begin, nbytes)

    def put(self, replaces: Ticket | None = None) -> None:
        payload, content = self._payload()
        hints = [bool(self.world.random.randrange(2)) for _ in range(2)]
        ticket = self.world.store.put(
            payload,
            "optimizer",
            self.world.tiers,
            whole_pages=hints[0],
            one_block_at_a_time=hints[1],
            replaces=replaces,
        )
        self.mine[ticket] = content

    def put_many(self) -> None:
        random, store = self.world.random, self.world.store
        made = [self._payload() for _ in range(random.choice((2, 3, 5)))]
        payloads, contents = zip(*made, strict=True)
        del made
        uses = [random.choice((None, 1.0, 5.0, 9.0)) for _ in payloads]
        tickets = store.put_all(payloads, "activations", self.world.tiers, uses, (True, True))
        self.mine.update(zip(tickets, contents, strict=True))

    def adopt(self) -> None:
        random = self.world.random
        begin, nbytes = random.randrange(4 * PAGE - 1000), random.choice((1, PAGE, 5000))
        ticket = self.world.store.adopt(self.world.shards, begin, nbytes, "parameters")
        self.mine[ticket] = (begin, nbytes)

    def replace(self, ticket: Ticket) -> None:
        self.put(ticket)
        del self.mine[ticket]
        self.world.store.free(ticket)

    # ------------------------------------------------------------------ reading and letting go
    def read(self, ticket: Ticket, how: str = "") -> None:
        store, (begin, nbytes) = self.world.store, self.mine[ticket]
        how = how or self.world.random.choice(("get", "private", "take", "writable"))
        if how in ("take", "writable"):
            del self.mine[ticket]  # Ctrl-C may come before it is freed, or after
        try:
            got = getattr(store, how)(ticket)
        except (StorageError, RuntimeError, MemoryError):
            if ticket.state is not TicketState.FREED:
                self.mine[ticket] = (begin, nbytes)
            raise
        right = torch.equal(got, CONTENT[begin : begin + nbytes])
        self.world.require(right, f"{how} returned other bytes of {ticket}")
        if how == "writable":
            store.free(ticket)
        if how != "get":
            got.fill_(_POISON)

    def let_go(self, ticket: Ticket) -> None:
        del self.mine[ticket]
        if self.world.random.randrange(2):
            self.world.store.free(ticket)

    def flip(self, ticket: Ticket) -> None:
        """Change a bit on a disk with checksums, behind the store's back."""
        world, stripes = self.world, ticket.entry.stripes
        stored = ticket.state is TicketState.STORED and ticket.entry.tier is not None
        if not stored or not world.checks:
            return
        disk: Any = stripes[0].queue.region.disk  # type: ignore[union-attr]
        at = stripes[0].extent.offset + ticket.entry.begin
        disk.data[at] ^= 1
        try:
            with suppress(CorruptDataError):
                world.store.get(ticket)
                world.scheduler.fail("wrong bytes went unnoticed")
        finally:
            disk.data[at] ^= 1

    def restart(self) -> None:
        """Close the store while bytes move, and open another one on the same disks."""
        if not self.world.alone:
            return
        with suppress(KeyboardInterrupt):
            self.world.store.close()
        self.world.scheduler.interrupt_in = 0
        self.world.store.close()
        self.leave(verify=True)
        self.world.close_store()
        self.world.open_store()

    def leave(self, *, verify: bool) -> None:
        """Look at everything once more, and let it go."""
        for ticket in list(self.mine):
            if verify:
                closed = self.world.store._registry.closed
                with suppress(OffloadError if closed else ()):
                    self.read(ticket, "get")
            if self.world.random.randrange(2):
                self.world.store.free(ticket)
        self.mine.clear()
        self.graphs.clear()

    # ------------------------------------------------------------------ the rest
    def wait(self) -> None:
        if self.world.random.randrange(2):
            self.world.store.wait_for_writes()
        else:
            seconds = self.world.random.choice((0.01, 0.0))
            self.world.store.await_writes("optimizer", 2 * PAGE, seconds)

    def reserve(self) -> None:
        buffers, store = self.world.pool, self.world.store
        [
            lambda: buffers.keep_idle_beyond(4 * PAGE),
            lambda: buffers.keep_idle(4 * PAGE),
            lambda: buffers.keep_idle(0),
            store.trim,
            store.pass_begins,
            store.release_written,
            lambda: [queue.end_threads() for queue in self.world.queues],
        ][self.world.random.randrange(7)]()

    def forward(self) -> None:
        world, random = self.world, self.world.random
        begin, nbytes = random.randrange(50) * PAGE, random.choice((1, 2)) * PAGE
        values = world.memory.tensor(nbytes, 64 * random.randrange(3)).view(torch.float32)
        values.copy_(CONTENT[begin : begin + len(values)]).requires_grad_()
        layers = random.choice((3, 1, 6))
        with world.activations.forward():
            result = values
            for _ in range(layers):
                result = _Sine.apply(result, world.memory)
        plain = again = values.detach().clone().requires_grad_()
        for _ in range(layers):
            again = torch.sin(again)
        again.sum().backward()
        assert plain.grad is not None
        self.graphs.append((values, result.sum(), plain.grad))

    def backward(self) -> None:
        if self.graphs:
            number = self.world.random.randrange(len(self.graphs))
            values, loss, expected = self.graphs.pop(number)
            loss.backward()
            assert values.grad is not None
            self.world.require(torch.equal(values.grad, expected), "other gradients")


def _forget(error: BaseException | None) -> None:
    """Free what the frames of an error refer to."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


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
        (pool, "_LARGE_BYTES", 2 * PAGE),
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


def simulate(random: Random, steps: int = 0) -> list[object]:
    """Run one world to its end, and return what happened; AssertionError if anything is wrong."""
    log: list[Any] = []
    with scheduled(random, log) as scheduler:
        world = World(random)
        world.log = log
        _live(world, steps or random.choice((10, 20, 30)))
    return [*log, scheduler.steps, scheduler.now]


def _live(world: World, steps: int) -> None:
    random, scheduler = world.random, world.scheduler
    clients = [Client(world, "main")]
    if random.randrange(3) == 2:
        world.alone = False
        clients.append(Client(world, "other"))
        helper = SimulatedThread(lambda: [clients[1].step() for _ in range(steps // 2)], "other")
        helper.start()
    for _ in range(steps):
        if random.randrange(8) == 7:
            world.something_happens()
        scheduler.interrupt_in = random.randrange(200) if random.randrange(20) == 19 else 0
        clients[0].step()
        scheduler.interrupt_in = 0
    if not world.alone:
        helper.join()
    world.heal()
    closes = random.randrange(4) == 3
    if closes:
        world.store.close()
    for client in clients:
        client.leave(verify=not closes)
    world.close()
