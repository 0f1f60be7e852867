"""The update of one subgroup: in place at `step()`, or ahead of it and committed there.

[Note: commit]
Ahead of `step()` nothing visible may change. So the update runs on copies of the weights and
states, which become new tickets; the old states stay where they are. `step()` checks that what
went in is still what is there (gradients, hyper-parameters, weights). If so, states are swapped by
swapping tickets, and weights are copied into the existing storage (never `p.data = ...`: aliases
would go stale). If not, the new tickets are dropped and the update runs again, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from offload_strategy.heap import Heap, Ticket, Tier
from offload_strategy.optimizer.kernel import run_update
from offload_strategy.optimizer.layout import Layout, packable
from offload_strategy.optimizer.marks import InputsMark, can_be_marked
from offload_strategy.optimizer.subgroups import StateSet, Subgroup, pack_states


@dataclass(eq=False)
class Speculation:
    """An update that ran ahead of `step()`; see [Note: commit]."""

    subgroup: Subgroup
    indices: list[int]
    inputs: InputsMark
    hyper: dict[str, Any]
    old_states: StateSet
    states: StateSet
    layout: Layout
    weights: Ticket

    def holds(self, group: dict[str, Any]) -> bool:
        """Whether `step()` would compute the very same thing now."""
        return (
            self.indices == self.subgroup.with_gradient()
            and self.subgroup.states is self.old_states
            and _same(self.hyper, hyper_parameters(group))
            and self.inputs.holds([self.subgroup.parameters[index] for index in self.indices])
        )


class Updater:
    """Runs updates of subgroups, with states in the heap.

    Args:
        optimizer: the user's; its class does the arithmetic.
        heap: where states are between updates.
        tiers: where they may go, in order.
        narrow: the dtype in which states of float32 are kept; None for their own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        heap: Heap,
        tiers: Sequence[Tier],
        narrow: torch.dtype | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._heap = heap
        self._tiers = list(tiers)
        self.narrow = narrow

    def put(self, flat: torch.Tensor) -> Ticket:
        """Give a flat buffer of the optimizer's to the heap."""
        return self._heap.put(flat, "optimizer", self._tiers)

    def group_of(self, subgroup: Subgroup) -> dict[str, Any]:
        """The parameter group of a subgroup; looked up anew, as loading a state replaces it."""
        group: dict[str, Any] = self._optimizer.param_groups[subgroup.group_index]
        return group

    @torch.no_grad()
    def update_in_place(self, subgroup: Subgroup) -> None:
        """Update the weights and states of every parameter that has a gradient."""
        indices = subgroup.with_gradient()
        if not indices:
            return
        old = subgroup.states
        flat = None if old.ticket is None else self._heap.writable(old.ticket)
        states = old.unpack(flat)
        # Nothing may be lost if the update is interrupted or refused, or cannot be put back: until
        # it is back on a tier the subgroup has it in memory.
        subgroup.states = StateSet(states)
        if old.ticket is not None:
            self._heap.free(old.ticket)
        run_update(
            self._optimizer,
            self.group_of(subgroup),
            [subgroup.parameters[index] for index in indices],
            [states[index] for index in indices],
        )
        subgroup.states = pack_states(self._heap, old, states, flat, self.put, self.narrow)

    @torch.no_grad()
    def speculate(self, subgroup: Subgroup) -> Speculation | None:
        """Run the update ahead of `step()`; None if it cannot be (it will run at `step()`)."""
        indices = subgroup.with_gradient()
        chosen = [subgroup.parameters[index] for index in indices]
        if not chosen or not all(can_be_marked(parameter) for parameter in chosen):
            return None
        inputs = InputsMark(chosen)
        group = self.group_of(subgroup)
        hyper = hyper_parameters(group)
        layout = Layout.of(chosen)
        flat_weights = self._heap.borrow("optimizer", layout.nbytes, chosen[0].device)
        weights = layout.views(flat_weights)
        for copy, parameter in zip(weights, chosen, strict=True):
            copy.copy_(parameter)
            copy.grad = parameter.grad
        old = subgroup.states
        flat = None if old.ticket is None else self._heap.private(old.ticket)
        states = old.unpack(flat)
        run_update(self._optimizer, group, weights, [states[index] for index in indices])
        for copy in weights:
            copy.grad = None
        new = pack_states(self._heap, old, states, flat, self.put, self.narrow)
        ticket = self.put(flat_weights)
        return Speculation(subgroup, indices, inputs, hyper, old, new, layout, ticket)

    @torch.no_grad()
    def commit(self, speculation: Speculation) -> None:
        """Make an update visible: weights by copying, states by swapping tickets."""
        subgroup = speculation.subgroup
        flat = self._heap.take(speculation.weights)
        views = speculation.layout.views(flat)
        for index, view in zip(speculation.indices, views, strict=True):
            subgroup.parameters[index].copy_(view)
        self._replace_states(subgroup, speculation.states)

    def drop(self, speculation: Speculation) -> None:
        """Forget an update that will not be committed."""
        self._heap.free(speculation.weights)
        if speculation.states.ticket is not None:
            self._heap.free(speculation.states.ticket)

    def fetch(self, subgroup: Subgroup) -> None:
        """Begin to load a subgroup's states."""
        if subgroup.states.ticket is not None:
            self._heap.prefetch(subgroup.states.ticket)

    def fetch_weights(self, speculation: Speculation) -> None:
        """Begin to load the weights of an update that is about to be committed."""
        self._heap.prefetch(speculation.weights)

    # ------------------------------------------------------------------ states as a whole
    def absorb(self, subgroup: Subgroup, states: list[dict[str, Any]]) -> None:
        """Replace a subgroup's states by the given ones (a loaded checkpoint)."""
        for parameter, state in zip(subgroup.parameters, states, strict=True):
            state.update(
                (name, value.to(parameter.device))
                for name, value in list(state.items())
                if packable(value)
            )
        new = pack_states(self._heap, StateSet([]), states, None, self.put, self.narrow)
        self._replace_states(subgroup, new)

    def copies(self, subgroup: Subgroup) -> list[dict[str, Any]]:
        """Copies of a subgroup's states in ordinary host memory, one dict a parameter.

        On the host also for parameters of an accelerator, where all states at once may not fit.
        """
        states = subgroup.states
        if states.ticket is None:
            return states.unpack(None)
        flat = self._heap.get(states.ticket)
        loaded = states.unpack(flat)
        for index, name in states.names:
            value = loaded[index][name]
            loaded[index][name] = value.clone() if value.device.type == "cpu" else value.cpu()
        self._heap.evict(states.ticket)
        return loaded

    def _replace_states(self, subgroup: Subgroup, new: StateSet) -> None:
        old, subgroup.states = subgroup.states, new
        if old.ticket is not None:
            self._heap.free(old.ticket)


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """A snapshot of a parameter group's settings (tensor learning rates by value)."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    if before.keys() != now.keys():
        return False
    for name, value in before.items():
        other = now[name]
        if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
            if not (
                isinstance(value, torch.Tensor)
                and isinstance(other, torch.Tensor)
                and torch.equal(value, other)
            ):
                return False
        elif value != other:
            return False
    return True
