"""Which saved tensors may leave at all, and why the others stay."""

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

    @property
    def is_shortcoming(self) -> bool:
        """Whether it would have left if this package knew how to move it."""
        return self in _SHORTCOMINGS


_SHORTCOMINGS = frozenset(
    {Stays.SUBCLASS, Stays.LAYOUT, Stays.NESTED, Stays.QUANTIZED, Stays.TRANSFORM}
)


def why_it_stays(tensor: torch.Tensor, is_weight: Callable[[torch.Tensor], bool]) -> Stays | None:
    """The reason why a saved tensor cannot leave, or None if it can.

    What leaves is the bytes; `identity.SavedView` rebuilds the rest, lazy conjugates included.

    Args:
        tensor: what autograd is about to save.
        is_weight: tells whether a tensor shares its storage with a parameter or buffer.
    """
    if type(tensor) not in _PLAIN:
        return Stays.WEIGHT if is_weight(tensor) else Stays.SUBCLASS
    kind = _kind(tensor)
    if kind is not None and kind is not Stays.QUANTIZED:
        return kind
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0:
        # An address of zero, which nobody may read from: sharded training takes the memory of
        # storages away.
        return Stays.EMPTY
    return Stays.WEIGHT if _is_form_of_weight(tensor, is_weight) else kind


def _kind(tensor: torch.Tensor) -> Stays | None:
    """Why tensors of its kind stay, whatever their sizes and values.

    All of it is told by what torch dispatches on, so each combination is looked at once: ten
    questions to every saved tensor would cost more than to move it.
    """
    keys = int(torch._C._dispatch_keys(tensor).raw_repr())
    try:
        return _KINDS[keys]
    except KeyError:
        return _KINDS.setdefault(keys, _look(tensor))


#: Dispatch keys, as bits, to the answer.
_KINDS: dict[int, Stays | None] = {}


def _look(tensor: torch.Tensor) -> Stays | None:
    # The order matters: a nested tensor calls itself strided, and a wrapped one answers for what it
    # wraps.
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


def is_small(tensor: torch.Tensor, min_size: int) -> bool:
    """Whether a saved tensor stays for its size, whatever it is: most are small, this is quick.

    Args:
        tensor: what autograd is about to save.
        min_size: bytes of a storage that may leave.
    """
    try:
        return tensor.nbytes < min_size and tensor.untyped_storage().nbytes() < min_size
    except (NotImplementedError, RuntimeError):  # without a storage of its own
        return False


def _is_form_of_weight(tensor: torch.Tensor, is_weight: Callable[[torch.Tensor], bool]) -> bool:
    """Whether it is a weight, a view of one, or one in another precision.

    Parameters are weights wherever they live: sharded training gathers a whole layer into one that
    no module owned when the forward pass began, and takes its memory away again after the layer.
    """
    base = tensor._base
    if isinstance(tensor, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter):
        return True
    return is_weight(tensor) or _is_cast_weight(tensor if base is None else base, is_weight)


def _is_cast_weight(tensor: torch.Tensor, is_weight: Callable[[torch.Tensor], bool]) -> bool:
    """Autocast saves a low-precision copy of a weight: cast from it, and it lives on in a cache.

    Mostly as a view of the copy: a linear layer saves its transpose.
    """
    node = tensor.grad_fn
    for _ in range(_FORM_DEPTH):
        if node is None:
            return False
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            # A cast of something expanded is larger than the weight, and no form of it.
            variable = node.variable  # type: ignore[attr-defined]
            return tensor.numel() <= variable.numel() and is_weight(variable)
        if name not in _FORM_NODES:
            return False
        node = node.next_functions[0][0]
    return False


class StayCounts:
    """Counts what stays although it should not have to, and names each kind once."""

    def __init__(self) -> None:
        self.tensors: dict[Stays, int] = {}
        self.nbytes: dict[Stays, int] = {}
        self._named: set[str] = set()

    def note(self, reason: Stays, tensor: torch.Tensor, at_least: int = 0) -> None:
        """A saved tensor stays.

        Args:
            reason: why.
            tensor: which one.
            at_least: bytes below which it would have stayed anyway and is not worth a word.
        """
        if not reason.is_shortcoming:
            return
        nbytes = bytes_in_memory(tensor)
        self.tensors[reason] = self.tensors.get(reason, 0) + 1
        self.nbytes[reason] = self.nbytes.get(reason, 0) + nbytes
        if nbytes < at_least:
            return
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        kind = f"{kind} with {tensor.layout}" if reason is Stays.LAYOUT else kind
        name = f"{reason.name} {kind}"
        if name not in self._named:
            self._named.add(name)
            logger.info(
                "a saved tensor of %s (%s) stays in memory, and so will others like it: it is %s, "
                "which cannot be offloaded.",
                kind,
                format_size(nbytes),
                reason.value,
            )


def bytes_in_memory(tensor: torch.Tensor) -> int:
    """Bytes of a saved tensor of any kind, those of the tensors that it consists of included."""
    if is_traceable_wrapper_subclass(tensor):
        # Among them may be what is no tensor, as the mesh of devices of a DTensor.
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return sum(bytes_in_memory(part) for part in parts if isinstance(part, torch.Tensor))
    if tensor.layout is torch.sparse_coo:
        return bytes_in_memory(tensor._indices()) + bytes_in_memory(tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return sum(bytes_in_memory(part) for part in parts)
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return sum(bytes_in_memory(part) for part in parts)
    return int(tensor.numel()) * tensor.element_size()
