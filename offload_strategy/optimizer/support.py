"""Which optimizers can be swapped, and why the others cannot."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from offload_strategy.errors import ConfigError

#: Optimizers whose update of one parameter depends on that parameter alone.
SUPPORTED: tuple[type[Optimizer], ...] = (Adam, AdamW, SGD)

#: Bytes of state that each keeps per parameter and byte of parameter, by option.
_STATES_PER_PARAMETER = {Adam: 2, AdamW: 2, SGD: 1}


def check_supported(optimizer: Optimizer) -> None:
    """Refuse what cannot be swapped without changing numbers.

    Raises:
        ConfigError: an unsupported type or option, or no parameters.
    """
    kind = type(optimizer)
    names = ", ".join(supported.__name__ for supported in SUPPORTED)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"attach: expected a torch.optim.Optimizer, got {kind.__name__}. Pass the optimizer "
            f"that updates the model's parameters."
        )
    if kind not in SUPPORTED:
        raise ConfigError(
            f"attach: {kind.__module__}.{kind.__qualname__} cannot be swapped in this version; "
            f"supported are {names} of torch.optim themselves (not subclasses). Use one of them, "
            f"or set optimizer.enabled to false and offload activations only."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            "attach: differentiable=True needs the whole history of the states in memory, so they "
            "cannot be swapped. Set it to False, or set optimizer.enabled to false."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        raise ConfigError("attach: the optimizer has no parameters, so there is nothing to swap.")
    odd = next((p for p in parameters if p.layout is not torch.strided), None)
    if odd is not None:
        raise ConfigError(
            f"attach: a parameter of layout {odd.layout} cannot be swapped; only dense ones can."
        )


def expected_state_bytes(optimizer: Optimizer) -> int:
    """Bytes of state that a supported optimizer will keep once every parameter was updated."""
    total = 0
    for group in optimizer.param_groups:
        states = _STATES_PER_PARAMETER[type(optimizer)]
        if isinstance(optimizer, SGD):
            states = 1 if group["momentum"] else 0
        elif group.get("amsgrad"):
            states += 1
        total += states * sum(p.numel() * p.element_size() for p in group["params"])
    return total
