"""What an update must leave alone: everything but its own parameters and their states.

[Note: the watch]
Subgroups are updated one after the other, by the user's own class, in an order of our own. That
gives the same numbers only if updates share nothing: no random numbers, which would be drawn in
another order, and nothing on the optimizer, in its groups, its class, its module or the state of
another parameter. No trial has every size and every step, so real updates are watched as well.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload_strategy.torch_support.accelerator import generator_states, generators_of

#: Attributes that a copy of an optimizer has of its own, or that updates of subgroups do not use.
OWN_ATTRIBUTES = frozenset(
    {
        *("param_groups", "state", "step"),
        "_need_device_dtype_check_for_fused",  # caches a check of devices
        "_opt_called",  # for schedulers
        *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    }
)
#: How deep values are looked into, and how many items of each.
_DEPTH, _WIDTH = 3, 256
#: Types of values that are compared as such, and of values that are not looked into.
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial, nn.Module)


class UnfitUpdateError(Exception):
    """Why an update would give other numbers than a plain one; completes a sentence "it ..."."""

    #: Whether it has changed something outside of the copy that was updated.
    leaves_traces = False


class Watch:
    """What the update of a copy of an optimizer must not change, at one moment."""

    def __init__(self, copy: Optimizer) -> None:
        self._copy = copy
        self._parameters = set(map(id, copy.state))
        self._devices = generators_of(copy.state)
        self._random = generator_states(self._devices)
        self._parts = {key: parts(value) for key, value in shared_values(copy)}

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since; raises if anything else has changed."""
        now = ((key, parts(value)) for key, value in shared_values(self._copy))
        changed = [key for key, each in now if not same_parts(each, self._parts.get(key, []))]
        if changed or any(id(key) not in self._parameters for key in self._copy.state):
            names = {name for _, name in changed} or {"state"}
            error = UnfitUpdateError(
                f"keeps something for all parameters together, outside of their states "
                f"({', '.join(sorted(names))})"
            )
            own = 1 + len(self._copy.param_groups)
            error.leaves_traces = any(place >= own for place, _ in changed)
            raise error
        return not all(map(torch.equal, generator_states(self._devices), self._random))


class RandomOperations(TorchDispatchMode):
    """Finds whether this thread draws from torch's generators, as other threads may do, too."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.found |= draws and kwargs.get("generator") is None
        return func(*args, **kwargs)


def shared_values(optimizer: Optimizer) -> Iterator[tuple[tuple[int, str], Any]]:
    """What all parameters of an optimizer share, by the number of its place and its name."""
    kind: Any = type(optimizer)
    classes: Any = map(vars, classes_of(kind))
    spaces = [vars(optimizer), *optimizer.param_groups, *classes]
    for place, space in enumerate(spaces):
        for name, value in list(space.items()):
            if name != "params" and not (place == 0 and name in OWN_ATTRIBUTES):
                yield (place, name), value
    for place, (name, read) in enumerate(_variables(kind), start=len(spaces)):
        yield (place, name), read()


def plain_values(space: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The plain values and tensors, also in lists, that an optimizer or a group has, by name."""
    return [
        (name, leaf)
        for name, value in space.items()
        if name not in ("params", "param_names") and name not in OWN_ATTRIBUTES
        for leaf in tree_leaves(value)
        if type(leaf) in _PLAIN or isinstance(leaf, torch.Tensor)
    ]


def switches(space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What may switch a part of an update on or off: of numbers only whether they are 0."""
    for name, value in plain_values(space):
        if isinstance(value, int | float):
            yield name, name == "lr" or bool(value)
        else:
            yield name, type(value) if isinstance(value, torch.Tensor) else value


def parts(value: Any, depth: int = _DEPTH) -> list[Any]:
    """A value and what it holds that may change: versions of tensors, items, attributes."""
    found = [value]
    if type(value) in _PLAIN or isinstance(value, CODE):
        return found
    items: Any = ()
    if isinstance(value, Mapping):
        items = chain.from_iterable(value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        items = value
    elif isinstance(value, torch.Tensor):
        found.append(value._version)
    elif isinstance(value, torch.Generator):
        found.append(value.get_state().numpy().tobytes())
    elif hasattr(type(value), "tobytes") and value.nbytes <= _WIDTH**2:
        found.append(value.tobytes())
    else:
        items = getattr(value, "__dict__", {}).values()
    for item in islice(items, _WIDTH if depth else 0):
        found += [item] if type(item) in _PLAIN else parts(item, depth - 1)
    return found


def same_parts(now: list[Any], before: list[Any]) -> bool:
    """Whether plain values are equal, and all others are the same ones."""
    return len(now) == len(before) and all(
        one is other or (type(one) is type(other) in _PLAIN and one == other)
        for one, other in zip(now, before, strict=True)
    )


def classes_of(kind: type) -> tuple[type, ...]:
    """Return the class of an optimizer and its bases, but for those of torch's `Optimizer`."""
    return kind.__mro__[: kind.__mro__.index(Optimizer)]


@cache
def _variables(kind: type) -> list[tuple[str, Callable[[], Any]]]:
    """Readers of variables in which the methods of a class may keep values.

    They are of its module and of enclosing functions, defaults and attributes of functions, which
    methods call, too. Functions of PyTorch's own optimizers keep none.
    """
    variables: list[tuple[str, Callable[[], Any]]] = []
    functions: list[Any] = []
    pending = [value for each in classes_of(kind) for value in vars(each).values()]
    for value in pending:  # which grows
        function = inspect.unwrap(getattr(value, "__func__", value))
        is_own = str(getattr(function, "__module__", None)).startswith("torch.optim.")
        if is_own or not inspect.isfunction(function) or function in functions:
            continue
        functions.append(function)
        for attribute in ("__dict__", "__defaults__", "__kwdefaults__"):
            variables.append((function.__name__, partial(getattr, function, attribute)))
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            variables.append((name, partial(getattr, cell, "cell_contents", None)))
        space = function.__globals__
        for name in space.keys() & set(function.__code__.co_names):
            if inspect.isfunction(space[name]) and space[name].__module__ == kind.__module__:
                pending.append(space[name])
            elif not isinstance(space[name], CODE):
                variables.append((name, partial(space.get, name)))
    return variables
