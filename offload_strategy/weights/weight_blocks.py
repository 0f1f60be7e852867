"""Partitioning a model into blocks whose weights are loaded and offloaded together.

Repeated layers are found automatically (torch_support/repeated_blocks.py). A module outside of
them, such as an embedding or a head, is a block if it holds a large parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from offload_strategy.errors import ConfigError
from offload_strategy.torch_support.repeated_blocks import WHOLE, outermost_blocks
from offload_strategy.weights.guarded_parameter import GuardedParameter


@dataclass(eq=False)
class ModuleBlock:
    """A module whose streamed parameters are loaded and offloaded together.

    Args:
        name: name of the module, as in `named_modules`.
        module: the module whose forward needs the weights.
        parameters: its streamed parameters by name; tied parameters are in several blocks.
    """

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def cut_into_blocks(
    model: nn.Module,
    classes: Collection[str] = (),
    choose: Callable[[str, nn.Module], bool] | None = None,
    min_bytes: int = 0,
) -> list[ModuleBlock]:
    """Return the blocks of a model in the order in which its modules are registered.

    Args:
        model: a model on any device, including meta.
        classes: names of module classes whose instances are blocks besides repeated layers.
        choose: returns for a module and its name whether it is a block, instead of the search for
            repeated layers.
        min_bytes: smaller parameters stay in memory.

    Raises:
        ConfigError: the model has no module of a named class.
    """
    known = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in known:
            raise ConfigError(
                f"parameters.blocks: the model has no module of class {name!r}; it has "
                f"{', '.join(sorted(known))}."
            )
    roots = [("", model)] if isinstance(model, WHOLE) else outermost_blocks(model, classes, choose)
    blocks = [
        ModuleBlock(
            name or type(module).__name__,
            module,
            _streamable(module.named_parameters(prefix=name), min_bytes),
        )
        for name, module in roots
    ]
    covered = {id(inner) for block in blocks for inner in block.module.modules()}
    for name, module in model.named_modules():
        if id(module) not in covered:
            own = module.named_parameters(prefix=name, recurse=False)
            blocks.append(
                ModuleBlock(name or type(model).__name__, module, _streamable(own, min_bytes))
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder):  # its forward reads the first layer's weights
            first = next(iter(module.layers.children()), None)
            if first is not None:
                own = first.named_parameters(prefix=f"{name}.layers.0".lstrip("."))
                blocks.append(
                    ModuleBlock(name or type(module).__name__, module, _streamable(own, min_bytes))
                )
    order = {id(module): place for place, module in enumerate(model.modules())}
    blocks = [block for block in blocks if block.parameters]
    return sorted(blocks, key=lambda block: order[id(block.module)])


def can_be_streamed(parameter: torch.Tensor, min_bytes: int) -> bool:
    """Whether a parameter can be streamed: plain, contiguous and large enough.

    It must be contiguous because autograd lays out gradients like their parameters.
    """
    return (
        type(parameter) in (nn.Parameter, GuardedParameter)
        and parameter.is_contiguous()
        and parameter.nbytes >= max(1, min_bytes)
    )


def _streamable(
    named: Iterator[tuple[str, nn.Parameter]], min_bytes: int
) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in named if can_be_streamed(parameter, min_bytes)}
