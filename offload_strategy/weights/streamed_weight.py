"""One streamed weight: where its bytes are, and whether they changed since they were written."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from offload_strategy.errors import OffloadError
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.store.tiers import Tier
from offload_strategy.torch_support.grad_mode import keeps_grad_mode
from offload_strategy.torch_support.weak_callbacks import weakly
from offload_strategy.weights.guarded_parameter import (
    forget,
    guard,
    nothing_like,
    place_bytes,
    unguard,
)
from offload_strategy.weights.neutral_context import undisturbed

_CLIENT = "parameters"
#: A storage that only the parameter has: its Python object, and the tensor's own reference.
_ALONE = 2


class StreamedWeight:
    """A parameter whose bytes are in the store while they are not in memory.

    Args:
        name: in the model, for messages.
        parameter: dense; it is not kept alive.
        store: takes the bytes.
        tiers: where they may go, in order.
        touched: called when somebody touches the parameter out of its block's turn.
        saving: see `Home.saving`.
        lock: held while the bytes come and go.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        store: TensorStore,
        tiers: Sequence[Tier],
        touched: Callable[[StreamedWeight], None],
        saving: Callable[[], AbstractContextManager[bool]],
        lock: AbstractContextManager[Any],
    ) -> None:
        self.name = name
        self._take_form(parameter)
        #: How many turns and touches need it at present.
        self.turns = 0
        # How many turns; in a touch it stays guarded, so that another thread's touch is seen too.
        self._unguarded = 0
        #: Whether it must stay until the step ends: autograd may have saved it itself.
        self.bound = False
        self._parameter = weakref.ref(parameter, weakly(self._gone))
        self._store = store
        self._tiers = list(tiers)
        self._touched = touched
        self.saving = saving
        self._lock = lock
        self._ticket: Ticket | None = None
        self._here = True
        # What the bytes in memory have beyond those of the ticket: a version, or a touch.
        self._version = -1
        self._maybe_changed = True
        guard(parameter, self)

    def _take_form(self, parameter: torch.Tensor) -> None:
        self.nbytes = parameter.numel() * parameter.element_size()
        self.device = parameter.device
        #: On the meta device, with its shape, strides and dtype.
        self.form = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
        )
        self._nothing = nothing_like(self.form, parameter.device)

    # ------------------------------------------------------------------ state
    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, while it lives."""
        return self._parameter()

    @property
    def here(self) -> bool:
        """Whether the bytes are in memory."""
        return self._here and self._parameter() is not None

    @property
    def storage_key(self) -> int:
        """Of the storage in which the bytes are at present."""
        parameter = self._alive()
        with torch._C.DisableTorchFunctionSubclass():
            return int(parameter.untyped_storage()._cdata)

    def lies_in(self, storage_key: int) -> bool:
        """Whether the bytes are in that storage now."""
        return self._here and self._parameter() is not None and self.storage_key == storage_key

    @property
    def storage_offset(self) -> int:
        """Where in that storage they begin, in elements."""
        with torch._C.DisableTorchFunctionSubclass():
            return int(self._alive().storage_offset())

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in that storage lies within the bytes."""
        begin = tensor.storage_offset() - self.storage_offset
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        last = begin + sum((size - 1) * stride for size, stride in strides)
        return begin >= 0 and last < self.form.numel()

    def values(self) -> torch.Tensor:
        """The bytes as a plain tensor that shares the parameter's version; they must be here."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._alive().detach()

    def _gone(self, _: object) -> None:
        """The parameter died."""
        self._ticket = None

    def _alive(self) -> nn.Parameter:
        parameter = self._parameter()
        if parameter is None:
            raise OffloadError(f"the parameter {self.name!r} is gone; attach the model again.")
        return parameter

    # ------------------------------------------------------------------ turns
    def begin_turn(self) -> None:
        """The bytes are needed from now on: bring them, and lift the guard."""
        with self._lock:
            self.bring()
            self.turns += 1
            self._unguarded += 1
            parameter = self._parameter()
            if self._unguarded == 1 and parameter is not None:
                unguard(parameter)

    def end_turn(self) -> None:
        """The end of what `begin_turn` began."""
        with self._lock:
            self.turns -= 1
            self._unguarded -= 1
            parameter = self._parameter()
            if self._unguarded == 0 and parameter is not None:
                guard(parameter, self)

    @keeps_grad_mode
    def begin_touch(self) -> None:
        """Somebody needs, and may change, the bytes out of turn, until `end_touch`."""
        with self._lock, undisturbed():
            self._touched(self)
            self.bring()
            self.turns += 1
            self.note_change()

    def end_touch(self) -> None:
        """The end of what `begin_touch` began."""
        with self._lock:
            self.turns -= 1

    def bind(self) -> None:
        """See `Home.bind`: it stays until the step ends."""
        self.bound = True

    def note_change(self) -> None:
        """The bytes may be others from now on than those of the ticket."""
        self._maybe_changed = True

    # ------------------------------------------------------------------ moving
    def fetch(self) -> bool:
        """Begin to bring the bytes; False for want of memory."""
        ticket = self._ticket
        return self._here or ticket is None or self._store.prefetch(ticket)

    def bring(self) -> None:
        """Bring the bytes, if they are away.

        Raises:
            StorageError: they cannot be read; they are away as before.
        """
        ticket = self._ticket
        if self._here or ticket is None or self._parameter() is None:
            return
        stored = ticket.state in (TicketState.STORED, TicketState.LOADING) or bool(
            ticket.entry.stripes and ticket.state is TicketState.IN_MEMORY
        )
        if stored:
            flat = self._store.private(ticket)
        else:  # on its way out, or in a tier of host memory: as it is, without a copy
            flat = self._store.take(ticket)
            self._ticket = None
        parameter = self._alive()
        place_bytes(parameter, self._seen_in(flat))
        self._version = parameter._version
        self._maybe_changed = False
        self._here = True

    def may_go(self) -> bool:
        """Whether nobody else has the bytes."""
        parameter = self._alive()
        if not self._here or self.turns or self.bound:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            storage = parameter.untyped_storage()
            form = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if form != (self.form.shape, self.form.stride(), self.form.dtype, self.device):
                self._take_form(parameter)  # model.to(...) has given it other values
            if not parameter.is_contiguous():
                return False
        return int(torch._C._storage_Use_Count(storage._cdata)) <= _ALONE

    @property
    def is_trained(self) -> bool:
        """Whether the parameter takes gradients."""
        parameter = self._parameter()
        return parameter is not None and parameter.requires_grad

    @property
    def is_placed(self) -> bool:
        """Whether it has a place on the tiers, not in a file of somebody else's or nowhere."""
        return self._ticket is not None and self._ticket.entry.tier is not None

    def receive(self, ticket: Ticket) -> None:
        """Have the bytes of a ticket from now on, wherever it has them; takes the ticket over."""
        if self._here and not self.may_go():  # others look at its memory
            with torch.no_grad():
                self.values().copy_(self._seen_in(self._store.get(ticket)))
            self.note_change()
            self._store.free(ticket)
            return
        parameter = self._alive()
        torch.autograd.graph.increment_version(parameter)  # what a graph has saved is void
        if self._here:
            place_bytes(parameter, self._nothing)
            self._here = False
        old, self._ticket = self._ticket, ticket
        if old is not None:
            self._store.free(old)

    def send(self) -> None:
        """Let the bytes go; what changed is written. To be called when they may."""
        parameter = self._alive()
        changed = self._maybe_changed or parameter._version != self._version
        if changed or self._ticket is None:
            ticket = self._store.put(
                self._bytes(parameter),
                _CLIENT,
                self._tiers,
                whole_pages=True,
                one_block_at_a_time=self.device.type == "cpu",
            )
            if self._ticket is not None:
                self._store.free(self._ticket)
            self._ticket = ticket
        guard(parameter, self)
        place_bytes(parameter, self._nothing)
        self._here = False

    def _bytes(self, parameter: nn.Parameter) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            flat = torch.empty(0, dtype=torch.uint8, device=parameter.device)
            start = parameter.storage_offset() * parameter.element_size()
            return flat.set_(parameter.untyped_storage(), start, (self.nbytes,), (1,))

    @contextmanager
    def read(self) -> Iterator[torch.Tensor]:
        """The values, which must not be changed; they stay where they are."""
        ticket = self._ticket
        if self._here or ticket is None:
            yield self.values()
            return
        flat = self._store.get(ticket)
        try:
            yield self._seen_in(flat)
        finally:
            del flat
            self._store.evict(ticket)

    def _seen_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Bytes as a tensor of the parameter's form."""
        return torch.empty(0, dtype=self.form.dtype, device=flat.device).set_(
            flat.untyped_storage(),
            flat.storage_offset() // self.form.element_size(),
            self.form.shape,
            self.form.stride(),
        )

    def close(self, *, restore: bool) -> None:
        """Give the ticket up.

        Args:
            restore: bring the bytes back before; else the parameter has NaN from now on.
        """
        parameter = self._parameter()
        if parameter is not None:
            if restore:
                self.bring()
            forget(parameter)
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._store.free(ticket)
