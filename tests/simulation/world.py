"""A store on simulated disks, its clients' random work, and a dictionary of what they put."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
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
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends import posix
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.queues.checksums import create_checksum
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.store import error_messages, tensor_store, tiers, writer
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.store.tiers import HostTier, PathTier
from offload_strategy.telemetry import Recorder, get_logger
from offload_strategy.units import PAGE_BYTES as PAGE
from tests.simulation.disks import FAULTS, SimulatedFile, SimulatedRegion, SimulatedSystem
from tests.simulation.scheduler import (
    Abandoned,
    Scheduler,
    Shim,
    SimulatedThread,
    simulated_threads,
)
from tests.store.rig import noise

CONTENT = noise(256 * 1024, seed=1)
_ADDRESSES = 8 << 20
_POISON = 0xDB


class _Memory:
    """Page-aligned memory that is poisoned when it is freed."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _ADDRESSES)
        self._at = 0

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
        self.random = random
        self.scheduler = Shim.scheduler = Scheduler(random, pick((30, 10, 3, 100)))
        self.memory = _Memory()
        self.system = SimulatedSystem(self.scheduler)
        self.scheduler.system = self.system
        self.recorder = Recorder()
        pages = pick((24, 12, 8, 5))
        self.pool = BufferPool(pages * PAGE)
        self._acquire = self.pool.acquire
        self.pool.acquire = self._poisoned  # type: ignore[method-assign]
        mode: Any = pick(("off", "off", "sampled"))
        threads, block = pick((1, 2)), pick((4, 1)) * PAGE
        shared = PosixBackend(threads=threads, block_size=block)
        check = create_checksum(mode, shared)
        self.backends = [shared]
        self.regions = [SimulatedRegion(self.system, 16 * PAGE) for _ in range(pick((1, 2, 3)))]
        self.queues = []
        for region in self.regions:
            if len(self.backends) == len(self.queues) > 0 and random.randrange(2):
                self.backends.append(PosixBackend(threads=threads, block_size=block))
            lock: Any = _PathLock(self) if random.randrange(4) == 3 else None
            options = {"path_lock": lock, "checksum": check}
            self.queues.append(PathQueue(region, self.backends[-1], self.recorder, **options))
        self.file = SimulatedFile(self.system, CONTENT[: 5 * PAGE + 123].numpy().tobytes())
        self.shards = PathQueue(self.file, shared, self.recorder)
        self.disk = PathTier("nvme", self.queues)
        self.host = HostTier("host", pick((0, 3, 6)) * PAGE)
        self.tiers = [self.host, self.disk] if self.host.capacity else [self.disk]
        self.write_behind = pick((64, 8, 2)) * PAGE
        self.open_store()
        #: Whether something was made to fail, so that errors of the store are to be expected.
        self.faulty = False
        self.checks = check is not None
        #: Whether there is one client.
        self.alone = True
        self.log: list[str] = []

    def close_store(self) -> None:
        gc.collect()  # the frames of errors
        self.store.close()
        live = self.store.live_tickets
        self.require(live == 0, f"{live} tickets are left")

    def open_store(self) -> None:
        self.store = TensorStore(self.pool, self.recorder, self.write_behind)
        # A set of objects is ordered by their addresses.
        self.store._registry.moving = _OrderedSet()  # type: ignore[assignment]
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

    def _poisoned(self, nbytes: int, **options: Any) -> torch.Tensor | None:
        tensor = self._acquire(nbytes, **options)
        return None if tensor is None else tensor.fill_(_POISON)

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            self.scheduler.fail(message)

    # ------------------------------------------------------------------ faults
    def something_happens(self) -> None:
        random = self.random
        kind = random.randrange(10)
        disk = random.choice((*self.regions, self.file)).disk
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
        self.log.append(f"fault {kind}")

    def heal(self) -> None:
        for disk in [region.disk for region in self.regions] + [self.file.disk]:
            disk.faults.clear()
            disk.dead = False
            disk.seconds = [0.0]
        self.scheduler.refuses_threads = False

    def close(self) -> None:
        """Close everything, and look for what is left."""
        scheduler, store = self.scheduler, self.store
        self.close_store()
        for queue in self.queues:
            queue.close()
        for backend in self.backends:
            backend.close()
        self.require(len(scheduler.strands) == 1, f"threads are left: {scheduler.strands}")
        registry = store._registry
        figures = {
            "bytes to be written": registry.writing_bytes + sum(registry.writing_bytes_of.values()),
            "transfers": len(registry.moving),
            "bytes of copies": len(registry._copies),
            "bytes in host memory": self.host.used_bytes,
            "bytes on the disks": self.disk.used_bytes,
            "bytes alive on the disks": sum(self.disk._live.values()),
            "requests": sum(q._reads.in_flight + q._writes.in_flight for q in self.queues),
        }
        usage = self.pool.usage()
        figures |= {"buffers": usage.lent_bytes + usage.requested_bytes}
        self.pool.close()
        figures |= {"mapped bytes": self.pool.usage().held_bytes}
        left = {name: count for name, count in figures.items() if count}
        self.require(not left, f"something is left: {left}")


