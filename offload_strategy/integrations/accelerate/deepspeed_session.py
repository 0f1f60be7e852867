"""Accelerate's `distributed_type: DEEPSPEED`: DeepSpeed runs ZeRO, activations are offloaded here.

DeepSpeed bypasses `Accelerator.prepare_model` and `prepare_optimizer`: `prepare` returns its engine
with the optimizer inside. The model is therefore attached after `prepare`, and the sections for
DeepSpeed's own offload are added to its config when the `Accelerator` is created
(config_sections.py).
"""

from __future__ import annotations

from collections.abc import Callable
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

__all__ = ["DeepSpeedSession"]


class DeepSpeedSession(Session):
    """A `Session` that leaves the optimizer to DeepSpeed.

    Raises:
        ConfigError: The two configs contradict each other, or NVMe cannot be used here.
    """

    def __init__(self, config: OffloadConfig, metrics_every: int, accelerator: Accelerator) -> None:
        plugin: Any = accelerator.state.deepspeed_plugin
        sections = derived_sections(plugin.deepspeed_config, config)
        if sections:
            check_nvme(sections)
            merge_sections(plugin.deepspeed_config, sections)
            if plugin.zero3_init_flag:
                plugin.set_deepspeed_weakref()  # by which Transformers makes models in pieces
        super().__init__(for_activations(config), metrics_every, accelerator)
        self._weights: list[GatheredWeights] = []

    def prepare(self, original: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        """Attach the DeepSpeed engines among the results."""
        import deepspeed

        self.begin(*objects)
        prepared = original(*objects, **options)
        for each in prepared if isinstance(prepared, tuple) else (prepared,):
            # An engine without an optimizer is only evaluated.
            if isinstance(each, deepspeed.DeepSpeedEngine) and each.optimizer is not None:
                self.attach_model(each)
        return prepared

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

    def free_memory(self, original: Callable[..., Any], *objects: Any) -> Any:
        """Close the engine once DeepSpeed's is released."""
        released = original(*objects)
        self.close()
        return released

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
