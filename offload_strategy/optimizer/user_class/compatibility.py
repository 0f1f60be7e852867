"""Whether an optimizer's states can be offloaded exactly, and how many bytes they take.

See [Note: the watch] for what an update must not do. Most optimizers that do it are found at
attach: by what they keep, and by a trial.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from offload_strategy.errors import ConfigError
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.subgroups import ALIGNMENT_BYTES, flatten_wrappers, packable
from offload_strategy.optimizer.user_class import inner_step, trial
from offload_strategy.optimizer.user_class.side_effects import (
    UnfitUpdateError,
    classes_of,
    parts,
    shared_values,
)
from offload_strategy.torch_support.dtensors import is_sharded, local_tensor
from offload_strategy.units import round_up


class UnsupportedOptimizerError(ConfigError):
    """The states of an optimizer cannot be offloaded; it can train with its states in memory."""


def of_inner(name: str) -> Any:
    """Return a property that is an attribute of `inner`."""
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
    )


@cache
def wrapper_class(base: type, kind: type) -> type[Any]:
    """Return a class whose instances, which have an optimizer `inner`, are of both classes.

    What `base` does not define is that of `inner`. `base` itself if `kind` refuses subclasses.
    """
    own, names = ({name for each in classes_of(c) for name in vars(each)} for c in (base, kind))
    space = {name: of_inner(name) for name in names - own if not name.startswith("__")}
    space["__new__"] = lambda cls, *_, **__: object.__new__(cls)
    space |= {"__module__": base.__module__, "__doc__": base.__doc__}
    try:
        return type(base.__name__, (base, kind), space)
    except TypeError:
        return base


class SupportedOptimizer(NamedTuple):
    """What a trial tells about an optimizer whose states can be offloaded."""

    #: For each group, bytes of its states once every parameter has been updated.
    state_bytes: list[int]
    #: Whether the update changes the gradients that it is given. Then it cannot run ahead of
    #: `step()`: until then gradients must be as backward left them, and after it as it left them.
    changes_gradients: bool


def check_supported(optimizer: Optimizer, precision: Precision) -> SupportedOptimizer:
    """Refuse optimizers whose states cannot be offloaded without changing numbers.

    Raises an UnsupportedOptimizerError, or a ConfigError if there is nothing that could be trained
    with states in memory, or if updates change variables of the optimizer's class or module.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"attach: expected a torch.optim.Optimizer, got {kind.__name__}. Pass the optimizer "
            f"that updates the model's parameters."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        raise ConfigError(
            "attach: the optimizer has no parameters, so there is nothing to offload."
        )
    if any(parameter.is_meta for parameter in parameters):
        raise ConfigError(
            "attach: the optimizer has parameters on the meta device. Materialise the model first "
            "(model.to_empty(device=...) and load weights), and make the optimizer after that."
        )
    optimizer = inner_step.with_overrides(optimizer)
    try:
        _check_what_it_keeps(optimizer, parameters)
        tried = trial.try_together_and_alone(optimizer, precision)
        for group in optimizer.param_groups:
            sharded = any(map(is_sharded, group["params"]))
            if sharded and not trial.is_elementwise(optimizer, group, precision):
                raise UnfitUpdateError(
                    "does not update every element by itself, and there are sharded parameters, "
                    "of which each rank updates its part"
                )
    except UnfitUpdateError as reason:
        # A trial that has left traces must not be followed by training.
        raise (ConfigError if reason.leaves_traces else UnsupportedOptimizerError)(
            f"attach: the states of {kind.__module__}.{kind.__qualname__} cannot be offloaded: it "
            f"{reason}. Use an optimizer that updates every parameter by itself (most of "
            f"torch.optim do), or set optimizer.enabled to false and offload activations only."
        ) from reason.__cause__
    quantized = any(trial.is_quantized(each.state) for of_group in tried for each in of_group)
    if quantized and precision.state_dtype is not None:
        raise ConfigError(
            f"attach: {kind.__qualname__} quantizes its states itself, and optimizer.state_dtype "
            f"would round them once more. Set it to float32."
        )
    state_bytes = [
        sum(_state_bytes(local_tensor(p), of_group, precision) for p in group["params"])
        for group, of_group in zip(optimizer.param_groups, tried, strict=True)
    ]
    changes = any(each.changes_gradient for of_group in tried for each in of_group)
    return SupportedOptimizer(state_bytes, changes)


def _state_bytes(
    parameter: torch.Tensor, tried: Sequence[trial.StandIn], precision: Precision
) -> int:
    """Stored bytes of the aligned states of a parameter, by those of a stand-in for it.

    It has as many dimensions, if one has, and is the largest that is not larger.
    """
    tried = sorted(tried, key=lambda each: each.alone.numel())
    same_dim = [each for each in tried if each.alone.dim() == parameter.dim()]
    smaller = [each for each in same_dim if each.alone.numel() <= parameter.numel()]
    model = [*tried, *same_dim[:1], *smaller][-1]
    share: float = parameter.numel() / max(1, model.alone.numel())
    each_bytes: list[float] = [4 * parameter.numel()] if precision.has_master(parameter) else []
    each_bytes += [
        share * value.numel() * precision.stored_dtype(value.dtype, name).itemsize
        for name, value in flatten_wrappers(model.state).items()
        if packable(value)
    ]
    return sum(round_up(round(nbytes), ALIGNMENT_BYTES) for nbytes in each_bytes)


def _check_what_it_keeps(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Raise `UnfitUpdateError` for what can be told without a trial."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnfitUpdateError(
            "was made with differentiable=True, which needs the history of all states in memory"
        )
    if inner_step.has_overrides(optimizer) and not all(map(torch.Tensor.is_contiguous, parameters)):
        raise UnfitUpdateError(
            "moves parameters that are not contiguous to other memory; make them contiguous first"
        )
    for layout in {parameter.layout for parameter in parameters} - {torch.strided}:
        raise UnfitUpdateError(f"has parameters of layout {layout}, and not only dense ones")
    plain = [each for each in parameters if type(each) in (torch.Tensor, nn.Parameter)]
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in plain)
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise UnfitUpdateError(
            "has parameters that share memory, where one update would undo another; tie weights "
            "by one nn.Parameter for both"
        )
    own_step = vars(optimizer).get("step")  # torch's schedulers put one there that counts
    replaced = own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched")
    if replaced or not inspect.isfunction(type(optimizer).step):
        raise UnfitUpdateError("has a step() that was replaced, which would run once a subgroup")
    closure = inspect.signature(inner_step.unhooked_step(type(optimizer))).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnfitUpdateError("needs a closure, which it may call several times in a step")
    own = set(map(id, parameters))
    for (_, name), value in shared_values(optimizer):
        for part in parts(value):
            if isinstance(part, Optimizer):
                raise UnfitUpdateError(
                    f"wraps another optimizer ({name}); attach that one before it is wrapped"
                )
            held = part.parameters() if isinstance(part, nn.Module) else (part,)
            if not own.isdisjoint(map(id, held)):
                raise UnfitUpdateError(
                    f"keeps parameters outside of its groups as well ({name}), so that the update "
                    f"of one may read others"
                )
