"""Ranks with the same weights and the same reduced gradients, which may shard the updates.

[Note: sharded updates]
After the reduction every rank could compute the same update, so each subgroup's states need only be
on one rank, its owner: N ranks read and write each state once, not N times (ZeRO stage 1). The
owner sends the new weights to the others. Owners are assigned in the order in which subgroups are
planned, which is the same on all ranks, so no communication is needed.

[Note: collectives that never end]
After an error this process sends nothing more, and other ranks wait for it. Gloo cannot cancel a
collective, and when the process ends it waits for each until the group's timeout (half an hour). So
the process gets some seconds for what it has to do at its end, and is then ended. Gloo may also
lose a message whose connection is closed when it is sent (torch 2.13), without an error for the
sender. So a wait ends some time after a rank of this machine has ended.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from timeit import default_timer as perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.optimizer.ranks.rank_directory import RankDirectory
from offload_strategy.torch_support.dtensors import fsdp_groups, is_sharded

#: How long ranks wait for each other to begin what all of them have to do.
_BARRIER_TIMEOUT = timedelta(seconds=300)
#: How often to see whether all ranks are there, and how long to wait from when one is not: one that
#: has done all of its part may end before the others have.
_LOOK_EVERY, _PATIENCE_SECONDS = timedelta(seconds=1), 15.0
#: For whatever else happens when a process ends, as writing logs.
_GRACE_SECONDS = 5.0

_pending: list[dist.Work] = []


class DataParallelGroup:
    """The ranks over which a `DistributedDataParallel` module reduces its gradients."""

    def __init__(self, module: DistributedDataParallel, *, shards_states: bool) -> None:
        self.module = weakref.ref(module)
        self.process_group = module.process_group
        self.rank = dist.get_rank(self.process_group)
        self.size = dist.get_world_size(self.process_group)
        self._device: torch.device = module.device
        self.shards_states = shards_states and self.size > 1
        self._directory: RankDirectory | None = None

    def any_rank(self, own: Sequence[int]) -> list[int]:
        """Return the largest flag of all ranks, 0 to 255, of equally many on each, one by one."""
        self.ranks()
        flags = torch.tensor(own, dtype=torch.uint8, device=self._device)
        self.wait(dist.all_reduce(flags, dist.ReduceOp.MAX, self.process_group, async_op=True))
        largest: list[int] = flags.tolist()
        return largest

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise on all ranks what one raises in this context, which all of them enter."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if self.any_rank([error is not None]) == [True]:
            raise error or OffloadError(f"another rank could not {what}, and says why.")

    def add_rank_note(self, error: BaseException) -> None:
        """Name the ranks that have ended in a note to an error that comes from their end."""
        if self._directory is not None:
            self._directory.add_rank_note(error)

    def broadcast(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """Begin to send the owner's values of a contiguous tensor to all other ranks."""
        if tensor.dtype.itemsize == 1:  # gloo does not know float8
            tensor = tensor.view(torch.uint8)
        group = self.process_group
        work: dist.Work = dist.broadcast(tensor, group=group, group_src=owner, async_op=True)
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective, but not for ever: see [Note: collectives that never end].

        Raises an OffloadError if it does not end after a rank of this machine has ended.
        """
        if self._directory is not None and dist.get_backend(self.process_group) == "gloo":
            until = math.inf
            while True:
                with suppress(RuntimeError):  # of the time, or why it failed
                    work.wait(_LOOK_EVERY)
                if work.is_completed():
                    break
                if until == math.inf and self._directory.ended():
                    until = perf_counter() + _PATIENCE_SECONDS
                elif perf_counter() > until:
                    allow_forced_exit([work])
                    raise OffloadError("a collective of gloo does not end: a peer has ended.")
        work.wait()

    def gather(self, value: Any) -> list[Any]:
        """The small objects of all ranks, by rank, on each of them."""
        self.ranks()
        own, _ = _object_to_tensor(value, self._device, self.process_group)
        sizes = [int(size) for size in self._gathered(torch.tensor(own.numel()))]
        rows = self._gathered(pad(own, (0, max(sizes) - own.numel())))
        return list(map(_tensor_to_object, rows, sizes, [self.process_group] * self.size))

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of one shape, on the host."""
        own = own.to(self._device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self.wait(dist.all_gather(found, own, self.process_group, async_op=True))
        return [each.cpu() for each in found]

    def barrier(self, call: str) -> None:
        """Wait for a limited time for the other ranks, which have to make the user's `call` too."""
        if dist.get_backend(self.process_group) != "gloo":
            return  # the only one that can tell who is missing
        try:
            dist.monitored_barrier(self.process_group, timeout=_BARRIER_TIMEOUT)
        except RuntimeError as error:
            raise OffloadError(
                f"not all of the {self.size} ranks came to {call} within "
                f"{_BARRIER_TIMEOUT.seconds} s. Each has a part of the states, so all of them have "
                f"to: call it on every rank and save on one; or call "
                f"optimizer.consolidate_state_dict() on every rank first; or set "
                f"optimizer.sharding: false."
            ) from error

    def ranks(self) -> RankDirectory:
        """The processes of the ranks, all of which have to ask for it at the same time."""
        if self._directory is None:  # the first collective that all ranks run together
            self._directory = RankDirectory(self.process_group)
        return self._directory


class GroupRegistry:
    """The data-parallel groups of the attached models' parameters."""

    def __init__(self, *, shards_states: bool) -> None:
        self._shards_states = shards_states
        self._modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._registered = 0

    @property
    def changes(self) -> int:
        """Grows when `find_group` might find what it did not find before."""
        return self._registered + (world_size() > 1)

    def register(self, model: nn.Module) -> None:
        """Register the data-parallel modules of a model that is attached."""
        modules = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._modules.update(modules)
        self._registered += len(modules)

    def find_group(self, parameters: Iterable[torch.Tensor]) -> DataParallelGroup | None:
        """The group that trains parameters; None if this process trains them alone."""
        parameters = list(parameters)
        wanted = {id(parameter) for parameter in parameters}
        modules = list(self._modules)
        if world_size() > 1:
            # A module that was not attached reduces gradients all the same. (Not isinstance: among
            # all objects there are some that answer for others.)
            modules += [m for m in gc.get_objects() if issubclass(type(m), DistributedDataParallel)]
        reduced = {
            id(parameter)
            for module in modules
            for name, parameter in module.module.named_parameters()
            if name not in module.parameters_to_ignore
        }
        # Ranks have values of their own of what no module keeps the same.
        alike = all(id(each) in reduced for each in parameters if each.requires_grad)
        for module in modules:
            if not wanted.isdisjoint(map(id, module.parameters())):
                return DataParallelGroup(module, shards_states=self._shards_states and alike)
        return None


def allow_forced_exit(works: Iterable[dist.Work]) -> None:
    """End this process in time although collectives do not end, after an error."""
    if not _pending:
        atexit.register(_end_in_time)
    _pending.extend(work for work in works if not work.is_completed())


def _end_in_time() -> None:
    if all(work.is_completed() for work in _pending):
        return
    # A thread that needs no interpreter: what waits may be the last of its clearing up.
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(_GRACE_SECONDS, exit=True, file=nowhere)


def world_size() -> int:
    """How many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_parallel(model: nn.Module, *, streams: bool, swaps: bool) -> None:
    """Raise `ConfigError` if another library does to a model what we would do as well.

    `streams`: its weights are to be streamed; `swaps`: its optimizer's states are to be offloaded.
    """
    groups = [group for module in model.modules() for group in fsdp_groups(module)]
    sharded = [each for group in groups for each in group.fsdp_params]
    managed = {id(each.sharded_param) for each in sharded}
    if streams and any(is_sharded(p) and id(p) not in managed for p in model.parameters()):
        raise ConfigError(
            "attach: parameters.enabled streams the weights of models that FSDP2 shards, and "
            "parameters of this one are sharded by tensor parallelism alone: apply fully_shard "
            "too, or set parameters.enabled: false."
        )
    if streams and any(group._use_post_forward_mesh for group in groups):
        raise ConfigError(
            "attach: fully_shard(reshard_after_forward=N) keeps weights in device memory between "
            "forward and backward, sharded over N ranks, and parameters.enabled streams them: set "
            "reshard_after_forward to True or False, or parameters.enabled to false."
        )
    if (swaps or streams) and any(each.offload_to_cpu for each in sharded):
        raise ConfigError(
            "attach: fully_shard(offload_policy=CPUOffloadPolicy()) keeps weights and states of "
            "the optimizer in host memory, and this engine moves them too. Leave the policy out, "
            "or set optimizer.enabled and parameters.enabled to false."
        )
