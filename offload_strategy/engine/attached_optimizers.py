"""The optimizers attached to an engine: checking, wrapping and releasing them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload_strategy.config import OptimizerConfig
from offload_strategy.engine.resources import Resources
from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.optimizer.ranks.data_parallel_group import GroupRegistry
from offload_strategy.optimizer.states.parameter_slices import local_tensor
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.user_class.compatibility import check_supported
from offload_strategy.plan_runtime.space_requirements import (
    optimizer_need,
    shortfall,
    subgroup_size,
)
from offload_strategy.weights.parameter_registry import ParameterRegistry
from offload_strategy.weights.weight_stream import WeightStream


class AttachedOptimizers:
    """The optimizers of an engine; iterates over those that are wrapped and alive.

    Args:
        resources: the engine's open resources.
        section: the ``optimizer`` section of the config.
        registry: knows which parameters have an owner already.
        residence: the stream of streamed weights, or None without ``parameters.enabled``.
    """

    def __init__(
        self,
        resources: Resources,
        section: OptimizerConfig,
        registry: ParameterRegistry,
        residence: WeightStream | None,
    ) -> None:
        self._resources = resources
        self._section = section
        self._registry = registry
        self._residence = residence
        self._dp_groups = GroupRegistry(shards_states=section.sharding)
        self._wrapped: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()
        self._guards: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = (
            weakref.WeakKeyDictionary()
        )

    def __iter__(self) -> Iterator[OffloadedOptimizer]:
        return iter(list(self._wrapped))

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states of all attached optimizers."""
        return sum(optimizer.state_bytes for optimizer in self._wrapped)

    def note(self, model: nn.Module) -> None:
        """Register an attached model whose ranks may shard optimizer states."""
        self._dp_groups.register(model)

    def wrap(self, optimizer: Optimizer, is_last: Callable[[], bool]) -> Optimizer:
        """Offload the states of an optimizer, if the config enables it.

        Args:
            optimizer: the user's optimizer.
            is_last: returns whether a step follows the current backward pass.

        Raises:
            ConfigError: it is not supported, is attached already, or the tiers are too small.
        """
        if isinstance(optimizer, OffloadedOptimizer):
            raise ConfigError("attach: this optimizer is attached already. Attach it once.")
        section = self._section
        if not section.enabled:
            return optimizer
        precision = Precision(
            state_dtype=torch.bfloat16 if section.state_dtype == "bfloat16" else None,
            stochastic_rounding=section.stochastic_rounding,
            master_weights=section.master_weights,
        )
        state_bytes = check_supported(optimizer, precision)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        subgroups = self._subgroup_size(parameters, state_bytes)
        own_bytes = self._check_room(parameters, state_bytes)
        self._registry.check_unclaimed(parameters)
        wrapped = OffloadedOptimizer(
            optimizer,
            self._resources.store,
            self._resources.clients["optimizer"],
            overlap=section.overlap,
            subgroup_size=subgroups,
            is_last=is_last,
            state_bytes=own_bytes,
            precision=precision,
            new_weight_tiers=self._resources.new_weight_tiers,
            gradient_memory=section.gradient_memory,
            directories=self._resources.scratch_directories("optimizer"),
            residency=self._residence,
            dp_groups=self._dp_groups,
        )
        self._registry.claim_states(parameters, wrapped)
        self._wrapped.add(wrapped)
        self._guard(optimizer)
        # Only an accepted optimizer may change how much idle memory is kept.
        self._expect(parameters, state_bytes, subgroups)
        return wrapped

    def unwrap(self, optimizer: OffloadedOptimizer) -> None:
        """Release an optimizer's states and everything it holds."""
        optimizer.close()
        self._registry.release_states(optimizer.parameters(), optimizer)
        self._wrapped.discard(optimizer)
        self._unguard(optimizer.inner)

    def close(self) -> None:
        """Release all optimizers. Idempotent."""
        for optimizer in self:
            self.unwrap(optimizer)
        for inner in list(self._guards):
            self._unguard(inner)

    def _guard(self, inner: Optimizer) -> None:
        """Make the user's own optimizer refuse to step while the engine holds its states.

        It would create new states in memory, or find gradients that were consumed. This holds even
        after the optimizer that `attach` returned was freed.
        """
        self._unguard(inner)
        engine, own = weakref.ref(self), weakref.ref(inner)

        def refuse(optimizer: Optimizer, *_: object) -> None:
            # The wrapping optimizer runs these hooks with itself as argument, and so does a class
            # whose step() calls its base class on the stand-in for one subgroup.
            if optimizer is own() and engine() is not None:
                name = type(optimizer).__name__
                raise OffloadError(
                    f"step(): an offload engine has the states of this {name}, which does not step "
                    f"by itself any more. Train with the optimizer that attach returned: "
                    "`optimizer = engine.attach(model, optimizer)`. To train without offload "
                    "again, close the engine."
                )

        self._guards[inner] = inner.register_step_pre_hook(refuse)

    def _unguard(self, inner: Optimizer) -> None:
        handle = self._guards.pop(inner, None)
        if handle is not None:
            handle.remove()

    def _subgroup_size(
        self, parameters: Sequence[nn.Parameter], state_bytes: int
    ) -> Callable[[int], int]:
        """Return a function from the number of parameters to the parameters per subgroup."""
        size = self._section.subgroup_size
        if size != "auto":
            fixed = int(size)
            return lambda _: fixed
        moved, memory = state_bytes, self._resources.pinned_bytes
        if self._section.overlap == "commit":  # new weights wait in the rest
            moved += sum(local_tensor(p).nbytes for p in parameters)
            memory -= sum(tier.capacity for tier in self._resources.new_weight_tiers)
        each = moved / max(1, sum(local_tensor(p).numel() for p in parameters))
        return partial(subgroup_size, each=each, memory=memory)

    def _expect(
        self,
        parameters: Sequence[nn.Parameter],
        state_bytes: int,
        subgroup_size: Callable[[int], int],
    ) -> None:
        """Keep idle buffers for one subgroup's states, which updates during backward reuse.

        Otherwise they are mapped and zeroed for every subgroup, which takes longer than reading
        into them.
        """
        if self._section.overlap != "off":
            count = max(1, sum(local_tensor(p).numel() for p in parameters))
            size = min(count, subgroup_size(count))
            self._resources.pool.idle_may_exceed(state_bytes * size // count)

    def _check_room(self, parameters: Sequence[nn.Parameter], state_bytes: int) -> int:
        """Return this rank's bytes of states, after checking that the tiers have room for them."""
        section = self._section
        weights_bytes = sum(local_tensor(p).nbytes for p in parameters)
        dp_group = self._dp_groups.find_group(parameters)
        if dp_group is not None and dp_group.shards_states:
            state_bytes = -(-state_bytes // dp_group.size)
            weights_bytes = -(-weights_bytes // dp_group.size)
        waiting_bytes = max(0, weights_bytes - section.gradient_memory)
        need = optimizer_need(state_bytes, weights_bytes, section.overlap, waiting_bytes)
        tiers = self._resources.clients["optimizer"]
        complaint = shortfall(need, sum(tier.capacity - tier.used_bytes for tier in tiers))
        if complaint is not None:
            raise ConfigError(f"attach: {complaint}")
        return state_bytes