class _OrderedSet(dict[Any, None]):
    def add(self, key: Any) -> None:
        self[key] = None

    def discard(self, key: Any) -> None:
        self.pop(key, None)


class _Sine(torch.autograd.Function):
    """A sine whose result begins at an address that is the same in each run."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, memory: _Memory) -> torch.Tensor:
        ctx.save_for_backward(values)
        nbytes = values.nbytes
        return memory.tensor(nbytes, 64).view(torch.float32).copy_(torch.sin(values))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        [values] = ctx.saved_tensors
        return gradient * torch.cos(values), None


class Client:
    """Does random work, and knows what must come of it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        #: What was put: where in CONTENT it begins, and its bytes.
        self.mine: dict[Ticket, tuple[int, int]] = {}
        self.graphs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.work: list[tuple[int, Callable[[], object]]] = [
            (6, self.put), (4, self.read), (3, self.prefetch), (1, self.evict), (3, self.let_go),
            (2, self.replace), (1, self.adopt), (1, self.cancel), (1, self.wait), (1, self.reserve),
            (2, self.forward), (2, self.backward), (1, self.put_many),
            (1, self.flip), (1, self.restart),
        ]  # fmt: skip
        self._bag = [action for weight, action in self.work for _ in range(weight)]

    def step(self) -> None:
        world = self.world
        action = world.random.choice(self._bag)
        world.log.append(f"{self.name} {action.__name__}")
        try:
            action()
        except KeyboardInterrupt:
            world.log.append("Ctrl-C")
        except TierFullError as error:
            _forget(error)
        except OffloadError as error:
            world.require(world.faulty, f"unexpected: {error}")
            _forget(error)
        except (RuntimeError, MemoryError) as error:
            world.require(world.faulty, f"unexpected: {error!r}")
            _forget(error)

    # ------------------------------------------------------------------ what it does
    def _some(self) -> Ticket | None:
        return self.world.random.choice(list(self.mine)) if self.mine else None

    def _payload(self) -> tuple[torch.Tensor, tuple[int, int]]:
        world, random = self.world, self.world.random
        nbytes = random.choice((PAGE, 2 * PAGE, 4 * PAGE, 1, PAGE + 8, 3 * PAGE - 64, 0))
        begin = random.randrange(200) * 1000
        if random.randrange(2):
            payload = world.memory.tensor(max(1, nbytes), random.choice((0, 64, 8)))[:nbytes]
        else:
            payload = world.store.borrow("optimizer", nbytes)
        return payload.copy_(CONTENT[begin : begin + nbytes]), (begin, nbytes)

    def put(self, replaces: Ticket | None = None) -> Ticket:
        random = self.world.random
        payload, content = self._payload()
        whole_pages, one = bool(random.randrange(2)), bool(random.randrange(2))
        ticket = self.world.store.put(
            payload,
            "optimizer",
            self.world.tiers,
            whole_pages=whole_pages,
            one_block_at_a_time=one,
            replaces=replaces,
        )
        self.mine[ticket] = content
        return ticket

    def put_many(self) -> None:
        random = self.world.random
        made = [self._payload() for _ in range(random.choice((2, 3, 5)))]
        uses = [random.choice((None, 1.0, 5.0, 9.0)) for _ in made]
        payloads = [payload for payload, _ in made]
        contents = [content for _, content in made]
        del made
        tickets = self.world.store.put_all(
            payloads, "activations", self.world.tiers, uses, (True, True)
        )
        self.mine.update(zip(tickets, contents, strict=True))

    def adopt(self) -> None:
        world = self.world
        begin, nbytes = (
            world.random.randrange(4 * PAGE - 1000),
            world.random.choice((1, PAGE, 5000)),
        )
        ticket = world.store.adopt(world.shards, begin, nbytes, "parameters")
        self.mine[ticket] = (begin, nbytes)

    def read(self) -> None:
        if (ticket := self._some()) is None:
            return
        self.check(ticket, self.world.random.choice(("get", "private", "take", "writable")))

    def check(self, ticket: Ticket, how: str) -> None:
        store, (begin, nbytes) = self.world.store, self.mine[ticket]
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

    def prefetch(self) -> None:
        if (ticket := self._some()) is not None:
            self.world.store.prefetch(ticket)

    def evict(self) -> None:
        if (ticket := self._some()) is not None:
            self.world.store.evict(ticket)

    def let_go(self) -> None:
        if (ticket := self._some()) is not None:
            del self.mine[ticket]
            if self.world.random.randrange(2):
                self.world.store.free(ticket)

    def replace(self) -> None:
        if (ticket := self._some()) is not None:
            self.put(ticket)
            self.mine.pop(ticket)
            self.world.store.free(ticket)

    def cancel(self) -> None:
        if (ticket := self._some()) is not None:
            self.world.store.cancel_write(ticket)

    def flip(self) -> None:
        """Change a bit on a disk with checksums, behind the store's back."""
        ticket = self._some()
        if ticket is None or not self.world.checks or ticket.state is not TicketState.STORED:
            return
        for stripe in ticket.entry.stripes[:1] if ticket.entry.tier is not None else ():
            disk, at = stripe.queue.region.disk, stripe.extent.offset + ticket.entry.begin  # type: ignore[union-attr]
            disk.data[at] ^= 1
            try:
                self.world.store.get(ticket)
            except CorruptDataError as error:
                _forget(error)
            except StorageError as error:
                self.world.require(self.world.faulty, f"unexpected: {error}")
                _forget(error)
            else:
                self.world.scheduler.fail("wrong bytes went unnoticed")
            finally:
                disk.data[at] ^= 1

    def restart(self) -> None:
        """Close the store while bytes move, and open another one on the same disks."""
        if not self.world.alone or not self.mine:
            return
        with suppress(KeyboardInterrupt):
            self.world.store.close()
        self.world.scheduler.interrupt_in = 0
        self.world.store.close()
        for ticket in list(self.mine):
            with suppress(OffloadError):
                self.check(ticket, "get")
        del ticket
        self.mine.clear()
        self.graphs.clear()
        self.world.close_store()
        self.world.open_store()

    def wait(self) -> None:
        store = self.world.store
        if self.world.random.randrange(2):
            return store.wait_for_writes()
        store.await_writes("optimizer", 2 * PAGE, self.world.random.choice((0.01, 0.0)))
        return None

    def reserve(self) -> None:
        pool, random = self.world.pool, self.world.random
        [
            lambda: pool.plan(self, [PAGE, 2 * PAGE], 4 * PAGE),
            lambda: pool.keep_idle(random.choice((0, 4 * PAGE))),
            pool.trim,
            self.world.store.trim,
            self.world.store.pass_begins,
            self.world.store.release_written,
            lambda: [queue.end_threads() for queue in self.world.queues],
        ][random.randrange(7)]()

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
            values, loss, expected = self.graphs.pop(self.world.random.randrange(len(self.graphs)))
            loss.backward()
            assert values.grad is not None
            self.world.require(torch.equal(values.grad, expected), "other gradients")

    def leave(self, *, verify: bool) -> None:
        """Look at everything once more, and let it go."""
        for ticket in list(self.mine):
            if verify:
                self.check(ticket, "get")
            if self.world.random.randrange(2):
                self.world.store.free(ticket)
        self.mine.clear()
        self.graphs.clear()


