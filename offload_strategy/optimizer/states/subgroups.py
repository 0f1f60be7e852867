"""Subgroups: the unit in which optimizer states are read, updated and written.

[Note: flat buffers]
The tensors of a subgroup lie in one flat buffer, which only I/O sees. Kernels get each tensor by
itself, in its own shape and strides, because a kernel that runs over packed tensors rounds
differently where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_strategy.optimizer.states.parameter_slices import (
    ParameterSlice,
    in_batches,
    may_be_sliced,
    slice_parameter,
)
from offload_strategy.optimizer.states.precision import INNER, Precision, copy_rounded
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, Tier
from offload_strategy.torch_support.accelerator import is_asynchronous
from offload_strategy.torch_support.dtensors import local_tensor
from offload_strategy.units import round_up

#: Alignment of each tensor: that of PyTorch's allocators at least, so that vector loads stay
#: aligned.
ALIGNMENT_BYTES = 256

State = dict[str, Any]


# ---------------------------------------------------------------------- flat buffers
@dataclass(frozen=True, slots=True)
class Segment:
    """Place of one tensor in a flat buffer, with its dtype, shape and strides."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where the next tensor begins, or the buffer ends."""
        return round_up(self.offset + self.nbytes, ALIGNMENT_BYTES)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of a flat uint8 buffer."""
        [tensor] = views_of(flat, [self])
        return tensor


def views_of(flat: torch.Tensor, segments: Sequence[Segment]) -> list[torch.Tensor]:
    """The tensors of segments as views of a flat uint8 buffer of whole elements of each dtype."""
    typed = {dtype: flat.view(dtype) for dtype in {each.dtype for each in segments}}
    begin = flat.storage_offset()
    return [
        typed[each.dtype].as_strided(
            each.shape, each.strides, (begin + each.offset) // each.dtype.itemsize
        )
        for each in segments
    ]


def lay_out(
    tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype] | None = None
) -> list[Segment]:
    """Lay out `packable` tensors one after the other, in `dtypes` (default: their own)."""
    segments = []
    offset = 0
    for tensor, dtype in zip(tensors, dtypes or [t.dtype for t in tensors], strict=True):
        nbytes = tensor.numel() * dtype.itemsize
        segments.append(Segment(offset, nbytes, dtype, tensor.shape, tuple(tensor.stride())))
        offset = segments[-1].end
    return segments


def digest_of(tensor: torch.Tensor) -> int:
    """A number of four bytes that tells a tensor's values, in their order."""
    flat = tensor.detach().to_dense().resolve_conj().resolve_neg().reshape(-1).cpu()
    row = flat.clone(memory_format=torch.contiguous_format)  # one element may have any stride
    return crc32(row.view(torch.uint8).numpy().data)


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
    return kind in (torch.Tensor, torch.nn.Parameter) or stands_for_plain(kind)


def stands_for_plain(kind: type) -> bool:
    """Whether a class of this package declares that it behaves like a plain tensor class."""
    return getattr(kind, "stands_for_plain", False)


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


# ---------------------------------------------------------------------- wrapper subclasses
class Wrapper(NamedTuple):
    """What rebuilds a tensor of a wrapper subclass, given the inner tensors of these names."""

    kind: Any
    inner: tuple[str, ...]
    context: Any
    shape: torch.Size
    strides: tuple[int, ...]


def flatten_wrappers(state: State) -> State:
    """A state with plain tensors in place of wrapper subclasses, as quantized states often are.

    Each of them becomes a `Wrapper` under its name, followed by its inner tensors.
    """
    flat: State = {}
    for name, value in state.items():
        if not is_traceable_wrapper_subclass(value):
            flat[name] = value
            continue
        inner, context = value.__tensor_flatten__()
        flat[name] = Wrapper(type(value), tuple(inner), context, value.shape, value.stride())
        flat |= flatten_wrappers({name + INNER + each: getattr(value, each) for each in inner})
    return flat


def rebuild_wrappers(state: State) -> State:
    """The state that was flattened, whose wrapper subclasses share memory with these tensors."""
    wrappers = [name for name, value in state.items() if isinstance(value, Wrapper)]
    for name in reversed(wrappers):  # inner ones come later
        kind, names, context, shape, strides = state[name]
        inner = {each: state.pop(name + INNER + each) for each in names}
        state[name] = kind.__tensor_unflatten__(inner, context, shape, strides)
    return state


