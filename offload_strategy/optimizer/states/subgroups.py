"""Subgroups: the unit in which optimizer states are read, updated and written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from offload_strategy.optimizer.states.flat_layout import Layout, packable
from offload_strategy.optimizer.states.parameter_slices import (
    ParameterSlice,
    local_tensor,
    slice_parameter,
)
from offload_strategy.optimizer.states.precision import Precision, copy_rounded
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket

State = dict[str, Any]


@dataclass(eq=False)
class StateSet:
    """The states of one subgroup: a ticket for dense tensors, everything else in memory.

    Args:
        small: for each slice, the values that stay in memory (step counters and the like).
        names: for each segment of the layout, (index of the slice, name of the state).
        layout: where the tensors lie in the ticket.
        ticket: bytes of the tensors; None if there are none.
        compute_dtypes: compute dtype of each segment, which may differ from its stored dtype.
        updates: how often these states were updated or replaced.
    """

    small: list[State]
    names: list[tuple[int, str]] = field(default_factory=list)
    layout: Layout = field(default_factory=lambda: Layout((), 0))
    ticket: Ticket | None = None
    compute_dtypes: list[torch.dtype] = field(default_factory=list)
    updates: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the ticket."""
        return 0 if self.ticket is None else self.ticket.nbytes

    def unpack(self, flat: torch.Tensor | None, *, upcast: bool = True) -> list[State]:
        """Return the state of each slice: copies of small values, views of `flat` for the rest.

        Without `flat` stored tensors are left out. Upcasting to compute dtypes copies them.
        """
        states = [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else deepcopy(value)
                for name, value in small.items()
            }
            for small in self.small
        ]
        if flat is not None:
            for (index, name), view in zip(self.names, self.layout.views(flat), strict=True):
                states[index][name] = view
        if upcast:
            self.upcast(states)
        return states

    def upcast(self, states: list[State]) -> None:
        """Upcast states to their compute dtype, where the stored dtype differs."""
        for state, dtypes in zip(states, self.upcast_dtypes(), strict=True):
            state.update(
                {name: state[name].to(dtype) for name, dtype in dtypes.items() if name in state}
            )

    def upcast_dtypes(self) -> list[dict[str, torch.dtype]]:
        """For each slice, the compute dtype of every state that is stored in another dtype."""
        dtypes: list[dict[str, torch.dtype]] = [{} for _ in self.small]
        segments = zip(self.names, self.layout.segments, self.compute_dtypes, strict=True)
        for (index, name), segment, dtype in segments:
            if segment.dtype != dtype:
                dtypes[index][name] = dtype
        return dtypes


