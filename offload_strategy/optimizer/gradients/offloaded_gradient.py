"""`p.grad` between backward and `step()` while the gradient's values are elsewhere.

[Note: what an offloaded gradient answers without its values]
Shape, strides, dtype and device; norms that were cached in advance (clipping by norm, most
logging); scaling, clipping by value and unscaling, which are recorded; zeroing. Everything else
loads the values, and returns what PyTorch returns for a plain gradient, bit by bit.

[Note: reads that bypass the dispatcher]
Operators arrive in `__torch_dispatch__`. What accesses memory directly does not: it would find
none, and lose data or crash. Every such method is overridden here. Where one was overlooked, or
called from C++, PyTorch raises an error when it asks for the address, as for its own tensors
without memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.autograd.graph import increment_version
from torch.utils import _foreach_utils

from offload_strategy.optimizer.gradients.gradient_backing import (
    GradientBacking,
    GradientSource,
    TensorMetadata,
    norm_of,
)
from offload_strategy.optimizer.gradients.recorded_edits import (
    DTYPES,
    FOR_LISTS,
    FOR_ONE,
    UNSCALE,
    Edit,
    operators,
    recordable,
)
from offload_strategy.torch_support.dtensors import local_tensor
from offload_strategy.torch_support.keyboard_interrupts import default_modes

aten = torch.ops.aten
#: Namespaces of operators that declare every argument that they change.
_DECLARING = ("aten", "prims")

Arguments = Sequence[Any]
Options = Mapping[str, Any]


class _Absent:
    """Hides an inherited attribute, of the class as well."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("an offloaded gradient gives no address of its values")


def _on_memory(name: str) -> Callable[..., Any]:
    """Make a method of the plain tensor, which gives out its memory."""

    def method(self: OffloadedGradient, *args: Any, **options: Any) -> Any:
        return getattr(self.backing.materialize(), name)(*args, **options)

    return method


class OffloadedGradient(torch.Tensor):
    """A tensor for `p.grad` whose values a `GradientBacking` loads when they are needed."""

    #: Shared by all aliases; `tensor.data = ...` puts another in its place.
    backing: GradientBacking

    # What C code of other libraries would use to get at the memory. Without it they use __dlpack__.
    __dlpack_c_exchange_api__ = _Absent()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, source: GradientSource, like: torch.Tensor) -> Self:
        """Make an offloaded gradient; see `GradientBacking`."""
        backing = GradientBacking(source, like)
        return cls.over(backing, backing.metadata)

    @classmethod
    def over(cls, backing: GradientBacking, metadata: TensorMetadata) -> Self:
        """Wrap a backing."""
        with default_modes():
            made: Self = torch.Tensor._make_wrapper_subclass(
                cls,
                metadata.shape,
                strides=metadata.strides,
                storage_offset=metadata.offset,
                dtype=metadata.dtype,
                device=metadata.device,
                requires_grad=False,
            )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.backing = backing
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        op: OpOverload,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> Any:
        """Run an operator some of whose arguments are offloaded gradients.

        It returns what it returns for plain tensors: results are plain, a gradient that was changed
        in place is itself. `OffloadError` if the values that it needs were consumed.
        """
        options = kwargs or {}
        handler = _HANDLERS.get(op)
        result = NotImplemented if handler is None else handler(op, args, options)
        if result is NotImplemented and torch.is_inference_mode_enabled():
            # Without autograd composite operators arrive undecomposed; their parts come one by one.
            result = op.decompose(*args, **options)
        if result is NotImplemented:
            result = _run_on_values(op, args, options)
        if op._schema.is_mutable and op._opname.startswith("_foreach_"):
            # Autograd must notice that saved tensors changed: these kernels increment no version.
            for each in args[0]:
                if isinstance(each, OffloadedGradient):
                    increment_version(each)
        return result

    @property
    def data(self) -> OffloadedGradient:
        """Another tensor of the same values: a change of one is seen in both."""
        return self.over(self.backing, TensorMetadata.of(self))

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if isinstance(values, OffloadedGradient):
            backing = values.backing
        else:
            backing = GradientBacking(None, values)
            backing.replace(values.detach())
        other = self.over(backing, TensorMetadata.of(values))
        # PyTorch's own setter changes shape, strides, dtype and device.
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.backing = backing

    # ------------------------------------------------------------------ as of the plain tensor
    numpy = _on_memory("numpy")
    data_ptr = _on_memory("data_ptr")
    const_data_ptr = _on_memory("data_ptr")
    untyped_storage = _on_memory("untyped_storage")
    __dlpack__ = _on_memory("__dlpack__")

    def __copy__(self) -> torch.Tensor:
        return copy.copy(self.backing.materialize())

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.backing.read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            shared = self.backing.is_materialized
            # With the memo, so that what shares its storage goes on to do so.
            own = copy.deepcopy(self.backing.materialize(), memo) if shared else self._own_copy()
            memo[id(self)] = own
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        shared = self.backing.is_materialized
        return (self.backing.materialize() if shared else self._own_copy()).__reduce_ex__(protocol)

    def _own_copy(self) -> torch.Tensor:
        """Copy the values to a plain tensor with no more memory than it needs."""
        return TensorMetadata.of(self).empty().copy_(self.backing.read())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.backing.is_consumed:
            return f"tensor(consumed, size={tuple(self.shape)}, dtype={self.dtype})"
        return repr(self.backing.read())