# ---------------------------------------------------------------------- states that are given
@dataclass(frozen=True, eq=False, slots=True)
class OpaqueTensor:
    """A dense tensor of a state dict that `Optimizer.load_state_dict` takes for something else.

    It would move every tensor to its parameter's device and cast it to its dtype, all at once.
    """

    tensor: torch.Tensor


def unwrap_tensors(state: State) -> State:
    """The same state with its tensors."""
    return {
        name: value.tensor if isinstance(value, OpaqueTensor) else value
        for name, value in state.items()
    }


def own_state(param_slice: ParameterSlice, given: State, precision: Precision) -> State:
    """A slice's part of its parameter's state, flattened, in its device and compute dtypes."""
    parameter = param_slice.parameter
    state = flatten_wrappers(param_slice.slice_state(unwrap_tensors(given)))
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not packable(value):
            state[name] = value = value.clone()  # not a view of a memory-mapped file
        if packable(value):
            dtype = value.dtype
            if isinstance(given.get(name), OpaqueTensor) and parameter.is_floating_point():
                dtype = parameter.dtype  # as `Optimizer.load_state_dict` casts it
            if precision.has_master(parameter) and INNER not in name:
                dtype = precision.compute_dtype(dtype)
            state[name] = value.to(parameter.device, dtype)
    return state


# ---------------------------------------------------------------------- states
class StoredState(NamedTuple):
    """One dense state of one slice, whose stored dtype (the segment's) may be narrower."""

    slice_index: int
    name: str
    segment: Segment
    compute_dtype: torch.dtype


