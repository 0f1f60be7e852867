"""The blocks of a model: layers that repeat.

They are found by themselves: the members of a `ModuleList`, `Sequential` or `ModuleDict` with two
or more parameterised children of one class, at the outermost level.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import nn

#: Their forward uses weights of modules in them, and looks at those before it takes a short cut.
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def outermost_blocks(
    model: nn.Module,
    classes: Collection[str] = (),
    choose: Callable[[str, nn.Module], bool] | None = None,
    prefix: str = "",
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are blocks, with their names, in the order of registration.

    Args:
        model: to look into.
        classes: names of module classes of which each instance is a block, besides what repeats.
        choose: says of a module, by its name, whether it is a block; nothing that repeats is found
            by itself then.
        prefix: of all names.
    """
    repeated = set() if choose is not None else _repeated(model)
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        chosen = choose is not None and choose(path, child)
        found = id(child) in repeated or isinstance(child, WHOLE)
        if chosen or type(child).__name__ in classes or found:
            yield path, child
        else:
            yield from outermost_blocks(child, classes, choose, f"{path}.")


def _repeated(module: nn.Module) -> set[int]:
    """Children of a container that have parameters, and siblings of the same class."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return set()
    by_class: dict[type, list[nn.Module]] = {}
    for child in module.children():
        if next(child.parameters(), None) is not None:
            by_class.setdefault(type(child), []).append(child)
    return {id(child) for alike in by_class.values() if len(alike) > 1 for child in alike}
