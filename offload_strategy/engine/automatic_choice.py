"""What the engine offloads if the config leaves it open (``mode: auto``), and why.

[Note: the order of offloading]
What costs least goes first: activations, of which a plan lets as many leave as memory requires
(activations/planned_budget.py); then optimizer states; then the weights. The memory in use, the
gradients and the states are known when something is attached, so states and weights are decided
there, before any training step. Activations depend on the batch and are decided while they are
saved: everything stays until what is certainly free is used, so nothing is moved, or measured,
where all fits. Only what cannot change numbers is decided here.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from offload_strategy.activations.planned_budget import MemoryLimit
from offload_strategy.config import OffloadConfig, TierConfig
from offload_strategy.engine.resources import Resources
from offload_strategy.host_memory.c_allocator import keep_freed_memory, reuse_freed_memory
from offload_strategy.optimizer.ranks.data_parallel_group import world_size
from offload_strategy.plan_runtime.lifetime_plan import GivenPlan
from offload_strategy.store.tiers import DeviceTier
from offload_strategy.telemetry import CLIENTS, get_logger
from offload_strategy.torch_support.dtensors import local_tensor
from offload_strategy.units import format_size

logger = get_logger(__name__)

#: Share of the limit that states in memory leave to activations and workspaces at least.
_ACTIVATIONS_SHARE = 0.25
#: Share of the limit that workspaces, and activations of which none can leave, take at least.
_WORKSPACE_SHARE = 0.1


class AutomaticChoice:
    """Decides for the sections of a config whose ``enabled`` is 'auto'.

    `plan` is that of ``planning.plan``; `models` are those that are attached at a time, of which
    gradients are expected.
    """

    def __init__(
        self,
        config: OffloadConfig,
        plan: GivenPlan | None,
        resources: Resources,
        models: Collection[nn.Module],
    ) -> None:
        self._config = config
        # Not the resources themselves: their pool, which asks how much there is, may live longer.
        self._pinned_bytes = resources.pinned_bytes
        has_tier = bool(resources.clients.get("parameters"))
        self._can_stream = has_tier and config.parameters.enabled == "auto"
        planning, name = config.planning, "planning.device_memory"
        limit = planning.device_memory
        if limit is None:
            limit, name = config.memory.limit, "memory.limit"
        nbytes = None if limit == "auto" else int(limit)
        #: The limit of training, with its meter.
        self.limit = MemoryLimit(nbytes, planning.profile_steps, given=plan, name=name)
        if planning.device_memory is None and config.activations.enabled == "auto":
            self.limit.upcoming_bytes = self.upcoming_bytes
        self._models = models
        #: Optimizers whose states stay in memory, with their bytes, and whether others are swapped.
        self._kept: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._swaps = False
        # Tiers for what of those stays in memory, with the bytes of all states of their optimizer.
        self._staying: weakref.WeakKeyDictionary[DeviceTier, int] = weakref.WeakKeyDictionary()
        #: Whether gradients accumulate over micro-batches, and stay in memory until the last one.
        self.accumulates = False
        self._decided: dict[str, bool] = {}

    def plans_activations(self) -> bool:
        """Return whether saved tensors leave by a plan, as many as the limit requires."""
        by_limit = self._config.planning.device_memory is not None
        return by_limit or self._config.activations.enabled == "auto"

    def streams_weights(self, model: nn.Module) -> bool:
        """Decide whether the weights of a model are streamed, before it is attached."""
        parameters = list(model.parameters())
        if (
            not self._can_stream
            or world_size() > 1
            or not parameters
            or any(is_lazy(p) or p.is_meta or type(p) is not nn.Parameter for p in parameters)
        ):
            return False
        used, limit = self.limit.measure(parameters[0]).used_bytes(), self.limit.limit_bytes()
        upcoming = self._window_bytes(parameters) + int(_WORKSPACE_SHARE * limit)
        self._decided["parameters"] = streams = used + upcoming > limit
        if streams:
            weights = format_size(sum(p.nbytes for p in parameters))
            logger.info(
                f"mode: auto: {weights} of weights are streamed. With them in memory, and all else "
                f"offloaded, training would need {format_size(used + upcoming)} of the "
                f"{format_size(limit)} there are."
            )
        return streams

    def tier_for_states(self, optimizer: Optimizer, state_bytes: int) -> DeviceTier | None:
        """Decide how many of these bytes stay in memory, before their optimizer is wrapped.

        Returns a tier for those that stay if the others leave, None if all stay. Several ranks must
        decide alike and have different memory, so their states leave.
        """
        tier = DeviceTier("states that stay", 0)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        on_host = parameters[0].device.type == "cpu"
        streams = self._decided.get("parameters", False)
        if self._config.optimizer.enabled != "auto" or streams or world_size() > 1:
            self._swap(on_host=on_host)
            return tier
        used, limit = self.limit.measure(parameters[0]).used_bytes(), self.limit.limit_bytes()
        states = (value for state in optimizer.state.values() for value in state.values())
        loaded = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        need = used + self.upcoming_bytes(parameters) + max(0, state_bytes - loaded)
        room = int((1 - _ACTIVATIONS_SHARE) * limit)
        keeps = need <= room
        what = f"{format_size(state_bytes)} of optimizer states stay in memory"
        if keeps:
            self._kept[optimizer] = state_bytes
            # Where nothing watches the memory of the process, it must not keep more.
            if on_host and self.plans_activations():
                keep_freed_memory()
        else:
            self._swap(on_host=on_host)
            # Host memory is of more use for new weights that wait for `step()`.
            if not on_host:
                tier.capacity = self._staying_bytes(parameters, state_bytes, room - used + loaded)
                self._staying[tier] = state_bytes
            tiers = ", ".join(each.name for each in self._config.tiers_for("optimizer"))
            part = f"{format_size(state_bytes - tier.capacity)} of " if tier.capacity else ""
            what = f"{part}{format_size(state_bytes)} of optimizer states are offloaded to {tiers}"
        logger.info(
            f"mode: auto: {what}. With all of them in memory, training needs {format_size(need)} "
            f"of the {format_size(limit)} there are, and room for activations."
        )
        self._decided["optimizer"] = not keeps
        return None if keeps else tier

    def _staying_bytes(
        self, parameters: Sequence[torch.Tensor], state_bytes: int, room: int
    ) -> int:
        """Return how many bytes of states stay in so much room, beside what training needs.

        Their gradients stay with them until `step()`, unless all do so or updates are eager.
        """
        if any(tier.kind == "device" for tier in self._config.tiers_for("optimizer")):
            return 0  # the config says how many
        with_gradients = self._config.optimizer.overlap == "commit" and not self.accumulates
        gradients = sum(_missing_gradients(parameters)) if with_gradients else 0
        room -= self.upcoming_bytes(parameters)
        return max(0, min(state_bytes, room * state_bytes // max(1, state_bytes + gradients)))

    def _swap(self, *, on_host: bool) -> None:
        self._swaps = True
        if on_host:
            reuse_freed_memory()

    @property
    def is_scarce(self) -> bool:
        """Whether training may use all of its memory: not all fits, or the limit was given."""
        return self.limit.nbytes is not None or any(self._decided.values())

    def host_limit_bytes(self) -> int:
        """Return the bytes that training may have in host memory, if it is on the CPU."""
        meter = self.limit.meter
        on_host = meter is not None and meter.counts_host_buffers
        return self.limit.limit_bytes() if on_host else sys.maxsize

    def explain(self, effective: OffloadConfig) -> None:
        """Log the settings that choose what was chosen, unless the config had them all."""
        auto = [client for client in CLIENTS if getattr(self._config, client).enabled == "auto"]
        sections: dict[str, Any] = {c: {"enabled": getattr(effective, c).enabled} for c in auto}
        if effective.planning.device_memory != self._config.planning.device_memory:
            limit = effective.planning.model_dump(mode="json")["device_memory"]
            sections["planning"] = {"device_memory": limit}
        if effective.tiers != self._config.tiers:
            tiers = [
                tier.model_dump(mode="json", exclude_defaults=True) for tier in effective.tiers
            ]
            sections["tiers"] = tiers
        if sections:
            text = yaml.safe_dump(sections, default_flow_style=True, width=1000).strip()
            logger.info("mode: auto: these settings choose the same: %s", text)

    def upcoming_bytes(self, parameters: Iterable[torch.Tensor] = ()) -> int:
        """Return the bytes of gradients, states and buffers that are not in memory yet.

        Of attached models, optimizers whose states stay in memory, and these parameters.
        """
        kept = list(self._kept.items())
        groups = (group["params"] for optimizer, _ in kept for group in optimizer.param_groups)
        models = (model.parameters() for model in list(self._models))
        known = {id(each): each for each in itertools.chain(parameters, *models, *groups)}
        nbytes = sum(state_bytes for optimizer, state_bytes in kept if not optimizer.state)
        if self._swaps:
            nbytes += sum(tier.capacity - tier.used_bytes for tier in self._staying)
            return nbytes + self._window_bytes(known.values())
        return nbytes + sum(_missing_gradients(known.values()))

    def _window_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return the bytes of gradients and buffers of parameters whose states are offloaded."""
        parameters = list(parameters)
        missing, overlap = _missing_gradients(parameters), self._config.optimizer.overlap
        if self.accumulates or overlap == "off":  # all stay until step()
            gradients = sum(missing)
        else:  # of updates that run, and of the next
            gradients = 2 * max(missing, default=0)
            if overlap == "commit" and self._staying:  # and of states that stay
                part = sum(tier.capacity for tier in self._staying) / sum(self._staying.values())
                gradients = min(sum(missing), gradients + int(part * sum(missing)))
        on_host = any(parameter.device.type == "cpu" for parameter in parameters[:1])
        return gradients + (self._pinned_bytes if on_host else 0)

    def effective(self, limit_bytes: int | None) -> OffloadConfig:
        """Return the config with everything decided; `limit_bytes` is that of activations."""
        config = self._config.model_copy()
        sections = config.__dict__
        for client, decided in self._decided.items():
            sections[client] = sections[client].model_copy(update={"enabled": decided})
        capacity = sum(tier.capacity for tier in self._staying)
        if capacity:
            section, name = config.optimizer, "device"
            while name in {tier.name for tier in config.tiers}:
                name += "_"
            own = TierConfig(name=name, kind="device", capacity=capacity)
            sections["tiers"] = [own, *config.tiers]
            names = None if section.tiers is None else [name, *section.tiers]
            sections["optimizer"] = section.model_copy(update={"tiers": names})
        if config.activations.enabled == "auto":
            sections["activations"] = config.activations.resolved(enabled=bool(limit_bytes))
            if limit_bytes and config.planning.device_memory is None:
                limit = {"device_memory": limit_bytes}
                sections["planning"] = config.planning.model_copy(update=limit)
        return config


def _missing_gradients(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return the bytes of the gradients that parameters will have besides what is there."""
    return [local_tensor(p).nbytes for p in parameters if p.requires_grad and p.grad is None]
