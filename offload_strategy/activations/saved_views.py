"""Which bytes a saved tensor stands for, so that one storage is written once.

[Note: identity of storages]
Neither `id()` nor an address names a tensor for longer than it lives: both are reused at once. A
storage is named here by a weak reference to its Python object, which torch keeps for as long as the
storage itself lives; an address only tells where to look.

One storage may have several version counters: the chunks that a recurrent layer changes in place
(`unsafe_chunk`) count for themselves. The version of one says nothing about the bytes of another,
so bytes are shared among saved tensors as far as the base that they are views of reaches, in which
such chunks never lie within each other's reach; and beyond that only while their counters are at
zero: a counter is made with its view, and says then that nobody changed the bytes through it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class ByteRange(NamedTuple):
    """Bytes `start` to `end` of a storage, that is, what a view can reach."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.end - self.start

    def covers(self, other: ByteRange) -> bool:
        """Whether every byte of `other` lies in this range."""
        return self.start <= other.start and other.end <= self.end


def reach(tensor: torch.Tensor) -> ByteRange:
    """The bytes of its storage that a strided tensor can touch (strides are never negative)."""
    itemsize = tensor.itemsize
    start = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        return ByteRange(start, start + max(itemsize, tensor.nbytes))
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return ByteRange(start, start + (last + 1) * itemsize)


def reach_of_base(tensor: torch.Tensor, own: ByteRange | None = None) -> ByteRange:
    """The bytes to take along with it, for other views of them that may be saved.

    Those that share its version counter: of what it is a view of, or its own. And all of its
    storage, if it lies between others there (query, key and value of one product, which a compiled
    region saves as views without a base) and nothing that its counter knows of has changed them.

    Args:
        tensor: strided, as autograd saves it.
        own: its `reach`, if that is known.
    """
    base = tensor._base
    own = reach(tensor) if own is None else own
    if base is None:
        if tensor.nbytes >= own.nbytes or tensor._version:
            return own
        return ByteRange(0, tensor.untyped_storage().nbytes())
    if base.layout is not torch.strided or base.numel() == 0:
        return own
    return reach(base) if storage_address(base) == storage_address(tensor) else own


def storage_address(tensor: torch.Tensor) -> int:
    """Address of the storage object; names it only while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


class SavedView:
    """How a saved tensor lies on the bytes of a range, to rebuild it from them elsewhere.

    Args:
        tensor: strided, as autograd saved it.
        span: the bytes of its storage that left; they reach as far as the tensor does.
    """

    __slots__ = ("conjugated", "dtype", "negated", "offset_bytes", "shape", "strides")

    def __init__(self, tensor: torch.Tensor, span: ByteRange) -> None:
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.dtype = tensor.dtype
        self.offset_bytes = int(tensor.storage_offset()) * tensor.element_size() - span.start
        # Flags beside the bytes: conjugation, and the negated imaginary part of a conjugate, are
        # put off until somebody computes with them.
        self.conjugated = tensor.dtype.is_complex and tensor.is_conj()
        self.negated = tensor.is_neg()

    def rebuild(self, loaded: torch.Tensor) -> torch.Tensor:
        """The tensor again: same values, dtype, shape, strides and flags.

        Args:
            loaded: the bytes of the range, flat uint8, on the device where the tensor was.
        """
        start = (loaded.storage_offset() + self.offset_bytes) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=loaded.device).set_(
            loaded.untyped_storage(), start, self.shape, self.strides
        )
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without elements; the same one each time, as nobody changes it."""
    return torch.empty(0, dtype=dtype, device=device)


class VersionProbe:
    """Reads the version counter of a tensor without holding its data.

    Under saved-tensor hooks autograd does not check whether a saved tensor was changed in place
    afterwards, which would give wrong gradients in silence; so the check is made here.
    """

    __slots__ = ("_alias", "_expected", "_shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias = tensor.detach()
        # A detached alias shares the counter; pointing it at nothing lets the data go.
        self._alias.data = _nothing(tensor.dtype, tensor.device)
        self._expected = tensor._version
        self._shape = tensor.shape

    def check(self) -> None:
        """Raise autograd's own error if the tensor was changed since.

        Raises:
            RuntimeError: as without offload.
        """
        if self._alias._version != self._expected:
            raise_if_changed(self._alias, self._expected, describe(self._alias, self._shape))


def describe(tensor: torch.Tensor, shape: torch.Size) -> str:
    """A tensor as autograd names it in errors."""
    try:
        kind = tensor.type()
    except RuntimeError:  # compressed sparse and opaque layouts have no name of that kind
        kind = f"{tensor.dtype}, {tensor.layout}"
    return f"[{kind} {list(shape)}]"


def raise_if_changed(alias: torch.Tensor, expected: int, what: str | None = None) -> None:
    """Raise what autograd raises for a saved tensor that was changed in place.

    Args:
        alias: shares the version counter of the saved tensor.
        expected: its version when it was saved.
        what: how to call it; None to call it what `alias` is.
    """
    if alias._version != expected:
        what = describe(alias, alias.shape) if what is None else what
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {what} is at version {alias._version}; expected version {expected} "
            "instead. Hint: enable anomaly detection to find the operation that failed to compute "
            "its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
