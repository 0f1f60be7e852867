"""An update that ran ahead of `step()`, and whether it is still valid there.

[Note: commit]
Ahead of `step()` nothing visible may change. So the update runs on copies of weights and states,
which become new tickets; the old states stay where they are. `step()` checks that the inputs of the
update are still the same (gradients, hyper-parameters, weights, autocast). If so, states are
replaced by swapping tickets, and weights are copied into the existing storage (never
`p.data = ...`: aliases would become stale). If not, the new tickets are dropped and the update
runs again, in place.

[Note: what version counters do not see]
Weights may change between backward and `step()` without their version counters: `p.data.clamp_`,
NumPy, fused optimizers of others. So in addition to the versions, the sums of the raw bits are
compared: wrapping integer sums, which any clipping, scaling or overwriting changes. They run at
memory bandwidth.

[Note: new values of streamed weights]
A streamed weight that is offloaded has the values of its ticket, which nobody can change. So its
new values are written to a ticket of their own, which takes the place of the old one in `step()`:
neither of them is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from offload_strategy.optimizer.gradients.offloaded_gradient import has_gradient
from offload_strategy.optimizer.gradients.recorded_edits import INTEGERS
from offload_strategy.optimizer.states.subgroups import Segment, StateSet, Subgroup, packable
from offload_strategy.optimizer.user_class.side_effects import plain_values, same_parts
from offload_strategy.store.ticket import Ticket
from offload_strategy.torch_support.accelerator import Autocast


def with_gradient(subgroup: Subgroup) -> list[int]:
    """Indices of the slices that have a gradient that no update has used yet."""
    return [i for i, each in enumerate(subgroup.slices) if has_gradient(each.parameter)]


class Settings:
    """What an update reads besides weights, gradients and states: copies, to be compared."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        def own(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.clone()
            changeable = isinstance(value, list | dict | set) or hasattr(value, "__array__")
            return copy(value) if changeable else value

        self._group = tree_map(own, {n: v for n, v in group.items() if n != "params"})
        # Of tensors on the optimizer, which may be large, the versions.
        values = plain_values(vars(optimizer))
        versions = (getattr(value, "_version", None) for _, value in values)
        self._own = [*chain(*values), *versions]

    def are_same(self, now: Settings) -> bool:
        """Whether they are equal; a tensor never equals a number."""

        def equal(one: Any, other: Any) -> bool:
            tensors = isinstance(one, torch.Tensor) + isinstance(other, torch.Tensor)
            try:
                return (
                    torch.equal(one, other) if tensors == 2 else not tensors and bool(one == other)
                )
            except Exception:  # such as arrays, whose comparison is an array
                return False

        (values, form), (others, other_form) = tree_flatten(self._group), tree_flatten(now._group)
        same_group = form == other_form and all(map(equal, values, others))
        return same_group and same_parts(self._own, now._own)


class StoredWeight(NamedTuple):
    """New values of a streamed weight, and what stood for those that went into the update."""

    ticket: Ticket
    content: object


@dataclass(eq=False)
class AheadUpdate:
    """A finished update ahead of `step()`; see [Note: commit]."""

    subgroup: Subgroup
    #: Of the slices that had a gradient.
    indices: list[int]
    #: Version counters and sums of bits of the weights that went into it, as `settings` and
    #: `old_states` did.
    versions: list[int]
    bits: torch.Tensor
    settings: Settings
    autocast: Autocast
    old_states: StateSet
    states: StateSet
    #: Copies of weights, until they are offloaded to a ticket with these segments; but for those
    #: that are `stored`, by position: see [Note: new values of streamed weights].
    new_weights: Sequence[torch.Tensor]
    segments: Sequence[Segment] = ()
    ticket: Ticket | None = None
    stored: dict[int, StoredWeight] = field(default_factory=dict)
    #: Whether `Updater.compare_weights` has found the same weights; None where `commit` compares.
    unchanged: bool | None = None

    def may_be_valid(self, settings: Settings) -> bool:
        """Whether `step()` would compute the same, as far as version counters tell.

        To be asked before any other update is committed: slices of one parameter share a version.
        """
        return (
            self.indices == with_gradient(self.subgroup)
            and self.subgroup.states is self.old_states
            and self.autocast == Autocast.current(self.autocast.device_type)
            and self.settings.are_same(settings)
            and self.versions == [parameter._version for parameter in self.parameters()]
        )

    def bits_match(self, places: Sequence[int]) -> torch.Tensor:
        """Whether the weights at these positions have the same bits, on their device."""
        weights = [self.weight(place) for place in places]
        if not all(map(packable, weights)):
            return torch.zeros((), dtype=torch.bool, device=self.bits.device)
        bits = self.bits
        if len(weights) < len(self.indices):
            # A list of positions would be copied to the device, which waits for it.
            bits = torch.stack([bits[place] for place in places])
        return (bits == sums_of_bits(weights)).all()

    def parameters(self) -> list[torch.Tensor]:
        """Whole parameters of the slices that it updated."""
        return [self.subgroup.slices[index].parameter for index in self.indices]

    def weight(self, place: int) -> torch.Tensor:
        """The current weight at a position among those that it updated."""
        return self.subgroup.slices[self.indices[place]].values


@torch.no_grad()
def sums_of_bits(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the bits of each weight, dense or rows of a dense one.

    It is that of its 8-byte words as integers, and of the elements at both ends.
    """
    sums = []
    for weight in weights:
        flat = weight.detach().as_strided((weight.numel(),), (1,))
        if flat.is_conj() or flat.is_neg():  # in their memory
            storage, begin = flat.untyped_storage(), flat.storage_offset()
            flat = flat.new_empty(0).set_(storage, begin, flat.shape, (1,))
        per_word = max(1, 8 // flat.element_size())
        begin = min(flat.numel(), -flat.storage_offset() % per_word)
        end = begin + (flat.numel() - begin) // per_word * per_word
        total = flat[begin:end].view(torch.int64).sum()
        for rest in (flat[:begin], flat[end:]):
            if rest.numel():
                total = total + rest.view(INTEGERS[flat.element_size()]).sum()
        sums.append(total)
    return torch.stack(sums)
