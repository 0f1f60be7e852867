"""A team: ranks with the same weights and the same final gradients, of which each updates a share.

[Note: shares]
After the reduction every rank could compute the same update, so each subgroup's states need only be
on one rank, its owner's: N ranks read and write each state once, not N times (ZeRO stage 1). The
owner sends the new weights to the others. Owners are dealt out in the order in which subgroups are
planned, which is the same on all ranks, so nobody has to be asked.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.parallel import DistributedDataParallel

from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.optimizer.ranks.forced_exit import abandon
from offload_strategy.optimizer.ranks.rank_directory import Roll
from offload_strategy.optimizer.states.parameter_slices import is_sharded
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.units import KiB

#: Weights smaller than this go together with others: a message costs as much as to send so many.
_TOGETHER_BYTES = 256 * KiB

#: How long ranks wait for each other to begin what all of them have to do.
_MEETING = timedelta(seconds=300)

_T = TypeVar("_T")


class Team:
    """The ranks over which a `DistributedDataParallel` module reduces its gradients.

    Args:
        module: whose process group it is.
        shares: whether each updates a share; else each updates all.
    """

    def __init__(self, module: DistributedDataParallel, *, shares: bool) -> None:
        self._module = weakref.ref(module)
        self.group = module.process_group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.shares = shares and self.size > 1
        self._dealt = [0] * self.size
        self._roll: Roll | None = None

    def deal(self, elements: int) -> int:
        """The owner of the next subgroup: the rank that has the least so far."""
        if not self.shares:
            return self.rank
        owner = min(range(self.size), key=self._dealt.__getitem__)
        self._dealt[owner] += elements
        return owner

    def deal_anew(self) -> None:
        """All subgroups will be planned again."""
        self._dealt = [0] * self.size

    @property
    def module(self) -> DistributedDataParallel | None:
        """The module, if it is still there."""
        return self._module()

    @property
    def reduces(self) -> bool:
        """Whether the gradients of the backward pass that runs are reduced: not in `no_sync`."""
        module = self._module()
        # DDP notes it in the forward pass, which decides, and not the context of backward.
        return module is not None and bool(module.require_forward_param_sync)

    def late_parameters(self) -> list[torch.Tensor]:
        """Parameters that may get their gradient from other ranks alone, as they were not used."""
        module = self._module()
        if module is None or not module.find_unused_parameters:
            return []
        return [p for p in module.parameters() if p.requires_grad and p.grad is not None]

    def agreed(self, own: Sequence[bool]) -> list[bool]:
        """What holds on some rank, element by element.

        Args:
            own: as it is on this rank; as long on all of them.
        """
        if not self.shares:
            return list(own)
        if self._roll is None:  # the first thing that all ranks do together
            self._roll = Roll(self.group)
        device = self._device()
        marks = torch.tensor(own, dtype=torch.uint8, device=device)
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(mark) for mark in marks.tolist()]

    def explain(self, error: BaseException) -> None:
        """Name the ranks that are gone in a note to an error, if that is what it comes from."""
        if self._roll is not None:
            self._roll.explain(error)

    def send(self, weights: Sequence[torch.Tensor], owner: int) -> Sending:
        """Begin to bring the owner's values of weights to all other ranks, in place.

        Args:
            weights: dense, the same shapes and dtypes on all ranks.
            owner: rank of the team.
        """
        return Sending(self, weights, owner)

    def broadcast(self, tensor: torch.Tensor, owner: int) -> dist.Work | None:
        """Begin to bring the owner's values of a contiguous tensor to all other ranks."""
        source = dist.get_global_rank(self.group, owner)
        work: dist.Work | None = dist.broadcast(tensor, source, group=self.group, async_op=True)
        return work

    def tell(self, what: _T | None, owner: int) -> _T:
        """A small object that the owner has, on all ranks."""
        box = [what if owner == self.rank else None]
        source = dist.get_global_rank(self.group, owner)
        dist.broadcast_object_list(box, source, group=self.group, device=self._device())
        found = box[0]
        assert found is not None
        return found

    def meet(self, what: str) -> None:
        """Wait for the other ranks, which have to do the same, but not for ever.

        Args:
            what: they have to do, for the message.

        Raises:
            OffloadError: some did not come.
        """
        if dist.get_backend(self.group) != "gloo":
            return  # the only one that can tell who is missing
        try:
            dist.monitored_barrier(self.group, timeout=_MEETING)
        except RuntimeError as error:
            raise OffloadError(
                f"not all of the {self.size} ranks came to {what} within {_MEETING.seconds} s. "
                f"Each has a part of the states, so all of them have to: call it on every rank and "
                f"save on one; or call optimizer.consolidate_state_dict() on every rank first; or "
                f"set optimizer.sharding: false."
            ) from error

    def _device(self) -> torch.device:
        module = self._module()
        first = None if module is None else next(module.parameters(), None)
        return torch.device("cpu") if first is None else first.device


