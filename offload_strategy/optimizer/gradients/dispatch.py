"""What PyTorch's operators do with stand-ins among their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from offload_strategy.optimizer.gradients.gradient_sources import Form
from offload_strategy.optimizer.gradients.recorded_edits import (
    DTYPES,
    FOR_LISTS,
    FOR_ONE,
    UNSCALE,
    WITH_A_NUMBER_EACH,
    Step,
    recordable,
)
from offload_strategy.optimizer.gradients.tensor_wrapper import Wrapper, adopt, alias_of

aten = torch.ops.aten

Arguments = Sequence[Any]
Options = Mapping[str, Any]


def run(op: OpOverload, args: Arguments, options: Options) -> Any:
    """Run an operator some of whose arguments are stand-ins.

    Args:
        op: the operator.
        args: its positional arguments, as `__torch_dispatch__` gets them.
        options: its keyword arguments.

    Returns:
        What it returns for plain tensors: results are plain, a stand-in that was changed in place
        is itself.

    Raises:
        OffloadError: the values that it needs were consumed.
    """
    handler = _HANDLERS.get(op)
    result = NotImplemented if handler is None else handler(op, args, options)
    if result is NotImplemented and torch.is_inference_mode_enabled():
        # Without autograd operators arrive that are made of others, which come one by one then.
        result = op.decompose(*args, **options)
    if result is NotImplemented:
        result = _run_on_values(op, args, options)
    if op._schema.is_mutable and op._opname.startswith("_foreach_"):
        # What autograd has saved of them may not change. For lists it is the kernels that tell it.
        for each in args[0]:
            if isinstance(each, Wrapper):
                increment_version(each)
    return result


# ---------------------------------------------------------------------- any operator
def _run_on_values(op: OpOverload, args: Arguments, options: Options) -> Any:
    loaded = _Loaded(op)
    declared = op._schema.arguments
    plain_args = [loaded.plain(a, d) for a, d in zip(args, declared, strict=False)]
    by_name = {argument.name: argument for argument in declared}
    plain_options = {name: loaded.plain(a, by_name[name]) for name, a in options.items()}
    return loaded.restored(op(*plain_args, **plain_options))


class _Loaded:
    """The values of those arguments of one call that are stand-ins.

    What the operator declares to change, or to return an alias of, is pinned; the rest is read.
    """

    def __init__(self, op: OpOverload) -> None:
        # `x.set_(y)` makes an alias of y and does not say so.
        self._aliases_all = op.overloadpacket is aten.set_
        self._reshapes = self._aliases_all or torch.Tag.inplace_view in op.tags
        self._read: dict[int, torch.Tensor] = {}
        self._changed: list[tuple[torch.Tensor, Wrapper]] = []

    def plain(self, value: Any, argument: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self.plain(each, argument) for each in value]
        if not isinstance(value, Wrapper):
            return value
        backing = value._backing
        alias = argument.alias_info
        if alias is None and not self._aliases_all:
            if id(backing) not in self._read:
                self._read[id(backing)] = backing.read()
            return self._read[id(backing)]
        values = backing.pin()
        if alias is not None and alias.is_write:
            if self._reshapes:
                values = values.detach()  # the shape of other aliases stays
            self._changed.append((values, value))
        return values

    def restored(self, result: Any) -> Any:
        """What is to be returned; each changed stand-in looks as its values do."""
        for values, stand_in in self._changed:
            if self._reshapes or Form.of(values) != Form.of(stand_in):
                adopt(stand_in, values)
        return self._with_stand_ins(result)

    def _with_stand_ins(self, result: Any) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(self._with_stand_ins(each) for each in result)
        for values, stand_in in self._changed:
            if result is values:
                return stand_in
        return result


# ---------------------------------------------------------------------- steps
def _steady(value: object) -> bool:
    """Whether steps on this tensor are recorded."""
    return isinstance(value, Wrapper) and not value._backing.is_pinned and value.dtype in DTYPES


def _change_one(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradient, *arguments = args
    if options or not _steady(gradient) or not all(map(recordable, arguments)):
        return NotImplemented
    step = Step.of(op, arguments, gradient.dtype, gradient.device)
    gradient._backing.record(step)
    return gradient


def _change_each(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradients, *arguments = args
    # One for each gradient, or the same for all of them.
    each = arguments[0] if op in WITH_A_NUMBER_EACH else None
    numbers = arguments if each is None else each
    if options or not all(map(recordable, numbers)):
        return NotImplemented
    if each is not None and len(each) != len(gradients):
        return NotImplemented  # PyTorch says what is wrong
    steps = _StepsAlike(op)
    others = []
    for index, gradient in enumerate(gradients):
        if _steady(gradient):
            own = arguments if each is None else [each[index]]
            gradient._backing.record(steps.step(gradient, own))
        else:
            others.append(index)
    if others:
        rest = arguments if each is None else [[each[index] for index in others]]
        _run_on_values(op, [[gradients[index] for index in others], *rest], options)
    return None


def _unscale(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradients, found, inverse = args
    if options or isinstance(found, Wrapper) or isinstance(inverse, Wrapper):
        return NotImplemented
    steps = _StepsAlike(op)
    overflow = False
    others = []
    for gradient in gradients:
        if _steady(gradient):
            overflow = gradient._backing.overflows() or overflow
            gradient._backing.record(steps.step(gradient, [inverse]))
        else:
            others.append(gradient)
    if others:
        _run_on_values(op, [others, found, inverse], options)
    if overflow:
        found.fill_(1.0)
    return None


class _StepsAlike:
    """Steps of one call: gradients that get the same share one, which is then compared once."""

    def __init__(self, op: OpOverload) -> None:
        self._op = op
        self._made: dict[tuple[Any, ...], Step] = {}

    def step(self, gradient: torch.Tensor, arguments: Sequence[Any]) -> Step:
        kind = (gradient.dtype, gradient.device, *map(id, arguments))
        if kind not in self._made:
            self._made[kind] = Step.of(self._op, arguments, gradient.dtype, gradient.device)
        return self._made[kind]


# ---------------------------------------------------------------------- norms
def _norm_of_each(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradients = args[0]
    order = args[1] if len(args) > 1 else options.get("ord", 2)
    if len(args) > 2 or options.keys() - {"ord"}:
        return NotImplemented
    plain = [g for g in gradients if not isinstance(g, Wrapper)]
    norms = iter(op(plain, order) if plain else ())
    return [
        g._backing.norm(order) if isinstance(g, Wrapper) else next(norms)  # as clipping takes it
        for g in gradients
    ]


def _norm_of_one(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradient = args[0]
    order = args[1] if len(args) > 1 else 2
    alike = gradient.device.type == "cpu"  # elsewhere the kernels for lists sum in another order
    if not alike or gradient._backing.is_pinned or len(args) > 2 or options:
        return NotImplemented
    return gradient._backing.norm(order)


# ---------------------------------------------------------------------- values that do not matter
def _zero(op: OpOverload, args: Arguments, options: Options) -> Any:
    args[0]._backing.zero()
    return args[0]


def _zero_each(op: OpOverload, args: Arguments, options: Options) -> Any:
    plain = []
    for gradient in args[0]:
        if isinstance(gradient, Wrapper):
            gradient._backing.zero()
        else:
            plain.append(gradient)
    if plain:
        op(plain)


def _overwrite(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradient, *arguments = args
    if not isinstance(gradient, Wrapper) or gradient._backing.is_pinned:
        return NotImplemented
    fresh = Form.of(gradient).empty()
    _run_on_values(op, [fresh, *arguments], options)
    gradient._backing.overwrite(fresh)
    return gradient


def _like(op: OpOverload, args: Arguments, options: Options) -> Any:
    if not isinstance(args[0], Wrapper):
        return NotImplemented
    form = Form.of(args[0])
    like = form.empty(torch.device("meta"))
    device = options.get("device") or form.device
    return op(like, *args[1:], **{**options, "device": device})


def _alias(op: OpOverload, args: Arguments, options: Options) -> Any:
    return alias_of(args[0])


def _itself(op: OpOverload, args: Arguments, options: Options) -> Any:
    return args[0]


_HANDLERS: dict[OpOverload, Callable[[OpOverload, Arguments, Options], Any]] = {
    **dict.fromkeys(FOR_ONE, _change_one),
    **dict.fromkeys(FOR_LISTS, _change_each),
    UNSCALE: _unscale,
    aten._foreach_norm.Scalar: _norm_of_each,
    aten.linalg_vector_norm.default: _norm_of_one,
    aten.norm.Scalar: _norm_of_one,
    aten.zero_.default: _zero,
    aten._foreach_zero_.default: _zero_each,
    aten.copy_.default: _overwrite,
    aten.fill_.Scalar: _overwrite,
    aten.fill_.Tensor: _overwrite,
    **dict.fromkeys(
        (
            aten.empty_like.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
        ),
        _like,
    ),
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.detach_.default: _itself,
}
