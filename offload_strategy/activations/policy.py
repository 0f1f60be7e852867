"""Which saved tensors may leave at all."""

from __future__ import annotations

from collections.abc import Callable

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def can_leave(tensor: torch.Tensor, is_weight: Callable[[torch.Tensor], bool]) -> bool:
    """Whether a saved tensor is plain data that is neither a weight nor another form of one.

    Args:
        tensor: what autograd is about to save.
        is_weight: tells whether a tensor shares its storage with a parameter or buffer.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False  # subclasses and sparse tensors are more than their storage
    if tensor.device.type == "meta" or tensor.is_quantized or tensor.is_inference():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False  # lazy flags that the bytes do not carry
    if tensor.numel() == 0:
        return False
    return not (is_weight(tensor) or _is_cast_weight(tensor, is_weight))


def _is_cast_weight(tensor: torch.Tensor, is_weight: Callable[[torch.Tensor], bool]) -> bool:
    """Autocast saves a low-precision copy of a weight: cast from it, and it lives on in a cache.

    Mostly as a view of the copy: a linear layer saves its transpose.
    """
    node = tensor.grad_fn if tensor._base is None else tensor._base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    parent = node.next_functions[0][0]
    variable = getattr(parent, "variable", None)
    return variable is not None and is_weight(variable)


def within_budget(
    budget: int | float | None, packed_bytes: int, left_bytes: int, nbytes: int
) -> bool:
    """Whether `nbytes` more may leave in this forward pass.

    Args:
        budget: bytes (int), share of what is saved (float, 0 to 1), or None for no limit.
        packed_bytes: bytes that were saved in this forward pass so far, these included.
        left_bytes: bytes of them that have left.
        nbytes: the candidate.
    """
    if budget is None:
        return True
    limit = budget * packed_bytes if isinstance(budget, float) else budget
    return left_bytes + nbytes <= limit
