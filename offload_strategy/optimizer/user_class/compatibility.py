"""Whether an optimizer's states can be offloaded exactly, and how many bytes they take.

Subgroups are updated one after the other, by the user's own class, in an order of our own. That
gives exactly the same numbers if the update of a parameter depends on that parameter alone: on no
other, on nothing that the optimizer keeps elsewhere, and on no random numbers, which would be drawn
in another order. The check runs the optimizer on two small tensors, together and one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload_strategy.errors import ConfigError
from offload_strategy.optimizer.states.parameter_slices import (
    SLICE_ALIGNMENT,
    ParameterSlice,
    is_sharded,
    local_tensor,
)
from offload_strategy.optimizer.states.precision import INNER, MASTER_WEIGHT, Precision
from offload_strategy.optimizer.states.subgroups import flatten_wrappers, is_plain, packable
from offload_strategy.optimizer.user_class.inner_step import (
    copy_with_parameters,
    has_overrides,
    run_update,
    unhooked_step,
    with_overrides,
)
from offload_strategy.torch_support.accelerator import (
    forked_generators,
    generator_states,
    generators_of,
)

#: Maximum size of each dimension of a small parameter.
_LONGEST = 8
_STEPS = 2
#: Attributes that a copy of an optimizer has of its own. The last one caches a check of devices.
_OWN = frozenset({"param_groups", "state", "step", "_need_device_dtype_check_for_fused"})

#: Sizes and slices of the tensors on which `is_elementwise` tries an optimizer: enough for several
#: threads; no multiple of any block, and a multiple of all.
_ELEMENTS = (2 * 65536 + 1237, 2 * 65536)
_CUTS = tuple(blocks * SLICE_ALIGNMENT for blocks in (0, 1, 3, 1025, 1500))


class UnsupportedOptimizerError(Exception):
    """Why the states of an optimizer cannot be offloaded; completes a sentence "it ..."."""


@dataclass(frozen=True)
class StateFormat:
    """The shape of a small parameter, and the shape and dtype of each dense state that it gets."""

    parameter_shape: torch.Size
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    def bytes_for(self, parameter: torch.Tensor, precision: Precision) -> int:
        """Stored bytes for a parameter with as many dimensions, of any size."""
        return precision.master_bytes(parameter) + sum(
            precision.stored_dtype(dtype).itemsize * prod(self._sizes(shape, parameter))
            for shape, dtype in self.tensors
        )

    def _sizes(self, shape: torch.Size, parameter: torch.Tensor) -> Iterable[int]:
        small = self.parameter_shape
        if len(shape) != len(small) or parameter.dim() != len(small):
            return [parameter.numel()] if shape == small else shape
        sizes = zip(shape, small, parameter.shape, strict=True)
        return [size if size != tried else real for size, tried, real in sizes]


def check_supported(optimizer: Optimizer, precision: Precision | None = None) -> int:
    """Refuse optimizers whose states cannot be offloaded without changing numbers.

    Returns:
        Bytes of its states once every parameter has been updated.

    Raises:
        ConfigError: an unsupported optimizer or option, or no parameters.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"attach: expected a torch.optim.Optimizer, got {kind.__name__}. Pass the optimizer "
            f"that updates the model's parameters."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            "attach: differentiable=True needs the whole history of the states in memory, so they "
            "cannot be offloaded. Set it to False, or set optimizer.enabled to false."
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ConfigError(
            "attach: the optimizer has no parameters, so there is nothing to offload."
        )
    precision = precision or Precision()
    return sum(check_group(optimizer, group, precision) for group in optimizer.param_groups)


def check_group(optimizer: Optimizer, group: dict[str, Any], precision: Precision) -> int:
    """`check_supported` for one parameter group of an otherwise supported optimizer."""
    parameters = group["params"]
    if not parameters:
        return 0
    for parameter in parameters:
        if parameter.layout is not torch.strided:
            raise ConfigError(
                f"attach: the states of a parameter of layout {parameter.layout} cannot be "
                f"offloaded; only those of dense parameters can."
            )
    if any(parameter.is_meta for parameter in parameters):
        raise ConfigError(
            "attach: the optimizer has parameters on the meta device. Materialise the model first "
            "(model.to_empty(device=...) and load weights), and make the optimizer after that."
        )
    try:
        formats = try_group(optimizer, group, precision)
    except UnsupportedOptimizerError as reason:
        kind = type(optimizer)
        raise ConfigError(
            f"attach: the states of {kind.__module__}.{kind.__qualname__} cannot be offloaded: it "
            f"{reason}. Use an optimizer that updates every parameter by itself (most of "
            f"torch.optim do), or set optimizer.enabled to false and offload activations only."
        ) from reason.__cause__
    total = 0
    for parameter in map(local_tensor, parameters):
        same_dim = [each for each in formats if len(each.parameter_shape) == parameter.dim()]
        total += (same_dim or formats)[-1].bytes_for(parameter, precision)
    return total


