"""Building a model that does not fit: its weights are offloaded during construction.

[Note: the same random numbers]
A model is built by its own constructor, on its own device and in its own order, and initializes
itself as usual. Each registered parameter is guarded from then on: when too many are in memory, the
least recently accessed ones are offloaded, and a later initialization (`model.apply(init)`) loads
them again. The weights are therefore bit-identical to those of a plain build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offload_strategy.errors import ConfigError
from offload_strategy.weights.weight_blocks import can_be_streamed

Register = Callable[[str, nn.Parameter], None]


@contextmanager
def on_parameter_registration(register: Register, min_bytes: int) -> Iterator[None]:
    """Call a function for each parameter that any module registers within the context.

    Args:
        register: receives a name for messages and the parameter before its initialization.
        min_bytes: smaller parameters are skipped.
    """

    def noticed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if (
            parameter is not None
            and can_be_streamed(parameter, min_bytes)
            and not parameter.is_meta
        ):
            register(f"{type(module).__name__}.{name}", parameter)

    handle = register_module_parameter_registration_hook(noticed)
    try:
        yield
    finally:
        handle.remove()


def modules_to_materialize(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that have parameters on the meta device, inner modules first.

    This is the order in which constructors initialize.

    Raises:
        ConfigError: one of them has no `reset_parameters`, or a buffer would stay uninitialized.
    """
    found = [
        (name, module)
        for name, module in _inner_first(model)
        if any(p is not None and p.is_meta for p in module._parameters.values())
    ]
    without_reset = [
        f"{name or '(the model)'} ({type(module).__name__})"
        for name, module in found
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
        if buffer.is_meta and name.rpartition(".")[0] not in {place for place, _ in found}
    ]
    if unfilled:
        raise ConfigError(
            f"attach: the buffers {', '.join(unfilled[:5])} are on the meta device, and nothing "
            f"initializes them. Build the model where buffers are created on a real device "
            f"(Accelerate's init_empty_weights() does), or within engine.building()."
        )
    return found


def materialize_module(name: str, module: nn.Module, device: torch.device, made: Register) -> None:
    """Materialize and initialize a module's own parameters and buffers on the meta device.

    Args:
        name: name of the module.
        module: one of `modules_to_materialize`.
        device: the target device.
        made: called with each parameter after its allocation and before its initialization.

    Raises:
        ConfigError: the module does not initialize one of its buffers.
    """
    missing = {n: p for n, p in module._parameters.items() if p is not None and p.is_meta}
    if not missing:
        return  # tied to parameters of another module
    for key, parameter in missing.items():
        materialize(parameter, device)
        made(key, parameter)
    buffers = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
    for key, buffer in buffers.items():
        module._buffers[key] = torch.empty_like(buffer, device=device)
    reset = _reset_method(module)
    assert reset is not None
    reset()
    for key in buffers:
        filled = module._buffers[key]
        if filled is not None and filled._version == 0:
            raise ConfigError(
                f"attach: {name or type(module).__name__}.{key} is a buffer on the meta device, "
                f"and {type(module).__name__}.reset_parameters() does not initialize it. Build the "
                f"model within engine.building() instead."
            )


def materialize(parameter: nn.Parameter, device: torch.device) -> None:
    """Allocate a meta parameter on a device, uninitialized."""
    values = torch.empty_like(parameter, device=device)
    # Keep the same Python object, which optimizers may hold already.
    torch.utils.swap_tensors(parameter, nn.Parameter(values, parameter.requires_grad))


def _reset_method(module: nn.Module) -> Callable[[], None] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


def _inner_first(
    module: nn.Module, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child_name, child in module.named_children():
        yield from _inner_first(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module
