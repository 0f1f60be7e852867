"""Where weights are while their update runs: always in memory, or brought there for it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Residence(Protocol):
    """Knows whether weights are in memory, and keeps them there while they are used."""

    def held(
        self, parameters: Iterable[torch.Tensor], *, changes: bool
    ) -> AbstractContextManager[None]:
        """Within, the weights of these are here; whether they are changed must be said."""

    def ahead(self, parameters: Iterable[torch.Tensor]) -> None:
        """The weights of these will be held soon."""


class Always:
    """The residence of weights that never leave."""

    def held(
        self, parameters: Iterable[torch.Tensor], *, changes: bool
    ) -> AbstractContextManager[None]:
        """They are."""
        return nullcontext()

    def ahead(self, parameters: Iterable[torch.Tensor]) -> None:
        """They are here."""
