"""The optimizer in a replay: states are prefetched, updated and written concurrently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from offload_strategy.plan_runtime.profile import Update

#: Updates whose states are read, computed or written at the same time (Fuyou, section 4.2).
_BUFFERS = 3
_LANE = "update"


class ReplayServices(Protocol):
    """What updates use of a replay."""

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        """Schedule a call."""

    def stripe(self, what: str, nbytes: int, *, write: bool, done: Callable[[], None]) -> None:
        """Transfer bytes over all paths."""

    def span(self, lane: str, what: str, seconds: float, nbytes: int = 0) -> None:
        """Record what a lane does."""

    def delay(self, seconds: float) -> None:
        """Delay the computation of the model."""

    def retry(self) -> None:
        """Check again whether training can go on."""


class Updates:
    """The updates of a step, in order.

    Args:
        services: Transfers bytes and keeps the time.
        updates: Updates of a step.
        shared_cores: Whether they compute on the cores that run the model.
    """

    def __init__(
        self, services: ReplayServices, updates: Sequence[Update], *, shared_cores: bool
    ) -> None:
        self._services = services
        self._updates = updates
        self._shared_cores = shared_cores
        self._writing = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step; writes of the last one may still be in flight."""
        self._ready: set[int] = set()
        self._read: set[int] = set()
        self._asked = self._updated = 0
        self._reading_ahead = self._computing = False

    @property
    def over(self) -> bool:
        """Whether all updates of the step have been computed."""
        return self._updated == len(self._updates)

    def read_ahead(self) -> None:
        """Start to prefetch states, because backward starts."""
        self._reading_ahead = True
        self._go_on()

    def ready(self, number: int) -> None:
        """Note that the gradients of an update are final."""
        self._ready.add(number)
        self._go_on()

    def _go_on(self) -> None:
        held = self._asked - self._updated + self._writing
        while self._reading_ahead and self._asked < len(self._updates) and held < _BUFFERS:
            number = self._asked
            self._asked += 1
            held += 1
            self._services.stripe(
                f"states {number}",
                self._updates[number].read_bytes,
                write=False,
                done=lambda number=number: self._here(number),  # type: ignore[misc]
            )
        number = self._updated
        if self._computing or number not in self._ready or number not in self._read:
            return
        self._computing = True
        seconds = self._updates[number].seconds
        self._services.span(_LANE, f"update {number}", seconds)
        if self._shared_cores:
            self._services.delay(seconds)
        self._services.at(seconds, lambda: self._over(number))

    def _here(self, number: int) -> None:
        self._read.add(number)
        self._go_on()

    def _over(self, number: int) -> None:
        self._computing = False
        self._updated += 1
        self._writing += 1
        self._services.stripe(
            f"states {number}", self._updates[number].written_bytes, write=True, done=self._written
        )
        self._go_on()
        self._services.retry()

    def _written(self) -> None:
        self._writing -= 1
        self._go_on()
