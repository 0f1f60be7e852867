"""The objects that autograd holds in place of saved tensors until backward unpacks them.

[Note: the interpreter lock]
If a call into torch releases the interpreter lock, I/O threads that were just woken acquire it, and
training waits for them. So calls into torch come before calls that wake threads: giving bytes to
the store and prefetching come last, and the threads start during training's next operation.

[Note: version counters]
Under saved-tensor hooks autograd does not check whether a saved tensor was changed in place
afterwards, which would give wrong gradients in silence; so the check is made here. What is unpacked
shares the counter of what was saved: all who saved these bytes see a backward that changes them.
"""

from __future__ import annotations

import weakref

import torch

from offload_strategy.activations.forward_records import SavedItem
from offload_strategy.activations.prefetch import Prefetcher
from offload_strategy.torch_support.saved_tensors import changed, nothing


class KeptTensor:
    """A saved tensor that stays in memory."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: otherwise a node that saves its own output would be part of a reference cycle.
        # Of a leaf, plain autograd holds the tensor itself, and finds the data that it has by then.
        leaf = type(tensor) is torch.nn.Parameter and tensor.is_leaf
        self.tensor = tensor if leaf else tensor.detach()
        try:
            self.version = tensor._version
        except RuntimeError:  # an inference tensor has none
            self.version = -1

    def unpack(self) -> torch.Tensor:
        """Return the tensor, or raise autograd's error if it was changed in place."""
        if self.version >= 0 and self.tensor._version != self.version:
            raise changed(self.tensor, self.version, self.tensor.shape)
        return self.tensor


class KeptItem(KeptTensor):
    """A saved tensor that could have left: its use is learned from."""

    __slots__ = ("item", "prefetcher")

    def __init__(self, tensor: torch.Tensor, item: SavedItem, prefetcher: Prefetcher) -> None:
        super().__init__(tensor)
        self.item = item
        self.prefetcher = prefetcher

    def unpack(self) -> torch.Tensor:
        """Return the tensor, or raise autograd's error if it was changed in place."""
        tensor = super().unpack()
        self.prefetcher.used(self.item)
        return tensor


class OffloadedTensor:
    """A saved strided tensor as a view of the bytes of an item; the tensor is not kept alive."""

    __slots__ = (
        "__weakref__", "alias", "conjugated", "dtype", "item", "negated", "offset_bytes",
        "prefetcher", "shape", "strides", "unpacked", "version",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, item: SavedItem, prefetcher: Prefetcher) -> None:
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.dtype = dtype = tensor.dtype
        self.offset_bytes = int(tensor.storage_offset()) * dtype.itemsize - item.span.start
        # Flags beside the bytes: conjugation and negation wait until somebody computes with them.
        self.conjugated = dtype.is_complex and tensor.is_conj()
        self.negated = tensor.is_neg()
        # A detached alias shares the version counter; pointing it at nothing lets the data go.
        self.alias = tensor.detach()
        self.alias.data = nothing(dtype, tensor.device)
        self.version = tensor._version
        self.item = item
        self.prefetcher = prefetcher
        self.unpacked = False
        item.views.append(weakref.ref(self))

    def unpack(self) -> torch.Tensor:
        """Return the tensor rebuilt from its bytes, or raise autograd's error if it was changed."""
        if self.alias._version != self.version:
            raise changed(self.alias, self.version, self.shape)
        self.unpacked = True
        tensor = self.alias.detach()
        tensor.data = self.rebuild(self.prefetcher.bytes_of(self.item))
        self.prefetcher.used(self.item)
        return tensor

    def is_as_saved(self, unpacked: torch.Tensor) -> bool:
        """Whether an unpacked tensor has the values of its original, if that is still there."""
        if self.item.original is None:
            return True
        tensors = (unpacked, self.rebuild(self.item.original))
        values = (each.resolve_conj().resolve_neg().reshape(-1) for each in tensors)
        # A single element may have any stride, and is then no row of bytes.
        rows = (each.clone(memory_format=torch.contiguous_format) for each in values)
        return torch.equal(*(row.view(torch.uint8) for row in rows))

    def rebuild(self, loaded: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the item's bytes: flat uint8, on the device where it was."""
        begin = int(loaded.storage_offset()) * loaded.itemsize
        start = (begin + self.offset_bytes) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=loaded.device).set_(
            loaded.untyped_storage(), start, self.shape, self.strides
        )
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor
