"""What autograd saves in a forward pass, tensor by tensor.

[Note: what a layer saves]
Counted are the tensors that the backward pass of each operator needs, as fused kernels save them,
and every storage once (the layers of Megatron-LM, on which SSDTrain measures its table III). With
u = batch x sequence x hidden x bytes of an element and a tensor-parallel degree t:

    input of each of two norms        1 u each; each rank has all of it
    input of "qkv" and of "up"        1 u each; likewise
    queries, keys and values          3 u / t, less with fewer key heads
    result of attention               1 u / t; it is the input of "projection" as well
    result of "up", and what its activation function gives
                                      4 u / t each with a feed-forward part of 4 x hidden

That is (4 + 12/t) u, and with dropout two masks of 1 byte an element, together 1 u in half
precision. SSDTrain does not say whether its runs have dropout; its own estimates are within 2 % of
the count without. Without flash attention there is the result of softmax for each head and pair of
positions. Of a gated feed-forward part autograd saves gate, the function of it, up, and their
product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from offload_strategy.errors import ConfigError
from offload_strategy.planner.transformer_shape import TransformerShape, require_positive

#: What SSDTrain leaves on the device: tensors of fewer elements (algorithm 1, line 2).
SMALL_ELEMENTS = 2**20
#: Flash attention keeps a float32 for each row of each head.
_STATISTICS_BYTES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """What is computed in one pass, on one device."""

    batch: int  # Sequences
    sequence: int  # Positions of each
    dtype_bytes: int = 2  # Of an activation
    tensor_parallel: int = 1  # Devices that share each layer
    sequence_parallel: bool = False  # Whether they also divide what lies between the products
    flash_attention: bool = True  # Whether scores are computed again in backward
    dropout: bool = False  # Whether masks are saved

    def __post_init__(self) -> None:
        names = ("batch", "sequence", "dtype_bytes", "tensor_parallel")
        require_positive(self, "workload: ", *names)

    @property
    def tokens(self) -> int:
        """Positions of the batch."""
        return self.batch * self.sequence


class SavedTensor(NamedTuple):
    """A tensor that waits for the backward pass, or its part on one device."""

    name: str
    elements: int
    element_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.element_bytes


def layer_tensors(
    shape: TransformerShape, work: Workload, *, crosses: bool = False
) -> list[SavedTensor]:
    """List what a layer saves; see [Note: what a layer saves].

    With `crosses` the layer attends to an encoder as well, of an equally long sequence. Raises a
    ConfigError if the heads cannot be shared among the tensor-parallel devices.
    """
    if shape.heads % work.tensor_parallel:
        raise ConfigError(
            f"workload: tensor_parallel is {work.tensor_parallel}, which does not divide the "
            f"{shape.heads} heads; give a divisor of them"
        )
    found = [
        *_attention(shape, work, ""),
        *(_attention(shape, work, "cross ") if crosses else []),
        _whole("input of the second norm", shape, work),
        _whole("input of up", shape, work),
    ]
    if shape.gated:
        names = ["gate", "activated gate", "up", "input of down"]
    else:
        names = ["result of up", "input of down"]
    found += [_shared(name, shape.inner, work) for name in names]
    if work.dropout:
        found.append(_whole("mask after the feed-forward part", shape, work, element_bytes=1))
    return found


def forward_tensors(shape: TransformerShape, work: Workload) -> list[SavedTensor]:
    """List what all layers and the norm after them save.

    The head is left out: its backward pass begins at once, so nothing of it leaves the device
    (SSDTrain, section III-C2). Of the embedding only dropout saves something that counts.
    """
    tensors = []
    if work.dropout:
        tensors.append(_whole("mask after the embedding", shape, work, element_bytes=1))
    tensors += (shape.layers - shape.decoder_layers) * layer_tensors(shape, work)
    tensors += shape.decoder_layers * layer_tensors(shape, work, crosses=True)
    tensors.append(_whole("input of the last norm", shape, work))
    return tensors


def activation_bytes(
    shape: TransformerShape, work: Workload, min_elements: int = SMALL_ELEMENTS
) -> int:
    """Bytes that one device saves in a forward pass in tensors of at least `min_elements`."""
    tensors = forward_tensors(shape, work)
    return sum(tensor.nbytes for tensor in tensors if tensor.elements >= min_elements)


def layer_activation_bytes(shape: TransformerShape, work: Workload) -> int:
    """Bytes that the largest layer saves on one device."""
    crosses = shape.decoder_layers > 0
    return sum(tensor.nbytes for tensor in layer_tensors(shape, work, crosses=crosses))


def layer_input_bytes(shape: TransformerShape, work: Workload) -> int:
    """Bytes of the input of a layer: what is kept of it when it is computed again."""
    return _whole("input", shape, work).nbytes


def _attention(shape: TransformerShape, work: Workload, prefix: str) -> list[SavedTensor]:
    scores = work.batch * math.ceil(shape.heads / work.tensor_parallel) * work.sequence
    found = [
        _whole(f"{prefix}input of the norm", shape, work),
        _whole(f"{prefix}input of qkv", shape, work),
        _shared(f"{prefix}queries", shape.attention_width, work),
        _shared(f"{prefix}keys", shape.keys_width, work),
        _shared(f"{prefix}values", shape.keys_width, work),
        _shared(f"{prefix}result of attention", shape.attention_width, work),
    ]
    if work.flash_attention:
        found.append(SavedTensor(f"{prefix}statistics", scores, _STATISTICS_BYTES))
    else:
        found.append(SavedTensor(f"{prefix}softmax", scores * work.sequence, work.dtype_bytes))
    if work.dropout:
        found.append(_whole(f"{prefix}mask after attention", shape, work, element_bytes=1))
        if not work.flash_attention:
            pairs = scores * work.sequence
            found.append(SavedTensor(f"{prefix}mask of softmax", pairs, 1))
            found.append(SavedTensor(f"{prefix}masked softmax", pairs, work.dtype_bytes))
    return found


def _whole(
    name: str, shape: TransformerShape, work: Workload, element_bytes: int | None = None
) -> SavedTensor:
    """A tensor of the residual stream's size, which only sequence parallelism divides."""
    share = work.tensor_parallel if work.sequence_parallel else 1
    elements = math.ceil(work.tokens * shape.hidden / share)
    return SavedTensor(name, elements, element_bytes or work.dtype_bytes)


def _shared(name: str, width: int, work: Workload) -> SavedTensor:
    """A tensor between two products, of which each tensor-parallel device has its columns."""
    elements = math.ceil(work.tokens * width / work.tensor_parallel)
    return SavedTensor(name, elements, work.dtype_bytes)
