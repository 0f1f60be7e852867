"""Partitioning a model into blocks whose weights are loaded and offloaded together.

Repeated layers are found automatically (torch_support/repeated_blocks.py). A module outside of
them, such as an embedding or a head, is a block if it holds a large parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import nn

from offload_strategy.errors import ConfigError
from offload_strategy.torch_support.modules import WHOLE, outermost_blocks
from offload_strategy.weights.guarded_parameter import GuardedParameter


class ModuleBlock(NamedTuple):
    """A module whose forward needs streamed parameters; tied ones are in several blocks."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]


def cut_into_blocks(
    model: nn.Module,
    classes: Collection[str],
    choose: Callable[[str, nn.Module], bool] | None,
    min_bytes: int,
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
    whole = isinstance(model, WHOLE)
    roots = [("", model)] if whole else list(outermost_blocks(model, classes, choose))
    named = [(name, module, module.named_parameters(prefix=name)) for name, module in roots]
    covered = {id(inner) for _, module in roots for inner in module.modules()}
    for name, module in model.named_modules():
        if id(module) not in covered:
            named.append((name, module, module.named_parameters(prefix=name, recurse=False)))
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder):  # its forward reads the first layer's weights
            first = next(iter(module.layers.children()), None)
            if first is not None:
                prefix = f"{name}.layers.0".lstrip(".")
                named.append((name, module, first.named_parameters(prefix=prefix)))
    blocks = []
    for name, module, parameters in named:
        streamed = {key: p for key, p in parameters if can_be_streamed(p, min_bytes)}
        if streamed:
            blocks.append(ModuleBlock(name or type(module).__name__, module, streamed))
    order = {id(module): place for place, module in enumerate(model.modules())}
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
