"""Subgroups: the unit in which states are read, updated and written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from offload_strategy.optimizer.states.dtensor_shards import local_part
from offload_strategy.optimizer.states.flat_layout import Layout, packable
from offload_strategy.optimizer.states.parameter_slices import Piece, cut_into_pieces
from offload_strategy.optimizer.states.precision import Precision, round_into
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket


@dataclass(eq=False)
class StateSet:
    """The states of one subgroup at one moment: a ticket for the tensors, the rest in memory.

    Args:
        small: for each parameter what stays in memory (step counters and the like).
        names: for each segment of the layout, (index of the parameter, name of the state).
        layout: how the tensors lie in the ticket.
        ticket: their bytes; None when there are none.
        dtypes: what each tensor is computed in, where it lies in another in the ticket.
        updates: how often they were updated or replaced.
    """

    small: list[dict[str, Any]]
    names: list[tuple[int, str]] = field(default_factory=list)
    layout: Layout = field(default_factory=lambda: Layout((), 0))
    ticket: Ticket | None = None
    dtypes: list[torch.dtype] = field(default_factory=list)
    updates: int = 0

    def unpack(self, flat: torch.Tensor | None) -> list[dict[str, Any]]:
        """One state dict a parameter: copies of the small values, views of `flat` for the rest.

        What lies there in another precision than it is computed in is a copy as well.
        """
        states = self.unpack_as_kept(flat)
        self.widen(states)
        return states

    def unpack_as_kept(self, flat: torch.Tensor | None) -> list[dict[str, Any]]:
        """As `unpack`, with all that is in `flat` in the precision in which it lies there."""
        states = [{name: _copy(value) for name, value in small.items()} for small in self.small]
        if flat is not None:
            for (index, name), view in zip(self.names, self.layout.views(flat), strict=True):
                states[index][name] = view
        return states

    def widen(self, states: list[dict[str, Any]]) -> None:
        """Bring what is as it is kept into the dtype in which it is computed."""
        for state, narrow in zip(states, self.narrow(), strict=True):
            known = {name: dtype for name, dtype in narrow.items() if name in state}
            state.update({name: state[name].to(dtype) for name, dtype in known.items()})

    def narrow(self) -> list[dict[str, torch.dtype]]:
        """For each parameter what is kept in another dtype than it is computed in, and that one."""
        found: list[dict[str, torch.dtype]] = [{} for _ in self.small]
        for (index, name), segment, dtype in zip(
            self.names, self.layout.segments, self.dtypes, strict=True
        ):
            if segment.dtype != dtype:
                found[index][name] = dtype
        return found

    def in_memory(self, states: list[dict[str, Any]]) -> StateSet:
        """A set of the same states that has them itself, and no ticket.

        Args:
            states: unpacked, or unpacked as kept.
        """
        return replace(self, small=states, ticket=None)


@dataclass(eq=False)
class Subgroup:
    """Pieces of one parameter group, dtype and device that are updated together.

    Args:
        group_index: of their parameter group.
        pieces: have no state so far.
        number: among all subgroups.
        owner: rank of the team that updates it.
    """

    group_index: int
    pieces: list[Piece]
    number: int = 0
    owner: int = 0
    states: StateSet = field(init=False)
    ready: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.states = StateSet([{} for _ in self.pieces])

    def waits_for(self) -> int:
        """How many of its pieces take gradients."""
        return sum(piece.parameter.requires_grad for piece in self.pieces)


@dataclass(frozen=True)
class Unpacked:
    """States for an update, and what is needed to put them back.

    Args:
        source: the set that they come from.
        flat: the buffer that its tensors lie in; None if it has none.
        states: one dict a parameter, to be changed.
        tensors: of the layout's segments, as they are in `states` at first.
        as_kept: whether they are in the precision in which they are kept.
    """

    source: StateSet
    flat: torch.Tensor | None
    states: list[dict[str, Any]]
    tensors: list[torch.Tensor]
    as_kept: bool = False

    @classmethod
    def of(cls, source: StateSet, flat: torch.Tensor | None, *, as_kept: bool = False) -> Unpacked:
        """States of a set, whose bytes are in a buffer.

        Args:
            source: the set.
            flat: the buffer.
            as_kept: leave what is in the buffer in the precision in which it is there.
        """
        as_kept = as_kept and flat is not None
        states = source.unpack_as_kept(flat) if as_kept else source.unpack(flat)
        tensors = [] if flat is None else [states[index][name] for index, name in source.names]
        return cls(source, flat, states, tensors, as_kept)

    def small_if_in_place(self) -> list[dict[str, Any]] | None:
        """What is not in the buffer, if all that was there has been updated right there."""
        source = self.source
        if self.flat is None:
            return None
        places = zip(source.names, self.tensors, source.layout.segments, strict=True)
        for (index, name), tensor, segment in places:
            if self.states[index].get(name) is not tensor or tensor.dtype != segment.dtype:
                return None
        packed = set(source.names)
        small = [
            {name: value for name, value in state.items() if (index, name) not in packed}
            for index, state in enumerate(self.states)
        ]
        return None if any(packable(v) for rest in small for v in rest.values()) else small


def pack_states(
    store: TensorStore,
    updated: Unpacked,
    put: Callable[[torch.Tensor], Ticket],
    precision: Precision,
    generator: torch.Generator | None = None,
) -> StateSet:
    """Make a new state set of updated states.

    Args:
        store: lends the buffer when a new one is needed.
        updated: the states; their buffer is used again if every tensor still has its place there.
        put: gives a flat buffer to the store and returns the ticket.
        precision: in which tensors are kept.
        generator: for stochastic rounding; None to round to the nearest.
    """
    old, states, flat = updated.source, updated.states, updated.flat
    updates = old.updates + 1
    in_place = updated.small_if_in_place()
    if in_place is not None:  # as nearly always; what follows is for everything else
        assert flat is not None
        return StateSet(in_place, old.names, old.layout, put(flat), old.dtypes, updates)
    names = [
        (index, name)
        for index, state in enumerate(states)
        for name, value in state.items()
        if packable(value)
    ]
    small = [
        {name: value for name, value in state.items() if not packable(value)} for state in states
    ]
    if not names:
        return StateSet(small, updates=updates)
    has_places = flat is not None and sorted(names) == sorted(old.names)
    if has_places:
        names = old.names
    tensors = [states[index][name] for index, name in names]
    dtypes = [tensor.dtype for tensor in tensors]
    kept = [
        precision.kept(tensor.dtype, name) for tensor, (_, name) in zip(tensors, names, strict=True)
    ]
    if has_places:
        assert flat is not None
        views = old.layout.views(flat)
        if all(map(_has_place, tensors, views, kept)):
            for view, tensor in zip(views, tensors, strict=True):
                if view.dtype != tensor.dtype:
                    round_into(view, tensor, generator)
            return StateSet(small, names, old.layout, put(flat), dtypes, updates)
    layout = Layout.of(tensors, kept)
    fresh = store.borrow("optimizer", layout.nbytes, tensors[0].device)
    for view, tensor in zip(layout.views(fresh), tensors, strict=True):
        round_into(view, tensor, generator)
    return StateSet(small, names, layout, put(fresh), dtypes, updates)


def _has_place(tensor: torch.Tensor, view: torch.Tensor, kept: torch.dtype) -> bool:
    """Whether a state is where it was unpacked, or can be rounded to where it came from."""
    if view.dtype != kept:
        return False
    if view.dtype == tensor.dtype:
        return view.data_ptr() == tensor.data_ptr()
    return view.shape == tensor.shape and view.stride() == tensor.stride()


def plan_subgroups(
    optimizer: Optimizer,
    known: Collection[int],
    size: Callable[[int], int],
    may_cut: Callable[[int], bool],
) -> Iterator[Subgroup]:
    """Cut the parameters that are not `known` yet into subgroups, last registered first.

    That is about the order in which backward completes gradients, so the first update can begin
    early.

    Args:
        optimizer: the user's.
        known: ids of parameters that have a subgroup already.
        size: how many parameters a subgroup has at most, given how many there are in all.
        may_cut: whether large parameters of the group of this index may be cut. Else one that is
            larger than that is a subgroup by itself.
    """
    seen = set(known)
    total = sum(local_part(p).numel() for group in optimizer.param_groups for p in group["params"])
    limit = size(total)
    for group_index in reversed(range(len(optimizer.param_groups))):
        batch: list[Piece] = []
        elements = 0
        for parameter in reversed(optimizer.param_groups[group_index]["params"]):
            if id(parameter) in seen:
                continue
            cut = local_part(parameter).numel() > limit and may_cut(group_index)
            for piece in cut_into_pieces(parameter, limit) if cut else [Piece(parameter)]:
                if batch and (
                    elements + piece.numel > limit
                    or parameter.dtype != batch[0].parameter.dtype
                    or parameter.device != batch[0].parameter.device
                ):
                    yield Subgroup(group_index, batch)
                    batch, elements = [], 0
                batch.append(piece)
                elements += piece.numel
        if batch:
            yield Subgroup(group_index, batch)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else deepcopy(value)
