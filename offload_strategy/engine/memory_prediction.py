"""Prediction of host memory from a model's sizes and an estimate with fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload_strategy.activations.fake_tensor_estimate import estimate_memory
from offload_strategy.config import OffloadConfig
from offload_strategy.engine.model_weights import ModelWeights
from offload_strategy.host_memory.pool import IDLE_BYTES
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.user_class.compatibility import check_supported
from offload_strategy.plan_runtime.host_memory_prediction import (
    HostMemoryPrediction,
    StreamedModelSizes,
    predict_host_memory,
)

#: Gradients that exist in backward while updates consume them.
_GRADIENTS_HELD = 1


def predict_memory(
    config: OffloadConfig,
    weights: ModelWeights,
    device: torch.device,
    model: nn.Module,
    optimizer: Optimizer,
    inputs: tuple[Any, ...],
    named_inputs: Mapping[str, Any],
) -> HostMemoryPrediction:
    """See `OffloadEngine.predict_memory`.

    Args:
        config: Config of the engine.
        weights: Streamed weights of its models.
        device: The device that computes; memory of an accelerator is not counted.
        model: The attached model.
        optimizer: The optimizer of its parameters.
        inputs: Positional arguments of the model's forward.
        named_inputs: Keyword arguments of the model's forward.
    """
    section = config.optimizer
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    trained_bytes = sum(parameter.nbytes for parameter in trained)
    states_share = upcast_share = 0.0
    subgroup = in_memory = 0
    if isinstance(optimizer, OffloadedOptimizer):
        subgroup = optimizer.largest_subgroup_bytes()
        states_share = optimizer.state_bytes / trained_bytes if trained_bytes else 0.0
        upcast_share = 2 * states_share if section.state_dtype == "bfloat16" else 0.0
    else:
        in_memory = check_supported(optimizer, Precision())
    computing = 0
    if device.type == "cpu":
        used_up = section.overlap == "eager" and isinstance(optimizer, OffloadedOptimizer)
        computing = estimate_memory(
            model,
            inputs,
            named_inputs,
            min_size=config.activations.min_size if config.activations.enabled else None,
            gradients=_GRADIENTS_HELD if used_up else None,
        ).peak_bytes
    return predict_host_memory(
        StreamedModelSizes(
            blocks=weights.blocks(),
            trained=trained_bytes,
            largest=max((parameter.nbytes for parameter in trained), default=0),
            subgroup=subgroup,
            states_share=states_share,
            upcast_share=upcast_share,
        ),
        process_bytes=weights.process_bytes() + in_memory,
        computing_bytes=computing,
        blocks_in_flight=config.parameters.blocks_in_flight,
        overlap=section.overlap,
        pinned=config.memory.pinned,
        idle=IDLE_BYTES,
    )
