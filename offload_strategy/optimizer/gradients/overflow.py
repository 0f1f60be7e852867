"""Whether gradients overflowed: one pass over them, with no temporary memory.

``isinf().any() | isnan().any()`` writes masks as large as a quarter to a half of the tensor and
reads everything several times (MemAscend, section on the one-pass overflow check).

[Note: why the extremes tell]
`torch.aminmax` hands a NaN on, wherever it is, and infinities are the largest and smallest values
there are. So the two extremes are finite exactly when every value is; no sum is formed that could
overflow by itself, as the sum of squares in a norm does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Elements that are copied at a time where a tensor has gaps between its elements.
_PIECE_ELEMENTS = 1 << 18


def has_overflow(*tensors: torch.Tensor) -> bool:
    """Whether any value of any tensor is infinite or not a number.

    Stops at the first tensor that has one. On an accelerator each tensor is waited for.

    Args:
        tensors: of any shape, layout in memory, dtype and device. Empty tensors, and those of
            integers and booleans, never overflow.

    Returns:
        The verdict of ``any(t.isinf().any() | t.isnan().any() for t in tensors)``.
    """
    return any(_has_overflow(tensor.detach()) for tensor in tensors)


def _has_overflow(tensor: torch.Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return False
    for piece in _dense_pieces(tensor):
        if not bool(torch.stack(torch.aminmax(piece)).isfinite().all()):
            return True
    return False


def _dense_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of a tensor in contiguous tensors, without a copy of it as a whole."""
    if not tensor.is_contiguous():
        # In the order of the memory: whatever is dense but transposed needs no copy. A repeated
        # (expanded) dimension holds the same values again.
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
        for dim in range(tensor.dim()):
            if tensor.stride(dim) == 0:
                tensor = tensor.narrow(dim, 0, 1)
    if tensor.is_contiguous():
        yield tensor
        return
    rows = max(1, _PIECE_ELEMENTS * tensor.size(0) // tensor.numel())
    for part in tensor.split(rows):
        if part.is_contiguous() or part.numel() <= _PIECE_ELEMENTS:
            yield part
        else:  # one row, and still too large
            yield from _dense_pieces(part[0])
