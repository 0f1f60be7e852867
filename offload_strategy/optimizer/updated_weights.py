"""The weights that an optimizer updates: ordinary ones, and streamed ones.

See [Note: new values of streamed weights] in overlap/ahead_update.py. Slices of weights are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from offload_strategy.optimizer.states.parameter_slices import ParameterSlice
from offload_strategy.optimizer.states.subgroups import lay_out
from offload_strategy.store.shared_tickets import SharedFiles, SharedTicket
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, Tier


class WeightResidency(Protocol):
    """Loads weights that are streamed, for their update; here, the answers if none of them are."""

    def resident(
        self, parameters: Iterable[torch.Tensor], *, changes: bool
    ) -> AbstractContextManager[None]:
        """Keep weights in memory within the context; `changes`: whether they are written there."""
        return nullcontext()

    def prefetch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Prefetch weights."""
        return

    def set_held(self, parameter: torch.Tensor, held: bool) -> None:
        """Do not offload a weight, once it is in memory, as long as it is held."""
        return

    def content(self, parameter: torch.Tensor) -> object | None:
        """Return what stands for a weight's values while they stay the same, or None."""
        return None

    def is_untouched(self, parameter: torch.Tensor, content: object) -> bool:
        """Whether a weight is not in memory, and has the values that this stands for."""
        return False

    def store_new(
        self, parameter: torch.Tensor, values: torch.Tensor, tiers: Sequence[Tier]
    ) -> Ticket:
        """Store new values of a weight, in `tiers` if its own have no room for both."""
        raise AssertionError("weights in memory are not stored")

    def replace(self, parameter: torch.Tensor, ticket: Ticket) -> bool:
        """Make stored values those of a weight, if it is streamed still."""
        return False

    @property
    def files(self) -> SharedFiles:
        """The files of the weights, which other processes on this machine may read."""
        raise AssertionError("weights in memory are in no file")

    def is_streamed_whole(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is a streamed weight, and no shard of one."""
        return False

    def share(self, parameters: Sequence[torch.Tensor]) -> list[SharedTicket | None]:
        """Return where other processes may read weights, or None, until `drop_replaced`."""
        return [None for _ in parameters]

    def drop_replaced(self, parameters: Sequence[torch.Tensor]) -> None:
        """Free what was shared of weights before, and nobody reads any more."""
        return


class _AlwaysInMemory(WeightResidency):
    """Of weights that are never offloaded."""


class UpdatedWeights:
    """Reaches the weights of an optimizer, some of which may be streamed if there is a residency.

    New ones wait in `tiers` if those of the weights have no room.
    """

    def __init__(
        self, store: TensorStore, tiers: Sequence[Tier], residency: WeightResidency | None
    ) -> None:
        self._store = store
        self._tiers = list(tiers)
        self.residency = _AlwaysInMemory() if residency is None else residency
        #: Whether some weights are streamed.
        self.streams = residency is not None

    # ------------------------------------------------------------------ new values
    def contents(self, slices: Sequence[ParameterSlice]) -> dict[int, object]:
        """Return, by position, what stands for the values of whole streamed weights."""
        return {
            place: content
            for place, each in enumerate(slices)
            if each.rows is None and (content := self.residency.content(each.parameter)) is not None
        }

    def buffer_like(self, form: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a buffer, without room to spare, for values of a weight of this form."""
        segment = lay_out([form])[0]
        return segment.view(self._store.borrow("parameters", segment.nbytes, device))

    # ------------------------------------------------------------------ other ranks
    def memory_for(self, slices: Sequence[ParameterSlice]) -> list[torch.Tensor]:
        """Return memory for values of weights."""
        found = []
        for each in slices:
            whole = each.parameter  # has shape and strides although it may not be in memory
            form = torch.empty_strided(
                whole.shape, whole.stride(), dtype=whole.dtype, device="meta"
            )
            found.append(self.buffer_like(each.of(form), whole.device))
        return found

    def copies(self, slices: Sequence[ParameterSlice]) -> list[torch.Tensor]:
        """Return copies of weights, which need not stay in memory while they are sent."""
        copies = self.memory_for(slices)
        with self.residency.resident([each.parameter for each in slices], changes=False):
            for copy, each in zip(copies, slices, strict=True):
                copy.copy_(each.values)
        return copies

    def set_values(self, slices: Sequence[ParameterSlice], values: Sequence[torch.Tensor]) -> None:
        """Give weights new values, which lie in `memory_for` them."""
        offloaded = {
            place
            for place, content in self.contents(slices).items()
            if self.residency.is_untouched(slices[place].parameter, content)
        }
        rest = [place for place in range(len(slices)) if place not in offloaded]
        with self.residency.resident([slices[place].parameter for place in rest], changes=True):
            for place in rest:
                slices[place].values.copy_(values[place])
        for place in offloaded:
            parameter = slices[place].parameter
            ticket = self.residency.store_new(parameter, values[place], self._tiers)
            self.residency.replace(parameter, ticket)
