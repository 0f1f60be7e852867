"""This rank's shard of one optimizer's states, and access to the shards of other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import compress
from pathlib import Path

import torch

from offload_strategy.checkpoints.scratch_file import ScratchFile, ScratchTensor
from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.ranks.data_parallel_group import DataParallelGroup, GroupRegistry
from offload_strategy.optimizer.ranks.gradient_reductions import GradientReductions
from offload_strategy.optimizer.ranks.weight_broadcasts import StepBroadcasts, WeightSharing
from offload_strategy.optimizer.states.subgroups import (
    State,
    StateSet,
    Subgroup,
    digest_of,
    rebuild_wrappers,
)
from offload_strategy.optimizer.subgroup_update import Updater
from offload_strategy.torch_support.dtensors import shard_like

#: What ranks do together, for an error of one of them.
_COLLECT = "collect the optimizer's states"
_ALONE = "while each rank updates a part of the weights for all: set optimizer.sharding: false"


class RankShards:
    """What an optimizer does with other ranks; nothing, while it has no data-parallel group."""

    def __init__(
        self, registry: GroupRegistry, updater: Updater, directories: Sequence[Path]
    ) -> None:
        self._registry = registry
        self._seen_changes = -1
        self._has_gradients = False
        self._updater = updater
        self._directories = list(directories)
        self.dp_group: DataParallelGroup | None = None
        # The same, if its ranks have different states.
        self._sharding_group: DataParallelGroup | None = None
        # Of streamed weights, if all ranks are on one machine.
        self._sharing: WeightSharing | None = None
        self._overlap: BackwardOverlap | None = None
        #: What gradients of this rank are told to, which are final only when they are reduced.
        self.reductions: GradientReductions | None = None
        # The consolidated states, or the rank that has them.
        self._consolidated: dict[torch.Tensor, State] | None = None
        self._consolidated_on: int | None = None

    def join_group(
        self, parameters: Callable[[], Iterable[torch.Tensor]], overlap: BackwardOverlap | None
    ) -> bool:
        """Look for the group, which may be made after the optimizer was attached.

        Updates of `overlap` wait for its reductions then. Returns whether this call has found it.
        """
        if self.dp_group is not None or self._seen_changes == self._registry.changes:
            return False
        self._seen_changes = self._registry.changes
        self.dp_group = group = self._registry.find_group(parameters())
        self._sharding_group = group if group is not None and group.shards_states else None
        if group is not None and overlap is not None:
            self._overlap, self.reductions = overlap, GradientReductions(group, overlap)
        return group is not None

    def first_gradient(self) -> None:
        """Look for the group once more before the first update: by now all models are wrapped."""
        if not self._has_gradients:
            self._has_gradients = True
            self._seen_changes = -1

    # ------------------------------------------------------------------ owners
    def assign_owners(self, subgroups: Sequence[Subgroup]) -> None:
        """Assign each subgroup in turn to the rank that has the fewest elements so far.

        Subgroups with slices of one streamed weight go to one rank: no other can store it.
        """
        group = self._sharding_group
        if group is None:
            return
        if self._overlap is not None and subgroups:
            self._overlap.compared = _compared(e.parameter for s in subgroups for e in s.slices)
        elements = [0] * group.size
        owners: dict[int, int] = {}  # of streamed weights
        for subgroup in subgroups:
            parameters = [id(each.parameter) for each in subgroup.slices]
            known = [owners[each] for each in parameters if each in owners]
            subgroup.owner = known[0] if known else elements.index(min(elements))
            elements[subgroup.owner] += sum(each.numel for each in subgroup.slices)
            if self._updater.weights.streams:
                owners.update(dict.fromkeys(parameters, subgroup.owner))

    def own(self, subgroups: list[Subgroup]) -> list[Subgroup]:
        """Return the subgroups that this rank updates, and has the states of."""
        group = self._sharding_group
        return subgroups if group is None else [s for s in subgroups if s.owner == group.rank]

    def others(self, subgroups: list[Subgroup]) -> list[Subgroup]:
        """Return the subgroups of other ranks."""
        group = self._sharding_group
        return [] if group is None else [s for s in subgroups if s.owner != group.rank]

    def check_local(self, parameter: torch.Tensor, subgroups: list[Subgroup]) -> None:
        """Raise `OffloadError` if another rank has the state of a parameter of these subgroups."""
        elsewhere = self.others(subgroups)
        if elsewhere:
            assert self.dp_group is not None
            raise OffloadError(
                f"the state of this parameter of shape {tuple(parameter.shape)} is on rank "
                f"{elsewhere[0].owner} of {self.dp_group.size}: call optimizer.state_dict() on all "
                f"ranks, or set optimizer.sharding: false to have all states on every rank."
            )

    def step_broadcasts(self, subgroups: Sequence[Subgroup]) -> StepBroadcasts:
        """Begin to exchange new weights of the subgroups that have a gradient on any rank."""
        group, weights = self._sharding_group, self._updater.weights
        if group is None:
            return StepBroadcasts(None, (), weights)
        if self._sharing is None and weights.streams and group.ranks().on_one_machine:
            self._sharing = WeightSharing(group, weights.residency)
        sharing, streamed = self._sharing, weights.residency.is_streamed_whole
        parameters = list(dict.fromkeys(e.parameter for s in subgroups for e in s.slices))
        flags = [int(any(e.parameter.grad is not None for e in s.slices)) for s in subgroups]
        shares = sharing is not None and sharing.works
        flags += [not (shares and streamed(parameter)) for parameter in parameters]
        module = group.module()
        if module is not None and module._join_config.enable:
            raise OffloadError(f"DistributedDataParallel.join() lets ranks end early, {_ALONE}")
        flags = group.any_rank([*flags, *_digest(_compared(parameters))])
        if any(high + low > 255 for high, low in zip(flags[-8:-4], flags[-4:], strict=True)):
            raise OffloadError(
                f"gradients differ between the ranks, {_ALONE} With overlap: eager, some weights "
                f"have changed already: go on from the last checkpoint."
            )
        changing = list(compress(subgroups, flags[: len(subgroups)]))
        sent = set(compress(parameters, flags[len(subgroups) : -8]))
        return StepBroadcasts(group, changing, weights, sharing, sent)

    # ------------------------------------------------------------------ all states
    def states(self, subgroups: Sequence[Subgroup], call: str) -> dict[torch.Tensor, State]:
        """The states of all ranks; all of them have to call it, unless consolidated."""
        if self._consolidated is not None:
            return self._consolidated
        if self._consolidated_on is not None and self.dp_group is not None:
            rank = self.dp_group.rank
            raise OffloadError(
                f"the states were consolidated on rank {self._consolidated_on}; this is rank "
                f"{rank}. Call {call} there, or call consolidate_state_dict(to={rank}) on every "
                f"rank."
            )
        if self._sharding_group is not None:
            self._sharding_group.barrier(call)
        return self._streamed_states(subgroups, self._sharding_group, self._directories)

    def copied_states(self, subgroups: Sequence[Subgroup]) -> dict[torch.Tensor, State]:
        """Copies, in host memory, of the states of subgroups that this rank owns.

        Where a parameter has slices in other subgroups, their rows are undefined.
        """
        return self._streamed_states(subgroups, None, ())

    def consolidate(self, subgroups: Sequence[Subgroup], to: int) -> None:
        """Collect the states on one rank; see `OffloadedOptimizer.consolidate_state_dict`."""
        group = self._sharding_group
        if group is None:
            return
        self.discard_consolidated()
        group.barrier("optimizer.consolidate_state_dict()")
        if group.rank == to:
            self._consolidated = self._streamed_states(subgroups, group, self._directories)
            return
        # Take part while that rank reads all of them.
        all_metadata = [_metadata(subgroup, group) for subgroup in subgroups]
        with group.together(_COLLECT):
            pass
        for subgroup, metadata in zip(subgroups, all_metadata, strict=True):
            deque(self._values(subgroup, metadata, group), maxlen=0)
        self._consolidated_on = to

    def discard_consolidated(self) -> None:
        """Drop consolidated states, which are out of date."""
        self._consolidated = self._consolidated_on = None

    def _streamed_states(
        self,
        subgroups: Sequence[Subgroup],
        group: DataParallelGroup | None,
        directories: Sequence[Path],
    ) -> dict[torch.Tensor, State]:
        """States as `OffloadedOptimizer.state_dict` has them; one subgroup in memory at a time."""
        all_metadata = [_metadata(subgroup, group) for subgroup in subgroups]
        with ScratchFile(directories) as scratch:
            # A rank that fails in the exchange below would leave the others waiting.
            with nullcontext() if group is None else group.together(_COLLECT):
                states, slots = _reserved(zip(subgroups, all_metadata, strict=True), scratch)
            for subgroup, metadata in zip(subgroups, all_metadata, strict=True):
                read = self._values(subgroup, metadata, group)
                for stored, values in zip(metadata.stored, read, strict=True):
                    param_slice = subgroup.slices[stored.slice_index]
                    start = 0 if param_slice.rows is None else param_slice.rows[0]
                    slots[param_slice.parameter][stored.name].fill(start, values)
            for parameter, own in slots.items():
                states[parameter].update((name, slot.tensor()) for name, slot in own.items())
        return {
            p: {name: shard_like(value, p) for name, value in rebuild_wrappers(state).items()}
            for p, state in states.items()
        }

    def _values(
        self, subgroup: Subgroup, metadata: StateSet, group: DataParallelGroup | None
    ) -> Iterator[torch.Tensor]:
        """The stored tensors of a subgroup, on whichever rank, not to be changed or kept."""
        owner = subgroup.owner
        if group is None:
            yield from self._updater.values(subgroup)
        elif owner == group.rank:
            for values in self._updater.values(subgroup):
                group.wait(group.broadcast(values.contiguous(), owner))
                yield values
        else:
            device = subgroup.slices[0].parameter.device
            for stored in metadata.stored:
                segment = stored.segment
                values = torch.empty(segment.shape, dtype=segment.dtype, device=device)
                group.wait(group.broadcast(values, owner))
                yield values


def _reserved(
    subgroups: Iterable[tuple[Subgroup, StateSet]], scratch: ScratchFile
) -> tuple[dict[torch.Tensor, State], dict[torch.Tensor, dict[str, ScratchTensor]]]:
    """Small states, and room for stored ones on the disk; TierFullError if there is none."""
    states: dict[torch.Tensor, State] = {}
    slots: dict[torch.Tensor, dict[str, ScratchTensor]] = {}
    names: dict[torch.Tensor, set[str]] = {}
    for subgroup, metadata in subgroups:
        for index, small in enumerate(metadata.small):
            parameter = subgroup.slices[index].parameter
            states.setdefault(parameter, small)
            own_names = {each.name for each in metadata.stored if each.slice_index == index}
            if names.setdefault(parameter, own_names) != own_names:
                raise OffloadError(
                    f"only some rows of a parameter of shape {tuple(parameter.shape)} have "
                    f"states: its first update failed. Start from the last checkpoint."
                )
        for index, name, segment, dtype in metadata.stored:
            param_slice = subgroup.slices[index]
            own = slots.setdefault(param_slice.parameter, {})
            if name not in own and param_slice.rows is None:
                own[name] = scratch.reserve(segment.shape, dtype, segment.strides)
            elif name not in own:
                own[name] = scratch.reserve((*param_slice.shape[:1], *segment.shape[1:]), dtype)
    scratch.open()
    return states, slots


def _metadata(subgroup: Subgroup, group: DataParallelGroup | None) -> StateSet:
    """What states a subgroup has, on whichever rank: all ranks read the same in one order."""
    metadata, owner = subgroup.states.metadata(), subgroup.owner
    if group is not None:
        metadata = group.gather(metadata if group.rank == owner else None)[owner]
    return metadata


def _compared(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The parameter by whose gradient ranks tell that theirs differ: the smallest."""
    return min(parameters, key=torch.Tensor.numel)


def _digest(parameter: torch.Tensor) -> list[int]:
    """Four bytes that tell a parameter's gradient, and their complements.

    The largest of all ranks add up to 255 where they are the same. Zeros if there is none.
    """
    gradient = parameter.grad
    if isinstance(gradient, OffloadedGradient):
        gradient = gradient.backing.compared_values()
    if gradient is None:
        return [0] * 8
    own = list(digest_of(gradient).to_bytes(4, "little"))
    return own + [255 - byte for byte in own]
