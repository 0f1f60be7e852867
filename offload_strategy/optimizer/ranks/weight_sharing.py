"""One copy of streamed weights for all ranks of a machine.

[Note: one copy of streamed weights]
If every rank stored all new weights, N ranks would write each of them N times. So the owner of a
weight stores it, as it would alone, and tells the others where: file, extent and digests. They open
its file, read the weight from there when they need it, and free the copy that they had. The owner
frees the old values once all ranks have the new ones. Values that are not on a path of the owner,
or that cannot leave its memory, are sent instead.

This needs all ranks on one machine, files that they can open of each other, and no encryption;
otherwise all weights are sent, and each rank has its own copy. With streamed weights one rank
updates all slices of a weight: no other can store it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_strategy.optimizer.ranks.data_parallel_group import DataParallelGroup
from offload_strategy.optimizer.updated_weights import WeightResidency
from offload_strategy.store.shared_tickets import FileIdentity, SharedTicket


class WeightSharing:
    """The shared weights of a group's ranks. All ranks have to make one at the same time."""

    def __init__(self, dp_group: DataParallelGroup, residency: WeightResidency) -> None:
        self._dp_group = dp_group
        self._residency = residency
        #: By rank.
        self._files: list[list[FileIdentity]] = dp_group.gather(residency.files.identities())
        others = [files for rank, files in enumerate(self._files) if rank != dp_group.rank]
        opened = all(others) and all([residency.files.open(files) for files in others])
        #: Whether every rank can read the files of all others.
        self.works = dp_group.any_rank([not opened]) == [False]

    def can_share(self, parameter: torch.Tensor) -> bool:
        """Whether this rank can read a parameter's values where another rank has stored them."""
        return self.works and self._residency.is_streamed_whole(parameter)

    def exchange(self, owners: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
        """Let all ranks have the new values of weights, each given with the rank that has them.

        Returns the positions of weights that have to be sent. Raises StorageError on all ranks if
        weights cannot be written on one.
        """
        residency, group = self._residency, self._dp_group
        own = [parameter for parameter, owner in owners if owner == group.rank]
        found: list[SharedTicket | None] = []
        with group.together("store new weights"):
            found = residency.share(own)
        gathered: list[list[SharedTicket | None]] = group.gather(found)
        by_owner = [iter(shared) for shared in gathered]
        to_send = []
        for position, (parameter, owner) in enumerate(owners):
            shared = next(by_owner[owner])
            if shared is None:
                to_send.append(position)
            elif owner != group.rank:
                ticket = residency.files.adopt(self._files[owner], shared, parameter.device)
                residency.replace(parameter, ticket)
        group.any_rank([False])  # until all have replaced what they had
        residency.drop_replaced(own)
        return to_send
