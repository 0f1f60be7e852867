"""In-place edits of a gradient that are recorded while its values are elsewhere.

[Note: recorded edits]
Clipping and unscaling change every value of a gradient by itself, with the same few numbers for
all of them. Such an edit is recorded with copies of its arguments, and applied when the values are
next needed, by the same operator: with the same kernel, and so with the same bits. The history is
an ordered list, not a product of factors: rounding twice is not rounding once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

#: An argument of an edit: a number, a tensor of one element by its value, or nothing.
Argument = bool | int | float | torch.Tensor | None


def operators(*names: str) -> frozenset[OpOverload]:
    """Operators of `torch.ops.aten` by name and overload."""
    return frozenset(attrgetter(*names)(aten))


UNSCALE: OpOverload = aten._amp_foreach_non_finite_check_and_unscale_.default
_SCALES_ONE = operators("mul_.Tensor", "mul_.Scalar", "div_.Tensor", "div_.Scalar")
_SCALES_LISTS = {UNSCALE} | operators(
    "_foreach_mul_.Scalar", "_foreach_mul_.Tensor", "_foreach_div_.Scalar", "_foreach_div_.Tensor"
)
#: Recorded operators whose first argument is the gradient.
FOR_ONE = _SCALES_ONE | operators(
    *("clamp_.default", "clamp_.Tensor", "clamp_min_.default", "clamp_min_.Tensor"),
    *("clamp_max_.default", "clamp_max_.Tensor"),
)
#: Recorded operators whose first argument is a list of gradients.
FOR_LISTS = _SCALES_LISTS | operators("_foreach_clamp_min_.Scalar", "_foreach_clamp_max_.Scalar")
#: Operators that change nothing if their factor, or divisor, is one.
_SCALES = _SCALES_ONE | _SCALES_LISTS

#: Dtypes of gradients whose edits are recorded.
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
#: Integers of so many bytes.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def recordable(argument: object) -> bool:
    """Whether an argument has a single value that can be recorded."""
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
class Edit:
    """One in-place operation on a gradient."""

    op: OpOverload
    #: All that follow the gradient, for one gradient.
    arguments: tuple[Argument, ...]
    #: Whether a factor of one keeps subnormal numbers; see `is_identity`.
    keeps_subnormals: bool

    @classmethod
    def of(
        cls, op: OpOverload, arguments: Sequence[Argument], dtype: torch.dtype, device: torch.device
    ) -> Edit:
        """Record an operation with copies of its arguments, each `recordable`.

        The operation is run on one value first, so that PyTorch's errors come at once. Of `UNSCALE`
        the argument is the inverse scale.
        """
        kept = tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in arguments)
        # The smallest subnormal number, from its bits: arithmetic may be set to flush it.
        value = torch.ones(1, dtype=INTEGERS[dtype.itemsize], device=device)
        cls(op, kept, keeps_subnormals=True).apply_(value.view(dtype))
        # On an accelerator reading the value would wait for it; its kernels never flush.
        return cls(op, kept, keeps_subnormals=device.type != "cpu" or int(value.item()) == 1)

    @torch.no_grad()
    def apply_(self, tensor: torch.Tensor) -> None:
        """Apply the edit to a plain tensor."""
        if self.op in FOR_ONE:
            self.op(tensor, *self.arguments)
        elif self.op is UNSCALE:
            found_inf = torch.zeros((), dtype=torch.float32, device=tensor.device)
            self.op([tensor], found_inf, *self.arguments)
        else:
            self.op([tensor], *self.arguments)

    @cached_property
    def is_identity(self) -> bool:
        """Whether it leaves every value as it is: a factor, or divisor, of exactly one.

        Multiplying by one is exact but for subnormal numbers that this thread flushes
        (`torch.set_flush_denormal`). Which of the many NaNs a NaN becomes is not tracked.
        """
        if self.op not in _SCALES:
            return False
        ((_, factor),) = self._numbers
        return self.keeps_subnormals and factor == 1.0

    @cached_property
    def key(self) -> str:
        """Equal for edits that do the same to every value."""
        return f"{self.op} {self._numbers}"

    @cached_property
    def _numbers(self) -> tuple[tuple[object, bool | int | float | None], ...]:
        """Types and values of the arguments, of which an accelerator's are awaited once."""
        return tuple(
            (a.dtype, a.item()) if isinstance(a, torch.Tensor) else (type(a), a)
            for a in self.arguments
        )


@dataclass(frozen=True, eq=False)
class EditHistory:
    """Edits in the order in which they were requested.

    Two histories are equal if they have the same operators in the same order, with arguments of the
    same type and value. Edits that change nothing do not count.
    """

    edits: tuple[Edit, ...] = ()

    def apply_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Apply all edits in place to a plain tensor on the gradient's device, and return it."""
        for edit in self.edits:
            if not edit.is_identity:
                edit.apply_(tensor)
        return tensor

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What is compared; computed at the first request, as it waits for an accelerator."""
        return tuple(edit.key for edit in self.edits if not edit.is_identity)

    def __bool__(self) -> bool:
        return bool(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EditHistory) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)
