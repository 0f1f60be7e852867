"""``overlap: eager``: weights change during backward, with the least memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.gradients.gradient_sources import Consumed
from offload_strategy.optimizer.gradients.offloaded_gradient import GradientStandIn
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Speculation, Updater


class EagerUpdates(BackwardOverlap):
    """``overlap: eager``: weights change as soon as their gradients are complete.

    The gradient's memory is free after that; in its place is something that refuses to be read.
    """

    def __init__(self, updater: Updater, is_last: Callable[[], bool]) -> None:
        super().__init__(updater, is_last)
        self._gradients: dict[int, tuple[torch.Tensor, int]] = {}
        # Whether weights were updated by a backward that no step() has followed.
        self._unstepped = False

    def _runs_ahead(self) -> bool:
        return True

    def _begin_backward(self) -> None:
        self._check_stepped()
        # What an earlier backward left that broke off, or whose gradients were cleared, is void.
        self._gradients.clear()
        self._start_over()
        super()._begin_backward()

    def _collect(self, parameter: torch.Tensor) -> bool:
        gradient = self._gradient_of(parameter)
        if gradient is None:
            return False
        self._gradients[id(parameter)] = (gradient, len(self._homes[id(parameter)]))
        what = f"a parameter of shape {tuple(parameter.shape)}"
        self._place(parameter, GradientStandIn.of(Consumed(what), gradient))
        return True

    def _update(self, subgroup: Subgroup) -> None:
        gradients = {}
        for index in sorted(subgroup.ready):
            key = id(subgroup.pieces[index].parameter)
            gradient, left = self._gradients.pop(key)
            gradients[index] = gradient
            if left > 1:
                self._gradients[key] = (gradient, left - 1)
        del gradient
        self._unstepped = True
        self._updater.update_in_place(subgroup, gradients)

    def finish(self) -> list[Speculation]:
        """Update what is left of the collected; nothing is to be committed."""
        while self._waiting:
            self._fetch_upcoming()
            self._update(self._waiting.popleft())
        done = set(map(id, self._completed))
        # Subgroups of which some parameters took no part in the loss.
        for subgroup in [s for s in self._order if s.ready and id(s) not in done]:
            self._update(subgroup)
        self.forget()
        self._unstepped = False
        return []

    def cleared(self) -> None:
        """See `BackwardOverlap.cleared`.

        Raises:
            OffloadError: no `step()` has followed the backward that updated the weights.
        """
        self.forget()
        self._check_stepped()

    def _check_stepped(self) -> None:
        if self._unstepped:
            self._unstepped = False
            raise OffloadError(
                "with optimizer.overlap: eager a backward pass has updated weights of this "
                "optimizer, and no step() followed: the pass failed, its gradients were meant to "
                "be thrown away, or it was the loss of another optimizer's parameters. The weights "
                "are not those of any step: go on from the last checkpoint, with "
                "optimizer.overlap: commit. (Parameters that a loss shall not train can be told so "
                "by requires_grad_(False), micro-batches by engine.microbatch(index, last=False).)"
            )

    def forget(self) -> None:
        """Let go of gradients that no update has used."""
        self._gradients.clear()
        self._start_over()
        self._backward = -1
