"""The states of all ranks of a team, for a state dict that is a plain optimizer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offload_strategy.optimizer.ranks.data_parallel_group import Team
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import StateMetadata, Updater


class TeamStates:
    """Reads states wherever they are; all ranks have to read the same, in the same order.

    Args:
        team: has them.
        updater: has those of this rank.
    """

    def __init__(self, team: Team, updater: Updater) -> None:
        self._team = team
        self._updater = updater

    def serve(self, subgroups: Sequence[Subgroup]) -> None:
        """Help another rank to read all of these, as `streamed_states` does."""
        all_metadata = [self.metadata(subgroup) for subgroup in subgroups]
        for subgroup, metadata in zip(subgroups, all_metadata, strict=True):
            for _ in self.values(subgroup, metadata):
                pass

    def metadata(self, subgroup: Subgroup) -> StateMetadata:
        """See `Updater.outline`."""
        owner = subgroup.owner
        own = self._updater.metadata(subgroup) if owner == self._team.rank else None
        return self._team.tell(own, owner)

    def values(self, subgroup: Subgroup, metadata: StateMetadata) -> Iterator[torch.Tensor]:
        """See `Updater.values`."""
        owner = subgroup.owner
        if owner == self._team.rank:
            for values in self._updater.values(subgroup, metadata):
                self._bring(values.contiguous(), owner)
                yield values
            return
        for _, _, segment, _ in metadata.stored:
            device = subgroup.slices[0].parameter.device
            values = torch.empty(segment.shape, dtype=segment.dtype, device=device)
            self._bring(values, owner)
            yield values

    def _bring(self, values: torch.Tensor, owner: int) -> None:
        work = self._team.broadcast(values, owner)
        if work is not None:
            work.wait()
