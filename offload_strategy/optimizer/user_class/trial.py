"""Runs an optimizer on stand-ins for its parameters: all together, and each as with offload.

Stand-ins take a few steps, and then their counters of steps jump to a number that every usual
period divides. Those of the real shapes, as far as they are cheap, are for optimizers that treat
large matrices in another way. Neither the optimizer nor its parameters change, nor do the states of
random numbers.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload_strategy.optimizer.states.parameter_slices import (
    SLICE_ALIGNMENT,
    ParameterSlice,
    slice_parameter,
)
from offload_strategy.optimizer.states.precision import INNER, MASTER_WEIGHT, Precision
from offload_strategy.optimizer.states.subgroups import flatten_wrappers, is_plain, packable
from offload_strategy.optimizer.user_class import inner_step
from offload_strategy.optimizer.user_class.side_effects import (
    CODE,
    OWN_ATTRIBUTES,
    UnfitUpdateError,
    parts,
)
from offload_strategy.torch_support.accelerator import forked_generators, generators_of
from offload_strategy.torch_support.dtensors import local_tensor

#: Maximum size of each dimension of a small stand-in, and elements of a large one.
_LONGEST = 8
_MOST_ELEMENTS = 1024 * 1024
#: Steps of a trial, before and after counters of steps have jumped to the late step.
_STEPS, _LATER_STEPS = 4, 2
_LEARNING_RATE = 0.1
#: Divisible by 1 to 10, 12, 14 to 16, 18, 20, 25, 50, 100, 200, 500 and 1000, for example.
_LATE_STEP = 504_000
#: Sizes and slices of flat stand-ins that are sliced: enough for several threads; no multiple of
#: any block, and a multiple of all. Others are cut into so many slices.
_FLAT_ELEMENTS = (2 * 65536 + 1237, 2 * 65536)
_FLAT_CUTS = tuple(blocks * SLICE_ALIGNMENT for blocks in (0, 1, 3, 1025, 1500))
_SLICES = 3


class StandIn:
    """A tensor like a parameter, twice: updated with others, and by itself, perhaps in slices."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.Tensor,
        shape: Sequence[int],
        precision: Precision,
        seed: int = 0,
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        # Not `new_empty`, which would load a streamed weight.
        dtype = precision.compute_dtype(model.dtype)
        self.alone = torch.empty(torch.Size(shape), dtype=dtype, device=model.device)
        self.alone.copy_(self._random())

        def part(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return deepcopy(value)
            if value.dim() == model.dim():
                value = value[tuple(slice(0, size) for size in shape)]
            copy = value.detach().clone()
            return copy.to(precision.compute_dtype(value.dtype)) if packable(value) else copy

        trains = self.alone.is_floating_point() or self.alone.is_complex()
        self.parameter = nn.Parameter(self.alone.clone(), requires_grad=trains)
        given = {n: v for n, v in optimizer.state.get(model, {}).items() if n != MASTER_WEIGHT}
        if is_quantized(given):
            given = {}  # a part of it has no meaning
        self.state = {name: part(value) for name, value in given.items()}
        self._slices = [ParameterSlice(self.alone)]
        self._states = [{name: part(value) for name, value in given.items()}]
        self._numbers: dict[str, float] = {}
        self.changes_gradient = False

    def cut(self, slices: Sequence[ParameterSlice]) -> None:
        """Update it in slices, from the first step on."""
        self._slices, self._states = list(slices), [{} for _ in slices]

    def _random(self) -> torch.Tensor:
        kind = torch.complex64 if self.alone.is_complex() else torch.float32
        # Of the generator's device, whatever the default device is.
        values = torch.randn(self.alone.shape, generator=self._generator, dtype=kind, device="cpu")
        return values.to(self.alone)

    def next_gradient(self, step: int | None) -> None:
        """Begin a step with another gradient; what has counted the last one is set to `step`."""
        numbers = inner_step.numbers_of(self.state)
        for name, number in numbers.items():
            if step is not None and number - self._numbers.get(name, 0) == 1:
                for state in (self.state, *self._states):
                    state[name] = state[name] + (step - 1 - int(number))
        self._numbers = numbers
        self.parameter.grad = self._random()

    def update_alone(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Update it as subgroups are updated."""
        gradient = self.parameter.grad
        assert gradient is not None
        for each, state in zip(self._slices, self._states, strict=True):
            tensor = each.values.detach()
            tensor.grad = each.of(gradient).clone()
            with torch.no_grad():
                inner_step.run_update(optimizer, group, [tensor], [state])
            self.changes_gradient |= not torch.equal(tensor.grad, each.of(gradient))

    @property
    def is_same(self) -> bool:
        """Whether both have the same values. States of slices must have the parameter's shape."""
        if len(self._slices) > 1 and not all(
            value.shape == self.alone.shape
            for value in filter(packable, flatten_wrappers(self.state).values())
        ):
            return False
        return inner_step.same_values({"": self.parameter.detach()}, {"": self.alone}) and all(
            inner_step.same_values(each.slice_state(self.state), state)
            for each, state in zip(self._slices, self._states, strict=True)
        )


def is_quantized(state: dict[str, Any]) -> bool:
    """Whether there are quantized tensors in a state."""
    return any(
        INNER in name
        or (packable(value) and value.dtype.itemsize == 1 and value.dtype is not torch.bool)
        for name, value in flatten_wrappers(state).items()
    )


def _bounded(shape: Sequence[int]) -> list[int]:
    """The shape, with its largest dimensions halved until a trial can afford it."""
    sizes = list(shape)
    while torch.Size(sizes).numel() > _MOST_ELEMENTS:
        sizes[sizes.index(max(sizes))] //= 2
    return sizes


def _plain_parameters(group: dict[str, Any]) -> list[torch.Tensor]:
    """Local tensors of a group that are plain ones; without empty ones, if there are others."""
    plain = [p for p in map(local_tensor, group["params"]) if is_plain(type(p))]
    return [p for p in plain if p.numel()] or plain


def try_together_and_alone(optimizer: Optimizer, precision: Precision) -> list[list[StandIn]]:
    """Return the stand-ins of each group; raise `UnfitUpdateError` if numbers differ."""
    stand_ins: list[list[StandIn]] = []
    #: With those of the first group that is like it, which may be larger.
    found: list[list[StandIn]] = []
    tried: dict[str, list[StandIn]] = {}
    for group in optimizer.param_groups:
        plain = _plain_parameters(group)
        if group["params"] and not plain:
            raise UnfitUpdateError(
                "updates parameters of a tensor subclass only, on which it was not tried"
            )
        models = [which(plain, key=torch.Tensor.numel) for which in (min, max) if plain]
        wanted = [(model, _bounded(model.shape)) for model in models]
        settings = {n: v for n, v in group.items() if n not in ("params", "param_names", "lr")}
        key = repr(([(model.dtype, shape) for model, shape in wanted], settings))
        if key in tried:
            wanted = []
        models = [which(plain, key=torch.Tensor.dim) for which in (min, max) if plain]
        wanted += [(model, [min(size, _LONGEST) for size in model.shape]) for model in models]
        stand_ins.append(
            [StandIn(optimizer, *each, precision, seed) for seed, each in enumerate(wanted)]
        )
        found.append([*stand_ins[-1], *tried.setdefault(key, stand_ins[-1])])
    _compare(optimizer, stand_ins)
    return found


def is_elementwise(optimizer: Optimizer, group: dict[str, Any], precision: Precision) -> bool:
    """Whether slices of a parameter can be updated one after the other, with the same bits.

    Tried on tensors of the group's dtype and device, whole and sliced: a flat one, and for each
    number of dimensions one of the largest shape; see [Note: where a parameter may be sliced]. An
    optimizer that compiles itself for every shape is never sliced.
    """
    plain = sorted(_plain_parameters(group), key=torch.Tensor.numel)
    if not plain or not plain[0].dtype.is_floating_point or inner_step.has_overrides(optimizer):
        return False
    empty = inner_step.copy_with_parameters(optimizer, group, [], [])
    stand_ins = [StandIn(empty, plain[0], [size], precision) for size in _FLAT_ELEMENTS]
    for each in stand_ins:
        cuts = pairwise((*_FLAT_CUTS, len(each.alone)))
        each.cut([ParameterSlice(each.alone, rows) for rows in cuts])
    largest = {p.dim(): p for p in plain if p.dim() > 1}
    for model in largest.values():
        each = StandIn(empty, model, _bounded(model.shape), precision)
        each.cut(slice_parameter(each.alone, each.alone.numel() // _SLICES))
        stand_ins.append(each)
    try:
        _compare(empty, [stand_ins], "fail_on_recompile")
    except UnfitUpdateError:
        return False
    return True


@contextmanager
def _random_numbers_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore the states of random numbers: those of torch, Python and NumPy."""
    numpy = sys.modules.get("numpy")
    with forked_generators(devices), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield


def _twin(optimizer: Optimizer) -> Optimizer:
    """A copy whose values an unfit update may change. Values with functions in them are shared."""

    def own(value: Any) -> Any:
        has_code = any(isinstance(part, CODE) for part in parts(value))
        return value if has_code else deepcopy(value)

    twin = inner_step.copy_with_parameters(optimizer, {}, [], [])
    twin.__dict__ |= {n: own(v) for n, v in vars(twin).items() if n not in OWN_ATTRIBUTES}
    twin.param_groups = [
        {name: value if name == "params" else own(value) for name, value in group.items()}
        for group in optimizer.param_groups
    ]
    for number, group in enumerate(twin.param_groups, start=1):
        if isinstance(rate := group.get("lr"), float | int | torch.Tensor):
            # Where a warm-up begins at 0, no weight would show what its update depends on.
            group["lr"] = rate * 0 + _LEARNING_RATE / number
    return twin


def _compare(
    optimizer: Optimizer, stand_ins: Sequence[Sequence[StandIn]], stance: Any = "force_eager"
) -> None:
    """Update stand-ins of each group, together and alone; see `try_together_and_alone`.

    Compiling takes seconds for each shape.
    """
    everything = [each for of_group in stand_ins for each in of_group]
    optimizer = _twin(optimizer)
    step = inner_step.unhooked_step(type(optimizer))
    takes_closure = "closure" in inspect.signature(step).parameters
    together = inner_step.copy_with_parameters(optimizer, {}, [], [])
    together.param_groups = [
        {**group, "params": [each.parameter for each in of_group]}
        for group, of_group in zip(optimizer.param_groups, stand_ins, strict=True)
    ]
    devices = generators_of(each.alone for each in everything)
    closures: list[list[int]] = []

    def closure() -> torch.Tensor:
        closures.append([each.parameter._version for each in everything])
        return torch.ones(())

    for number in range(_STEPS + _LATER_STEPS):
        for each in everything:
            each.next_gradient(_LATE_STEP if number == _STEPS else None)
        before = [each.parameter._version for each in everything]
        closures.clear()
        together.state = defaultdict(dict, {each.parameter: each.state for each in everything})
        try:
            with _random_numbers_kept(devices), torch.compiler.set_stance(stance):
                for group, of_group in zip(optimizer.param_groups, stand_ins, strict=True):
                    for each in of_group:
                        each.update_alone(optimizer, group)
                with torch.enable_grad():
                    step(together, *[closure] * takes_closure)
        except UnfitUpdateError:
            raise
        except Exception as error:
            raise UnfitUpdateError(
                f"failed on two small tensors: {type(error).__name__}: {error}"
            ) from error
        for each in everything:
            each.state = dict(together.state[each.parameter])
            held = filter(packable, flatten_wrappers(each.state).values())
            addresses = [value.untyped_storage().data_ptr() for value in held if value.numel()]
            if len(set(addresses)) < len(addresses):
                raise UnfitUpdateError("keeps states of one parameter that share memory")
        if closures not in ([], [before]):
            raise UnfitUpdateError("does not call its closure once, before it updates anything")
        if not all(each.is_same for each in everything):
            raise UnfitUpdateError(
                "updates a parameter in another way when others are there: it was tried on "
                "stand-ins, together and one by one"
            )
