"""This rank's shard of one optimizer's states, and access to the shards of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from offload_strategy.checkpoints import ScratchFile, ScratchTensor
from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.ranks.data_parallel_group import DataParallelGroup, GroupRegistry
from offload_strategy.optimizer.ranks.gradient_reductions import GradientReductions
from offload_strategy.optimizer.states.parameter_slices import local_tensor, shard_like
from offload_strategy.optimizer.states.subgroups import State, Subgroup
from offload_strategy.optimizer.subgroup_update import StateMetadata, Updater


class RankShards:
    """What an optimizer does with other ranks; nothing, while it has no data-parallel group.

    Args:
        registry: of the groups; None if this process trains alone.
        updater: has the states of this rank.
        directories: where state dicts may be; none for ordinary memory.
    """

    def __init__(
        self, registry: GroupRegistry | None, updater: Updater, directories: Sequence[Path]
    ) -> None:
        self._registry = registry
        self._seen_changes = -1
        self._has_gradients = False
        self._updater = updater
        self._directories = list(directories)
        self.dp_group: DataParallelGroup | None = None
        self._reductions: GradientReductions | None = None
        # The consolidated states, or the rank that has them.
        self._consolidated: dict[torch.Tensor, State] | None = None
        self._consolidated_on: int | None = None

    def join_group(
        self, parameters: Callable[[], Iterable[torch.Tensor]], overlap: BackwardOverlap | None
    ) -> bool:
        """Look for the group, which may be made after the optimizer was attached.

        From then on updates of `overlap` wait for its reductions. Returns whether this call has
        found it.
        """
        registry = self._registry
        known = registry is None or self._seen_changes == registry.changes
        if self.dp_group is not None or registry is None or known:
            return False
        self._seen_changes = registry.changes
        self.dp_group = registry.find_group(parameters())
        if self.dp_group is not None and overlap is not None:
            self._reductions = GradientReductions(
                self.dp_group,
                overlap.backward_begins,
                overlap.gradient_reduced,
                overlap.backward_over,
            )
        return self.dp_group is not None

    def first_gradient(self) -> None:
        """Look for the group once more before the first update: by now all models are wrapped."""
        if not self._has_gradients:
            self._has_gradients = True
            self._seen_changes = -1

    def awaits_reduction(self, parameter: torch.Tensor) -> bool:
        """Handle a gradient of this rank; return whether it is final only when it is reduced."""
        if self._reductions is None:
            return False
        self._reductions.gradient_computed(parameter)
        return True

    # ------------------------------------------------------------------ owners
    @property
    def _sharding_group(self) -> DataParallelGroup | None:
        """The group if its ranks have different states."""
        group = self.dp_group
        return group if group is not None and group.shards_states else None

    def assign_owner(self, subgroup: Subgroup) -> None:
        """Assign a new subgroup to a rank."""
        if self.dp_group is not None:
            elements = sum(param_slice.numel for param_slice in subgroup.slices)
            subgroup.owner = self.dp_group.assign_owner(elements)

    def reset_owners(self) -> None:
        """Start again: all subgroups will be planned anew."""
        if self.dp_group is not None:
            self.dp_group.reset_owners()

    def own(self, subgroups: list[Subgroup]) -> list[Subgroup]:
        """Return the subgroups that this rank updates, and has the states of."""
        group = self._sharding_group
        return subgroups if group is None else [s for s in subgroups if s.owner == group.rank]

    def others(self, subgroups: list[Subgroup]) -> list[Subgroup]:
        """Return the subgroups of other ranks."""
        group = self._sharding_group
        return [] if group is None else [s for s in subgroups if s.owner != group.rank]

    def check_local(self, parameter: torch.Tensor, subgroups: Sequence[Subgroup]) -> None:
        """Raise `OffloadError` if another rank has the state of a parameter."""
        for subgroup in self.others(list(subgroups)):
            if any(param_slice.parameter is parameter for param_slice in subgroup.slices):
                assert self.dp_group is not None
                raise OffloadError(
                    f"the state of this parameter of shape {tuple(parameter.shape)} is on rank "
                    f"{subgroup.owner} of {self.dp_group.size}: call optimizer.state_dict() on all "
                    f"ranks, or set optimizer.sharding: false to have all states on every rank."
                )

    # ------------------------------------------------------------------ all states
    def states(self, subgroups: Sequence[Subgroup], call: str) -> dict[torch.Tensor, State]:
        """Return the states of all ranks; all of them have to call it, unless consolidated.

        Raises:
            OffloadError: other ranks did not come, or another one has the consolidated states.
            TierFullError: there is no room for them.
            StorageError: states could not be read.
        """
        if self._consolidated is not None:
            return self._consolidated
        if self._consolidated_on is not None and self.dp_group is not None:
            rank = self.dp_group.rank
            raise OffloadError(
                f"the states were consolidated on rank {self._consolidated_on}; this is rank "
                f"{rank}. Call {call} there, or call consolidate_state_dict(to={rank}) on every "
                f"rank."
            )
        group = self._sharding_group
        if group is None:
            return streamed_states(subgroups, self._updater, self._directories)
        group.barrier(call)
        return streamed_states(subgroups, AllRankStates(group, self._updater), self._directories)

    def consolidate(self, subgroups: Sequence[Subgroup], to: int, call: str) -> None:
        """Collect the states on one rank; see `OffloadedOptimizer.consolidate_state_dict`."""
        group = self._sharding_group
        if group is None:
            return
        states = AllRankStates(group, self._updater)
        self.discard_consolidated()
        group.barrier(call)
        if group.rank == to:
            self._consolidated = streamed_states(subgroups, states, self._directories)
        else:
            states.serve(subgroups)
            self._consolidated_on = to

    def discard_consolidated(self) -> None:
        """Drop consolidated states, which are out of date."""
        self._consolidated = self._consolidated_on = None


# ---------------------------------------------------------------------- reading states
class StateReader(Protocol):
    """Reads the states of subgroups."""

    def metadata(self, subgroup: Subgroup) -> StateMetadata:
        """What states a subgroup has, without the values of stored tensors."""

    def values(self, subgroup: Subgroup, metadata: StateMetadata) -> Iterator[torch.Tensor]:
        """Yield the stored tensors of a subgroup in order, not to be changed or kept."""


def streamed_states(
    subgroups: Sequence[Subgroup], reader: StateReader, directories: Sequence[Path]
) -> dict[torch.Tensor, State]:
    """The states of all parameters, with large tensors in an unlinked file.

    The states of one subgroup are in memory at a time. The tensors are ordinary ones over private
    maps of the file, which is gone with the last of them. Without `directories` for the file they
    are in ordinary memory.

    Raises:
        TierFullError: no directory has room.
        StorageError: states could not be read, or the file not be written.
    """
    states: dict[torch.Tensor, State] = {}
    all_metadata = [reader.metadata(subgroup) for subgroup in subgroups]
    with ScratchFile(directories) as scratch:
        slots: dict[torch.Tensor, dict[str, ScratchTensor]] = {}
        for subgroup, metadata in zip(subgroups, all_metadata, strict=True):
            for param_slice, small in zip(subgroup.slices, metadata.small, strict=True):
                states.setdefault(param_slice.parameter, small)
            for index, name, segment, dtype in metadata.stored:
                param_slice = subgroup.slices[index]
                own = slots.setdefault(param_slice.parameter, {})
                if name not in own and param_slice.rows is None:
                    own[name] = scratch.reserve(segment.shape, dtype, segment.strides)
                elif name not in own:
                    shape = local_tensor(param_slice.parameter).shape
                    own[name] = scratch.reserve(shape, dtype, None)
        for subgroup, metadata in zip(subgroups, all_metadata, strict=True):
            read = reader.values(subgroup, metadata)
            for (index, name, _, _), values in zip(metadata.stored, read, strict=True):
                param_slice = subgroup.slices[index]
                start = 0 if param_slice.rows is None else param_slice.rows[0]
                slots[param_slice.parameter][name].fill(start, values)
        for parameter, own in slots.items():
            states[parameter].update(
                (name, shard_like(slot.tensor(), parameter)) for name, slot in own.items()
            )
    return states


class AllRankStates:
    """Reads states wherever they are; all ranks have to read the same, in the same order."""

    def __init__(self, dp_group: DataParallelGroup, updater: Updater) -> None:
        self._dp_group = dp_group
        self._updater = updater

    def serve(self, subgroups: Sequence[Subgroup]) -> None:
        """Take part while another rank reads all of these with `streamed_states`."""
        all_metadata = [self.metadata(subgroup) for subgroup in subgroups]
        for subgroup, metadata in zip(subgroups, all_metadata, strict=True):
            for _ in self.values(subgroup, metadata):
                pass

    def metadata(self, subgroup: Subgroup) -> StateMetadata:
        """See `Updater.metadata`."""
        owner = subgroup.owner
        own = self._updater.metadata(subgroup) if owner == self._dp_group.rank else None
        return self._dp_group.broadcast_object(own, owner)

    def values(self, subgroup: Subgroup, metadata: StateMetadata) -> Iterator[torch.Tensor]:
        """See `Updater.values`."""
        owner = subgroup.owner
        if owner == self._dp_group.rank:
            for values in self._updater.values(subgroup, metadata):
                self._dp_group.broadcast(values.contiguous(), owner).wait()
                yield values
            return
        for _, _, segment, _ in metadata.stored:
            device = subgroup.slices[0].parameter.device
            values = torch.empty(segment.shape, dtype=segment.dtype, device=device)
            self._dp_group.broadcast(values, owner).wait()
            yield values