@dataclass(eq=False)
class Subgroup:
    """Slices of one parameter group, dtype and device that are updated together.

    Its number is unique within an optimizer; its owner is the data-parallel rank that updates it.
    """

    group_index: int
    slices: list[ParameterSlice]
    number: int = 0
    owner: int = 0
    states: StateSet = field(init=False)
    #: Indices of the slices whose gradient is final in this backward pass.
    ready: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.states = StateSet([{} for _ in self.slices])

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of all its trainable parameters are final."""
        trainable = sum(param_slice.parameter.requires_grad for param_slice in self.slices)
        return len(self.ready) >= trainable


@dataclass(frozen=True)
class UnpackedStates:
    """The states of a subgroup during an update.

    Args:
        source: the set that they were unpacked from.
        flat: the buffer that its tensors lie in; None if it has none.
        states: one dict for each slice, to be changed.
        tensors: the tensor of each segment, as it was unpacked into `states`.
        upcast: whether `states` are in their compute dtypes, not in their stored dtypes.
    """

    source: StateSet
    flat: torch.Tensor | None
    states: list[State]
    tensors: list[torch.Tensor]
    upcast: bool = True

    @classmethod
    def of(
        cls, source: StateSet, flat: torch.Tensor | None, *, upcast: bool = True
    ) -> UnpackedStates:
        """Unpack a set whose bytes are in `flat`; see `StateSet.unpack`."""
        upcast = upcast or flat is None  # states in memory may be in their stored dtype
        states = source.unpack(flat, upcast=upcast)
        tensors = [] if flat is None else [states[index][name] for index, name in source.names]
        return cls(source, flat, states, tensors, upcast)

    def in_memory(self) -> StateSet:
        """A set of the same states that keeps them in memory, without a ticket."""
        return replace(self.source, small=self.states, ticket=None)

    def small_if_in_place(self) -> list[State] | None:
        """The values outside the buffer, if all tensors in it were updated in place; else None."""
        source = self.source
        if self.flat is None:
            return None
        segments = zip(source.names, self.tensors, source.layout.segments, strict=True)
        for (index, name), tensor, segment in segments:
            if self.states[index].get(name) is not tensor or tensor.dtype != segment.dtype:
                return None
        packed = set(source.names)
        small = [
            {name: value for name, value in state.items() if (index, name) not in packed}
            for index, state in enumerate(self.states)
        ]
        return None if any(packable(v) for state in small for v in state.values()) else small


def pack_states(
    store: TensorStore,
    updated: UnpackedStates,
    put: Callable[[torch.Tensor], Ticket],
    precision: Precision,
    generator: torch.Generator | None = None,
) -> StateSet:
    """Pack updated states into a new set.

    Their buffer is used again if every tensor still fits its segment; else the store lends another.
    `put` gives the buffer to the store. A generator rounds stochastically; None rounds to nearest.
    """
    old, states, flat = updated.source, updated.states, updated.flat
    updates = old.updates + 1
    in_place = updated.small_if_in_place()
    if in_place is not None:  # the usual case
        assert flat is not None
        return StateSet(in_place, old.names, old.layout, put(flat), old.compute_dtypes, updates)
    small = [{name: v for name, v in state.items() if not packable(v)} for state in states]
    names = [
        (index, name)
        for index, state in enumerate(states)
        for name, value in state.items()
        if packable(value)
    ]
    if not names:
        return StateSet(small, updates=updates)
    same_names = flat is not None and sorted(names) == sorted(old.names)
    if same_names:
        names = old.names
    tensors = [states[index][name] for index, name in names]
    compute_dtypes = [tensor.dtype for tensor in tensors]
    stored_dtypes = [
        precision.stored_dtype(dtype, name)
        for dtype, (_, name) in zip(compute_dtypes, names, strict=True)
    ]
    layout = old.layout
    views = layout.views(flat) if same_names and flat is not None else []
    if flat is None or not (views and all(map(_fits, tensors, views, stored_dtypes))):
        layout = Layout.of(tensors, stored_dtypes)
        flat = store.borrow("optimizer", layout.nbytes, tensors[0].device)
        views = layout.views(flat)
    for view, tensor in zip(views, tensors, strict=True):
        if view.dtype != tensor.dtype or view.data_ptr() != tensor.data_ptr():
            copy_rounded(view, tensor, generator)
    return StateSet(small, names, layout, put(flat), compute_dtypes, updates)


def _fits(tensor: torch.Tensor, view: torch.Tensor, stored_dtype: torch.dtype) -> bool:
    """Whether a state is where it was unpacked, or can be rounded into that place."""
    if view.dtype != stored_dtype:
        return False
    if view.dtype == tensor.dtype:
        return view.data_ptr() == tensor.data_ptr()
    return view.shape == tensor.shape and view.stride() == tensor.stride()


def plan_subgroups(
    optimizer: Optimizer,
    planned: Collection[int],
    size: Callable[[int], int],
    is_elementwise: Callable[[int], bool],
) -> Iterator[Subgroup]:
    """Divide parameters into subgroups, last registered first.

    That is about the order in which backward completes gradients, so the first update can begin
    early.

    Args:
        optimizer: the user's.
        planned: ids of parameters that already have a subgroup.
        size: maximum number of elements of a subgroup, given the number of all elements.
        is_elementwise: whether large parameters of the group of this index may be sliced. Otherwise
            one that exceeds the maximum is a subgroup by itself.
    """
    seen = set(planned)
    groups = optimizer.param_groups
    limit = size(sum(local_tensor(p).numel() for group in groups for p in group["params"]))
    for group_index in reversed(range(len(groups))):
        batch: list[ParameterSlice] = []
        elements = 0
        for parameter in reversed(groups[group_index]["params"]):
            if id(parameter) in seen:
                continue
            slices = [ParameterSlice(parameter)]
            if local_tensor(parameter).numel() > limit and is_elementwise(group_index):
                slices = slice_parameter(parameter, limit)
            for param_slice in slices:
                if batch and (
                    elements + param_slice.numel > limit
                    or parameter.dtype != batch[0].parameter.dtype
                    or parameter.device != batch[0].parameter.device
                ):
                    yield Subgroup(group_index, batch)
                    batch, elements = [], 0
                batch.append(param_slice)
                elements += param_slice.numel
        if batch:
            yield Subgroup(group_index, batch)
