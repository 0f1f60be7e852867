"""What was done in place to a gradient while its values were elsewhere.

[Note: recipes]
Clipping and unscaling change every value of a gradient by itself, with the same few numbers for
all of them. Such an operation is written down, with its arguments as they were, and carried out
when the values are next needed, by the same operator: so with the same kernel and the same bits.
An ordered list, not a product: two roundings are not one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

#: An argument of a step: a number, a tensor of one element by its value, or nothing.
Argument = bool | int | float | torch.Tensor | None

UNSCALE: OpOverload = aten._amp_foreach_non_finite_check_and_unscale_.default
_SCALES = frozenset(
    {
        aten.mul_.Tensor,
        aten.mul_.Scalar,
        aten.div_.Tensor,
        aten.div_.Scalar,
    }
)
_SCALES_OF_LISTS = frozenset(
    {
        aten._foreach_mul_.Scalar,
        aten._foreach_mul_.Tensor,
        aten._foreach_mul_.ScalarList,
        aten._foreach_div_.Scalar,
        aten._foreach_div_.Tensor,
        aten._foreach_div_.ScalarList,
    }
)
#: Recorded operators whose first argument is the gradient.
FOR_ONE = _SCALES | {
    aten.clamp_.default,
    aten.clamp_.Tensor,
    aten.clamp_min_.default,
    aten.clamp_min_.Tensor,
    aten.clamp_max_.default,
    aten.clamp_max_.Tensor,
}
#: Recorded operators whose first argument is a list of gradients.
FOR_LISTS = _SCALES_OF_LISTS | {
    aten._foreach_clamp_min_.Scalar,
    aten._foreach_clamp_min_.ScalarList,
    aten._foreach_clamp_max_.Scalar,
    aten._foreach_clamp_max_.ScalarList,
}
#: Those of them whose second argument is a list with a number for each.
WITH_A_NUMBER_EACH = frozenset(op for op in FOR_LISTS if op._overloadname == "ScalarList")

_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
#: Dtypes of gradients on which steps are recorded.
DTYPES = frozenset(_INTEGERS)


def recordable(argument: object) -> bool:
    """Whether an argument has one value that can be written down."""
    if isinstance(argument, torch.Tensor):
        return (
            type(argument) in (torch.Tensor, torch.nn.Parameter)
            and argument.dim() == 0
            and argument.layout is torch.strided
            and not argument.is_complex()
            and not (argument.requires_grad and torch.is_grad_enabled())
        )
    return argument is None or isinstance(argument, bool | int | float)


@dataclass(frozen=True, eq=False)
class Step:
    """One operation, as it was asked for.

    Args:
        op: the operator.
        arguments: all that follow the gradient, for one gradient.
        keeps_subnormals: whether the operator left a subnormal number as it was, if its factor is
            one; see `is_identity`.
    """

    op: OpOverload
    arguments: tuple[Argument, ...]
    keeps_subnormals: bool

    @classmethod
    def of(
        cls,
        op: OpOverload,
        arguments: Sequence[Argument],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Step:
        """Write an operation down.

        It is tried on one value first: what PyTorch refuses is refused now, with PyTorch's error.

        Args:
            op: one of `FOR_ONE` or `FOR_LISTS`, or `UNSCALE`.
            arguments: all that follow the gradient (of `UNSCALE`: the inverse scale), each
                `recordable`. Tensors are copied.
            dtype: of the gradient.
            device: of the gradient.
        """
        kept = tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in arguments)
        # The smallest subnormal number, from its bits: arithmetic may be set to flush it.
        integer = _INTEGERS[dtype]
        trial = torch.ones(1, dtype=integer, device=device)
        step = cls(op, kept, keeps_subnormals=True)
        step.apply_(trial.view(dtype))
        # On an accelerator, to look at the value would be to wait for it; kernels there never
        # flush.
        if device.type == "cpu" and int(trial.item()) != 1:
            step = cls(op, kept, keeps_subnormals=False)
        return step

    @torch.no_grad()
    def apply_(self, tensor: torch.Tensor) -> None:
        """Carry it out."""
        if self.op in FOR_ONE:
            self.op(tensor, *self.arguments)
        elif self.op is UNSCALE:
            nowhere = torch.zeros((), dtype=torch.float32, device=tensor.device)
            self.op([tensor], nowhere, *self.arguments)
        elif self.op in WITH_A_NUMBER_EACH:
            self.op([tensor], list(self.arguments))
        else:
            self.op([tensor], *self.arguments)

    @cached_property
    def is_identity(self) -> bool:
        """Whether it leaves every value as it is: a factor, or divisor, of exactly one.

        Times one is exact for zeros of both signs and infinities. It is so for subnormal numbers
        unless this thread flushes them (`torch.set_flush_denormal`), which was tried out. Which of
        the many NaNs a NaN becomes is not kept track of.
        """
        if self.op not in _SCALES and self.op not in _SCALES_OF_LISTS and self.op is not UNSCALE:
            return False
        (factor,) = self.arguments
        return self.keeps_subnormals and factor is not None and float(factor) == 1.0

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for steps that do the same to every value."""
        return (str(self.op), *map(_bits, self.arguments))

    def __str__(self) -> str:
        numbers = (a.item() if isinstance(a, torch.Tensor) else a for a in self.arguments)
        return f"{self.op._opname}({', '.join(map(str, numbers))})"


class Recipe:
    """An ordered list of steps; immutable.

    Two are equal if they do the same to the bits of every tensor, as far as can be told without
    trying: the same operators in the same order, with arguments of the same kind and bits. Steps
    that change nothing are left out.

    Args:
        steps: in the order in which they were asked for.
    """

    __slots__ = ("_key", "steps")

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        self.steps = tuple(steps)
        self._key: tuple[object, ...] | None = None

    def then(self, step: Step) -> Recipe:
        """This recipe and one more step."""
        return Recipe((*self.steps, step))

    def after(self, count: int) -> Recipe:
        """What remains to be done when the first `count` steps were carried out."""
        return Recipe(self.steps[count:])

    def apply_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Carry it out in place.

        Args:
            tensor: plain, of the dtype of the gradient, and on its device: kernels of other
                devices round otherwise.

        Returns:
            The tensor.
        """
        for step in self.steps:
            if not step.is_identity:
                step.apply_(tensor)
        return tensor

    @property
    def key(self) -> tuple[object, ...]:
        """What is compared. Worked out when first asked for: it waits for an accelerator."""
        if self._key is None:
            self._key = tuple(step.key for step in self.steps if not step.is_identity)
        return self._key

    def __bool__(self) -> bool:
        return bool(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Recipe({', '.join(str(step) for step in self.steps if not step.is_identity)})"


def _bits(argument: Argument) -> tuple[Any, ...]:
    if isinstance(argument, torch.Tensor):
        words = argument.detach().cpu().reshape(1).view(torch.uint8).tolist()
        return (str(argument.dtype), *words)
    if isinstance(argument, float):
        return ("float", struct.pack("d", argument))
    return (type(argument).__name__, argument)
