"""One streamed weight: where its bytes are, whether they changed, and how autograd saves it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from offload_strategy.errors import OffloadError
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState, Tier
from offload_strategy.torch_support.keyboard_interrupts import default_modes, keeps_grad_mode
from offload_strategy.torch_support.modules import WeakHook
from offload_strategy.torch_support.saved_tensors import changed, nothing
from offload_strategy.weights.guarded_parameter import (
    expose,
    guard,
    nan_placeholder,
    set_data,
    unguard,
)

_CLIENT = "parameters"
#: Use count of a storage that only the parameter holds: its Python object and its tensor.
_UNSHARED_USE_COUNT = 2


def lies_in_a_row(values: torch.Tensor) -> bool:
    """Whether the memory of a tensor has its elements in their order, none to be conjugated."""
    return values.is_contiguous() and not values.is_conj() and not values.is_neg()


class Streaming(Protocol):
    """What a weight needs of that which streams it."""

    store: TensorStore
    tiers: Sequence[Tier]
    #: Held by whoever prefetches, loads, acquires, releases or offloads a weight.
    lock: AbstractContextManager[Any]
    #: Makes a context that recognizes saved weights, and yields False if it cannot.
    saving: Callable[[], AbstractContextManager[bool]]

    def on_access(self, weight: StreamedWeight) -> None:
        """Note that a weight is accessed outside its block."""

    def load_now(self, weight: StreamedWeight) -> torch.Tensor:
        """Return the values of a weight that is needed at once."""


class StreamedWeight:
    """A parameter, not kept alive, whose bytes are in the store while they are not in memory."""

    def __init__(self, name: str, parameter: nn.Parameter, stream: Streaming) -> None:
        self.name = name
        self._take_form(parameter)  # a meta tensor of its shape, strides and dtype
        #: Number of blocks and accesses that need the bytes now.
        self.users = 0
        # Blocks among them; during an access it stays guarded, to see other threads' accesses.
        self._unguarded = 0
        #: Whether it must stay until the step ends, because autograd may have saved it.
        self.pinned = False
        #: Whether it must stay because some of its slices are updated, and others are not.
        self.held = False
        #: Whether the values may differ from the ticket's besides what the version counter shows.
        self.changed = True
        #: How often somebody else has replaced the memory of the parameter (`p.data = values`).
        self.replacements = 0
        self._version = -1
        self.parameter = weakref.ref(parameter, WeakHook(self._on_parameter_freed))
        #: The parameter that the model has; both are None after it was freed.
        self.key: weakref.ref[Any] = self.parameter
        self.stream = stream
        # Freed when it is dropped, unless `BlockResidency` keeps it for other processes.
        self._ticket: Ticket | None = None
        self._here = True
        guard(parameter, self)

    def _take_form(self, parameter: torch.Tensor) -> None:
        self.nbytes = parameter.numel() * parameter.element_size()
        self.device = parameter.device
        self.form = torch.empty_like(parameter, device="meta")
        self._placeholder = nan_placeholder(self.form, parameter.device)

    @property
    def is_resident(self) -> bool:
        """Whether the bytes are in memory."""
        return self._here and self.parameter() is not None

    @property
    def is_placed(self) -> bool:
        """Whether its ticket is on a tier, and not in an external file."""
        return self._ticket is not None and self._ticket.entry.tier is not None

    @property
    def storage_key(self) -> int:
        """Key of the storage that holds the bytes now."""
        return int(self.values().untyped_storage()._cdata)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Offset of a tensor in the resident values in elements; None if it is no view of them."""
        if tensor.dtype != self.form.dtype or not self.is_resident:
            return None
        values = self.values()
        if values.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            return None
        begin = int(tensor.storage_offset() - values.storage_offset())
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        last = begin + sum((size - 1) * stride for size, stride in strides)
        return begin if begin >= 0 and last < self.form.numel() else None

    @property
    def content(self) -> Ticket | None:
        """The ticket that has the values of now, or None; changed values get another one.

        None if nobody knows, and in host memory, where there is no room for two of each weight.
        """
        parameter, ticket = self.parameter(), self._ticket
        if parameter is None or (self._here and self._may_have_changed(parameter)):
            return None
        in_memory = ticket is None or (ticket.entry.tier is not None and not ticket.entry.stripes)
        return None if in_memory else ticket

    def _may_have_changed(self, parameter: nn.Parameter) -> bool:
        """Whether resident values may differ from those that were loaded."""
        return self.changed or parameter._version != self._version

    def values(self) -> torch.Tensor:
        """Return the resident values as a plain tensor that shares the version counter."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.live_parameter().detach()

    def _on_parameter_freed(self, _: object) -> None:
        self._ticket = None

    def live_parameter(self) -> nn.Parameter:
        """Return the parameter; an OffloadError if it was freed."""
        parameter = self.parameter()
        if parameter is None:
            raise OffloadError(f"the parameter {self.name!r} was freed; attach the model again.")
        return parameter

    def acquire(self) -> None:
        """Load the bytes, keep them until `release`, and remove the guard meanwhile."""
        self.load()
        self.users += 1
        self._unguarded += 1
        if self._unguarded == 1 and (parameter := self.parameter()) is not None:
            expose(parameter)

    def release(self) -> None:
        """Undo one `acquire`."""
        self.users -= 1
        self._unguarded -= 1
        if self._unguarded == 0 and (parameter := self.parameter()) is not None:
            guard(parameter, self)

    @keeps_grad_mode
    def begin_access(self) -> None:
        """Load the bytes for an access outside the block that may change them."""
        with self.stream.lock, default_modes():
            self.stream.on_access(self)
            self.load()
            self.users += 1
            self.changed = True

    def end_access(self) -> None:
        """Undo one `begin_access`."""
        with self.stream.lock:
            self.users -= 1

    def prefetch(self) -> bool:
        """Start loading the bytes; return False if there is no memory for them."""
        ticket = self._ticket
        return self._here or ticket is None or self.stream.store.prefetch(ticket)

    def load(self) -> None:
        """Load the bytes, if they are offloaded; they stay so if they cannot be read."""
        ticket = self._ticket
        if self._here or ticket is None or self.parameter() is None:
            return
        if ticket.state in (TicketState.STORED, TicketState.LOADING) or ticket.entry.is_copy:
            flat = self.stream.store.private(ticket)
        else:  # still being written, or in a host tier: take the buffer without a copy
            flat = self.stream.store.take(ticket)
            self._ticket = None
        parameter, form = self.live_parameter(), self.form
        set_data(parameter, flat.view(form.dtype).as_strided(form.shape, form.stride()))
        self._version = parameter._version
        self.changed = False
        self._here = True

    def can_be_offloaded(self) -> bool:
        """Whether nobody else holds the resident bytes."""
        parameter = self.live_parameter()
        if self.users or self.pinned or self.held:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            storage = parameter.untyped_storage()
            form = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if form != (self.form.shape, self.form.stride(), self.form.dtype, self.device):
                self._take_form(parameter)  # model.to(...) has replaced its data
            if not lies_in_a_row(parameter):
                return False
        return int(torch._C._storage_Use_Count(storage._cdata)) <= _UNSHARED_USE_COUNT

    def store_new(self, values: torch.Tensor, tiers: Sequence[Tier]) -> Ticket:
        """Offload values for `take_ticket`, to the paths of its own tiers, or to these tiers."""
        return self._put(values, [*(tier for tier in self.stream.tiers if tier.queues), *tiers])

    def _put(self, values: torch.Tensor, tiers: Sequence[Tier]) -> Ticket:
        flat, on_host = values.view(-1).view(torch.uint8), self.device.type == "cpu"
        return self.stream.store.put(flat, _CLIENT, tiers, one_block_at_a_time=on_host)

    def take_ticket(self, ticket: Ticket) -> None:
        """Take over a ticket as the new values of the parameter, without loading it."""
        if self._here and not self.can_be_offloaded():  # others hold its memory
            values = self.values()
            # Written bytes are contiguous; the memory need not be (`channels_last`).
            new = self.stream.store.get(ticket).view(values.dtype).view(values.shape)
            with torch.no_grad():
                values.copy_(new)
            del new
            self.changed = True
            self.stream.store.free(ticket)
            return
        parameter = self.live_parameter()
        torch.autograd.graph.increment_version(parameter)  # invalidates what a graph has saved
        set_data(parameter, self._placeholder)
        self._here = False
        self._ticket = ticket

    def offload(self) -> None:
        """Offload the bytes, writing them if they changed; requires `can_be_offloaded`."""
        parameter = self.live_parameter()
        if self._may_have_changed(parameter) or self._ticket is None:
            self._ticket = self._put(self.values(), self.stream.tiers)
        guard(parameter, self)
        set_data(parameter, self._placeholder)
        self._here = False

    def close(self, *, restore: bool) -> None:
        """Free the ticket; unless the bytes are restored, the parameter is NaN from now on."""
        parameter = self.parameter()
        if parameter is not None:
            if restore:
                self.load()
            unguard(parameter, for_good=True)
        self._ticket = None


class SavedWeight:
    """What autograd holds for a saved streamed weight or a view of one: position and version."""

    def __init__(
        self,
        tensor: torch.Tensor,
        weight: StreamedWeight,
        offset: int,
    ) -> None:
        self._weight = weight
        self._parameter = weight.parameter()  # a graph keeps its parameters alive
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._offset = offset
        self._conjugated, self._negated = tensor.is_conj(), tensor.is_neg()
        # Tensors that share the storage without being views (`.data`) count versions separately.
        self._version = tensor._version
        # Plain autograd saves a leaf itself, and finds the memory that it has by then.
        self._replacements = None if tensor is self._parameter else weight.replacements
        self._alias = tensor.detach()
        self._alias.data = nothing(tensor.dtype, tensor.device)

    def unpack(self) -> torch.Tensor:
        """Return the tensor on the bytes where they are now.

        Raises RuntimeError if the weight was changed in place since, as in plain autograd, and
        OffloadError if its memory was replaced since: a view of the old memory is not kept.
        """
        if self._replacements not in (None, self._weight.replacements):
            raise OffloadError(
                f"the data of the parameter {self._weight.name!r} was replaced (as in `p.data = "
                "values`, or by `model.to(...)`) after a forward pass whose backward needs the "
                "old values, which streamed weights do not keep. Call backward first, or change "
                "the values in place."
            )
        values = self._weight.stream.load_now(self._weight)
        if self._alias._version != self._version:
            of = f" (the parameter {self._weight.name!r})"
            raise changed(self._alias, self._version, self._shape, of)
        if self._replacements is None:
            return values
        view = values.as_strided(self._shape, self._strides, values.storage_offset() + self._offset)
        view = torch._conj(view) if self._conjugated else view
        return torch._neg_view(view) if self._negated else view
