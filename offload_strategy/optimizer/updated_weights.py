"""The weights that an optimizer updates: ordinary ones, and streamed ones.

Whole streamed weights get new values without reading the old ones: values are stored next to those,
and then take their place. Weights that are updated in slices are read. See [Note: commit] in
overlap/ahead_update.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from offload_strategy.optimizer.states.parameter_slices import ParameterSlice
from offload_strategy.optimizer.states.subgroups import lay_out
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, Tier


class WeightResidency(Protocol):
    """Loads weights that are streamed, for their update."""

    def resident(
        self, parameters: Iterable[torch.Tensor], *, changes: bool
    ) -> AbstractContextManager[None]:
        """Keep weights in memory within the context; `changes`: whether they are written there."""

    def prefetch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Prefetch weights."""

    def content(self, parameter: torch.Tensor) -> object | None:
        """Return what stands for a weight's values while they stay the same, or None."""

    def is_untouched(self, parameter: torch.Tensor, content: object) -> bool:
        """Whether a weight is not in memory, and has the values that this stands for."""

    def store_new(
        self, parameter: torch.Tensor, values: torch.Tensor, tiers: Sequence[Tier]
    ) -> Ticket:
        """Store new values of a weight, in `tiers` if its own have no room for both."""

    def replace(self, parameter: torch.Tensor, ticket: Ticket) -> bool:
        """Make stored values those of a weight, if it is streamed still."""


class UpdatedWeights:
    """Reaches the weights of an optimizer, by their residency if some are streamed.

    Args:
        store: has buffers for copies of streamed weights.
        tiers: where new weights may wait if those of the weights have no room.
        residency: of streamed weights; None if weights are never offloaded.
    """

    def __init__(
        self, store: TensorStore, tiers: Sequence[Tier], residency: WeightResidency | None
    ) -> None:
        self._store = store
        self._tiers = list(tiers)
        self._residency = residency

    @property
    def streams(self) -> bool:
        """Whether some weights are streamed."""
        return self._residency is not None

    def resident(
        self, parameters: Iterable[torch.Tensor], *, changes: bool
    ) -> AbstractContextManager[None]:
        """Keep weights in memory within the context; `changes`: whether they are written there."""
        if self._residency is None:
            return nullcontext()
        return self._residency.resident(parameters, changes=changes)

    def prefetch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin to load streamed weights."""
        if self._residency is not None:
            self._residency.prefetch(parameters)

    # ------------------------------------------------------------------ new values
    def contents(self, slices: Sequence[ParameterSlice]) -> dict[int, object]:
        """Return, by position, what stands for the values of whole streamed weights."""
        if self._residency is None:
            return {}
        found = {
            place: self._residency.content(each.parameter)
            for place, each in enumerate(slices)
            if each.rows is None
        }
        return {place: content for place, content in found.items() if content is not None}

    def is_untouched(self, parameter: torch.Tensor, content: object) -> bool:
        """Whether a streamed weight is not in memory, and has the values that this stands for."""
        return self._residency is not None and self._residency.is_untouched(parameter, content)

    def with_buffers(
        self,
        memory: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        streamed: Container[int],
    ) -> list[torch.Tensor]:
        """Return memory for copies of weights: a buffer for each streamed one, or `memory`."""
        found, others = [], iter(memory)
        for place, weight in enumerate(weights):
            if place not in streamed:
                found.append(next(others))
            else:
                flat = self._store.borrow("parameters", weight.nbytes, weight.device)
                found.append(lay_out([weight])[0].view(flat))
        return found

    def store_new(self, parameter: torch.Tensor, values: torch.Tensor) -> Ticket:
        """Store new values of a streamed weight, which `replace` makes current."""
        assert self._residency is not None
        return self._residency.store_new(parameter, values, self._tiers)

    def replace(self, parameter: torch.Tensor, ticket: Ticket) -> bool:
        """Make stored values those of a weight, if it is streamed still."""
        return self._residency is not None and self._residency.replace(parameter, ticket)

    # ------------------------------------------------------------------ other ranks
    @contextmanager
    def sending(self, slices: Sequence[ParameterSlice]) -> Iterator[list[torch.Tensor]]:
        """Yield the values of weights, which stay in memory within the context."""
        with self.resident([each.parameter for each in slices], changes=False):
            yield [each.values for each in slices]

    @contextmanager
    def receiving(self, slices: Sequence[ParameterSlice]) -> Iterator[list[torch.Tensor]]:
        """Yield memory that is filled within the context with the new values of weights."""
        offloaded = [
            place
            for place, content in self.contents(slices).items()
            if self.is_untouched(slices[place].parameter, content)
        ]
        rest = [each for place, each in enumerate(slices) if place not in offloaded]
        with self.resident([each.parameter for each in rest], changes=True):
            parameters = [each.parameter for each in slices]
            values = self.with_buffers([each.values for each in rest], parameters, offloaded)
            yield values
            for place in offloaded:
                self.replace(parameters[place], self.store_new(parameters[place], values[place]))
            del values  # views of slices would keep their weights in memory