def _quantized(state: dict[str, Any]) -> bool:
    """Whether a state has quantized tensors."""
    return any(
        INNER in name
        or (packable(value) and value.dtype.itemsize == 1 and value.dtype is not torch.bool)
        for name, value in flatten_wrappers(state).items()
    )


def try_group(
    optimizer: Optimizer, group: dict[str, Any], precision: Precision
) -> list[StateFormat]:
    """Update two small parameters like those of a group, together and one by one.

    Neither the optimizer nor its parameters change, nor does the state of torch's random numbers.
    Returns the format of the states of both; raises `UnsupportedOptimizerError` if its numbers
    would not be the same.
    """
    optimizer, kind = with_overrides(optimizer), type(optimizer)
    closure = inspect.signature(unhooked_step(kind)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizerError(
            "needs a closure, which it may call several times in a step"
        )
    inner = next((n for n, v in vars(optimizer).items() if isinstance(v, Optimizer)), None)
    if inner is not None:
        raise UnsupportedOptimizerError(
            f"wraps another optimizer ({inner}); attach that one before it is wrapped"
        )
    plain = _plain_parameters(group)
    if not plain:
        raise UnsupportedOptimizerError(
            "updates parameters of a tensor subclass only, on which it was not tried"
        )
    models = (min(plain, key=torch.Tensor.dim), max(plain, key=torch.Tensor.dim))
    together, apart = (
        [_SmallParameter(optimizer, model, precision, seed) for seed, model in enumerate(models)]
        for _ in range(2)
    )
    devices = generators_of(models)
    with forked_generators(devices):
        before = _fingerprint(optimizer, group)
        random = generator_states(devices)
        changed = _run_steps(optimizer, group, together)
        for small in apart:
            changed |= _run_steps(optimizer, group, [small])
        drew = not all(map(torch.equal, random, generator_states(devices)))
        after = _fingerprint(optimizer, group)
    changed |= {name for name, value in after.items() if before.get(name) != value}
    if changed:
        raise UnsupportedOptimizerError(
            f"keeps something for all parameters together, outside of their states "
            f"({', '.join(sorted(changed))})"
        )
    if drew:
        raise UnsupportedOptimizerError(
            "draws random numbers, which subgroups would draw in another order"
        )
    if not all(
        _same(one.tensors(), other.tensors()) for one, other in zip(together, apart, strict=True)
    ):
        raise UnsupportedOptimizerError(
            f"updates a parameter in another way when others are there ({kind.__name__} was tried "
            f"on two small tensors, together and one by one)"
        )
    if any(map(is_sharded, group["params"])) and not is_elementwise(optimizer, group, precision):
        raise UnsupportedOptimizerError(
            "does not update every element by itself, and there are sharded parameters, of which "
            "each rank updates its part"
        )
    return [small.state_format() for small in together]


def changes_gradients(optimizer: Optimizer, group: dict[str, Any], precision: Precision) -> bool:
    """Whether a supported optimizer's update changes the gradients that it is given.

    Then it cannot run ahead of `step()`: until then gradients must be as backward left them, and
    after it as the update left them.
    """
    model = _plain_parameters(group)[0]
    small = _SmallParameter(optimizer, model, precision, 0)
    with forked_generators(generators_of([model])):
        _run_steps(optimizer, group, [small])
    assert small.parameter.grad is not None
    return not torch.equal(small.parameter.grad, small.gradients[-1])


def is_elementwise(optimizer: Optimizer, group: dict[str, Any], precision: Precision) -> bool:
    """Whether slices of a parameter can be updated one after the other, with the same bits.

    Tried on tensors of the group's dtype and device, whole and sliced at multiples of
    `SLICE_ALIGNMENT`; see [Note: where a parameter may be sliced]. A state must have the shape of
    the parameter, or be the same for every slice. An optimizer that compiles itself for every shape
    is never sliced.
    """
    model = next(iter(_plain_parameters(group)), None)
    if model is None or not model.dtype.is_floating_point or has_overrides(optimizer):
        return False
    dtype = precision.compute_dtype(model.dtype)
    for size in _ELEMENTS:
        generator = torch.Generator().manual_seed(0)
        values, *gradients = (
            torch.randn(size, generator=generator).to(model.device, dtype)
            for _ in range(1 + _STEPS)
        )
        whole, sliced = values.clone(), values.clone()
        slices = [ParameterSlice(sliced, rows) for rows in pairwise((*_CUTS, size))]
        state: dict[str, Any] = {}
        slice_states: list[dict[str, Any]] = [{} for _ in slices]

        def update(tensor: torch.Tensor, gradient: torch.Tensor, its: dict[str, Any]) -> None:
            tensor.grad = gradient
            with torch.compiler.set_stance("fail_on_recompile"):
                run_update(optimizer, group, [tensor], [its])

        with torch.no_grad(), forked_generators(generators_of([model])):
            try:
                for gradient in gradients:
                    update(whole, gradient, state)
                    for each, its_state in zip(slices, slice_states, strict=True):
                        update(each.values, each.of(gradient), its_state)
            except Exception:
                return False
        tensors = filter(packable, flatten_wrappers(state).values())
        if not (
            all(value.shape == values.shape for value in tensors)
            and torch.equal(whole.view(torch.uint8), sliced.view(torch.uint8))
            and all(map(_same, [each.slice_state(state) for each in slices], slice_states))
        ):
            return False
    return True


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states have the same values, to the last bit."""

    def same(mine: Any, theirs: Any) -> bool:
        if not isinstance(mine, torch.Tensor):
            return bool(mine == theirs)
        return (
            isinstance(theirs, torch.Tensor)
            and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (mine, theirs)))
        )

    one, other = flatten_wrappers(one), flatten_wrappers(other)
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------- small parameters
class _SmallParameter:
    """A small parameter like one of the user's, with its state and a gradient for each step."""

    def __init__(
        self, optimizer: Optimizer, model: torch.Tensor, precision: Precision, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = [min(size, _LONGEST) for size in model.shape]
        drawn = torch.complex64 if model.dtype.is_complex else torch.float32

        def random() -> torch.Tensor:
            values = torch.randn(shape, generator=generator, dtype=drawn)
            return values.to(device=model.device, dtype=precision.compute_dtype(model.dtype))

        def small(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return deepcopy(value)
            if value.dim() == model.dim():
                value = value[tuple(slice(0, _LONGEST) for _ in model.shape)]
            copy = value.detach().clone()
            return copy.to(precision.compute_dtype(value.dtype)) if packable(value) else copy

        self.parameter = nn.Parameter(random())
        self.gradients = [random() for _ in range(_STEPS)]
        state = optimizer.state.get(model, {})
        if _quantized(state):
            state = {}  # a part of it has no meaning
        self.state = {n: small(value) for n, value in state.items() if n != MASTER_WEIGHT}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameter, and its states that are tensors."""
        tensors = {n: v for n, v in self.state.items() if isinstance(v, torch.Tensor)}
        return {**tensors, "the parameter itself": self.parameter.detach()}

    def state_format(self) -> StateFormat:
        """The format of its states."""
        tensors = [value for value in self.state.values() if packable(value)]
        return StateFormat(self.parameter.shape, tuple((t.shape, t.dtype) for t in tensors))


def _plain_parameters(group: dict[str, Any]) -> list[torch.Tensor]:
    """Local tensors of a group that are plain ones; without empty ones, if there are others."""
    plain = [p for p in map(local_tensor, group["params"]) if is_plain(type(p))]
    return [p for p in plain if p.numel()] or plain


def _run_steps(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[_SmallParameter]
) -> set[str]:
    """Run a few steps on a copy; return the attributes outside of states that it has changed."""
    changed = set()
    for number in range(_STEPS):
        for small in parameters:
            small.parameter.grad = small.gradients[number].clone()
        copy = copy_with_parameters(
            optimizer, group, [s.parameter for s in parameters], [s.state for s in parameters]
        )
        try:
            with torch.compiler.set_stance("force_eager"):  # compiling takes seconds for each shape
                unhooked_step(type(optimizer))(copy)
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"failed on two small tensors: {type(error).__name__}: {error}"
            ) from error
        for small in parameters:
            small.state = dict(copy.state[small.parameter])
        before = _shared_attributes(optimizer, group)
        now = _shared_attributes(copy, copy.param_groups[0])
        changed |= {name for name in now if now[name] is not before.get(name, _OWN)}
    return changed


def _shared_attributes(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Attributes and settings that all parameters of a group share."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
    return {**own, **{name: value for name, value in group.items() if name != "params"}}


def _fingerprint(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """What tells whether mutable shared attributes were changed in place, one level deep."""
    prints: dict[str, Any] = {}
    for name, value in _shared_attributes(optimizer, group).items():
        if isinstance(value, torch.Tensor):
            prints[name] = value._version
        elif isinstance(value, dict):
            prints[name] = [(key, id(item)) for key, item in value.items()]
        elif isinstance(value, list | set | tuple):
            prints[name] = [id(item) for item in value]
    return prints
