"""Subgroups: the unit in which states are read, updated and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from offload_strategy.heap import Heap, Ticket
from offload_strategy.optimizer.layout import Layout, packable

#: Limits of `subgroup_size: auto`, in parameters: small enough to start early, large enough that
#: a read or write is worth a request.
_AUTO_RANGE = (1 << 18, 1 << 24)
_AUTO_SHARE = 16


@dataclass(eq=False)
class StateSet:
    """The states of one subgroup at one moment: a ticket for the tensors, the rest in memory.

    Args:
        small: for each parameter what stays in memory (step counters and the like).
        names: for each segment of the layout, (index of the parameter, name of the state).
        layout: how the tensors lie in the ticket.
        ticket: their bytes; None when there are none.
        dtypes: what each tensor is computed in, where it lies in another in the ticket.
    """

    small: list[dict[str, Any]]
    names: list[tuple[int, str]] = field(default_factory=list)
    layout: Layout = field(default_factory=lambda: Layout((), 0))
    ticket: Ticket | None = None
    dtypes: list[torch.dtype] = field(default_factory=list)

    def unpack(self, flat: torch.Tensor | None) -> list[dict[str, Any]]:
        """One state dict a parameter: copies of the small values, views of `flat` for the rest.

        What lies there in another precision than it is computed in is a copy as well.
        """
        states = [{name: _copy(value) for name, value in small.items()} for small in self.small]
        if flat is not None:
            views = self.layout.views(flat)
            for (index, name), view, dtype in zip(self.names, views, self.dtypes, strict=True):
                states[index][name] = view.to(dtype)
        return states


@dataclass(eq=False)
class Subgroup:
    """Parameters of one parameter group, dtype and device that are updated together."""

    group_index: int
    parameters: list[torch.Tensor]
    states: StateSet
    ready: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, group_index: int, parameters: list[torch.Tensor]) -> Subgroup:
        """A subgroup whose parameters have no state so far."""
        return cls(group_index, parameters, StateSet([{} for _ in parameters]))

    def waits_for(self) -> int:
        """How many of its parameters take gradients."""
        return sum(parameter.requires_grad for parameter in self.parameters)

    def with_gradient(self) -> list[int]:
        """Indices of the parameters that have a gradient now."""
        return [index for index, p in enumerate(self.parameters) if p.grad is not None]


def pack_states(
    heap: Heap,
    old: StateSet,
    states: list[dict[str, Any]],
    flat: torch.Tensor | None,
    put: Callable[[torch.Tensor], Ticket],
    narrow: torch.dtype | None = None,
) -> StateSet:
    """Make a new state set of updated states.

    Args:
        heap: lends the buffer when a new one is needed.
        old: the set that `states` were unpacked from.
        states: one dict a parameter.
        flat: the buffer that they were unpacked into and updated in; used again if every tensor
            still has its place there.
        put: gives a flat buffer to the heap and returns the ticket.
        narrow: the dtype in which tensors of float32 are kept; None for their own.
    """
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
        return StateSet(small)
    if flat is not None and sorted(names) == sorted(old.names):
        names, layout = old.names, old.layout
        tensors = [states[index][name] for index, name in names]
        views = layout.views(flat)
        if all(map(partial(_has_place, narrow), tensors, views)):
            for view, tensor in zip(views, tensors, strict=True):
                if view.dtype != tensor.dtype:
                    view.copy_(tensor)
            return StateSet(small, names, layout, put(flat), [t.dtype for t in tensors])
    tensors = [states[index][name] for index, name in names]
    layout = Layout.of(tensors, [kept_dtype(tensor.dtype, narrow) for tensor in tensors])
    fresh = heap.borrow("optimizer", layout.nbytes, tensors[0].device)
    for view, tensor in zip(layout.views(fresh), tensors, strict=True):
        view.copy_(tensor)
    return StateSet(small, names, layout, put(fresh), [tensor.dtype for tensor in tensors])


def kept_dtype(dtype: torch.dtype, narrow: torch.dtype | None) -> torch.dtype:
    """In which dtype a state is kept: `narrow` stands in for float32."""
    return narrow if narrow is not None and dtype == torch.float32 else dtype


def _has_place(narrow: torch.dtype | None, tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a state is where it was unpacked, or can be rounded to where it came from."""
    if view.dtype != kept_dtype(tensor.dtype, narrow):
        return False
    if view.dtype == tensor.dtype:
        return view.data_ptr() == tensor.data_ptr()
    return view.shape == tensor.shape and view.stride() == tensor.stride()


def plan_subgroups(
    optimizer: Optimizer, known: Sequence[torch.Tensor], size: int | None
) -> Iterator[Subgroup]:
    """Cut the parameters that are not `known` yet into subgroups, last registered first.

    That is about the order in which backward completes gradients, so the first update can begin
    early. A tensor is never cut; one that is larger than `size` is a subgroup by itself.

    Args:
        optimizer: the user's.
        known: parameters that have a subgroup already.
        size: parameters a subgroup at most; None to choose by the model's size.
    """
    seen = {id(parameter) for parameter in known}
    total = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    low, high = _AUTO_RANGE
    limit = size if size is not None else min(high, max(low, total // _AUTO_SHARE))
    for group_index in reversed(range(len(optimizer.param_groups))):
        batch: list[torch.Tensor] = []
        for parameter in reversed(optimizer.param_groups[group_index]["params"]):
            if id(parameter) in seen:
                continue
            if batch and (
                sum(p.numel() for p in batch) + parameter.numel() > limit
                or parameter.dtype != batch[0].dtype
                or parameter.device != batch[0].device
            ):
                yield Subgroup.of(group_index, batch)
                batch = []
            batch.append(parameter)
        if batch:
            yield Subgroup.of(group_index, batch)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else deepcopy(value)
