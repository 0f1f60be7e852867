"""Block residency: when the weights of a block are in memory, and what autograd saves of them.

[Note: block residency]
A block's weights are acquired during its forward (again inside backward, where it is recomputed)
and during every update. Autograd saves only the position of a tensor within its weight, so backward
finds the bytes wherever they are by then. A block is offloaded after its forward, unless it was
needed twice in a row the last time. Blocks that stay, after backward or an update, are offloaded
when others need the room: the least recently used one first, unless it is among the next blocks.
Weights that are accessed outside their blocks are tracked apart: a few of them may stay besides the
one that is accessed now.

[Note: grace period]
Another thread may call a function with a weight while the weight's block computes, and PyTorch's
C++ may give up the GIL after it found a plain parameter and before it reads the data. So between
the guard and the NaN placeholder there is a grace period, as in read-copy-update: other threads
leave the call in which they are. A thread that stays in a call is waited for once.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload_strategy.errors import OffloadError
from offload_strategy.store.shared_tickets import SharedFiles, SharedTicket
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, Tier
from offload_strategy.torch_support.keyboard_interrupts import (
    UninterruptedSection,
    default_modes,
    keeps_grad_mode,
)
from offload_strategy.torch_support.modules import calls_of
from offload_strategy.units import MiB
from offload_strategy.weights.streamed_weight import SavedWeight, StreamedWeight, Streaming
from offload_strategy.weights.weight_blocks import BlockOrder, StreamedBlock

#: Bytes of weights accessed outside their blocks that may stay besides the current one.
_ACCESSED_BYTES = 64 * MiB
_GRACE_SECONDS = 0.02
#: Modules whose functions wait and read no weight, and ours, which take the lock for it.
_NO_READERS = tuple(
    ["threading", "queue", "selectors", "multiprocessing", "torch.autograd", "offload_strategy"]
)


_frames_lock = threading.RLock()


class BlockResidency(Streaming):
    """Loads the weights of a block before it computes, and offloads them for the next ones."""

    def __init__(
        self, store: TensorStore, tiers: Sequence[Tier], blocks_in_flight: int, files: SharedFiles
    ) -> None:
        self.store = store
        self.tiers = list(tiers)
        self._most = blocks_in_flight
        #: Through which other processes of this machine read weights, and this one theirs.
        self.files = files
        # Tickets that other processes may read, of each weight the present one and older ones.
        self._shared: dict[StreamedWeight, list[Ticket]] = {}
        self.lock = threading.RLock()
        self._open = _Open()
        self._order = BlockOrder()
        self._weights: MutableMapping[torch.Tensor, StreamedWeight] = WeakTensorKeyDictionary()
        self._blocks_of: dict[StreamedWeight, list[StreamedBlock]] = {}
        # Blocks with weights in memory, least recently used first.
        self._resident: dict[StreamedBlock, None] = {}
        # Weights accessed outside their blocks, least recently accessed first.
        self._accessed: dict[StreamedWeight, None] = {}
        self._by_storage: dict[int, StreamedWeight] = {}
        self._calls = _CallsInProgress()
        #: Context with the saved-tensor hooks that recognize weights; yields whether it has any.
        self.saving: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(False)

    # ------------------------------------------------------------------ blocks
    @keeps_grad_mode
    def enter_block(self, block: StreamedBlock, *_: Any) -> None:
        """Load and acquire the weights of a block that is about to compute; a pre-hook."""
        with self.lock, default_modes():
            self._mark_needed(block)
            self._load(block)
            with UninterruptedSection():  # all are in memory: nothing waits or fails
                for weight in block.weights:
                    weight.acquire()
                self._open.blocks.append((block, ExitStack()))
            self._prefetch_next()
        # Without gradients, too: the block may enable them.
        found_again = self._open.blocks[-1][1].enter_context(self.saving())
        if torch.is_grad_enabled() and not found_again:
            self.pin_open_blocks()

    def pin_open_blocks(self) -> None:
        """Keep weights of this thread's blocks until the step ends: autograd saves them itself."""
        for block, _ in self._open.blocks:
            for weight in block.weights:
                weight.pinned = True

    @keeps_grad_mode
    def exit_block(self, block: StreamedBlock, *_: Any) -> None:
        """Release the weights of a block that computed or raised, if it was entered; a hook."""
        open_blocks = self._open.blocks
        places = [place for place, (known, _) in enumerate(open_blocks) if known is block]
        if not places:
            return
        open_blocks.pop(places[-1])[1].close()
        with self.lock, default_modes():
            for weight in block.weights:
                weight.release()
            self._calls.may_have_readers = True
            if not self._order.is_needed_again:
                self._offload(block)

    def enter_model(self, blocks: list[StreamedBlock], model: nn.Module, *_: Any) -> None:
        """Exit leftover blocks at a model's outermost call on this thread; a pre-hook.

        torch does not run always_call hooks after Ctrl-C.
        """
        if len(calls_of(model)) == 1:
            self._exit_blocks([block for block, _ in self._open.blocks if block in blocks])

    @keeps_grad_mode
    def end_step(self) -> None:
        """End a step: nothing that autograd saved is needed any more."""
        self._exit_blocks([block for block, _ in self._open.blocks])
        with self.lock, default_modes():
            self._order.step_ended()
            for weight in list(self._weights.values()):
                weight.pinned = False
            with suppress(OffloadError):  # the step is over: the next offloaded tensor raises it
                self._offload_accessed()
                self._make_room(self._most)

    def _exit_blocks(self, blocks: list[StreamedBlock]) -> None:
        """Exit blocks of a pass that Ctrl-C interrupted before their forward hooks ran."""
        for block in reversed(blocks):
            self.exit_block(block)

    # ------------------------------------------------------------------ parameters
    @contextmanager
    def resident(self, parameters: Iterable[torch.Tensor], *, changes: bool) -> Iterator[None]:
        """Keep the streamed weights among some parameters in memory within the context.

        `changes` says whether the caller changes their values; version counters do not show it,
        because fused kernels do not increment them.
        """
        weights = [weight for p in parameters if (weight := self._weights.get(p)) is not None]
        if not weights:
            yield
            return
        acquired = ExitStack()
        with self.lock:
            try:
                with default_modes():
                    for weight in weights:
                        if blocks := self._blocks_of.get(weight):
                            self._resident[blocks[0]] = None
                        else:  # its model is not attached yet
                            self.on_access(weight)
                        weight.acquire()
                        acquired.callback(weight.release)
                        weight.changed |= changes
                yield
            finally:
                with default_modes():
                    acquired.close()
                    self._calls.may_have_readers = True
                    self._make_room(self._most)
                    self._offload_accessed(keep=weights[-1])

    def set_held(self, parameter: torch.Tensor, held: bool) -> None:
        """Do not offload a streamed weight, once it is in memory, as long as it is held."""
        with self.lock:
            if (weight := self._weights.get(parameter)) is not None:
                weight.held = held

    def content(self, parameter: torch.Tensor) -> object | None:
        """Return the `StreamedWeight.content` of a parameter; None if it is not streamed."""
        weight = self._weights.get(parameter)
        return None if weight is None else weight.content

    def is_untouched(self, parameter: torch.Tensor, content: object) -> bool:
        """Whether a streamed weight is not in memory, and has the values that this stands for."""
        weight = self._weights.get(parameter)
        return weight is not None and not weight.is_resident and weight.content is content

    def store_new(
        self, parameter: torch.Tensor, values: torch.Tensor, tiers: Sequence[Tier]
    ) -> Ticket:
        """Store new values of a streamed weight, in `tiers` if its own have no room for both."""
        return self._weights[parameter].store_new(values, tiers)

    def replace(self, parameter: torch.Tensor, ticket: Ticket) -> bool:
        """Make stored values those of a weight without loading them, if it is streamed still."""
        with self.lock, default_modes():
            weight = self._weights.get(parameter)
            if weight is not None:
                weight.take_ticket(ticket)
            return weight is not None

    def is_streamed_whole(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is a streamed weight, and no shard of one."""
        return type(self._weights.get(parameter)) is StreamedWeight

    def share(self, parameters: Sequence[torch.Tensor]) -> list[SharedTicket | None]:
        """Offload streamed weights; return where other processes may read each of them.

        Of what cannot be offloaded, or is in host memory, that is None. What is shared is not freed
        before `drop_replaced`. Raises StorageError if weights cannot be written.
        """
        weights = [self._weights[parameter] for parameter in parameters]
        with self.lock, default_modes():
            for weight in weights:
                self._offload_weight(weight)
            tickets = [weight.content for weight in weights]
        found: list[SharedTicket | None] = []
        for weight, ticket in zip(weights, tickets, strict=True):
            found.append(None if ticket is None else self.files.share(ticket))
            if ticket is not None and found[-1] is not None:
                self._shared.setdefault(weight, []).append(ticket)
        return found

    def drop_replaced(self, parameters: Sequence[torch.Tensor]) -> None:
        """Free what was shared of weights before, and nobody reads any more."""
        for parameter in parameters:
            weight = self._weights.get(parameter)
            if weight is not None:
                del self._shared.get(weight, [])[:-1]

    def prefetch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Prefetch the streamed weights among some parameters."""
        with self.lock:
            for parameter in parameters if self._weights else ():
                if (weight := self._weights.get(parameter)) is not None:
                    weight.prefetch()

    def save(self, tensor: torch.Tensor) -> SavedWeight | None:
        """Return the handle autograd keeps for a streamed weight or a view of one, else None."""
        if not torch._C._has_storage(tensor):
            return None
        weight = self._by_storage.get(int(tensor.untyped_storage()._cdata))
        offset = None if weight is None else weight.offset_of(tensor)
        if weight is None or offset is None:
            return None  # a view with another dtype or range keeps the storage alive
        with default_modes():
            return SavedWeight(tensor, weight, offset)

    def load_now(self, weight: StreamedWeight) -> torch.Tensor:
        """Load a weight that backward or an all-gather needs; return its values."""
        with self.lock, default_modes():
            for block in self._blocks_of.get(weight, ())[:1]:
                self._mark_needed(block)
                if not weight.is_resident:
                    self._load(block, only=weight)
                self._prefetch_next()
            weight.load()
            return weight.values()

    def on_access(self, weight: StreamedWeight) -> None:
        """Record an access to a weight outside its block, and make room for it."""
        with self.lock:
            self._accessed.pop(weight, None)
            self._accessed[weight] = None
            self._offload_accessed(keep=weight)

    # ------------------------------------------------------------------ memory, under the lock
    def _mark_needed(self, block: StreamedBlock) -> None:
        self._order.record(block, backward=torch._C._current_graph_task_id() != -1)
        self._resident.pop(block, None)
        self._resident[block] = None

    def _load(self, block: StreamedBlock, only: StreamedWeight | None = None) -> None:
        """Load the weights of a block that is needed now, or one of them."""
        self._make_room(max(1, self._most - 1), keep=block)
        for weight in block.weights:
            weight.prefetch()
        for weight in block.weights:
            if only is None or weight is only:
                weight.load()
            if weight.is_resident:
                self._by_storage[weight.storage_key] = weight

    def _prefetch_next(self) -> None:
        """Start loading the next blocks, as far as there is memory for them."""
        for block in self._order.next_blocks(self._most - 1):
            for weight in block.weights:
                if not weight.prefetch():
                    return

    def _make_room(self, most: int, keep: StreamedBlock | None = None) -> None:
        """Offload blocks until at most `most` are in memory, as far as possible."""
        needed = [keep, *self._order.next_blocks(max(0, most - 1))]
        for block in [block for block in self._resident if block not in needed]:
            if len(self._resident) <= most:
                return
            self._offload(block)

    def _offload(self, block: StreamedBlock) -> None:
        # A tied weight stays while another block computes with it.
        if all([self._offload_weight(weight) for weight in block.weights]):
            self._resident.pop(block, None)

    def _offload_accessed(self, keep: StreamedWeight | None = None) -> None:
        """Offload weights accessed outside their blocks; some may stay besides `keep`."""
        room = 0 if keep is None else max(keep.nbytes, _ACCESSED_BYTES)
        held = sum(weight.nbytes for weight in self._accessed)
        for weight in list(self._accessed):
            if held <= room:
                return
            if weight is not keep and self._offload_weight(weight):
                held -= weight.nbytes
                del self._accessed[weight]

    def _offload_weight(self, weight: StreamedWeight) -> bool:
        """Offload a weight if possible; return whether it is offloaded."""
        if weight.is_resident:
            self._calls.wait()
        if weight.is_resident and weight.can_be_offloaded():
            self._by_storage.pop(weight.storage_key, None)
            weight.offload()
        return not weight.is_resident


class _Open(threading.local):
    """The blocks that are computing on this thread, outermost first."""

    def __init__(self) -> None:
        self.blocks: list[tuple[StreamedBlock, ExitStack]] = []


class _CallsInProgress:
    """The calls in which other threads are; see [Note: grace period]."""

    def __init__(self) -> None:
        #: Whether weights were guarded since the last `wait`.
        self.may_have_readers = False
        # Those in which a thread has stayed for a whole grace period.
        self._waited_for: set[tuple[int, int, int]] = set()

    def wait(self) -> None:
        """Wait until each thread has left its call, unless it was waited for before."""
        if not self.may_have_readers:
            return
        self.may_have_readers = False
        deadline = time.perf_counter() + _GRACE_SECONDS
        self._waited_for &= (found := self._find())
        waiting = found - self._waited_for
        while waiting and time.perf_counter() < deadline:
            time.sleep(1e-4)
            waiting &= self._find()
        self._waited_for |= waiting

    def _find(self) -> set[tuple[int, int, int]]:
        """Return threads that may read weights, each with its frame and instruction."""
        own = threading.get_ident()
        return {
            (thread, id(frame), frame.f_lasti)
            for thread, frame in _current_frames().items()
            if thread != own and not frame.f_globals.get("__name__", "").startswith(_NO_READERS)
        }


def _current_frames() -> dict[int, FrameType]:
    """Return the frame of each thread.

    CPython 3.11 makes them while it holds a lock that the garbage collector may wait for: that
    frees `threading.local` objects, and its callbacks close engines (CPython issue 106883). The
    caller's own frame is among them, so a variable with the result would be a reference cycle.
    """
    with _frames_lock:
        collects = gc.isenabled()
        try:
            gc.disable()
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
