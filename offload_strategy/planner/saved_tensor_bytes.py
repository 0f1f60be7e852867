"""What autograd saves in a forward pass on one device, tensor by tensor.

Counted are the tensors that backward of each operator needs, as fused kernels save them, and
every storage once (the layers of Megatron-LM, on which SSDTrain measures its table III);
docs/planning.md lists them under "What a layer saves".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import MiB

#: Smaller storages are not offloaded (`activations.min_size`).
_MIN_STORAGE_BYTES = 1 * MiB
#: Flash attention keeps a float32 for each row of each head.
_STATISTICS_BYTES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """What is computed in one pass, on one device."""

    batch: int  # Sequences
    sequence: int  # Positions of each
    dtype_bytes: int = 2  # Of an activation

    @property
    def tokens(self) -> int:
        """Positions of the batch."""
        return self.batch * self.sequence


def layer_tensors(
    shape: TransformerShape, work: Workload, *, crosses: bool = False
) -> dict[str, int]:
    """Return the bytes of each tensor that a layer saves, by name.

    With `crosses` the layer attends to an encoder as well, of an equally long sequence.
    """
    stream, queries, keys = shape.hidden, shape.attention_width, shape.keys_width
    widths: dict[str, int] = {}
    for prefix in ("", "cross ") if crosses else ("",):
        widths |= {
            f"{prefix}input of the norm": stream,
            f"{prefix}input of qkv": stream,
            f"{prefix}queries": queries,
            f"{prefix}keys": keys,
            f"{prefix}values": keys,
            f"{prefix}result of attention": queries,
            f"{prefix}statistics": shape.heads,
        }
    widths |= {"input of the second norm": stream, "input of up": stream}
    inner = ("gate", "activated gate", "up") if shape.gated else ("result of up",)
    widths |= dict.fromkeys((*inner, "input of down"), shape.inner)
    statistics, others = _STATISTICS_BYTES * work.tokens, work.dtype_bytes * work.tokens
    return {
        name: width * (statistics if name.endswith("statistics") else others)
        for name, width in widths.items()
    }


def activation_bytes(shape: TransformerShape, work: Workload, min_bytes: int = 0) -> int:
    """Bytes that a forward pass saves in tensors of at least `min_bytes`.

    Counted are all layers and the norm after them. The head is left out: its backward pass begins
    at once, so nothing of it leaves the device (SSDTrain, section III-C2).
    """
    sizes = [work.tokens * shape.hidden * work.dtype_bytes]
    sizes += (shape.layers - shape.decoder_layers) * [*layer_tensors(shape, work).values()]
    sizes += shape.decoder_layers * [*layer_tensors(shape, work, crosses=True).values()]
    return sum(nbytes for nbytes in sizes if nbytes >= min_bytes)


def layer_activation_bytes(shape: TransformerShape, work: Workload) -> int:
    """Bytes that the largest layer saves."""
    return sum(layer_tensors(shape, work, crosses=shape.decoder_layers > 0).values())


class ModelSizes(NamedTuple):
    """Bytes that follow from the model and the work of a pass alone."""

    saved: int  # What all layers save for backward
    movable: int  # Of these, what is large enough to be offloaded
    saved_layer: int  # What the largest layer saves
    layer_input: int
    movable_input: int  # The same, or 0 if it is too small to be offloaded
    logits: int  # Of one sequence


@functools.lru_cache(maxsize=4096)
def model_sizes(shape: TransformerShape, work: Workload) -> ModelSizes:
    """Count what does not depend on the settings."""
    layer_input = work.tokens * shape.hidden * work.dtype_bytes
    return ModelSizes(
        saved=activation_bytes(shape, work),
        movable=activation_bytes(shape, work, _MIN_STORAGE_BYTES),
        saved_layer=layer_activation_bytes(shape, work),
        layer_input=layer_input,
        movable_input=layer_input if layer_input >= _MIN_STORAGE_BYTES else 0,
        logits=work.sequence * shape.vocabulary * work.dtype_bytes,
    )
