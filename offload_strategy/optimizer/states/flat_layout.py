"""Layout of the tensors of one subgroup in one flat buffer.

Only I/O sees packed tensors. Kernels get each tensor by itself, in its own shape and strides,
because a kernel that runs over packed tensors rounds differently where they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_strategy.units import round_up

#: Alignment of each tensor: that of PyTorch's allocators at least, so that vector loads stay
#: aligned.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Segment:
    """Place of one tensor in a flat buffer, with its dtype, shape and strides."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of a flat uint8 buffer."""
        return (
            flat[self.offset : self.offset + self.nbytes]
            .view(self.dtype)
            .as_strided(
                self.shape,
                self.strides,
                (flat.storage_offset() + self.offset) // self.dtype.itemsize,
            )
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments of a flat buffer of `nbytes`."""

    segments: tuple[Segment, ...]
    nbytes: int

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype] | None = None
    ) -> Layout:
        """Lay out `packable` tensors one after the other, in `dtypes` (default: their own)."""
        segments = []
        offset = 0
        for tensor, dtype in zip(tensors, dtypes or [t.dtype for t in tensors], strict=True):
            nbytes = tensor.numel() * dtype.itemsize
            segments.append(Segment(offset, nbytes, dtype, tensor.shape, tuple(tensor.stride())))
            offset = round_up(offset + nbytes, _ALIGNMENT_BYTES)
        return cls(tuple(segments), offset)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return every tensor as a view of a flat uint8 buffer of this layout."""
        return [segment.view(flat) for segment in self.segments]


def packable(tensor: object) -> bool:
    """Whether a value is a plain strided tensor without gaps between its elements."""
    return (
        isinstance(tensor, torch.Tensor)
        and is_plain(type(tensor))
        and tensor.layout is torch.strided
        and tensor.dim() > 0
        and tensor.numel() > 0
        and _is_dense(tensor)
    )


def is_plain(kind: type) -> bool:
    """Whether a class is a plain tensor class, or declares that it behaves like one."""
    return kind in (torch.Tensor, torch.nn.Parameter) or getattr(kind, "stands_for_plain", False)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
