"""New weights go from the rank that updates them to the other ranks.

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

from collections import deque
from collections.abc import Container, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from offload_strategy.optimizer.ranks.data_parallel_group import (
    DataParallelGroup,
    allow_forced_exit,
)
from offload_strategy.optimizer.states.parameter_slices import ParameterSlice
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.updated_weights import UpdatedWeights, WeightResidency
from offload_strategy.store.shared_tickets import FileIdentity, SharedTicket
from offload_strategy.units import KiB

#: Smaller weights are packed: a message costs as much as sending so many bytes.
_PACKED_BYTES = 256 * KiB


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

    def exchange(
        self, owners: Sequence[tuple[torch.Tensor, int]]
    ) -> list[tuple[torch.Tensor, int]]:
        """Let all ranks have the new values of weights, each given with the rank that has them.

        Returns those that have to be sent. Raises StorageError on all ranks if weights cannot be
        written on one.
        """
        residency, group = self._residency, self._dp_group
        own = [parameter for parameter, owner in owners if owner == group.rank]
        found: list[SharedTicket | None] = []
        with group.together("store new weights"):
            found = residency.share(own)
        gathered: list[list[SharedTicket | None]] = group.gather(found)
        by_owner = [iter(shared) for shared in gathered]
        to_send = []
        for parameter, owner in owners:
            shared = next(by_owner[owner])
            if shared is None:
                to_send.append((parameter, owner))
            elif owner != group.rank:
                ticket = residency.files.adopt(self._files[owner], shared, parameter.device)
                residency.replace(parameter, ticket)
        group.any_rank([False])  # until all have replaced what they had
        residency.drop_replaced(own)
        return to_send


class WeightBroadcast:
    """A broadcast of a subgroup's dense weights, in place, from their owner to the other ranks.

    Large contiguous weights are sent as they lie in memory; others are packed.
    """

    def __init__(
        self, dp_group: DataParallelGroup, weights: Sequence[torch.Tensor], owner: int
    ) -> None:
        self._dp_group = dp_group
        self._receives = owner != dp_group.rank
        self._weights = [weight.detach() for weight in weights]
        self._small: list[torch.Tensor] = []
        self._packed = torch.empty(0)
        self.works: list[dist.Work] = []
        for weight in self._weights:
            if weight.nbytes >= _PACKED_BYTES and weight.is_contiguous():
                self.works.append(dp_group.broadcast(weight, owner))
            else:
                self._small.append(weight)
        if self._small:  # all of one dtype, as those of a subgroup are
            self._packed = torch.cat([weight.reshape(-1) for weight in self._small])
            self.works.append(dp_group.broadcast(self._packed, owner))

    def wait(self) -> None:
        """Wait until the weights have arrived."""
        for work in self.works:
            self._dp_group.wait(work)
        if not self._receives:
            return
        values = self._packed.split([weight.numel() for weight in self._small])
        for weight, value in zip(self._small, values, strict=True):
            weight.copy_(value.view(weight.shape))
        # What autograd saved of them is out of date, as after any update in place.
        increment_version(self._weights)


class StepBroadcasts:
    """The broadcasts of one step's new weights, begun as the weights are ready.

    Every rank has to begin the same collectives in the same order: that of the subgroups that
    change in this step. Those of other ranks are received at once; this rank's wait until they are
    updated. Where weights are streamed, all follow when those of this rank are updated, subgroup by
    subgroup, so that few are in memory; and `sharing` exchanges the weights of parameters that are
    not in `sent`, as far as it can. Without a group there is nothing to send.
    """

    def __init__(
        self,
        dp_group: DataParallelGroup | None,
        changing: Iterable[Subgroup],
        weights: UpdatedWeights,
        sharing: WeightSharing | None = None,
        sent: Container[torch.Tensor] = frozenset(),
    ) -> None:
        self.dp_group = dp_group
        self._weights = weights
        self._sharing = sharing
        self._sent = sent
        self._upcoming = deque(changing)
        self._ready: set[Subgroup] = set()
        self._begun: deque[WeightBroadcast] = deque()
        self.ready()

    def ready(self, *subgroups: Subgroup) -> None:
        """Subgroups of this rank have their new weights, or keep the old ones."""
        self._ready.update(subgroups)
        while self.dp_group is not None and not self._weights.streams and self._upcoming:
            subgroup = self._upcoming[0]
            if subgroup.owner == self.dp_group.rank and subgroup not in self._ready:
                return
            weights = [param_slice.values for param_slice in subgroup.slices]
            self._begun.append(WeightBroadcast(self.dp_group, weights, subgroup.owner))
            self._upcoming.popleft()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until the weights of every rank have arrived."""
        while self._begun:
            self._begun[0].wait()
            self._begun.popleft()
        if self.dp_group is None:
            return
        shared: dict[torch.Tensor, int] = {}
        to_send: list[tuple[list[ParameterSlice], int]] = []
        for subgroup in self._upcoming:
            sent = [each for each in subgroup.slices if each.parameter in self._sent]
            if sent:
                to_send.append((sent, subgroup.owner))
            rest = [each.parameter for each in subgroup.slices if each not in sent]
            shared |= dict.fromkeys(rest, subgroup.owner)
        self._upcoming.clear()
        self._send(self.dp_group, to_send)
        if self._sharing is not None and shared:
            left = self._sharing.exchange(list(shared.items()))
            self._send(self.dp_group, [([ParameterSlice(p)], owner) for p, owner in left])

    def _send(
        self, dp_group: DataParallelGroup, to_send: Sequence[tuple[list[ParameterSlice], int]]
    ) -> None:
        """Send slices of streamed weights, each from its owner to all other ranks."""
        rank, weights = dp_group.rank, self._weights
        for place, (slices, owner) in enumerate(to_send, start=1):
            if place < len(to_send):
                following, its_owner = to_send[place]
                if its_owner == rank:
                    weights.residency.prefetch(each.parameter for each in following)
            values = weights.copies(slices) if owner == rank else weights.memory_for(slices)
            # Nothing of this rank is held while it waits for others.
            self._begun.append(WeightBroadcast(dp_group, values, owner))
            self._begun[0].wait()
            self._begun.popleft()
            if owner != rank:
                weights.set_values(slices, values)
            del values

    def allow_forced_exit(self) -> None:
        """After an error: see [Note: collectives that never end]."""
        allow_forced_exit(work for broadcast in self._begun for work in broadcast.works)
