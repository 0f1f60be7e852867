"""Building a model that does not fit: its weights leave while it is still being made.

[Note: the same random numbers]
A model is made by its own constructor, on its own device, in its own order, and initialises itself
as it always does. Each parameter that a module registers is guarded from then on: when more of them
are in memory than is allowed, those that were touched longest ago leave, and an initialisation that
comes back to one (`model.apply(init)`) brings it back. So the weights are those of a plain build,
to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offload_strategy.errors import ConfigError
from offload_strategy.weights.weight_blocks import can_leave

Register = Callable[[str, nn.Parameter], None]


@contextmanager
def watched_registration(register: Register, min_bytes: int) -> Iterator[None]:
    """Be told of each parameter that any module registers inside.

    Args:
        register: called with a name for messages and the parameter, whose values are still to come.
        min_bytes: smaller ones are not told.
    """

    def noticed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and can_leave(parameter, min_bytes) and not parameter.is_meta:
            register(f"{type(module).__name__}.{name}", parameter)

    handle = register_module_parameter_registration_hook(noticed)
    try:
        yield
    finally:
        handle.remove()


def modules_to_fill(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that have parameters on the meta device, inner ones first.

    That is the order in which constructors initialise: a module's own values come after those of
    the modules that it made.

    Raises:
        ConfigError: one of them cannot initialise itself.
    """
    found = [
        (name, module)
        for name, module in _inner_first(model)
        if any(p is not None and p.is_meta for p in module._parameters.values())
    ]
    helpless = [
        f"{name or '(the model)'} ({type(module).__name__})"
        for name, module in found
        if _initialiser(module) is None
    ]
    if helpless:
        more = f" and {len(helpless) - 5} more" if len(helpless) > 5 else ""
        raise ConfigError(
            f"attach: parameters of {', '.join(helpless[:5])}{more} are on the meta device, and "
            f"these modules have no reset_parameters() to fill them. Build the model within "
            f"engine.building() instead, which runs the model's own initialisation."
        )
    unfilled = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name.rpartition(".")[0] not in {place for place, _ in found}
    ]
    if unfilled:
        raise ConfigError(
            f"attach: the buffers {', '.join(unfilled[:5])} are on the meta device, and nothing "
            f"fills them. Make the model where buffers are made for real (Accelerate's "
            f"init_empty_weights() does), or within engine.building()."
        )
    return found


def fill_module(name: str, module: nn.Module, device: torch.device, made: Register) -> None:
    """Let a module fill its own parameters and buffers that are on the meta device.

    Args:
        name: of the module.
        module: one of `modules_to_fill`.
        device: where they are to be.
        made: called with each parameter that is there from now on, without values.

    Raises:
        ConfigError: it does not fill one of its buffers.
    """
    missing = {n: p for n, p in module._parameters.items() if p is not None and p.is_meta}
    if not missing:
        return  # all of them are tied to what another module has filled
    for key, parameter in missing.items():
        materialise(parameter, device)
        made(key, parameter)
    buffers = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
    for key, buffer in buffers.items():
        module._buffers[key] = torch.empty_like(buffer, device=device)
    fill = _initialiser(module)
    assert fill is not None
    fill()
    for key in buffers:
        filled = module._buffers[key]
        if filled is not None and filled._version == 0:
            raise ConfigError(
                f"attach: {name or type(module).__name__}.{key} is a buffer on the meta device, "
                f"and {type(module).__name__}.reset_parameters() does not fill it. Make the model "
                f"within engine.building() instead."
            )


def materialise(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter of the meta device a place on another; it has no values yet."""
    values = torch.empty_like(parameter, device=device)
    # The same object, as optimizers may have it already.
    torch.utils.swap_tensors(parameter, nn.Parameter(values, parameter.requires_grad))


def _initialiser(module: nn.Module) -> Callable[[], None] | None:
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
