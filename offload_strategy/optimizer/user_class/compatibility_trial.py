"""A trial of an optimizer on two small tensors: is the state of each parameter its own?

Subgroups are updated one after the other, by the user's own class, in an order of our own. That
gives the same numbers exactly if the update of one parameter depends on that parameter alone: on no
other, on nothing that the optimizer keeps elsewhere, and on no random numbers, which would be drawn
in another order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload_strategy.optimizer.states.dtensor_shards import is_sharded, local_part
from offload_strategy.optimizer.states.flat_layout import is_plain, packable
from offload_strategy.optimizer.states.parameter_slices import CUT_ELEMENTS
from offload_strategy.optimizer.states.precision import MASTER, Precision
from offload_strategy.optimizer.user_class.inner_step import shadow_of, unhooked_step

#: Elements of a stand-in along each dimension at most.
_LONGEST = 8
_STEPS = 2
#: What a shadow has of its own, and what may be forgotten: torch notes that it has checked devices.
_OWN = frozenset({"param_groups", "state", "step", "_need_device_dtype_check_for_fused"})


class Unfit(Exception):
    """Why an optimizer cannot be swapped; completes "it ..."."""


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps for a parameter.

    Args:
        like: shape of the stand-in that it was found with.
        tensors: shape and dtype of each tensor that goes to a tier.
    """

    like: torch.Size
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    def bytes_for(self, parameter: torch.Tensor, precision: Precision) -> int:
        """Bytes for a parameter of as many dimensions, of any size."""
        return sum(
            precision.kept(dtype).itemsize * prod(self._sizes(shape, parameter))
            for shape, dtype in self.tensors
        )

    def _sizes(self, shape: torch.Size, parameter: torch.Tensor) -> Iterable[int]:
        if len(shape) != len(self.like) or parameter.dim() != len(self.like):
            return [parameter.numel()] if shape == self.like else shape
        real = zip(shape, self.like, parameter.shape, strict=True)
        return [size if size != small else large for size, small, large in real]


