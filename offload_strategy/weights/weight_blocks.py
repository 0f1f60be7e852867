"""Blocks of a model, whose weights are loaded and offloaded together, and their order in a step.

Repeated layers are found automatically. A module outside of them, such as an embedding or a head,
is a block if it holds a large parameter itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from offload_strategy.errors import ConfigError
from offload_strategy.torch_support.dtensors import is_sharded, local_tensor
from offload_strategy.weights.guarded_parameter import GuardedParameter
from offload_strategy.weights.streamed_weight import StreamedWeight, lies_in_a_row

#: Their forward uses weights of modules in them, and reads those before it takes a fast path.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
#: Longer sequences (generation, which never ends a step) are not recorded completely.
_MOST_ENTRIES = 4096


def cut_into_blocks(
    model: nn.Module,
    classes: Collection[str],
    choose: Callable[[str, nn.Module], bool] | None,
    min_bytes: int,
) -> list[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    """Return the blocks of a model in the order in which its modules are registered.

    A block is a name, a module, and the parameters that are streamed for its forward; tied ones are
    in several blocks. Instances of module classes named in `classes` are blocks besides repeated
    layers; `choose` says for a module and its name whether it is a block, instead of the search for
    repeated layers. Parameters below `min_bytes` stay in memory. Raises ConfigError if the model
    has no module of a named class, or a scripted one with such parameters.
    """
    known = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in known:
            raise ConfigError(
                f"parameters.blocks: the model has no module of class {name!r}; it has "
                f"{', '.join(sorted(known))}."
            )
    roots = {model} if isinstance(model, _WHOLE) else {*_outermost_blocks(model, classes, choose)}
    covered = {inner for root in roots for inner in root.modules()}
    blocks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(
            can_be_streamed(parameter, min_bytes) for parameter in module.parameters()
        ):
            raise ConfigError(
                f"attach: the module {name!r} is a ScriptModule. PyTorch calls no hooks of such a "
                f"module, so its weights cannot be streamed. Leave it as it was before torch.jit, "
                f"or keep all weights in memory (parameters: {{enabled: false}})."
            )
        named = []
        if module in roots or module not in covered:
            named.append(module.named_parameters(prefix=name, recurse=module in roots))
        if isinstance(module, nn.TransformerEncoder):  # its forward reads the first layer's weights
            first = next(iter(module.layers.children()), None)
            if first is not None:
                named.append(first.named_parameters(prefix=f"{name}.layers.0".lstrip(".")))
        for each in named:
            plain = ((key, p) for key, p in each if not is_sharded(p))
            streamed = {key: p for key, p in plain if can_be_streamed(p, min_bytes)}
            if streamed:
                blocks.append((name or type(module).__name__, module, streamed))
    return blocks


def _outermost_blocks(
    model: nn.Module,
    classes: Collection[str],
    choose: Callable[[str, nn.Module], bool] | None,
    prefix: str = "",
) -> Iterator[nn.Module]:
    """Yield the outermost modules that are blocks.

    Repeated layers are members of a `ModuleList`, `Sequential` or `ModuleDict` that has two or more
    children of one class with parameters.
    """
    counts: Counter[type] = Counter()
    if choose is None and isinstance(model, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        with_weights = (child for child in model.children() if [*child.parameters()])
        counts.update(map(type, with_weights))
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        chosen = choose is not None and choose(path, child)
        named = type(child).__name__ in classes or isinstance(child, _WHOLE)
        if chosen or named or counts[type(child)] > 1:
            yield child
        else:
            yield from _outermost_blocks(child, classes, choose, f"{path}.")


def can_be_streamed(parameter: torch.Tensor, min_bytes: int) -> bool:
    """Whether a parameter can be streamed: plain or sharded, its elements in a row, large enough.

    One in memory that processes share stays there: all of them see its updates.
    """
    if type(parameter) is nn.Parameter and parameter.is_cpu and parameter.is_shared():
        return False
    return (
        (type(parameter) in (nn.Parameter, GuardedParameter) or is_sharded(parameter))
        and lies_in_a_row(parameter)  # as autograd lays out gradients like their parameters
        and local_tensor(parameter).nbytes >= max(1, min_bytes)
    )


@dataclass(eq=False)
class StreamedBlock:
    """Weights that are loaded and offloaded together; tied weights are in several blocks."""

    name: str
    weights: list[StreamedWeight]

    @property
    def nbytes(self) -> int:
        """Bytes of all its weights."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def trained(self) -> int:
        """Bytes of the weights that require gradients."""
        parameters = [(weight.nbytes, weight.parameter()) for weight in self.weights]
        return sum(nbytes for nbytes, p in parameters if p is not None and p.requires_grad)


_Key = tuple[StreamedBlock | None, StreamedBlock | None, bool]


class BlockOrder:
    """Predicts the next blocks from what followed the last time.

    The key is a block, its predecessor and whether backward runs. The blocks in use may change from
    one pass to the next (mixture of experts, validation); a wrong prediction only costs time.
    """

    def __init__(self) -> None:
        # The block that followed, and whether that of the key was needed twice in a row before.
        self._next: dict[_Key, tuple[StreamedBlock, bool]] = {}
        self._key: _Key = (None, None, False)
        self._repeated = False
        # The blocks needed since the last step ended, and those of the last whole step.
        self._step: list[tuple[StreamedBlock, bool]] = []
        self.last_step: list[tuple[StreamedBlock, bool]] = []

    def record(self, block: StreamedBlock, *, backward: bool) -> None:
        """Record that a block is needed now."""
        entry = (block, backward)
        if len(self._step) < _MOST_ENTRIES and (not self._step or self._step[-1] != entry):
            self._step.append(entry)
        before = self._key[1]
        if before is block:
            self._repeated = True
            return
        self._next[self._key] = block, self._repeated
        self._repeated = False
        self._key = (before, block, backward)

    def step_ended(self) -> None:
        """Keep the recorded blocks as the order of a step, if they include a backward pass."""
        if any(backward for _, backward in self._step):
            self.last_step = self._step
        self._step = []

    @property
    def is_needed_again(self) -> bool:
        """Whether the current block was needed twice in a row the last time."""
        return self._next.get(self._key, (None, False))[1]

    def next_blocks(self, count: int) -> Iterator[StreamedBlock]:
        """Yield the blocks that are expected next, at most `count` different ones."""
        key = self._key
        seen = {key[1]}
        for _ in range(4 * count):
            if key not in self._next or len(seen) > count:
                return
            block, _ = self._next[key]
            if block not in seen:
                seen.add(block)
                yield block
            key = (key[1], block, key[2])