class Sending:
    """Weights on their way from their owner to the other ranks.

    Large contiguous ones go as they lie in memory; others are packed.

    Args:
        team: the ranks.
        weights: see `Team.send`.
        owner: rank of the team.

    Attributes:
        works: the messages.
    """

    def __init__(self, team: Team, weights: Sequence[torch.Tensor], owner: int) -> None:
        self._receives = owner != team.rank
        self._weights = [weight.detach() for weight in weights]
        self._packed: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self.works: list[dist.Work | None] = []
        together: dict[torch.dtype, list[torch.Tensor]] = {}
        for weight in self._weights:
            if weight.nbytes >= _TOGETHER_BYTES and weight.is_contiguous():
                self.works.append(team.broadcast(weight, owner))
            else:
                together.setdefault(weight.dtype, []).append(weight)
        for dtype, small in together.items():
            if self._receives:
                elements = sum(weight.numel() for weight in small)
                flat = torch.empty(elements, dtype=dtype, device=small[0].device)
            else:
                flat = torch.cat([weight.reshape(-1) for weight in small])
            self._packed.append((flat, small))
            self.works.append(team.broadcast(flat, owner))

    def wait(self) -> None:
        """Wait until the weights are there."""
        for work in self.works:
            if work is not None:
                work.wait()
        if not self._receives:
            return
        for flat, small in self._packed:
            values = flat.split([weight.numel() for weight in small])
            for weight, value in zip(small, values, strict=True):
                weight.copy_(value.view(weight.shape))
        # What autograd saved of them is out of date, as after any update in place.
        increment_version(self._weights)


class Deliveries:
    """New weights of one step, brought to all ranks as they are ready.

    Every rank has to begin the same messages in the same order: that of the subgroups, in which
    those of other ranks are received at once and one's own wait until they are updated.

    Args:
        team: the ranks.
        subgroups: that change in this step.
    """

    def __init__(self, team: Team, subgroups: Sequence[Subgroup]) -> None:
        self._team = team
        self._upcoming = deque(subgroups)
        self._ready: set[int] = set()
        self._sendings: list[Sending] = []
        self._advance()

    def ready(self, *subgroups: Subgroup) -> None:
        """Subgroups of this rank have their new weights, or keep the old ones."""
        self._ready.update(map(id, subgroups))
        self._advance()

    def _advance(self) -> None:
        team = self._team
        while self._upcoming:
            subgroup = self._upcoming[0]
            if subgroup.owner == team.rank and id(subgroup) not in self._ready:
                return
            weights = [param_slice.values for param_slice in subgroup.slices]
            self._sendings.append(team.send(weights, subgroup.owner))
            self._upcoming.popleft()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until every rank's weights are here."""
        while self._sendings:
            self._sendings[0].wait()
            del self._sendings[0]

    def abandon(self) -> None:
        """After an error: see [Note: messages that are never over]."""
        works = [work for sending in self._sendings for work in sending.works]
        abandon(work for work in works if work is not None)


class TeamBook:
    """Which parameters are trained by which team.

    Args:
        shares: whether the ranks of a team share updates.
    """

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares
        self._modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._noted = 0

    @property
    def changes(self) -> int:
        """Grows when `team_of` might find what it did not find before."""
        return self._noted + (_world_size() > 1)

    def note(self, model: nn.Module) -> None:
        """A model is attached: find what in it is data-parallel."""
        found = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._modules.update(found)
        self._noted += len(found)

    def team_of(self, parameters: Iterable[torch.Tensor]) -> Team | None:
        """The team that trains parameters; None if this process trains them by itself."""
        wanted = {id(parameter) for parameter in parameters}
        modules = list(self._modules)
        if _world_size() > 1:
            # One that was not attached reduces gradients all the same. (Not isinstance: among all
            # objects there are some that answer for others.)
            modules += [m for m in gc.get_objects() if issubclass(type(m), DistributedDataParallel)]
        for module in modules:
            if not wanted.isdisjoint(map(id, module.parameters())):
                return Team(module, shares=self._shares)
        return None


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_parallel(model: nn.Module, *, streams: bool, swaps: bool) -> None:
    """Refuse what others do to a model's weights and we would do as well.

    Args:
        model: to be attached.
        streams: whether its weights are to be streamed.
        swaps: whether the states of its optimizer are to be swapped.

    Raises:
        ConfigError: only one of both can be.
    """
    modules = list(model.modules())
    spread = any(isinstance(module, DistributedDataParallel) for module in modules)
    if streams and (spread or any(map(is_sharded, model.parameters()))):
        raise ConfigError(
            "attach: parameters.enabled streams the weights of one process, and this model is "
            f"{'a DistributedDataParallel' if spread else 'sharded (FSDP2, tensor parallelism)'}: "
            "set parameters.enabled: false, or train in one process."
        )
    if swaps and any(map(_leaves_to_the_host, modules)):
        raise ConfigError(
            "attach: fully_shard(offload_policy=CPUOffloadPolicy()) keeps the states of the "
            "optimizer in host memory, and optimizer.enabled moves them too. Leave the policy out, "
            "or set optimizer.enabled: false."
        )


def _leaves_to_the_host(module: nn.Module) -> bool:
    """Whether FSDP2 offloads a module itself; it does not say so publicly."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    group = getattr(state, "_fsdp_param_group", None)
    return type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy"


def local_processes() -> int:
    """How many processes of this job are on this machine, as far as their launcher says so."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdigit() else 1
