"""The optimizers attached to an engine: checking, wrapping and releasing them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from offload_strategy.checkpoints.scratch_file import scratch_directories
from offload_strategy.engine.automatic_choice import AutomaticChoice
from offload_strategy.engine.resources import Resources
from offload_strategy.errors import ConfigError
from offload_strategy.optimizer.inner_guard import LOST, guard_of, has_lost_states
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.optimizer.ranks.data_parallel_group import GroupRegistry
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.subgroups import ALIGNMENT_BYTES
from offload_strategy.optimizer.user_class import compatibility
from offload_strategy.plan_runtime.space_requirements import (
    MOST_FROM_MEMORY,
    MOST_PARAMETERS,
    MOST_TO_COMMIT_ON_CPU,
    optimizer_need,
    subgroup_size,
)
from offload_strategy.store.tiers import HostTier
from offload_strategy.telemetry import get_logger
from offload_strategy.torch_support.dtensors import local_tensor
from offload_strategy.torch_support.modules import WeakHook
from offload_strategy.units import format_size, round_up
from offload_strategy.weights.parameter_registry import ParameterRegistry, after_collection
from offload_strategy.weights.weight_stream import WeightStream

logger = get_logger(__name__)

# Of all engines of the process, so that no two offload the same parameter's states.
_state_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class AttachedOptimizers:
    """The optimizers of an engine; iterates over those that are wrapped and alive."""

    def __init__(
        self, resources: Resources, registry: ParameterRegistry, choice: AutomaticChoice
    ) -> None:
        self._resources = resources
        self._section = resources.config.optimizer
        self._registry = registry
        self._choice = choice
        self.stream: WeightStream | None = None
        #: Knows attached models whose ranks may shard optimizer states.
        self.dp_groups = GroupRegistry(shards_states=self._section.sharding)
        # With the bytes that they need in the tiers.
        self._wrapped = weakref.WeakKeyDictionary[OffloadedOptimizer, int]()
        #: Users' own whose states are here; also where the wrapping one is gone.
        self._inner: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __iter__(self) -> Iterator[OffloadedOptimizer]:
        return iter(list(self._wrapped))

    def __len__(self) -> int:
        return len(self._wrapped)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states of all attached optimizers."""
        return sum(optimizer.state_bytes for optimizer in self._wrapped)

    def wrap(self, optimizer: Optimizer, is_last: Callable[[], bool]) -> Optimizer:
        """Offload the states of an optimizer, if the config enables it and they can be offloaded.

        `is_last` returns whether a step follows the current backward pass.
        """
        attached = after_collection(lambda: any(each.inner is optimizer for each in self))
        if attached or isinstance(optimizer, OffloadedOptimizer):
            raise ConfigError("attach: this optimizer is attached already. Attach it once.")
        if has_lost_states(optimizer):
            raise ConfigError(f"attach: {LOST.format(kind=type(optimizer).__name__)}")
        section = self._section
        if not section.enabled:
            return optimizer
        precision = Precision(
            state_dtype=torch.bfloat16 if section.state_dtype == "bfloat16" else None,
            stochastic_rounding=section.stochastic_rounding,
            master_weights=section.master_weights,
        )
        try:
            supported = compatibility.check_supported(optimizer, precision)
        except compatibility.UnsupportedOptimizerError as error:
            if section.is_demanded or precision != Precision():
                raise
            logger.warning(
                "%s Its states stay in memory, and activations leave as usual.", str(error)
            )
            return optimizer
        state_bytes = sum(supported.state_bytes)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._resources.note_device(parameters[0].device)
        staying = self._choice.tier_for_states(optimizer, state_bytes)
        if staying is None:
            return optimizer
        subgroups = self._subgroup_size(parameters, state_bytes)
        # Errors name only tiers that the config has, unless states stay without one.
        own_tiers = [staying] if staying.capacity else []
        count = _elements(parameters)
        subgroup_bytes = state_bytes * min(count, subgroups(count)) // count
        own_bytes, gradient_memory, need = self._check_room(
            parameters, state_bytes, staying.capacity, subgroup_bytes
        )
        base: Any = OffloadedOptimizer
        kind: Any = type(optimizer)
        wrapped: OffloadedOptimizer = compatibility.wrapper_class(base, kind)(
            optimizer,
            self._resources.store,
            [*own_tiers, *self._resources.clients["optimizer"]],
            overlap=section.overlap,
            subgroup_size=subgroups,
            is_last=is_last,
            state_bytes=own_bytes,
            changes_gradients=supported.changes_gradients,
            precision=precision,
            waiting=HostTier("what waits for step()", gradient_memory),
            directories=scratch_directories(self._resources.state_paths),
            residency=self.stream,
            dp_groups=self.dp_groups,
            claim=WeakHook(self._claim),
        )
        self._wrapped[wrapped] = need
        # Until this is closed, the user's own must not step: it would create new states in memory,
        # or find gradients that were consumed.
        self._inner.add(optimizer)
        guard = guard_of(optimizer)
        guard.attached, guard.wrapper = weakref.ref(self._inner), weakref.ref(wrapped)
        if section.overlap != "off":
            # Keep idle buffers for one subgroup's states: to map them takes longer than to read.
            # Only an accepted optimizer may change how much idle memory is kept.
            self._resources.pool.idle_may_exceed(subgroup_bytes)
        if section.overlap == "commit" and parameters[0].device.type == "cpu":
            # What waits for step() stays in memory as far as there is room.
            self._choice.limit.measure(parameters[0])
            self._resources.pool.limit_process(
                self._choice.host_limit_bytes, is_scarce=self._choice.is_scarce
            )
            # Of states in host memory, step() frees all old ones at once.
            tiers = self._resources.clients["optimizer"]
            host_bytes = sum(tier.capacity for tier in tiers if tier.is_host_memory)
            self._resources.pool.keep_idle_beyond(host_bytes)
        return wrapped

    def _claim(self, optimizer: OffloadedOptimizer) -> None:
        """Claim its parameters; optimizers that share some update in `step()` from now on."""
        parameters = optimizer.parameters()

        def others() -> dict[torch.Tensor, set[OffloadedOptimizer]]:
            owners = {p: {*_state_owners.get(p, ())} - {optimizer} for p in parameters}
            return {parameter: found for parameter, found in owners.items() if found}

        shared = after_collection(others)
        for parameter, owners in shared.items():
            if not owners <= {*self}:
                raise ConfigError(
                    f"attach: the parameter {self._registry.name_of(parameter)!r} is attached with "
                    f"another optimizer already, by another engine. Attach each parameter to one "
                    f"engine. Close the other engine first if it is a leftover."
                )
        for parameter in parameters:
            _state_owners.setdefault(parameter, weakref.WeakSet()).add(optimizer)
        sharing = set().union({optimizer} if shared else (), *shared.values())
        if any([each.stop_overlap() for each in sharing]):
            logger.warning(
                "several optimizers have the same parameters, so their updates run in step() and "
                "not during backward (as with optimizer.overlap: off)."
            )

    def unwrap(self, optimizer: OffloadedOptimizer) -> None:
        """Release an optimizer's states and everything it holds."""
        optimizer.close()
        for parameter in optimizer.parameters():
            _state_owners.get(parameter, weakref.WeakSet()).discard(optimizer)
        self._wrapped.pop(optimizer, None)
        self._inner.discard(optimizer.inner)

    def close(self) -> None:
        """Release all optimizers. Idempotent."""
        for optimizer in self:
            self.unwrap(optimizer)
        self._inner.clear()

    def _subgroup_size(
        self, parameters: Sequence[nn.Parameter], state_bytes: int
    ) -> Callable[[int], int]:
        """Return a function from the number of parameters to the parameters per subgroup."""
        if self._section.subgroup_size != "auto":
            fixed = int(self._section.subgroup_size)
            return lambda _: fixed
        moved, memory, most = state_bytes, self._resources.pinned_bytes, MOST_PARAMETERS
        accelerated = parameters[0].device.type != "cpu"
        if self._section.overlap == "commit":
            moved += sum(local_tensor(p).nbytes for p in parameters)
            if accelerated:  # the rest is for gradients, or new weights
                memory //= 2
            elif self._choice.is_scarce:
                most = MOST_TO_COMMIT_ON_CPU
        each, tiers = moved / _elements(parameters), self._resources.clients["optimizer"]
        outside = [tier for tier in tiers if not tier.is_own_device]
        if accelerated and outside and outside[0].is_host_memory:
            most = MOST_FROM_MEMORY
        return partial(subgroup_size, each=each, memory=memory, most=most)

    def _check_room(
        self,
        parameters: Sequence[nn.Parameter],
        state_bytes: int,
        staying_bytes: int,
        subgroup_bytes: int,
    ) -> tuple[int, int, int]:
        """Check that the tiers have room for this rank's states, and for gradients that wait there.

        `staying_bytes` of states stay without a tier of the config. With `commit`, what is on the
        device, in whole subgroups, is updated in `step()` without new states or weights beside it.
        Returns the bytes of its states, those of host memory for gradients, and those of the tiers.
        """
        section = self._section
        sizes = [local_tensor(p).nbytes for p in parameters]
        gradient_bytes = weights_bytes = sum(round_up(size, ALIGNMENT_BYTES) for size in sizes)
        dp_group = self.dp_groups.find_group(parameters)
        ranks = dp_group.size if dp_group is not None and dp_group.shards_states else 1
        state_bytes, weights_bytes = -(-state_bytes // ranks), -(-weights_bytes // ranks)
        own_bytes = max(0, state_bytes - staying_bytes)
        tiers = [tier for tier in self._resources.clients["optimizer"] if tier.is_own_device]
        outside = own_bytes - sum(tier.capacity - tier.used_bytes for tier in tiers)
        outside = min(own_bytes, outside + subgroup_bytes) if outside > 0 else 0
        new_weights = weights_bytes * outside // max(1, state_bytes)
        need = own_bytes - outside + optimizer_need(outside, new_weights, section.overlap)
        # Of others that have no states yet.
        others = sum(n for each, n in self._wrapped.items() if not guard_of(each.inner).has_stored)
        room = self._resources.room("optimizer") - others
        if section.gradient_memory != "auto":
            gradient_memory = int(section.gradient_memory)
            need += max(0, weights_bytes - gradient_memory) if section.overlap == "commit" else 0
        elif any(parameter.device.type == "cpu" for parameter in parameters):
            # Host memory is what is scarce: none of it if the tiers have room, and only one rank
            # writes. Each of several has slices of all gradients, and would write all of them.
            gradient_memory = max(0, gradient_bytes - (0 if ranks > 1 else max(0, room - need)))
        else:
            gradient_memory = self._resources.pinned_bytes
        detail = f"{format_size(own_bytes)} of states"
        if need > own_bytes:
            updates = format_size(need - own_bytes)
            detail += f" and {updates} of updates on their way (overlap: commit)"
        detail += f", beside {format_size(others)} of other optimizers" if others else ""
        what = f"attach: optimizer states need {format_size(need)} ({detail})"
        advice = "add a tier, or set optimizer.overlap to off, which needs less"
        self._resources.check_room("optimizer", need + others, what, advice)
        return state_bytes, gradient_memory, need


def _elements(parameters: Sequence[nn.Parameter]) -> int:
    return max(1, sum(local_tensor(p).numel() for p in parameters))
