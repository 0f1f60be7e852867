"""How the tensors of one subgroup lie in one flat buffer.

Packing concerns the disk only: kernels see each tensor by itself, in its own shape and strides,
because a kernel that is given packed or cut tensors rounds differently at the seams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_strategy.units import round_up

#: Start of each tensor: at least what allocators give, so that vector loads stay aligned.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one tensor lies in a flat buffer, and how to see it there."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of a flat uint8 buffer."""
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
        """Lay out tensors one behind the other; each must be `packable`.

        Args:
            tensors: to be laid out.
            dtypes: in which each lies there; None for its own.
        """
        segments = []
        offset = 0
        for tensor, dtype in zip(tensors, dtypes or [t.dtype for t in tensors], strict=True):
            nbytes = tensor.numel() * dtype.itemsize
            segments.append(Segment(offset, nbytes, dtype, tensor.shape, tuple(tensor.stride())))
            offset = round_up(offset + nbytes, _ALIGNMENT_BYTES)
        return cls(tuple(segments), offset)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Every tensor, as a view of a flat uint8 buffer of this layout."""
        return [segment.view(flat) for segment in self.segments]


def packable(tensor: object) -> bool:
    """Whether a value is a dense strided tensor that fills its own memory without gaps."""
    return (
        isinstance(tensor, torch.Tensor)
        and is_plain(type(tensor))
        and tensor.layout is torch.strided
        and tensor.dim() > 0
        and tensor.numel() > 0
        and _is_dense(tensor)
    )


def is_plain(kind: type) -> bool:
    """Whether tensors of a class are plain ones; those that are guarded say so."""
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