def _forget(error: BaseException | None) -> None:
    """Free what the frames of an error refer to."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@contextmanager
def tiny_world() -> Iterator[None]:
    """Within this, a few pages are a lot."""
    small: list[tuple[Any, str, Any]] = [
        (tiers, "STRIPE_BYTES", 2 * PAGE),
        (tiers, "STRIPE_UNIT", PAGE),
        (writer, "_WORTH_BYTES", PAGE),
        (pool, "_LARGE_BYTES", 2 * PAGE),
        (arena, "BLOCK_BYTES", 2 * PAGE),
        (posix, "os", _System()),
        (saved_tensor_hooks, "ForwardRecord", _record),
        (idle_memory, "resident_bytes", lambda: Shim.scheduler.random.randrange(50, 60) * PAGE),
        (tensor_store, "_COLLECT_BYTES", 4 * PAGE),
        (error_messages, "PATIENCE_SECONDS", 0.1),
    ]
    logger = get_logger("offload_strategy")
    level = logger.level
    gc.collect()
    gc.freeze()  # collections look at what a world made, and not at all of torch
    with pytest.MonkeyPatch.context() as patch, simulated_threads():
        for module, name, value in small:
            patch.setattr(module, name, value)
        logger.setLevel("CRITICAL")
        gc.disable()  # worlds must not differ by when it runs
        yield
        gc.enable()
        logger.setLevel(level)


def _record(serial: int) -> ForwardRecord:
    # A default value of a dataclass is not replaced with the clock.
    return ForwardRecord(serial, Trace(Shim.scheduler.now))


class _System:
    def __getattr__(self, name: str) -> Any:
        return getattr(Shim.scheduler.system, name)


def simulate(random: Random, steps: int = 0) -> World:
    """Run one world to its end; AssertionError if it is not what it should be."""
    world = World(random)
    try:
        _live(world, steps or random.choice((10, 20, 40)))
    except Abandoned:
        pass
    finally:
        world.scheduler.end()
    if world.scheduler.failure is not None:
        raise AssertionError("\n".join((*world.log[-60:], world.scheduler.failure)))
    return world


def _live(world: World, steps: int) -> None:
    random, scheduler = world.random, world.scheduler
    clients = [Client(world, "main")]
    helper = None
    if random.randrange(3) == 2:
        other = Client(world, "other")
        world.alone = False
        clients.append(other)
        helper = SimulatedThread(lambda: [other.step() for _ in range(steps // 2)], "other")
        helper.start()
    for _ in range(steps):
        if random.randrange(8) == 7:
            world.something_happens()
        scheduler.interrupt_in = random.randrange(200) if random.randrange(20) == 19 else 0
        clients[0].step()
        scheduler.interrupt_in = 0
    if helper is not None:
        helper.join()
    world.heal()
    while world.store._registry.moving:
        scheduler.sleep(0.01)
    closes = random.randrange(4) == 3
    if closes:
        world.store.close()
    for client in clients:
        client.leave(verify=not closes)
    world.close()
