"""How many bytes activations may write to drives that have a budget for a day.

[Note: writes per day]
All that is written counts, over the whole run. At the start of a forward pass activations get what
the budget allows until its end (it takes as long as the one before), less what was written and what
states and weights will write meanwhile: as much as in the mean of all passes. What others must
write comes first, and a run is within its budget at the end of every step from the first ones on.
What it did not use in a pause, it may use later. The first pass, of which no time is known, writes
all that it may.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from timeit import default_timer as perf_counter

from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.telemetry import Direction
from offload_strategy.units import SECONDS_PER_DAY


class WriteBudget:
    """Decides what may be written within `per_day` bytes of each tier by its name."""

    def __init__(self, per_day: Mapping[str, int], store: TensorStore) -> None:
        self._rates = {tier: nbytes / SECONDS_PER_DAY for tier, nbytes in per_day.items()}
        self._store = store
        self._started_at = self._pass_began = perf_counter()
        self._passes = 0
        self._room = math.inf

    def begin_pass(self) -> None:
        """Note that a forward pass begins."""
        now, passes = perf_counter(), self._passes
        until = 2 * now - self._pass_began - self._started_at
        self._pass_began, self._passes = now, passes + 1
        recorder, waiting = self._store.recorder, self._store.writing_bytes
        own = recorder.client_bytes["activations", "written"]
        if passes:
            written = {
                tier: recorder.tier_bytes[tier, Direction.WRITE] + waiting for tier in self._rates
            }
            self._room = min(
                rate * until - written[tier] - max(0, written[tier] - own) / passes
                for tier, rate in self._rates.items()
            )

    def admits(self, nbytes: int) -> bool:
        """Return whether an item may be written, and count it if so."""
        if nbytes > self._room:
            return False
        self._room -= nbytes
        return True
