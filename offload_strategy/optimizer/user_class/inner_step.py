"""Updates of a few tensors by the user's own optimizer class: whole, or in chunks.

[Note: rehearsals]
What an optimizer does in a certain step only is found before it has changed a weight: the first
update of a group in a step runs on copies of its two smallest tensors before, together and alone.

[Note: updates in chunks]
States whose stored dtype is narrower than their compute dtype have to be upcast. All at once that
needs memory of twice their size; a chunk at a time, they stay in the processor's caches. The same
holds for gradients of weights that have a master weight. Chunks are parameter slices, which change
no bits: see [Note: where a parameter may be sliced].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.states.parameter_slices import (
    ParameterSlice,
    in_batches,
    slice_parameter,
)
from offload_strategy.optimizer.states.precision import copy_rounded
from offload_strategy.optimizer.states.subgroups import (
    StateSet,
    flatten_wrappers,
    packable,
    rebuild_wrappers,
)
from offload_strategy.optimizer.user_class.side_effects import (
    RandomOperations,
    UnfitUpdateError,
    Watch,
)
from offload_strategy.torch_support.accelerator import is_asynchronous

#: Elements of a chunk, which take 8 MiB for two states in float32: smaller chunks cost more in
#: calls than they save in caches (a step took 5 % longer with a quarter of them).
CHUNK_ELEMENTS = 1024 * 1024

#: Elements of the largest tensor that is copied for a rehearsal.
_REHEARSED_ELEMENTS = 16 * 1024
#: How often an update is repeated because other threads draw random numbers.
_MOST_FALSE_ALARMS = 3
_false_alarms: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

_States = Sequence[dict[str, Any]]


# ---------------------------------------------------------------------- whole
def run_update(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor], states: _States
) -> None:
    """Update tensors in place, and their states, as `optimizer.step()` would update its own.

    The class's own `step` runs on a copy of the instance: same code path, same kernel (single,
    foreach or fused), same bits. States that are empty are filled.
    """
    copy = copy_with_parameters(optimizer, group, parameters, states)
    watch, step = Watch(copy), unhooked_step(type(optimizer))
    (torch.compiler.disable(step) if _is_compiling() else step)(copy)
    drawn = watch.has_drawn()
    for parameter, state in zip(parameters, states, strict=True):
        updated = copy.state[parameter]
        if updated is not state:  # the class has assigned another one
            state.clear()
            state.update(updated)
    is_watched = _false_alarms.get(optimizer, 0) < _MOST_FALSE_ALARMS
    if drawn and is_watched and _draws_random_numbers(optimizer, group, parameters, states):
        raise UnfitUpdateError("draws random numbers, which subgroups would draw in another order")


def _is_compiling() -> bool:
    """Whether torch.compile would compile what is called from here, as after a graph break."""
    return bool(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def refuse_compilation() -> None:
    """Raise `OffloadError` if `step()` is called from what torch.compile compiles."""
    if _is_compiling():
        raise OffloadError(
            "optimizer.step() is called from what torch.compile compiles, where updates of "
            "subgroups round differently: call step() outside, or set optimizer.enabled: false."
        )


def _draws_random_numbers(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor], states: _States
) -> bool:
    """Whether this thread has drawn in the last update: it is repeated on copies to see that."""
    copies, copied_states = _copies(parameters, states)
    for state in copied_states:
        for name, number in numbers_of(state).items():
            state[name] = state[name] - int(number >= 1 and number.is_integer())  # a count of steps
    copy = copy_with_parameters(optimizer, group, copies, copied_states)
    with RandomOperations() as operations, torch.compiler.set_stance("force_eager"):
        unhooked_step(type(optimizer))(copy)
    _false_alarms[optimizer] = _false_alarms.get(optimizer, 0) + (not operations.found)
    return bool(operations.found)


def rehearse(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor], states: _States
) -> bool:
    """See [Note: rehearsals]; return whether there was a tensor small enough.

    Results are compared on the CPU alone, as an accelerator would have to be waited for.
    """
    if has_overrides(optimizer):
        return True
    small = sorted(
        (each.numel(), index)
        for index, each in enumerate(parameters)
        if each.numel() <= _REHEARSED_ELEMENTS and packable(each) and packable(each.grad)
    )
    results: list[dict[str, Any]] = []
    for chosen in ([i for _, i in (small * 2)[:2]], [i for _, i in small[:1]]):
        if chosen and not (results and is_asynchronous(parameters[chosen[0]].device)):
            copies, its = _copies([parameters[i] for i in chosen], [states[i] for i in chosen])
            run_update(optimizer, group, copies, its)
            results.append({"": copies[0], **its[0]})
    if len(results) == 2 and not same_values(*results):
        raise UnfitUpdateError("updates a parameter in another way when others are there")
    return bool(results)


def _copies(
    parameters: Sequence[torch.Tensor], states: _States
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    copies = [parameter.detach().clone() for parameter in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad_dtype = parameter.grad_dtype
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    return copies, [rebuild_wrappers(state) for state in StateSet(list(states)).small_copies()]


def numbers_of(state: dict[str, Any]) -> dict[str, float]:
    """The states that are numbers, or tensors of one number."""
    values = {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in state.items()
    }
    return {name: float(value) for name, value in values.items() if type(value) in (int, float)}


def same_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states have the same tensors, to the last bit, and numbers, also in lists."""

    def same(mine: Any, theirs: Any) -> bool:
        if not isinstance(mine, torch.Tensor):  # NaN, too, is written as NaN
            return type(mine) not in (int, float) or repr(mine) == repr(theirs)
        return (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and torch.equal(
            *(each.reshape(-1).view(torch.uint8) for each in (mine, theirs))
        )

    flat = (flatten_wrappers(state) for state in (one, other))
    (mine, names), (theirs, its_names) = (
        tree_flatten({name: state[name] for name in sorted(state, key=str)}) for state in flat
    )
    return names == its_names and all(map(same, mine, theirs))


def copy_with_parameters(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor], states: _States
) -> Optimizer:
    """An instance of the same class with the same attributes, which has only these parameters."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update({name: v for name, v in optimizer.__dict__.items() if name != "step"})
    copy.param_groups = [{**group, "params": list(parameters)}]
    copy.state = defaultdict(dict, zip(parameters, states, strict=True))
    return copy


def unhooked_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's `step` without the hooks that `Optimizer` wraps around it, which run once."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def has_overrides(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes, whose settings parameters may override."""
    return hasattr(getattr(optimizer, "mng", None), "pid2config")


