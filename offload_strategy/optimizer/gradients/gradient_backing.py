"""What is behind a stand-in and its aliases: a source, what is to be done to it, its norms.

[Note: recorded, read, pinned]
::

    away     the source has the values. Steps are recorded; reading loads a copy and forgets it.
    pinned   a plain tensor has them, recorded steps carried out: somebody has an alias of its
             memory, or has changed it in another way than by a step. All happens to it from now on.

From pinned nothing leads back: nobody knows when the last alias is gone.

[Note: one thread at a time]
There are no locks. Gradients belong to whoever runs: to the thread of autograd that accumulates
into them while backward runs, to the caller of backward and `step()` afterwards, as PyTorch has it
for plain gradients. The last owner may die on any thread: a ticket can be dropped on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from offload_strategy.optimizer.gradients.gradient_sources import (
    Consumed,
    Form,
    Source,
    Zeros,
    lasting,
)
from offload_strategy.optimizer.gradients.overflow import has_overflow
from offload_strategy.optimizer.gradients.recorded_edits import Recipe, Step


def norm_of(values: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """The norm of one gradient as `torch.nn.utils.clip_grad_norm_` takes it.

    Args:
        values: a plain tensor.
        order: of the norm; may be infinite.

    Returns:
        A tensor without dimensions, on the same device.
    """
    with torch.no_grad():
        norm: torch.Tensor = torch._foreach_norm([values], order)[0]
    return norm


class Backing:
    """The values of one gradient, for all stand-ins that are aliases of each other.

    Args:
        source: has the values.
        form: shape, strides, dtype and device of the gradient.
    """

    def __init__(self, source: Source, form: Form) -> None:
        self._source = source
        self._form = form
        self._pinned: torch.Tensor | None = None
        self._recipe = Recipe()
        #: How many of its steps were carried out on the data that the source exposes.
        self._carried_out = 0
        self._norms: dict[tuple[Recipe, float], torch.Tensor] = {}
        self._asked: dict[tuple[Recipe, float], None] = {}
        self._edited = False
        self._version = self._version_of_source()

    @classmethod
    def pinned_on(cls, tensor: torch.Tensor) -> Backing:
        """A backing whose values are a plain tensor that others know as well."""
        form = Form.of(tensor)
        backing = cls(Zeros(form), form)
        backing._pin(tensor)
        return backing

    # ------------------------------------------------------------------ what is known
    @property
    def source(self) -> Source:
        """Has the values, unless they are pinned."""
        return self._source

    @property
    def is_pinned(self) -> bool:
        """Whether a plain tensor has the values; see [Note: recorded, read, pinned]."""
        return self._pinned is not None

    @property
    def edited(self) -> bool:
        """Whether the values may be others than the recipe makes of those given at first."""
        return self._edited or self._version != self._version_of_source()

    @property
    def recipe(self) -> Recipe:
        """What was recorded."""
        return self._recipe

    @property
    def asked_norms(self) -> list[tuple[Recipe, float]]:
        """Every norm that was asked for, in that order: after which recipe, of which order."""
        return list(self._asked)

    # ------------------------------------------------------------------ values
    def raw(self) -> torch.Tensor:
        """The values before the recipe, from the source; see `GradientStandIn.raw`."""
        if self._pinned is not None:
            return self._pinned
        assert not self._carried_out, "the recipe was carried out on the gradient itself"
        return self._load()[0]

    def values(self) -> torch.Tensor:
        """The values; see `GradientStandIn.values`."""
        if self._pinned is not None:
            return self._pinned
        self._notice_changes()
        data, exposed = self._load()
        self._recipe.after(self._carried_out).apply_(data)
        if exposed:
            self._carried_out = len(self._recipe.steps)
            self._version = self._version_of_source()  # this change is our own
        return data

    def read(self) -> torch.Tensor:
        """The values for somebody who neither changes nor keeps them; nothing is different then."""
        if self._pinned is not None:
            return self._pinned
        data, exposed = self._load()
        pending = self._recipe.after(self._carried_out)
        if pending:
            data = pending.apply_(data.clone() if exposed else data)
        return data

    def pin(self) -> torch.Tensor:
        """The values for somebody who changes them, or makes an alias."""
        if self._pinned is None:
            values = self.values()
            if not self._source.exposes and values.untyped_storage().nbytes() != values.nbytes:
                # A part of a buffer of ours: its storage is nothing that a user should see.
                values = self._form.empty().copy_(values)
            self._pin(values)
        assert self._pinned is not None
        return self._pinned

    def _pin(self, values: torch.Tensor) -> None:
        self._pinned = values
        self._forget()

    def zero(self) -> None:
        """Make all values zero; nothing is loaded for that."""
        if self._pinned is not None:
            self._pinned.zero_()
            return
        self._forget()
        self._source = Zeros(self._form)

    def overwrite(self, values: torch.Tensor) -> None:
        """Put a plain tensor of the same form, that nobody else has, in the place of the values."""
        assert self._pinned is None
        self._pin(values)

    def _forget(self) -> None:
        self._source.drop()
        self._source = Zeros(self._form)
        self._edited = True
        self._version = 0
        self._recipe = Recipe()
        self._carried_out = 0
        self._norms.clear()

    def _load(self) -> tuple[torch.Tensor, bool]:
        """What the source has, on the gradient's device, and whether it is the data itself."""
        with lasting():
            data = self._source.load()
            placed = data.to(self._form.device)
        return placed, placed is data and self._source.exposes

    def _version_of_source(self) -> int:
        # Somebody may have kept the tensor from before it was held, and change it.
        if not self._source.exposes:
            return 0
        data = self._source.load()
        return 0 if data.is_inference() else data._version

    # ------------------------------------------------------------------ moving
    def relocate(self, put: Callable[[torch.Tensor], Source]) -> bool:
        """Have another source give the same values; see `GradientStandIn.relocate`."""
        if self._pinned is not None or self.edited or self._carried_out:
            return False
        if not self._source.exposes:
            return False
        data = self._source.load()
        storage = data.untyped_storage()
        # An alias that somebody kept could be changed without anyone noticing. The two that may be
        # there: the tensor that the source holds, and `storage`.
        alone = torch._C._storage_Use_Count(storage._cdata) <= 2
        if not alone or storage.nbytes() != data.nbytes:
            return False
        source = put(data)
        self._source.drop()
        self._source = source
        self._version = 0
        return True

    # ------------------------------------------------------------------ steps
    def record(self, step: Step) -> None:
        """Do something to all values, later.

        Raises:
            OffloadError: they were consumed.
        """
        assert self._pinned is None
        self._check_not_consumed()
        self._recipe = self._recipe.then(step)

    def note_norm(self, recipe: Recipe, order: float, value: torch.Tensor) -> None:
        """Remember a norm; see `GradientStandIn.note_norm`."""
        if self._pinned is None:
            self._norms[recipe, float(order)] = value.detach().clone()

    def norm(self, order: float) -> torch.Tensor:
        """The norm as `norm_of` takes it; loads the values only if it is not known.

        Raises:
            OffloadError: the values were consumed.
        """
        if self._pinned is not None:
            return norm_of(self._pinned, order)
        self._check_not_consumed()
        self._notice_changes()
        asked = (self._recipe, float(order))
        self._asked[asked] = None
        if asked not in self._norms:
            self._norms[asked] = norm_of(self.read(), order)
        return self._norms[asked].to(self._form.device, copy=True)

    def overflows(self) -> bool:
        """Whether any value is infinite or not a number.

        A finite norm says no; the norm of finite values may be infinite, and then they are looked
        at. Norms of order zero and below are finite whatever the values are.

        Raises:
            OffloadError: the values were consumed.
        """
        self._check_not_consumed()
        self._notice_changes()
        finite = any(
            order > 0 and recipe == self._recipe and math.isfinite(norm.item())
            for (recipe, order), norm in self._norms.items()
        )
        return not finite and has_overflow(self.read())

    def _notice_changes(self) -> None:
        """Forget what is known of a tensor that somebody has changed behind the stand-in's back."""
        version = self._version_of_source()
        if self._version != version:
            self._norms.clear()
            self._edited = True
            self._version = version

    def _check_not_consumed(self) -> None:
        if isinstance(self._source, Consumed):
            self._source.load()
