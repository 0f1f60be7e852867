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
from offload_strategy.memory.buffers import HostBuffer
from offload_strategy.units import PAGE_BYTES, MiB, format_size, round_up

#: Idle buffers kept for the next request at most, unless `keep_idle` says less: a fresh mapping has
#: its page faults again (13 % of step time in a trial without recycling), idle memory costs memory.
IDLE_BYTES = 256 * MiB

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


class BufferPool:
    """Lends flat uint8 tensors over page-aligned host memory.

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
        self._loans: dict[int, tuple[weakref.ref[Any], HostBuffer, int]] = {}
        self._held = self._idle_bytes = self._lent = self._requested = self._peak = 0
        self._planned: dict[int, int] = {}
        self._idle_at_most = IDLE_BYTES

    def plan(self, classes: Mapping[int, int]) -> None:
        """Tell which buffers will be asked for again and again, as a shape census finds them.

        Idle buffers are unmapped beyond `IDLE_BYTES`; planned ones are kept, as long as the budget
        does not need their memory for others (MemAscend, section on the adaptive buffer pool).

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

    def lend(
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
                self._held += size
                self._peak = max(self._peak, self._held)
            self._lent += buffer.nbytes
            self._requested += nbytes
            tensor, exporter = buffer.lend(nbytes)
            loan = weakref.ref(exporter, self._returned.append)
            self._loans[id(loan)] = (loan, buffer, nbytes)
            return tensor

    def trim(self) -> None:
        """Unmap idle buffers, for a while in which none will be asked for.

        Planned ones stay, and pinned ones: to register memory with a device takes long.
        """
        with self._lock:
            self._collect()
            for size, pinned in list(self._idle):
                while not pinned and len(self._idle.get((size, False), ())) > self._planned.get(
                    size, 0
                ):
                    self._unmap_one(size, pinned)

    def keep_idle(self, nbytes: int) -> None:
        """Unmap idle buffers beyond so many bytes from now on, where memory is scarce."""
        with self._lock:
            self._idle_at_most = nbytes
            self._collect()

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
            self._held = self._lent = self._requested = 0

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
            _, buffer, nbytes = loan
            self._lent -= buffer.nbytes
            self._requested -= nbytes
            self._idle.setdefault((buffer.nbytes, buffer.pinned), []).append(buffer)
            self._idle_bytes += buffer.nbytes
        self._trim(self.budget, self._idle_at_most)

    def _trim(self, held_at_most: int, idle_at_most: int) -> None:
        """Unmap idle buffers, the class unused for longest first, until both limits hold."""
        if self._held <= held_at_most and self._idle_bytes <= idle_at_most:
            return
        self._unmap(self._planned, held_at_most, idle_at_most)
        # What is planned goes only when the budget needs it.
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
        self._held -= size
        self._idle_bytes -= size
        if not buffers:
            del self._idle[size, pinned]
