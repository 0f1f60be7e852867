"""Accelerate's `distributed_type: DEEPSPEED`: DeepSpeed runs ZeRO, activations are offloaded here.

DeepSpeed bypasses `Accelerator.prepare_model` and `prepare_optimizer`: `prepare` returns its engine
with the optimizer inside. The model is therefore attached after `prepare`, and the sections for
DeepSpeed's own offload are added to its config when the `Accelerator` is created
(config_sections.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offload_strategy.config import OffloadConfig
from offload_strategy.integrations.accelerate.session import Session
from offload_strategy.integrations.deepspeed.config_sections import (
    check_nvme,
    derived_sections,
    for_activations,
    merge_sections,
)
from offload_strategy.integrations.deepspeed.gathered_weights import GatheredWeights, install

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["DeepSpeedSession", "session_for"]


def session_for(
    accelerator: Accelerator, config: OffloadConfig, metrics_every: int
) -> Session | None:
    """Return the session of an `Accelerator` that trains through DeepSpeed; None of any other.

    Args:
        accelerator: the owner of the session, which also has DeepSpeed's config.
        config: the offload config.
        metrics_every: optimizer steps between two sets of metrics, 0 for none.

    Raises:
        ConfigError: The two configs contradict each other, or NVMe cannot be used here.
    """
    distributed = accelerator.distributed_type
    if str(getattr(distributed, "value", distributed)) != "DEEPSPEED":
        return None
    plugin: Any = accelerator.state.deepspeed_plugin
    sections = derived_sections(plugin.deepspeed_config, config)
    if sections:
        check_nvme(sections)
        merge_sections(plugin.deepspeed_config, sections)
        if plugin.zero3_init_flag:
            plugin.set_deepspeed_weakref()  # by which Transformers makes models in pieces
    return DeepSpeedSession(config, metrics_every, accelerator)


class DeepSpeedSession(Session):
    """A `Session` that leaves the optimizer to DeepSpeed."""

    def __init__(self, config: OffloadConfig, metrics_every: int, accelerator: Accelerator) -> None:
        super().__init__(for_activations(config), metrics_every, accelerator)
        self._weights: list[GatheredWeights] = []

    def attach_prepared(self, prepared: Any) -> None:
        """Attach the DeepSpeed engines among the results of a `prepare`."""
        import deepspeed

        for each in prepared if isinstance(prepared, tuple) else (prepared,):
            # An engine without an optimizer is only evaluated.
            if isinstance(each, deepspeed.DeepSpeedEngine) and each.optimizer is not None:
                self.attach_model(each)

    def attach_model(self, model: torch.nn.Module) -> None:
        """Offload the saved tensors of DeepSpeed's engine, unless it is attached already."""
        is_new = model not in self._attached
        super().attach_model(model)
        if is_new and model in self._attached:
            weights = install(self.engine, model)
            if weights is not None:
                self._weights.append(weights)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer unchanged."""
        return optimizer

    def retire(self) -> None:
        """Close the engine; `free_memory` has released DeepSpeed's engine."""
        self.close()

    def metrics(self, now: bool = False) -> dict[str, float]:
        """Return the metrics for the trackers; the steps are DeepSpeed's."""
        engines: list[Any] = list(self._attached)
        self._steps = max((int(engine.global_steps) for engine in engines), default=0)
        return super().metrics(now)

    def close(self) -> None:
        """Close the engine and remove all hooks."""
        for weights in self._weights:
            weights.close()
        self._weights.clear()
        super().close()
