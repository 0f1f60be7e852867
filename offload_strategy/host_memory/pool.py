"""The pool: buffers recycled per size class, under one budget, with honest figures."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.arena import Arena, can_be_used
from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.units import PAGE_BYTES, MiB, format_size, round_up

#: Idle buffers kept for the next request at most, unless another limit was set: a fresh mapping has
#: its page faults again (13 % of step time in a trial without recycling), idle memory costs memory.
IDLE_BYTES = 256 * MiB

#: From this size on buffers are cut out of an arena, where any size serves another. Smaller ones
#: have no huge pages, and fresh pages of theirs cost little.
_LARGE_BYTES = 1 * MiB

#: An idle buffer may be larger than what is asked for by this share of it: sizes that differ a
#: little would else each have buffers of their own, idle most of the time.
_SPARE = 0.125


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Host buffers in figures.

    Args:
        held_bytes: mapped now, lent or idle.
        peak_bytes: the most that was ever mapped.
        lent_bytes: mapped and in use, rounded up to pages.
        requested_bytes: what the users of the lent buffers asked for.
    """

    held_bytes: int
    peak_bytes: int
    lent_bytes: int
    requested_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share of the bytes in use that nobody asked for, 0 to 1."""
        return 1.0 - self.requested_bytes / self.lent_bytes if self.lent_bytes else 0.0


@dataclass(frozen=True, slots=True)
class _Range:
    """What an arena lent."""

    arena: Arena
    begin: int
    nbytes: int


#: A tensor, what dies with its storage, and where its memory is from.
_Lent = tuple[torch.Tensor, Any, HostBuffer | _Range]


class BufferPool:
    """Lends flat uint8 tensors over page-aligned host memory.

    Large ones are ranges of an arena. Small ones are recycled by size, and so are those that were
    planned, so that they are there when they are needed, and those that are pinned, as memory is
    registered with CUDA as a whole.

    Args:
        budget: bytes that may be mapped at once.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        # (Size class, pinned) -> idle buffers; the class unused for longest is trimmed first.
        self._idle: OrderedDict[tuple[int, bool], list[HostBuffer]] = OrderedDict()
        # See [Note: no Python code in finalizers]. A loan is known by its weak reference, which
        # must be kept to be told.
        self._returned: deque[weakref.ref[Any]] = deque()
        self._loans: dict[int, tuple[weakref.ref[Any], HostBuffer | _Range, int]] = {}
        # Bytes that are mapped one by one, and how many of them are idle.
        self._apart = self._idle_bytes = 0
        self._lent = self._requested = self._peak = 0
        self._arena: Arena | None = None
        self._has_arena = can_be_used()
        self._planned: dict[int, int] = {}
        # What `keep_idle` said; without it the usual bytes, and those beyond them.
        self._scarce: int | None = None
        self._beyond = 0

    def plan(self, classes: Mapping[int, int]) -> None:
        """Tell which buffers will be asked for again and again, as a shape census finds them.

        Idle buffers are unmapped beyond a limit (`keep_idle`); planned ones are kept, as long as
        the budget does not need their memory for others (MemAscend, section on the adaptive buffer
        pool).

        Args:
            classes: how many buffers of a size, in bytes, will be in use at a time.

        Raises:
            ConfigError: together they exceed the budget.
        """
        planned: dict[int, int] = defaultdict(int)
        for nbytes, count in classes.items():
            planned[round_up(nbytes, PAGE_BYTES)] += count
        total = sum(size * count for size, count in planned.items())
        if total > self.budget:
            raise ConfigError(
                f"memory.pinned: the buffers of this model need {format_size(total)}, but only "
                f"{format_size(self.budget)} are allowed. Raise memory.pinned, or keep fewer "
                f"blocks in flight (parameters.blocks_in_flight)."
            )
        with self._lock:
            self._planned = dict(planned)
            self._collect()

    def acquire(
        self, nbytes: int, *, pinned: bool = False, beyond_budget: bool = False
    ) -> torch.Tensor | None:
        """A flat uint8 host tensor of `nbytes`, or None when the budget is used up.

        Its memory returns to the pool when the last alias of the tensor is gone. The contents are
        undefined.

        Args:
            nbytes: bytes wanted.
            pinned: registered with CUDA, for asynchronous copies to and from a device.
            beyond_budget: map more memory even so. For what a running computation cannot go on
                without: waiting there would be for ever.
        """
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        with self._lock:
            self._collect()
            acquired: _Lent | None = None
            if size >= _LARGE_BYTES and not pinned and size not in self._planned:
                acquired = self._lend_range(nbytes)
            if acquired is None:
                acquired = self._lend_buffer(nbytes, size, pinned, beyond_budget=beyond_budget)
            if acquired is None:
                return None
            tensor, exporter, memory = acquired
            self._peak = max(self._peak, self._held)
            self._lent += memory.nbytes
            self._requested += nbytes
            loan = weakref.ref(exporter, self._returned.append)
            self._loans[id(loan)] = (loan, memory, nbytes)
            return tensor

    def trim(self, keep: int = 0) -> None:
        """Give idle memory back, for a while in which little will be asked for.

        Planned buffers stay, and pinned ones: to register memory with a device takes long.

        Args:
            keep: bytes that may stay nevertheless.
        """
        with self._lock:
            self._collect()
            idle, spare = self._spare()
            for size, count in spare.items():
                for _ in range(count):
                    if idle <= keep:
                        return
                    self._unmap_one(size, False)
                    idle -= size
            if self._arena is not None:
                self._arena.give_up(idle - keep)

    def idle_bytes(self) -> int:
        """Idle memory that `trim` can give back."""
        with self._lock:
            self._collect()
            return self._spare()[0]

    def keep_idle(self, nbytes: int) -> None:
        """Unmap idle buffers beyond so many bytes from now on, where memory is scarce."""
        with self._lock:
            self._scarce = nbytes
            self._collect()

    def keep_idle_beyond(self, nbytes: int) -> None:
        """Keep so many bytes of idle buffers beyond the usual ones, unless `keep_idle` limits them.

        Args:
            nbytes: that a client gives back together, to ask for them again. Of several clients
                the most counts.
        """
        with self._lock:
            self._beyond = max(self._beyond, nbytes)

    def usage(self) -> MemoryUsage:
        """Figures of this moment."""
        with self._lock:
            self._collect()
            return MemoryUsage(self._held, self._peak, self._lent, self._requested)

    def close(self) -> None:
        """Unmap what is idle; what is still lent is unmapped when its tensor dies."""
        with self._lock:
            self._collect()
            self._trim(0, 0)
            # From now on the tensors alone own their memory.
            self._loans.clear()
            self._arena = None
            self._apart = self._lent = self._requested = 0

    @property
    def _idle_at_most(self) -> int:
        return IDLE_BYTES + self._beyond if self._scarce is None else self._scarce

    @property
    def _held(self) -> int:
        return self._apart + (0 if self._arena is None else self._arena.held_bytes)

    def _spare(self) -> tuple[int, dict[int, int]]:
        """Idle bytes that are neither planned nor pinned, and such buffers of each size."""
        spare = {
            size: max(0, len(buffers) - self._planned.get(size, 0))
            for (size, pinned), buffers in self._idle.items()
            if not pinned
        }
        in_arena = 0 if self._arena is None else self._arena.idle_bytes()
        return in_arena + sum(size * count for size, count in spare.items()), spare

    def _lend_range(self, nbytes: int) -> _Lent | None:
        """A range of the arena, if there is one and the budget has room."""
        if self._arena is None:
            if not self._has_arena:
                return None
            try:
                self._arena = Arena(self.budget)
            except (OSError, OverflowError, ValueError):  # no addresses left for it
                self._has_arena = False
                return None
        arena = self._arena
        acquired = arena.acquire(nbytes, self.budget - self._held)
        if acquired is None:
            self._trim(self.budget - nbytes, self._idle_at_most)
            acquired = arena.acquire(nbytes, self.budget - self._held)
        if acquired is None:
            return None
        tensor, exporter, begin = acquired
        return tensor, exporter, _Range(arena, begin, round_up(nbytes, PAGE_BYTES))

    def _lend_buffer(
        self, nbytes: int, size: int, pinned: bool, *, beyond_budget: bool
    ) -> _Lent | None:
        """A mapping of its own, used before or fresh."""
        fitting = self._fitting(size, pinned)
        if fitting is not None:
            buffer = self._idle[fitting, pinned].pop()
            self._idle.move_to_end((fitting, pinned))
            self._idle_bytes -= fitting
        else:
            self._trim(self.budget - size, self._idle_at_most)
            if self._held + size > self.budget and not beyond_budget:
                return None
            buffer = HostBuffer(size, pinned=pinned)
            self._apart += size
        return *buffer.acquire(nbytes), buffer

    def _fitting(self, size: int, pinned: bool) -> int | None:
        """The size of an idle buffer that can be lent, if there is one."""
        if self._idle.get((size, pinned)):
            return size
        return min(
            (
                other
                for (other, is_pinned), buffers in self._idle.items()
                if is_pinned == pinned
                and size < other <= size * (1 + _SPARE)
                and len(buffers) > self._planned.get(other, 0)
            ),
            default=None,
        )

    def _collect(self) -> None:
        while self._returned:
            loan = self._loans.pop(id(self._returned.popleft()), None)
            if loan is None:
                continue  # lent before `close`
            _, memory, nbytes = loan
            self._lent -= memory.nbytes
            self._requested -= nbytes
            if isinstance(memory, _Range):
                memory.arena.take_back(memory.begin, memory.nbytes)
            else:
                self._idle.setdefault((memory.nbytes, memory.pinned), []).append(memory)
                self._idle_bytes += memory.nbytes
        self._trim(self.budget, self._idle_at_most)

    def _trim(self, held_at_most: int, idle_at_most: int) -> None:
        """Give idle memory back until both limits hold, if they can.

        Buffers go first, the size unused for longest before the others; then memory of the arena;
        and what is planned only where the budget needs it.
        """
        if self._held <= held_at_most and self._held - self._lent <= idle_at_most:
            return
        arena = self._arena
        in_arena = 0 if arena is None else arena.idle_bytes()
        self._unmap(self._planned, held_at_most, idle_at_most - in_arena)
        if arena is not None:
            arena.give_up(max(self._held - held_at_most, in_arena - idle_at_most))
        self._unmap({}, held_at_most, self._idle_bytes)

    def _unmap(self, kept: Mapping[int, int], held_at_most: int, idle_at_most: int) -> None:
        spare = sum(
            size * max(0, len(buffers) - kept.get(size, 0))
            for (size, _), buffers in self._idle.items()
        )
        for size, pinned in list(self._idle):
            buffers = self._idle[size, pinned]
            while len(buffers) > kept.get(size, 0):
                if self._held <= held_at_most and spare <= idle_at_most:
                    return
                self._unmap_one(size, pinned)
                spare -= size

    def _unmap_one(self, size: int, pinned: bool) -> None:
        buffers = self._idle[size, pinned]
        buffers.pop().release()
        self._apart -= size
        self._idle_bytes -= size
        if not buffers:
            del self._idle[size, pinned]