@dataclass(eq=False)
class StateSet:
    """The states of one subgroup: a ticket for dense tensors, everything else in memory."""

    #: For each slice, the values that stay in memory (step counters and the like).
    small: list[State]
    #: The tensors in the ticket; without a ticket `small` has them.
    stored: list[StoredState] = field(default_factory=list)
    ticket: Ticket | None = None
    #: How often these states were updated; of loaded ones, as far as they tell.
    updates: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the ticket."""
        return 0 if self.ticket is None else self.ticket.nbytes

    def metadata(self) -> StateSet:
        """Copies of the small values, and which tensors are stored, without the ticket.

        Without a ticket, as after an update that failed, `small` has the stored ones as well: other
        subgroups may have other rows of the same states.
        """
        states, stored = self.small_copies(), self.stored
        if self.ticket is None:
            self.upcast(states)
            stored = stored_states(states, Precision())
        return StateSet(states, stored)

    def small_copies(self) -> list[State]:
        """Copies of the values in memory, of wrapper subclasses flattened ones."""

        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return deepcopy(value)
            if is_asynchronous(value.device):  # it may belong to another stream, and be freed soon
                value.record_stream(torch.accelerator.current_stream(value.device))
            return value.clone()

        return [
            {name: copy(value) for name, value in flatten_wrappers(state).items()}
            for state in self.small
        ]

    def upcast(self, states: list[State]) -> None:
        """Upcast states to their compute dtypes, where the stored dtypes differ."""
        for state, names in zip(states, self.rounded_names(), strict=True):
            state.update((name, state[name].float()) for name in names if name in state)

    def rounded_names(self) -> list[list[str]]:
        """For each slice, the float32 states that are stored in another dtype."""
        names: list[list[str]] = [[] for _ in self.small]
        for index, name, segment, dtype in self.stored:
            if segment.dtype != dtype:
                names[index].append(name)
        return names


@dataclass(eq=False)
class Subgroup:
    """Slices of one parameter group, dtype and device that are updated together."""

    group_index: int
    slices: list[ParameterSlice]
    number: int = 0  # Unique within an optimizer
    owner: int = 0  # The data-parallel rank that updates it
    stays_on_device: bool = False  # Whether its states have a place in a tier of the device
    states: StateSet = field(init=False)
    #: Indices of the slices whose gradient is final in this backward pass.
    ready: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.states = StateSet([{} for _ in self.slices])


@dataclass(eq=False)
class UnpackedStates:
    """The states of a subgroup during an update, unpacked from a set. They have stored dtypes."""

    source: StateSet
    #: One dict for each slice, to be changed.
    states: list[State]
    #: The bytes of the ticket, which may be overwritten, and the stored tensors as views of it.
    flat: torch.Tensor | None = None
    views: Sequence[torch.Tensor] = ()

    @classmethod
    def of(cls, source: StateSet, flat: torch.Tensor | None) -> UnpackedStates:
        """Unpack a set, of whose ticket these are the bytes."""
        states = source.small_copies()
        views = [] if flat is None else views_of(flat, [each.segment for each in source.stored])
        for each, view in zip(source.stored, views, strict=False):
            states[each.slice_index][each.name] = view
        return cls(source, [rebuild_wrappers(state) for state in states], flat, views)

    def pack(
        self,
        store: TensorStore,
        tiers: Sequence[Tier],
        precision: Precision,
        generator: torch.Generator | None,
    ) -> StateSet:
        """Pack the updated states into a new set, whose tensors go to the tiers.

        Their buffer is used again if every tensor still fits into its segment, as it usually does;
        else the store lends another. A generator rounds stochastically; None rounds to nearest.
        """
        updates = self.source.updates + 1
        states = [flatten_wrappers(state) for state in self.states]
        small = [dict(state) for state in states]
        tensors = [small[each.slice_index].pop(each.name, None) for each in self.source.stored]
        flat, stored, views = self.flat, self.source.stored, self.views
        if (
            flat is None
            or not all(map(_fits, tensors, views, stored))
            or any(packable(value) for state in small for value in state.values())
        ):
            small, stored = states, stored_states(states, precision)
            tensors = [small[each.slice_index].pop(each.name) for each in stored]
            if not stored:
                return StateSet(small, updates=updates)
            flat = store.borrow("optimizer", stored[-1].segment.end, tensors[0].device)
            views = views_of(flat, [each.segment for each in stored])
        for tensor, view in zip(tensors, views, strict=True):
            if tensor is not view and tensor.data_ptr() != view.data_ptr():
                copy_rounded(view, tensor, generator)
        ticket = store.put(flat, "optimizer", tiers, replaces=self.source.ticket)
        return StateSet(small, stored, ticket, updates)


def stored_states(states: Sequence[State], precision: Precision) -> list[StoredState]:
    """Lay out every state that a ticket can have, in its stored dtype."""
    places = [
        (index, name, value)
        for index, state in enumerate(states)
        for name, value in state.items()
        if packable(value)
    ]
    dtypes = [precision.stored_dtype(value.dtype, name) for _, name, value in places]
    segments = lay_out([value for _, _, value in places], dtypes)
    return [
        StoredState(index, name, segment, value.dtype)
        for (index, name, value), segment in zip(places, segments, strict=True)
    ]


def _fits(state: object, view: torch.Tensor, stored: StoredState) -> bool:
    """Whether an updated state is where it was unpacked, or can be rounded into that place."""
    return state is view or (
        isinstance(state, torch.Tensor)
        and state.dtype == stored.compute_dtype
        and (state.shape, state.stride()) == (view.shape, view.stride())
        and (view.dtype != state.dtype or view.data_ptr() == state.data_ptr())
    )


# ---------------------------------------------------------------------- planning
def plan_subgroups(
    optimizer: Optimizer,
    size: Callable[[int], int],
    is_elementwise: Callable[[int], bool],
    states: Mapping[torch.Tensor, State],
) -> Iterator[Subgroup]:
    """Divide parameters into subgroups, last registered first.

    That is about the order in which backward completes gradients, so the first update can begin
    early. `size` gives the maximum number of elements of a subgroup for the number of all elements;
    `is_elementwise` tells by index which are sliced if their `states` may be: others may exceed it.
    """
    groups = optimizer.param_groups
    limit = size(sum(local_tensor(p).numel() for group in groups for p in group["params"]))
    for group_index in reversed(range(len(groups))):
        slices: list[ParameterSlice] = []
        for parameter in reversed(groups[group_index]["params"]):
            if is_lazy(parameter):
                continue
            is_large = local_tensor(parameter).numel() > limit
            fits = is_large and may_be_sliced(parameter, states.get(parameter, {}))
            if fits and is_elementwise(group_index):
                slices += slice_parameter(parameter, limit)
            else:
                slices.append(ParameterSlice(parameter))
        for _, alike in groupby(slices, lambda each: (each.parameter.dtype, each.parameter.device)):
            yield from (Subgroup(group_index, batch) for batch in in_batches(alike, limit))
