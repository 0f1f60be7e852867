"""What an update finds in `p.grad`."""

from __future__ import annotations

import torch

from offload_strategy.optimizer.gradients.gradient_sources import Consumed
from offload_strategy.optimizer.gradients.offloaded_gradient import GradientStandIn
from offload_strategy.optimizer.states.parameter_slices import local_tensor


def has_gradient(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a gradient that no update has used."""
    gradient = parameter.grad
    if gradient is not None:
        gradient = local_tensor(gradient)
    if isinstance(gradient, GradientStandIn):
        backing = gradient._backing
        return backing.is_pinned or not isinstance(backing.source, Consumed)
    return gradient is not None


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient that a parameter has here, as a plain tensor for an update at `step()`."""
    gradient = parameter.grad
    assert gradient is not None
    gradient = local_tensor(gradient)
    return gradient.values() if isinstance(gradient, GradientStandIn) else gradient
