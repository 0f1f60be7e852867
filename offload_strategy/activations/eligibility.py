"""Which saved tensors may leave at all, as which bytes, and why the others stay.

[Note: identity of storages]
Neither `id()` nor an address names a tensor for longer than it lives: both are reused at once. A
storage is named by a weak reference to its Python object, which torch keeps for as long as the
storage itself lives; an address only tells where to look.

One storage may have several version counters: the chunks that a recurrent layer changes in place
(`unsafe_chunk`) count for themselves. The version of one says nothing about the bytes of another,
so bytes are shared among saved tensors as far as the base that they are views of reaches, in which
such chunks never lie within each other's reach; and beyond that only while their counters are at
zero: a counter is made with its view, and says then that nobody changed the bytes through it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_strategy.telemetry import get_logger
from offload_strategy.units import format_size

logger = get_logger(__name__)

_PLAIN = (torch.Tensor, torch.nn.Parameter)

#: Nodes whose result holds the very values of their input, in another arrangement or precision.
_FORM_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        *("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias"),
        *("Slice", "Select", "Squeeze", "Unsqueeze", "AsStrided"),
    )
)
#: As many of them in a row as are looked through.
_FORM_DEPTH = 6


class Stays(enum.Enum):
    """Why a saved tensor stays in memory; the value completes "it is ..."."""

    WEIGHT = "a weight or buffer, or another form of one"
    EMPTY = "without bytes of its own"
    INFERENCE = "an inference tensor"
    SUBCLASS = "of a tensor subclass"
    LAYOUT = "of a layout that is not strided"
    NESTED = "a nested tensor"
    QUANTIZED = "a quantized tensor"
    TRANSFORM = "inside a torch.func transform"


#: Dispatch keys, as bits, to why tensors of that kind stay.
_KINDS: dict[int, Stays | None] = {}


def is_small(tensor: torch.Tensor, min_size: int) -> bool:
    """Whether a tensor stays for the size of its storage: most are small, and this is quick."""
    try:
        return tensor.nbytes < min_size and tensor.untyped_storage().nbytes() < min_size
    except (NotImplementedError, RuntimeError):  # without a storage of its own
        return False


def why_it_stays(tensor: torch.Tensor, is_weight: Callable[[torch.Tensor], bool]) -> Stays | None:
    """Return the reason why a saved tensor cannot leave, or None if it can.

    What leaves is the bytes; `OffloadedTensor` rebuilds the rest, lazy conjugates included.
    `is_weight` tells whether a tensor shares its storage with a parameter or buffer.
    """
    if type(tensor) not in _PLAIN:
        weight = isinstance(tensor, torch.nn.Parameter) or is_weight(tensor)
        return Stays.WEIGHT if weight else Stays.SUBCLASS
    # Ten questions to every saved tensor would cost more than to move it.
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    if keys not in _KINDS:
        _KINDS[keys] = _kind(tensor)
    kind = _KINDS[keys]
    if kind is not None and kind is not Stays.QUANTIZED:
        return kind
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0:
        # An address of zero must not be read: sharded training takes the memory of storages away.
        return Stays.EMPTY
    return Stays.WEIGHT if _is_form_of_weight(tensor, is_weight) else kind


def _kind(tensor: torch.Tensor) -> Stays | None:
    """Return why tensors with such dispatch keys stay, whatever their sizes and values."""
    # The order matters: a nested tensor calls itself strided, a wrapper answers for what it wraps.
    if tensor.is_nested:
        return Stays.NESTED
    if tensor.layout is not torch.strided:
        return Stays.LAYOUT
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return Stays.TRANSFORM
    if tensor.is_inference():
        return Stays.INFERENCE
    # Forward-mode differentiation makes tensors of zeros that only say so.
    if tensor.device.type == "meta" or tensor._is_zerotensor():
        return Stays.EMPTY
    return Stays.QUANTIZED if tensor.is_quantized else None


def _is_form_of_weight(tensor: torch.Tensor, is_weight: Callable[[torch.Tensor], bool]) -> bool:
    """Whether it is a weight, a view of one, or one in another precision.

    Parameters are weights wherever they live: sharded training gathers a whole layer into one that
    no module owned when the forward pass began, and takes its memory away again after the layer.
    Autocast saves a low-precision copy of a weight, mostly as a view of it (a linear layer saves
    its transpose): cast from the weight, and it lives on in a cache.
    """
    whole = tensor if (base := tensor._base) is None else base
    # `isinstance` of parameters is slow Python code, which is for what `type` does not tell.
    if type(tensor) is torch.nn.Parameter or is_weight(tensor):
        return True
    if whole is not tensor and isinstance(whole, torch.nn.Parameter):
        return True
    node = whole.grad_fn
    for _ in range(_FORM_DEPTH):
        if node is None:
            return False
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            # A cast of something expanded is larger than the weight, and no form of it.
            variable = node.variable  # type: ignore[attr-defined]
            return whole.numel() <= variable.numel() and is_weight(variable)
        if name not in _FORM_NODES:
            return False
        node = node.next_functions[0][0]
    return False


# ---------------------------------------------------------------------- bytes
def reach(tensor: torch.Tensor) -> range:
    """Return the bytes of its storage that a strided tensor can touch (no stride is negative)."""
    itemsize = tensor.itemsize
    start = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        return range(start, start + (tensor.nbytes or itemsize))
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return range(start, start + (last + 1) * itemsize)


def covers(span: range, wanted: range) -> bool:
    """Return whether every byte of `wanted` lies in `span`."""
    return span.start <= wanted.start and wanted.stop <= span.stop


def reach_of_base(tensor: torch.Tensor, own: range) -> range:
    """Return the bytes to take along with a tensor's own `reach`, for other views that are saved.

    Those that share its version counter: of what it is a view of, or its own. And all of its
    storage, if it lies between others there (query, key and value of one product, which a compiled
    region saves as views without a base) and nothing that its counter knows of has changed them.
    """
    base = tensor._base
    if base is None:
        if tensor.nbytes >= len(own) or tensor._version:
            return own
        return range(tensor.untyped_storage().nbytes())
    if base.layout is not torch.strided or base.numel() == 0:
        return own
    return reach(base) if base.untyped_storage()._cdata == tensor.untyped_storage()._cdata else own


# ---------------------------------------------------------------------- what stays
class UnsupportedTensors:
    """Counts what stays for want of knowing how to move it, and names each kind once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._named: set[tuple[Stays, str]] = set()

    def note(self, reason: Stays, tensor: torch.Tensor, min_size: int) -> None:
        """Count a saved tensor that stays, and name it if it is larger than others that stay."""
        if reason in (Stays.WEIGHT, Stays.EMPTY, Stays.INFERENCE):
            return
        nbytes = bytes_in_memory(tensor)
        self.nbytes += nbytes
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        kind = f"{kind} with {tensor.layout}" if reason is Stays.LAYOUT else kind
        if nbytes >= min_size and (reason, kind) not in self._named:
            self._named.add((reason, kind))
            logger.info(
                f"a saved tensor of {kind} ({format_size(nbytes)}) stays in memory, and so will "
                f"others like it: it is {reason.value}, which cannot be offloaded."
            )


_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_INDICES = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), (*_ROWS, "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), (*_COLUMNS, "values")),
}


def bytes_in_memory(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor of any kind, with those of tensors that it consists of."""
    if is_traceable_wrapper_subclass(tensor):
        # Among them may be what is no tensor, as the mesh of devices of a DTensor.
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout in _INDICES:
        parts = [getattr(tensor, name)() for name in _INDICES[tensor.layout]]
    else:
        return int(tensor.numel()) * tensor.element_size()
    return sum(bytes_in_memory(part) for part in parts if isinstance(part, torch.Tensor))
