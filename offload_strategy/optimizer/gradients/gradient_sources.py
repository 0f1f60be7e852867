"""Where the values of a gradient are while an `OffloadedGradient` is in `p.grad`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.states.flat_layout import Layout, Segment
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, Tier
from offload_strategy.torch_support.grad_mode import no_grad


class GradientSource(ABC):
    """Loads the values of one gradient."""

    #: Whether `load` returns the gradient's own memory, so that writing to it changes the gradient.
    shares_memory = False

    @abstractmethod
    def load(self) -> torch.Tensor:
        """Return a plain tensor of the gradient's shape, strides and dtype.

        Unless the source `shares_memory`, every call returns a tensor that the caller may change.
        """


class InMemoryGradient(GradientSource):
    """A plain tensor in memory.

    Args:
        tensor: the values.
    """

    shares_memory = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def load(self) -> torch.Tensor:
        """Return the tensor itself."""
        return self._tensor


class StoredGradient(GradientSource):
    """A ticket of the store, or a part of one.

    Args:
        store: has the ticket.
        ticket: is freed when its last owner is gone; several gradients may share one.
        segment: offset of the gradient in the ticket's bytes, its shape, strides and dtype.
    """

    def __init__(self, store: TensorStore, ticket: Ticket, segment: Segment) -> None:
        self._store = store
        self._ticket = ticket
        self._segment = segment

    @classmethod
    def put(
        cls, store: TensorStore, gradient: torch.Tensor, tiers: Sequence[Tier]
    ) -> StoredGradient:
        """Give a gradient to the store.

        Args:
            store: takes it.
            gradient: dense; it must not change any more.
            tiers: where it may go, in order.

        Raises:
            ValueError: there are gaps between its elements.
        """
        order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
        in_order = gradient.detach().permute(order)
        if not in_order.is_contiguous():
            raise ValueError(
                f"only dense gradients can be stored; got shape {tuple(gradient.shape)} with "
                f"strides {gradient.stride()}"
            )
        flat = in_order.view(-1).view(torch.uint8)
        ticket = store.put(flat, "optimizer", tiers, whole_pages=True)
        return cls(store, ticket, Layout.of([gradient]).segments[0])

    def load(self) -> torch.Tensor:
        """Return a copy in a buffer of the store's.

        Raises:
            StorageError: the bytes could not be read.
        """
        if self._segment.nbytes == self._ticket.nbytes:
            return self._segment.view(self._store.private(self._ticket))
        return self._segment.view(self._store.get(self._ticket)).clone()


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make ordinary tensors, without history, even while inference mode is on."""
    with contextlib.ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(no_grad())
        yield


class TensorMetadata(NamedTuple):
    """Everything about a strided tensor except its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMetadata:
        """Return the metadata of a tensor."""
        strides, offset = tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(tensor.shape, strides, offset, tensor.dtype, tensor.device)

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """Allocate a tensor of this shape, strides and dtype."""
        with outside_inference_mode():
            return torch.empty_strided(
                self.shape, self.strides, dtype=self.dtype, device=device or self.device
            )


class ZeroGradient(GradientSource):
    """A gradient that was zeroed: nothing has to be kept.

    Args:
        metadata: of the gradient.
    """

    def __init__(self, metadata: TensorMetadata) -> None:
        self._metadata = metadata

    def load(self) -> torch.Tensor:
        """Return new zeros."""
        return self._metadata.empty().zero_()


class ConsumedGradient(GradientSource):
    """A gradient that an update has used up already.

    Args:
        parameter: name or shape of the parameter whose gradient it was, for the error.
    """

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter

    def load(self) -> torch.Tensor:
        """Refuse to load.

        Raises:
            OffloadError: always.
        """
        raise OffloadError(
            f"the gradient of {self._parameter} is gone: with `optimizer.overlap: eager` the "
            f"update has used it during backward, so it can neither be read, scaled or clipped, "
            f"nor accumulated into by another backward before step(). Set `optimizer.overlap: "
            f"commit`, which keeps gradients until step()."
        )
