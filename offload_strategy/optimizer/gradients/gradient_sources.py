"""Where the values of a gradient are while a stand-in has its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.states.flat_layout import Layout, Segment
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket
from offload_strategy.store.tiers import Tier
from offload_strategy.torch_support.grad_mode import no_grad


class Source(Protocol):
    """Gives the values of one gradient."""

    @property
    def exposes(self) -> bool:
        """Whether `load` gives the data itself, so that to change it changes the gradient."""

    def load(self) -> torch.Tensor:
        """The values, as a plain tensor of the gradient's shape, strides and dtype.

        May be asked any number of times. Unless the source `exposes` its data, each time for a
        tensor that the caller may change.
        """

    def drop(self) -> None:
        """Let the data go; it will not be loaded any more."""


class Held:
    """A plain tensor in memory.

    Args:
        tensor: the values.
    """

    exposes = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor.detach()

    def load(self) -> torch.Tensor:
        """The tensor itself."""
        assert self._tensor is not None, "a source was dropped, and loaded after that"
        return self._tensor

    def drop(self) -> None:
        """Let go of the tensor."""
        self._tensor = None


class Stored:
    """A ticket, or a part of one, in the store.

    Args:
        store: has the ticket.
        ticket: is freed when nobody has it any more; several gradients may share one.
        segment: where in its bytes the gradient lies, and its shape, strides and dtype.
    """

    exposes = False

    def __init__(self, store: TensorStore, ticket: Ticket, segment: Segment) -> None:
        self._store = store
        self._ticket: Ticket | None = ticket
        self._segment = segment

    @classmethod
    def put(
        cls,
        store: TensorStore,
        gradient: torch.Tensor,
        tiers: Sequence[Tier],
        client: str = "optimizer",
    ) -> Stored:
        """Give a gradient to the store.

        Args:
            store: takes it.
            gradient: dense; it must not change any more.
            tiers: where it may go, in order.
            client: whose it is, for metrics.

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
        ticket = store.put(flat, client, tiers, whole_pages=True)
        return cls(store, ticket, Layout.of([gradient]).segments[0])

    def load(self) -> torch.Tensor:
        """A copy in a buffer of the store's.

        Raises:
            StorageError: the bytes could not be read.
        """
        assert self._ticket is not None, "a source was dropped, and loaded after that"
        if self._segment.nbytes == self._ticket.nbytes:
            return self._segment.view(self._store.private(self._ticket))
        return self._segment.view(self._store.get(self._ticket)).clone()

    def drop(self) -> None:
        """Let go of the ticket."""
        self._ticket = None


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Ordinary tensors are made herein: they may outlive an inference mode that is in force."""
    with contextlib.ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(no_grad())
        yield


class Form(NamedTuple):
    """What a tensor is like, apart from its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """What this one is like."""
        return cls(
            tensor.shape,
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
        )

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """A tensor of this shape, strides and dtype, with memory of its own."""
        with lasting():
            return torch.empty_strided(
                self.shape, self.strides, dtype=self.dtype, device=device or self.device
            )


class Zeros:
    """A gradient that was zeroed: nothing has to be kept.

    Args:
        form: what it is like.
    """

    exposes = False

    def __init__(self, form: Form) -> None:
        self._form = form

    def load(self) -> torch.Tensor:
        """Zeros."""
        return self._form.empty().zero_()

    def drop(self) -> None:
        """There is nothing to let go."""


class Consumed:
    """A gradient that an update has used up already.

    Args:
        what: the parameter whose gradient it was, as the user knows it: its name, or its shape.
    """

    exposes = False

    def __init__(self, what: str) -> None:
        self.what = what

    def load(self) -> torch.Tensor:
        """Refuse.

        Raises:
            OffloadError: always.
        """
        raise OffloadError(
            f"the gradient of {self.what} is gone: with `optimizer.overlap: eager` the update has "
            f"used it during backward, so it can neither be read, scaled or clipped, nor "
            f"accumulated into by another backward before step(). Set `optimizer.overlap: commit`, "
            f"which keeps gradients until step()."
        )

    def drop(self) -> None:
        """There is nothing to let go."""