def try_out(optimizer: Optimizer, group: dict[str, Any], precision: Precision) -> list[Kept]:
    """Update stand-ins for two parameters of a group, together and one by one.

    Neither the optimizer nor its parameters change, nor does the state of torch's random numbers.

    Args:
        optimizer: the user's.
        group: one of its parameter groups, with parameters.
        precision: of the update.

    Returns:
        What it keeps for each of the two.

    Raises:
        Unfit: its numbers would not be the same.
    """
    kind = type(optimizer)
    _check_interface(optimizer)
    plain = _plain_parts(group)
    if not plain:
        raise Unfit("updates parameters of a tensor subclass only, on which it was not tried")
    models = (min(plain, key=torch.Tensor.dim), max(plain, key=torch.Tensor.dim))
    together, apart = (
        [_StandIn(optimizer, model, precision, seed) for seed, model in enumerate(models)]
        for _ in range(2)
    )
    devices = list({p.device for p in models if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        before = _fingerprint(_shared(optimizer, group))
        random = _random_states(devices)
        changed = _run(optimizer, group, together)
        for stand_in in apart:
            changed |= _run(optimizer, group, [stand_in])
        drew = not all(map(torch.equal, random, _random_states(devices)))
        after = _fingerprint(_shared(optimizer, group))
    changed |= {name for name, mark in after.items() if before.get(name) != mark}
    if changed:
        raise Unfit(
            f"keeps something for all parameters together, outside of their states "
            f"({', '.join(sorted(changed))})"
        )
    if drew:
        raise Unfit("draws random numbers, which subgroups would draw in another order")
    if not all(one.same_bits(other) for one, other in zip(together, apart, strict=True)):
        raise Unfit(
            f"updates a parameter in another way when others are there ({kind.__name__} was tried "
            f"on two small tensors, together and one by one)"
        )
    if any(map(is_sharded, group["params"])) and not can_be_cut(optimizer, group, precision):
        raise Unfit(
            "does not update every element by itself, and there are sharded parameters, of which "
            "each rank updates its part"
        )
    return [stand_in.kept() for stand_in in together]


def _plain_parts(group: dict[str, Any]) -> list[torch.Tensor]:
    """What of a group's parameters is here and can stand for others; not empty, if possible."""
    parts = [part for p in group["params"] if is_plain(type(part := local_part(p)))]
    return [part for part in parts if part.numel()] or parts


def _random_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _check_interface(optimizer: Optimizer) -> None:
    closure = inspect.signature(unhooked_step(type(optimizer))).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unfit("needs a closure, which it may call several times in a step")
    inner = next((n for n, v in vars(optimizer).items() if isinstance(v, Optimizer)), None)
    if inner is not None:
        raise Unfit(f"wraps another optimizer ({inner}); attach that one before it is wrapped")


class _StandIn:
    """A small tensor in the place of a parameter, with its state and a gradient for each step."""

    def __init__(
        self, optimizer: Optimizer, model: torch.Tensor, precision: Precision, seed: int
    ) -> None:
        self._corner = tuple(slice(0, _LONGEST) for _ in model.shape)
        generator = torch.Generator().manual_seed(seed)
        shape = [min(size, _LONGEST) for size in model.shape]

        def random() -> torch.Tensor:
            values = torch.randn(shape, generator=generator, dtype=_drawn(model.dtype))
            return values.to(device=model.device, dtype=precision.computed(model.dtype))

        self.parameter = nn.Parameter(random())
        self.gradients = [random() for _ in range(_STEPS)]
        state = optimizer.state.get(model, {})
        self.state = {
            name: self._cut(value, model, precision)
            for name, value in state.items()
            if name != MASTER
        }

    def _cut(self, value: Any, model: torch.Tensor, precision: Precision) -> Any:
        """A copy of what there is for a parameter, as small as the stand-in."""
        if not isinstance(value, torch.Tensor):
            return deepcopy(value)
        small = value[self._corner] if value.dim() == model.dim() else value
        dtype = precision.computed(value.dtype)
        return small.detach().clone().to(dtype) if packable(small) else small.detach().clone()

    def same_bits(self, other: _StandIn) -> bool:
        """Whether values and states are the same."""
        mine, theirs = self._numbers(), other._numbers()
        return mine.keys() == theirs.keys() and all(
            value.shape == theirs[name].shape
            and torch.allclose(value, theirs[name], rtol=0, atol=0, equal_nan=True)
            for name, value in mine.items()
        )

    def _numbers(self) -> dict[str, torch.Tensor]:
        tensors = {n: v for n, v in self.state.items() if isinstance(v, torch.Tensor)}
        return {**tensors, "the parameter itself": self.parameter.detach()}

    def kept(self) -> Kept:
        """What the optimizer keeps for it."""
        tensors = [value for value in self.state.values() if packable(value)]
        return Kept(self.parameter.shape, tuple((t.shape, t.dtype) for t in tensors))


def _drawn(dtype: torch.dtype) -> torch.dtype:
    """What random numbers are drawn in: of the same kind."""
    return torch.complex64 if dtype.is_complex else torch.float32


def _run(optimizer: Optimizer, group: dict[str, Any], stand_ins: Sequence[_StandIn]) -> set[str]:
    """A few steps; returns what the shadow optimizer keeps besides states and would lose."""
    parameters = [stand_in.parameter for stand_in in stand_ins]
    step: Callable[[Optimizer], Any] = unhooked_step(type(optimizer))
    changed = set()
    for number in range(_STEPS):
        for stand_in in stand_ins:
            stand_in.parameter.grad = stand_in.gradients[number].clone()
        shadow = shadow_of(optimizer, group, parameters, [s.state for s in stand_ins])
        try:
            step(shadow)
        except Exception as error:
            raise Unfit(f"failed on two small tensors: {type(error).__name__}: {error}") from error
        for stand_in in stand_ins:
            stand_in.state = dict(shadow.state[stand_in.parameter])
        before, now = _shared(optimizer, group), _shared(shadow, shadow.param_groups[0])
        changed |= {name for name in now if now[name] is not before.get(name, _OWN)}
    return changed


def _shared(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """What all parameters of a group have in common."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
    return {**own, **{name: value for name, value in group.items() if name != "params"}}


def _fingerprint(attributes: dict[str, Any]) -> dict[str, Any]:
    """Tells whether values were changed where they are, one level deep."""
    marks: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            marks[name] = value._version
        elif isinstance(value, dict):
            marks[name] = [(key, id(item)) for key, item in value.items()]
        elif isinstance(value, list | set | tuple):
            marks[name] = [id(item) for item in value]
    return marks


def edits_gradients(optimizer: Optimizer, group: dict[str, Any], precision: Precision) -> bool:
    """Whether an update changes the gradients that it is given.

    Then it cannot run ahead of `step()`: until then gradients must be as backward left them, and
    after it as the update left them.

    Args:
        optimizer: the user's, which `try_out` has approved; nothing of it changes.
        group: one of its parameter groups, with parameters.
        precision: of the update.
    """
    model = _plain_parts(group)[0]
    stand_in = _StandIn(optimizer, model, precision, 0)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        _run(optimizer, group, [stand_in])
    assert stand_in.parameter.grad is not None
    return not torch.equal(stand_in.parameter.grad, stand_in.gradients[-1])


#: Elements of the tensor that is cut: enough for several threads, and no multiple of any block.
_UNCUT_ELEMENTS = 2 * 65536 + 1237
_CUTS = (CUT_ELEMENTS, 3 * CUT_ELEMENTS, 1025 * CUT_ELEMENTS, 1500 * CUT_ELEMENTS)


def can_be_cut(optimizer: Optimizer, group: dict[str, Any], precision: Precision) -> bool:
    """Whether pieces of a parameter can be updated one after the other, with the same bits.

    Tried on a tensor of the group's dtype and device, as a whole and cut at multiples of
    `pieces.CUT_ELEMENTS`; see [Note: where a parameter may be cut]. What an optimizer keeps for a
    parameter must be as large as the parameter, or the same for every piece.

    Args:
        optimizer: the user's; nothing of it changes.
        group: one of its parameter groups.
        precision: of the update.
    """
    model = next(iter(_plain_parts(group)), None)
    if model is None or not model.dtype.is_floating_point:
        return False
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (
        torch.randn(_UNCUT_ELEMENTS, generator=generator).to(
            model.device, precision.computed(model.dtype)
        )
        for _ in range(1 + _STEPS)
    )
    whole = _Cut(values, [slice(None)])
    edges = [0, *_CUTS, _UNCUT_ELEMENTS]
    cut = _Cut(values, [slice(*edge) for edge in pairwise(edges)])
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        try:
            for gradient in gradients:
                whole.step(optimizer, group, gradient)
                cut.step(optimizer, group, gradient)
        except Exception:
            return False
    return cut.is_like(whole)


class _Cut:
    """Pieces of a tensor, each with a state, that are updated one after the other."""

    def __init__(self, values: torch.Tensor, parts: list[slice]) -> None:
        self._values = values.clone()
        self._parts = parts
        self._states: list[dict[str, Any]] = [{} for _ in parts]

    @torch.no_grad()
    def step(self, optimizer: Optimizer, group: dict[str, Any], gradient: torch.Tensor) -> None:
        """Update every piece."""
        for part, state in zip(self._parts, self._states, strict=True):
            piece = self._values[part]
            piece.grad = gradient[part]
            shadow = shadow_of(optimizer, group, [piece], [state])
            unhooked_step(type(optimizer))(shadow)
            state.update(shadow.state[piece])

    def is_like(self, whole: _Cut) -> bool:
        """Whether values and states have the same bits."""
        (full,) = whole._states
        if not torch.equal(self._values.view(torch.uint8), whole._values.view(torch.uint8)):
            return False
        for name, value in full.items():
            found = [state.get(name) for state in self._states]
            if not isinstance(value, torch.Tensor):
                if any(other != value for other in found):
                    return False
            elif not self._tensors_are_like(found, value):
                return False
        return True

    def _tensors_are_like(self, found: list[Any], value: torch.Tensor) -> bool:
        tensors = [other for other in found if isinstance(other, torch.Tensor)]
        if len(tensors) != len(found):
            return False
        if value.shape != self._values.shape:
            return not packable(value) and all(torch.equal(other, value) for other in tensors)
        sizes = [self._values[part].shape for part in self._parts]
        return [other.shape for other in tensors] == sizes and torch.equal(
            torch.cat(tensors), value
        )