def with_overrides(
    optimizer: Any, parameters: Sequence[torch.Tensor] = (), weights: Sequence[torch.Tensor] = ()
) -> Any:
    """An instance that finds what parameters override for the weights that stand for them.

    What they override is kept for all optimizers, by their identity and by their place in a group.
    """
    if not has_overrides(optimizer):
        return optimizer
    optimizer.check_overrides()  # those of modules, as the first step does
    groups = enumerate(optimizer.param_groups)
    places = {id(p): (i, j) for i, group in groups for j, p in enumerate(group["params"])}
    instance, manager = object.__new__(type(optimizer)), object.__new__(type(optimizer.mng))
    manager.initialize()
    for parameter, weight in zip(parameters, weights, strict=True):
        by_place = optimizer.mng.index2config.get(places[id(parameter)], {})
        by_identity = optimizer.mng.pid2config.get(id(parameter), {})
        manager.pid2config[id(weight)] = {**by_place, **by_identity}
    # Nothing is left to be done at its first step, and its states are swapped instead of paged.
    changed = {"mng": manager, "initialized": True, "is_paged": False}
    instance.__dict__.update({**optimizer.__dict__, **changed})
    return instance


# ---------------------------------------------------------------------- in chunks
def can_update_in_chunks(weights: Sequence[torch.Tensor], states: _States) -> bool:
    """Whether weights, gradients and stored states are contiguous, dense and on the CPU."""
    return all(
        tensor is not None
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.shape == weight.shape
        for weight, state in zip(weights, states, strict=True)
        for tensor in (weight, weight.grad, *filter(packable, state.values()))
    )


def update_in_chunks(
    run: Callable[[Sequence[torch.Tensor], _States], None],
    weights: Sequence[torch.Tensor],
    states: _States,
    upcast: Sequence[Collection[str]],
    generator: torch.Generator | None,
) -> bool:
    """Update weights with gradients in place, and their states in their stored dtypes.

    `run` updates some tensors and their states, like `run_update`. `upcast` has, for each weight,
    the states to be upcast to float32. A generator rounds stochastically, None to nearest. Returns
    whether there are new states.
    """
    known = [len(state) for state in states]
    updated: list[list[tuple[ParameterSlice, dict[str, Any]]]] = [[] for _ in weights]
    index_of = {id(weight): index for index, weight in enumerate(weights)}
    slices = (each for weight in weights for each in slice_parameter(weight, CHUNK_ELEMENTS))
    for batch in in_batches(slices, CHUNK_ELEMENTS):
        chunk = [(index_of[id(each.parameter)], each) for each in batch]
        parameters, slice_states = [], []
        for index, param_slice in chunk:
            parameter, gradient = param_slice.values, weights[index].grad
            if param_slice.rows is not None and gradient is not None:
                parameter.grad_dtype = gradient.dtype
                parameter.grad = param_slice.of(gradient)
            state = param_slice.slice_state(states[index])
            state.update((name, state[name].float()) for name in upcast[index])
            parameters.append(parameter)
            slice_states.append(state)
        run(parameters, slice_states)
        for (index, param_slice), state in zip(chunk, slice_states, strict=True):
            for name in upcast[index]:
                value = state.pop(name, None)
                if value is not None:
                    copy_rounded(param_slice.of(states[index][name]), value, generator)
            updated[index].append((param_slice, state))
    for state, its_slices in zip(states, updated, strict=True):
        _merge_states(state, its_slices)
    return known != [len(state) for state in states]


def _merge_states(
    state: dict[str, Any], updated: Sequence[tuple[ParameterSlice, dict[str, Any]]]
) -> None:
    """Write what was not upcast of the slices' states into the state of their weight."""
    for name, value in updated[-1][1].items():
        stored = state.get(name)
        if stored is None or not packable(stored):
            shape = updated[-1][0].values.shape
            of_slice = isinstance(value, torch.Tensor) and value.shape == shape
            parts = [each[name] for _, each in updated]
            state[name] = torch.cat(parts) if of_slice and len(parts) > 1 else parts[0]
            continue
        for param_slice, each in updated:
            place = param_slice.of(stored)
            if place.data_ptr() != each[name].data_ptr():
                place.copy_(each[name])