# Clipping takes lists of gradients to PyTorch's kernels for lists if it knows their class, and else
# every gradient by itself, which on accelerators rounds differently. DTensor registers itself in
# the same way.
_foreach_utils._foreach_supported_types.append(OffloadedGradient)


# ---------------------------------------------------------------------- gradients of parameters
def has_gradient(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a gradient that no update has used."""
    if parameter.grad is None:
        return False
    gradient = local_tensor(parameter.grad)
    return not (isinstance(gradient, OffloadedGradient) and gradient.backing.is_consumed)


def gradient_values(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient that a parameter has, as a plain tensor for an update at `step()`."""
    assert parameter.grad is not None
    gradient = local_tensor(parameter.grad)
    return gradient.backing.values() if isinstance(gradient, OffloadedGradient) else gradient


# ---------------------------------------------------------------------- any operator
def _run_on_values(op: OpOverload, args: Arguments, options: Options) -> Any:
    """Run an operator on the values of the offloaded gradients among its arguments.

    What the operator declares to change, or to return an alias of, is materialized; the rest is
    read. Changed gradients are in the result, with the metadata that their values have then.
    """
    # Collectives, and operators of other libraries, may change what they do not declare to change.
    declares_nothing = op.namespace not in _DECLARING and not op._schema.is_mutable
    # `x.set_(y)` makes an alias of y without declaring it.
    aliases_all = op.overloadpacket is aten.set_
    reshapes = aliases_all or torch.Tag.inplace_view in op.tags
    was_read: dict[int, torch.Tensor] = {}
    changed: list[tuple[torch.Tensor, OffloadedGradient]] = []

    def plain(value: Any, declared: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(each, declared) for each in value]
        if not isinstance(value, OffloadedGradient):
            return value
        backing, alias = value.backing, declared.alias_info
        if alias is None and not aliases_all and not declares_nothing:
            if id(backing) not in was_read:
                was_read[id(backing)] = backing.read()
            return was_read[id(backing)]
        values = backing.materialize()
        if declares_nothing or (alias is not None and alias.is_write):
            if reshapes:
                values = values.detach()  # the shape of other aliases stays
            changed.append((values, value))
        return values

    def with_gradients(result: Any) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(with_gradients(each) for each in result)
        return next((gradient for values, gradient in changed if result is values), result)

    declared = op._schema.arguments
    by_name = {argument.name: argument for argument in declared}
    plain_args = [plain(a, d) for a, d in zip(args, declared, strict=False)]
    result = op(*plain_args, **{name: plain(a, by_name[name]) for name, a in options.items()})
    for values, gradient in changed:
        if reshapes or TensorMetadata.of(values) != TensorMetadata.of(gradient):
            gradient.data = values
    result = with_gradients(result)
    # The functions above refer to themselves, and would keep the values until garbage collection.
    was_read.clear()
    changed.clear()
    return result


# ---------------------------------------------------------------------- recorded edits
def _records(value: object) -> bool:
    return (
        isinstance(value, OffloadedGradient)
        and not value.backing.is_materialized
        and value.dtype in DTYPES
    )


def _edit_one(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradient, *arguments = args
    if options or not _records(gradient) or not all(map(recordable, arguments)):
        return NotImplemented
    gradient.backing.record(Edit.of(op, arguments, gradient.dtype, gradient.device))
    return gradient


def _edit_each(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradients, *arguments = args
    found = arguments.pop(0) if op is UNSCALE else None
    if options or isinstance(found, OffloadedGradient) or not all(map(recordable, arguments)):
        return NotImplemented
    # Gradients of one kind share an edit, which is then compared once.
    edits: dict[tuple[Any, ...], Edit] = {}
    overflows = []
    others = []
    for gradient in gradients:
        if not _records(gradient):
            others.append(gradient)
            continue
        if op is UNSCALE:
            overflows.append(gradient.backing.overflows())
        key = (gradient.dtype, gradient.device)
        if key not in edits:
            edits[key] = Edit.of(op, arguments, *key)
        gradient.backing.record(edits[key])
    if others:
        _run_on_values(op, [others, *args[1:]], options)
    if found is not None and overflows:  # the host of an accelerator must not wait for it
        found.masked_fill_(torch.stack(overflows).any(), 1.0)
    return None


# ---------------------------------------------------------------------- norms
def _norm_of_each(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradients = args[0]
    order = args[1] if len(args) > 1 else options.get("ord", 2)
    if len(args) > 2 or options.keys() - {"ord"}:
        return NotImplemented
    return [
        g.backing.norm(order) if isinstance(g, OffloadedGradient) else norm_of(g, order)
        for g in gradients
    ]


def _norm_of_one(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradient = args[0]
    order = args[1] if len(args) > 1 else 2
    same_kernel = gradient.device.type == "cpu"  # elsewhere kernels for lists sum in another order
    if not same_kernel or gradient.backing.is_materialized or len(args) > 2 or options:
        return NotImplemented
    return gradient.backing.norm(order)


# ---------------------------------------------------------------------- values that do not matter
def _zero_one(op: OpOverload, args: Arguments, options: Options) -> Any:
    args[0].backing.zero_()
    return args[0]


def _zero_each(op: OpOverload, args: Arguments, options: Options) -> Any:
    for gradient in args[0]:
        gradient.zero_()


def _overwrite(op: OpOverload, args: Arguments, options: Options) -> Any:
    gradient, *arguments = args
    if not isinstance(gradient, OffloadedGradient) or gradient.backing.is_materialized:
        return NotImplemented
    values = TensorMetadata.of(gradient).empty()
    _run_on_values(op, [values, *arguments], options)
    gradient.backing.replace(values)
    return gradient


def _like(op: OpOverload, args: Arguments, options: Options) -> Any:
    metadata = TensorMetadata.of(args[0])
    like = metadata.empty(torch.device("meta"))
    device = options.get("device") or metadata.device
    return op(like, *args[1:], **{**options, "device": device})


_HANDLERS: dict[OpOverload, Callable[[OpOverload, Arguments, Options], Any]] = {
    **dict.fromkeys(FOR_ONE, _edit_one),
    **dict.fromkeys(FOR_LISTS, _edit_each),
    aten._foreach_norm.Scalar: _norm_of_each,
    aten.linalg_vector_norm.default: _norm_of_one,
    aten.norm.Scalar: _norm_of_one,
    aten.zero_.default: _zero_one,
    aten._foreach_zero_.default: _zero_each,
    **dict.fromkeys(operators("copy_.default", "fill_.Scalar", "fill_.Tensor"), _overwrite),
    **dict.fromkeys(
        operators(
            *("empty_like.default", "zeros_like.default", "ones_like.default"),
            *("full_like.default", "rand_like.default", "randn_like.default"),
            *("new_empty.default", "new_empty_strided.default", "new_zeros.default"),
            *("new_ones.default", "new_full.default"),
        ),
        _like,
    ),
    aten.detach.default: lambda op, args, options: args[0].data,
    aten.alias.default: lambda op, args, options: args[0].data,
    aten.detach_.default: lambda op, args, options: args[0],
}
