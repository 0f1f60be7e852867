"""Accelerate's `distributed_type: DEEPSPEED`: DeepSpeed keeps ZeRO, our activation tickets on top.

DeepSpeed bypasses `Accelerator.prepare_model` and `prepare_optimizer`: what comes back from
`prepare` is its engine, with the optimizer inside. So `prepare` is where the engine comes in here,
and the sections for DeepSpeed's own offload are put into its config before that, when the
`Accelerator` is made (`deepspeed_sections`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offload_strategy.config import OffloadConfig
from offload_strategy.integrations.accelerate.session import Session
from offload_strategy.integrations.deepspeed.config_sections import (
    derived_sections,
    for_activations,
    merge_sections,
)
from offload_strategy.integrations.deepspeed.gathered_weights import GatheredWeights, install
from offload_strategy.integrations.deepspeed.nvme_support import check_nvme

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["DeepSpeedSession", "session_for"]


def session_for(
    accelerator: Accelerator, config: OffloadConfig, metrics_every: int
) -> Session | None:
    """Return the session of an `Accelerator` that trains through DeepSpeed; None of any other.

    Args:
        accelerator: Who is to have the session.
        config: Ours; DeepSpeed's is in the `Accelerator`.
        metrics_every: Optimizer steps between two sets of metrics, 0 for none.

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
    """A `Session` without an optimizer of ours: DeepSpeed has it."""

    def __init__(self, config: OffloadConfig, metrics_every: int, accelerator: Accelerator) -> None:
        super().__init__(for_activations(config), metrics_every, accelerator)
        self._weights: list[GatheredWeights] = []

    def attach_prepared(self, prepared: Any) -> None:
        """Offload what the DeepSpeed engines among the results of a `prepare` save for backward."""
        import deepspeed

        for each in prepared if isinstance(prepared, tuple) else (prepared,):
            # One without an optimizer is there to be evaluated.
            if isinstance(each, deepspeed.DeepSpeedEngine) and each.optimizer is not None:
                self.attach_model(each)

    def attach_model(self, model: torch.nn.Module) -> None:
        """Offload what DeepSpeed's engine saves for backward, unless it is attached already."""
        is_new = model not in self._attached
        super().attach_model(model)
        if is_new and model in self._attached:
            weights = install(self.engine, model)
            if weights is not None:
                self._weights.append(weights)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer as it is."""
        return optimizer

    def retire(self) -> None:
        """Close the engine: `free_memory` has let go of DeepSpeed's."""
        self.close()

    def metrics(self, now: bool = False) -> dict[str, float]:
        """Return the metrics for the trackers; the steps are DeepSpeed's."""
        engines: list[Any] = list(self._attached)
        self._steps = max((int(engine.global_steps) for engine in engines), default=0)
        return super().metrics(now)

    def close(self) -> None:
        """Close the engine and take every hook off."""
        for weights in self._weights:
            weights.close()
        self._weights.clear()
        super().close()
