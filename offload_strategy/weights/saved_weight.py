"""What autograd holds in place of a streamed weight that it saves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from offload_strategy.weights.streamed_weight import StreamedWeight


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without elements; the same one each time, as nobody changes it."""
    return torch.empty(0, dtype=dtype, device=device)


class SavedWeight:
    """A saved weight, or a view of one: where it lies in the weight, and its version.

    Args:
        tensor: what autograd saves; it is not held.
        weight: whose bytes it has.
        needed: brings a weight for backward.
    """

    __slots__ = (
        "_alias",
        "_needed",
        "_offset",
        "_parameter",
        "_shape",
        "_strides",
        "_version",
        "_weight",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        weight: StreamedWeight,
        needed: Callable[[StreamedWeight], torch.Tensor],
    ) -> None:
        self._weight = weight
        self._parameter = weight.parameter  # a graph keeps what it needs
        self._needed = needed
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset() - weight.storage_offset
        # What has its bytes in the same storage (a slice of a vector, another parameter's data)
        # counts its changes for itself.
        self._version = tensor._version
        self._alias = tensor.detach()
        self._alias.data = _nothing(tensor.dtype, tensor.device)

    def unpack(self) -> torch.Tensor:
        """The tensor, on the bytes where they are now.

        Raises:
            RuntimeError: the weight was changed in place since, as autograd says it.
            StorageError: the bytes could not be read.
        """
        values = self._needed(self._weight)
        version = self._alias._version
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{values.type()} {list(self._shape)}] (the parameter "
                f"{self._weight.name!r}) is at version {version}; expected version "
                f"{self._version} instead. Hint: enable anomaly detection to find the operation "
                "that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
        offset = values.storage_offset() + self._offset
        return values.as_strided(self._shape, self._strides, offset)
