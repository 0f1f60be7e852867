"""Cutting a model into the blocks whose weights come and go together.

Layers that repeat are found by themselves (model_blocks.py). What lies outside of them, an
embedding or a head, is a block of its own where it holds a large parameter itself.
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
class Block:
    """Modules whose weights come and go together.

    Args:
        name: of the module, as in `named_modules`.
        module: during whose forward the weights are needed.
        parameters: names, and the parameters that leave; tied ones are in several blocks.
    """

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def cut_into_blocks(
    model: nn.Module,
    classes: Collection[str] = (),
    choose: Callable[[str, nn.Module], bool] | None = None,
    min_bytes: int = 0,
) -> list[Block]:
    """The blocks of a model, in the order in which its modules are registered.

    Args:
        model: on any device; meta is fine.
        classes: names of module classes of which each instance is a block, besides what repeats.
        choose: says of a module, by its name, whether it is a block; nothing is found by itself
            then but what it leaves over.
        min_bytes: smaller parameters stay in memory.

    Raises:
        ConfigError: a class is named that the model has not; a parameter cannot leave.
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
        Block(
            name or type(module).__name__,
            module,
            _leaving(module.named_parameters(prefix=name), min_bytes),
        )
        for name, module in roots
    ]
    covered = {id(inner) for block in blocks for inner in block.module.modules()}
    for name, module in model.named_modules():
        if id(module) not in covered:
            own = module.named_parameters(prefix=name, recurse=False)
            blocks.append(Block(name or type(model).__name__, module, _leaving(own, min_bytes)))
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder):  # looks at its first layer likewise
            first = next(iter(module.layers.children()), None)
            if first is not None:
                own = first.named_parameters(prefix=f"{name}.layers.0".lstrip("."))
                blocks.append(
                    Block(name or type(module).__name__, module, _leaving(own, min_bytes))
                )
    order = {id(module): place for place, module in enumerate(model.modules())}
    blocks = [block for block in blocks if block.parameters]
    return sorted(blocks, key=lambda block: order[id(block.module)])


def can_leave(parameter: torch.Tensor, min_bytes: int) -> bool:
    """Whether a parameter is one that is streamed: plain, contiguous and large enough.

    Contiguous, because autograd lays gradients out as the parameter is.
    """
    return (
        type(parameter) in (nn.Parameter, GuardedParameter)
        and parameter.is_contiguous()
        and parameter.nbytes >= max(1, min_bytes)
    )


def _leaving(named: Iterator[tuple[str, nn.Parameter]], min_bytes: int) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in named if can_leave(parameter, min_bytes)}
