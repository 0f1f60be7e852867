"""`p.grad` between backward and `step()`: the gradient to its users, wherever its values are.

[Note: what a stand-in answers without its values]
Shape, strides, dtype and device; norms that were noted in advance (clipping by norm, most logging);
scaling, clipping by value and unscaling, which are recorded; zeroing. Everything else brings the
values back, and gives what PyTorch gives for a plain gradient, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.utils import _foreach_utils

from offload_strategy.optimizer.gradients import dispatch as operations
from offload_strategy.optimizer.gradients.gradient_backing import Backing
from offload_strategy.optimizer.gradients.gradient_sources import Form, Source
from offload_strategy.optimizer.gradients.recorded_edits import Recipe
from offload_strategy.optimizer.gradients.tensor_wrapper import Wrapper


class GradientStandIn(Wrapper):
    """A tensor to be put into `p.grad`, whose values a source gives when they are asked for.

    One thread at a time may use it, as a plain gradient: the one of autograd that accumulates into
    it, and whoever called backward after that. When it and its aliases are gone, so is the source.
    """

    @classmethod
    def of(cls, source: Source, like: torch.Tensor) -> Self:
        """A stand-in for a gradient.

        Args:
            source: has its values, in the shape, strides and dtype of `like`, on any device.
            like: the gradient, or any tensor like it.
        """
        form = Form.of(like)
        if not source.exposes:
            form = form._replace(offset=0)
        return cls.over(Backing(source, form), form)

    # ------------------------------------------------------------------ for the optimizer
    @property
    def recipe(self) -> Recipe:
        """What was done to the gradient and is not done to `raw`, since it was made."""
        return self._backing.recipe

    @property
    def edited(self) -> bool:
        """Whether the gradient may be another than what the recipe makes of the source's values.

        It was changed otherwise than by steps of a recipe, or somebody has an alias of its memory
        and may do so at any time. Then `recipe` is empty, and `raw` and `values` are the same.
        """
        return self._replaced or self._backing.edited

    def raw(self) -> torch.Tensor:
        """The values before the recipe, on whatever device the source has them.

        Not to be changed. Not after `values`, which may have carried the recipe out on them.

        Raises:
            OffloadError: they were consumed.
            StorageError: they could not be read.
        """
        return self._backing.raw()

    def values(self) -> torch.Tensor:
        """The values as a plain tensor on the gradient's device, for an update at `step()`.

        If the source exposes its data, that is what is returned, and the recipe is carried out on
        it, once; `recipe` goes on to name it, so that it can still be compared. Else it is a copy.

        Raises:
            OffloadError: they were consumed.
            StorageError: they could not be read.
        """
        return self._backing.values()

    def relocate(self, put: Callable[[torch.Tensor], Source]) -> bool:
        """Have the values elsewhere from now on, if nobody else has their memory.

        Args:
            put: takes the values, and gives a source that has them.

        Returns:
            Whether they are there. They stay where they are if they were edited or somebody has an
            alias of their memory, and if they are away already.

        Raises:
            TierFullError: there is no room for them.
        """
        return self._backing.relocate(put)

    def note_norm(self, recipe: Recipe, order: float, value: torch.Tensor) -> None:
        """Tell a norm in advance, so that asking for it does not load the values.

        Args:
            recipe: what will have been done to the gradient when the norm is asked for.
            order: of the norm.
            value: of the values of the source after the recipe, as `norm_of` takes it.
        """
        self._backing.note_norm(recipe, order, value)

    @property
    def asked_norms(self) -> list[tuple[Recipe, float]]:
        """Recipe and order of every norm that was asked for, in that order; none twice."""
        return self._backing.asked_norms

    # ------------------------------------------------------------------ for PyTorch
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return operations.run(func, args, kwargs or {})


# Clipping takes lists of gradients to PyTorch's kernels for lists if it knows their class, and else
# every gradient by itself, which on accelerators rounds differently. DTensor has itself known in
# the same way.
_foreach_utils._foreach_supported_types.append(GradientStandIn)
