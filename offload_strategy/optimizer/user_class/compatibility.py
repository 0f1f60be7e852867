"""Which optimizers can be swapped, why the others cannot, and what the states will take."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from offload_strategy.errors import ConfigError
from offload_strategy.optimizer.states.dtensor_shards import local_part
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.user_class.compatibility_trial import Kept, Unfit, try_out


def check_supported(optimizer: Optimizer, precision: Precision | None = None) -> int:
    """Refuse what cannot be swapped without changing numbers.

    Args:
        optimizer: the user's.
        precision: of its states; None for what a plain one has.

    Returns:
        bytes of state that the optimizer will keep once every parameter was updated.

    Raises:
        ConfigError: an unsupported optimizer or option, or no parameters.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"attach: expected a torch.optim.Optimizer, got {kind.__name__}. Pass the optimizer "
            f"that updates the model's parameters."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            "attach: differentiable=True needs the whole history of the states in memory, so they "
            "cannot be swapped. Set it to False, or set optimizer.enabled to false."
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ConfigError("attach: the optimizer has no parameters, so there is nothing to swap.")
    precision = precision or Precision()
    return sum(check_group(optimizer, group, precision) for group in optimizer.param_groups)


def check_group(optimizer: Optimizer, group: dict[str, Any], precision: Precision) -> int:
    """As `check_supported`, for one parameter group of an optimizer that it has approved."""
    if not group["params"]:
        return 0
    _check_parameters(group["params"])
    try:
        kept = try_out(optimizer, group, precision)
    except Unfit as reason:
        kind = type(optimizer)
        raise ConfigError(
            f"attach: {kind.__module__}.{kind.__qualname__} cannot be swapped: it {reason}. Use an "
            f"optimizer that updates every parameter by itself (most of torch.optim do), or set "
            f"optimizer.enabled to false and offload activations only."
        ) from reason.__cause__
    parts = map(local_part, group["params"])
    return sum(_bytes_for(part, kept, precision) for part in parts)


def _check_parameters(parameters: list[torch.Tensor]) -> None:
    odd = next((p for p in parameters if p.layout is not torch.strided), None)
    if odd is not None:
        raise ConfigError(
            f"attach: a parameter of layout {odd.layout} cannot be swapped; only dense ones can."
        )
    if any(p.is_meta for p in parameters):
        raise ConfigError(
            "attach: the optimizer has parameters on the meta device. Materialise the model first "
            "(model.to_empty(device=...) and load weights), and make the optimizer after that."
        )


def _bytes_for(parameter: torch.Tensor, kept: list[Kept], precision: Precision) -> int:
    """Bytes of state, by the stand-in with as many dimensions."""
    same = [each for each in kept if len(each.like) == parameter.dim()]
    states = (same or kept)[-1].bytes_for(parameter, precision)
    return states + precision.master_bytes(parameter)
