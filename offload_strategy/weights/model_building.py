"""Building a model that does not fit: its weights are offloaded during construction.

[Note: the same random numbers]
A model is built by its own constructor, on its own device and in its own order, and initializes
itself as usual. Each registered parameter is guarded from then on: when too many are in memory, the
least recently accessed ones are offloaded, and a later initialization (`model.apply(init)`) loads
them again. The weights are therefore bit-identical to those of a plain build.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from offload_strategy.errors import ConfigError
from offload_strategy.torch_support.dtensors import local_tensor

_TensorType = TypeVar("_TensorType", bound=torch.Tensor)


def modules_to_materialize(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules with parameters on the meta device by name, in order of construction.

    Raises ConfigError if one has no `reset_parameters`, a buffer would stay uninitialized, or a
    parameter has hooks.
    """
    refuse_hooks("attach", model)
    modules: list[nn.Module] = []
    model.apply(modules.append)  # inner modules come first
    names = {module: name for name, module in model.named_modules()}
    found = {module: names[module] for module in modules if _meta_tensors(module._parameters)}
    without_reset = [
        f"{name or '(the model)'} ({type(module).__name__})"
        for module, name in found.items()
        if _reset_method(module) is None
    ]
    if without_reset:
        more = f" and {len(without_reset) - 5} more" if len(without_reset) > 5 else ""
        raise ConfigError(
            f"attach: parameters of {', '.join(without_reset[:5])}{more} are on the meta "
            f"device, and these modules have no reset_parameters() to initialize them. Build "
            f"the model within engine.building() instead, which runs its own initialization."
        )
    unfilled = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name.rpartition(".")[0] not in found.values()
    ]
    if unfilled:
        raise ConfigError(
            f"attach: the buffers {', '.join(unfilled[:5])} are on the meta device, and nothing "
            f"initializes them. Build the model where buffers are created on a real device "
            f"(Accelerate's init_empty_weights() does), or within engine.building()."
        )
    return found


def materialize_module(
    name: str, module: nn.Module, device: torch.device, made: Callable[[str, nn.Parameter], None]
) -> None:
    """Materialize and initialize the own parameters and buffers of a module on the meta device.

    `made` is called with each parameter after its allocation and before its initialization.
    """
    missing = _meta_tensors(module._parameters)
    if not missing:
        return  # tied to parameters of another module
    for key, parameter in missing.items():
        materialize(parameter, device)
        if parameter.is_floating_point() or parameter.is_complex():
            local_tensor(parameter.detach()).fill_(math.nan)  # to see what nothing fills
        made(key, parameter)
    buffers = _meta_tensors(module._buffers)
    for buffer in buffers.values():
        materialize(buffer, device)
    _reset_method(module)()
    unfilled = {}
    for key in buffers:
        filled = module._buffers[key]
        if filled is not None and filled._version == 0:
            unfilled[key] = "buffer"
    for key, p in module._parameters.items():
        if key in missing and p is not None:
            values = local_tensor(p.detach())
            if values.numel() and bool(values.isnan().all()):
                unfilled[key] = "parameter"
    for key, kind in unfilled.items():
        raise ConfigError(
            f"attach: {name or type(module).__name__}.{key} is a {kind} on the meta device, "
            f"and {type(module).__name__}.reset_parameters() does not initialize it. Build the "
            f"model within engine.building() instead."
        )


def materialize(tensor: torch.Tensor, device: torch.device) -> None:
    """Allocate a meta parameter or buffer on a device, uninitialized."""
    values = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
        values.__dict__.update(tensor.__dict__)  # which are swapped too
    # Keep the same Python object, which optimizers may hold already.
    torch.utils.swap_tensors(tensor, values)


def refuse_hooks(doing: str, model: nn.Module) -> None:
    """Raise a ConfigError if parameters on the meta device have hooks, which would be lost."""
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        if parameter.is_meta and any(hooks):
            raise ConfigError(
                f"{doing}: {name} is on the meta device and has hooks, which are lost when it is "
                f"materialized. Register them afterwards."
            )


def _meta_tensors(tensors: Mapping[str, _TensorType | None]) -> dict[str, _TensorType]:
    return {name: t for name, t in tensors.items() if t is not None and t.is_meta}


def _reset_method(module: nn.Module) -> Any:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
