"""``overlap: eager``: weights change during backward, with the least memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.gradients.gradient_backing import ConsumedGradient
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from offload_strategy.optimizer.overlap.ahead_update import AheadUpdate
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Updater


class EagerUpdates(BackwardOverlap):
    """``overlap: eager``: weights change as soon as their gradients are complete.

    The gradient's memory is free after that; what is in `p.grad` then refuses to be read.
    """

    def __init__(self, updater: Updater, is_last: Callable[[], bool]) -> None:
        super().__init__(updater, is_last)
        #: Parameter id -> its gradient, and the number of its slices that are not yet updated.
        self._gradients: dict[int, tuple[torch.Tensor, int]] = {}
        #: Whether a backward has updated weights and no step() has followed.
        self._unstepped = False

    def _runs_ahead(self) -> bool:
        return True

    def _begin_backward(self) -> None:
        self._check_stepped()
        # Drop what an earlier backward left that raised, or whose gradients were cleared.
        self._gradients.clear()
        self._expect_all()
        super()._begin_backward()

    def _collect(self, parameter: torch.Tensor) -> bool:
        gradient = self._gradient_of(parameter)
        if gradient is None:
            return False
        self._gradients[id(parameter)] = (gradient, len(self._subgroups_of[id(parameter)]))
        what = f"a parameter of shape {tuple(parameter.shape)}"
        self._set_gradient(parameter, OffloadedGradient.of(ConsumedGradient(what), gradient))
        return True

    def _update(self, subgroup: Subgroup) -> None:
        gradients = {}
        for index in sorted(subgroup.ready):
            key = id(subgroup.slices[index].parameter)
            gradient, slices_left = self._gradients.pop(key)
            gradients[index] = gradient
            if slices_left > 1:
                self._gradients[key] = (gradient, slices_left - 1)
        del gradient
        self._unstepped = True
        self._updater.update_in_place(subgroup, gradients)

    def finish(self) -> list[AheadUpdate]:
        """Update the subgroups whose gradients are left; there is nothing to commit."""
        while self._waiting:
            self._prefetch_upcoming()
            self._update(self._waiting.popleft())
        completed = set(map(id, self._completed))
        # Subgroups of which some parameters took no part in the loss.
        for subgroup in [s for s in self._order if s.ready and id(s) not in completed]:
            self._update(subgroup)
        self.reset()
        self._unstepped = False
        return []

    def gradients_cleared(self) -> None:
        """See `BackwardOverlap.gradients_cleared`.

        Raises:
            OffloadError: no `step()` has followed the backward that updated the weights.
        """
        self.reset()
        self._check_stepped()

    def _check_stepped(self) -> None:
        if self._unstepped:
            self._unstepped = False
            raise OffloadError(
                "with optimizer.overlap: eager a backward pass has updated weights of this "
                "optimizer, and no step() followed: the pass failed, its gradients were meant to "
                "be thrown away, or it was the loss of another optimizer's parameters. The weights "
                "are not those of any step: go on from the last checkpoint, with "
                "optimizer.overlap: commit. (Exclude parameters that a loss shall not train by "
                "requires_grad_(False), micro-batches by engine.microbatch(index, last=False).)"
            )

    def reset(self) -> None:
        """Drop gradients that no update has used."""
        self._gradients.clear()
        self._expect_all()
        self._backward = -1
