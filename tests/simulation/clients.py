"""The random work of a simulated store's clients, and a dictionary of what they put."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import torch

from offload_strategy.errors import CorruptDataError, OffloadError, StorageError, TierFullError
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.units import PAGE_BYTES as PAGE
from tests.simulation.scheduler import SimulatedThread
from tests.simulation.world import CONTENT, POISON, Memory, World, scheduled


class _Sine(torch.autograd.Function):
    """A sine whose result begins at an address that is the same in each run."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, memory: Memory) -> torch.Tensor:
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
        ticket = self.world.store.put(
            payload,
            "optimizer",
            self.world.tiers,
            one_block_at_a_time=bool(self.world.random.randrange(2)),
            replaces=replaces,
        )
        self.mine[ticket] = content

    def put_many(self) -> None:
        random, store = self.world.random, self.world.store
        made = [self._payload() for _ in range(random.choice((2, 3, 5)))]
        payloads, contents = zip(*made, strict=True)
        del made
        uses = [random.choice((None, 1.0, 5.0, 9.0)) for _ in payloads]
        tickets = store.put_all(payloads, "activations", self.world.tiers, uses, True)
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
            got.fill_(POISON)

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
        for ticket in list(self.mine):
            if verify:
                with suppress(OffloadError if self.world.store.registry.closed else ()):
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
            store.registry.release_written,
            lambda: [backend.threads.end_threads() for backend in self.world.backends],
        ][self.world.random.randrange(7)]()

    def forward(self) -> None:
        world, random = self.world, self.world.random
        begin, nbytes = random.randrange(50) * PAGE, random.choice((1, 2)) * PAGE
        values = world.memory.tensor(nbytes, 64 * random.randrange(3)).view(torch.float32)
        values.copy_(CONTENT[begin : begin + len(values)]).requires_grad_()
        layers = random.choice((3, 1, 6))
        hooks, result = world.activations.enter(), values
        try:
            for _ in range(layers):
                result = _Sine.apply(result, world.memory)
        finally:
            world.activations.leave(hooks)
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


def _forget(error: BaseException | None) -> None:
    """Free what the frames of an error refer to."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


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
