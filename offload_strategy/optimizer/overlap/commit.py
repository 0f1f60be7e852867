"""``overlap: commit``: updates run ahead of `step()`, which makes them visible.

[Note: predicted scaling]
An update ahead of `step()` must know how gradients will be scaled after backward: not at all
without clipping or where the limit is not reached, by the inverse loss scale under GradScaler. An
update that predicted wrongly is dropped and runs again, so running ahead is worthwhile only if
predictions are right most of the time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from offload_strategy.optimizer.gradients.gradient_backing import (
    GradientBacking,
    RetainedGradients,
    norm_of,
)
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from offload_strategy.optimizer.gradients.recorded_edits import EditHistory
from offload_strategy.optimizer.overlap.ahead_update import AheadUpdate
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.states.parameter_slices import local_tensor
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Updater

#: Steps from which the next one is predicted.
_WINDOW = 16
#: Share of them that must have been predicted right for running ahead to be worthwhile.
_WORTHWHILE = 0.75


class ScalingPrediction:
    """Predicts the scaling of gradients from the last steps; see [Note: predicted scaling]."""

    def __init__(self) -> None:
        self._scalings: deque[EditHistory | None] = deque(maxlen=_WINDOW)
        self._right: deque[bool] = deque(maxlen=_WINDOW)
        #: At first, gradients are expected to stay as they are.
        self.predicted = EditHistory()

    @property
    def is_worthwhile(self) -> bool:
        """Whether enough of the last predictions were right."""
        return sum(self._right) >= _WORTHWHILE * len(self._right)

    def record(self, scaling: EditHistory | None) -> None:
        """Learn the scaling of a step; None for a change that cannot be predicted."""
        self._right.append(scaling is not None and scaling == self.predicted)
        self._scalings.append(scaling)
        known = [each for each in self._scalings if each is not None]
        if known:
            counts = Counter(known)
            # The latest, unless others come back and this one does not: a clipping limit that is
            # exceeded now and then scales by another factor each time.
            repeated = [each for each in known if counts[each] > 1]
            self.predicted = repeated[-1] if repeated else known[-1]


class CommittedUpdates(BackwardOverlap):
    """``overlap: commit``: updates run ahead on copies, and `step()` makes them current.

    Gradients that are clipped or scaled after backward in another way than predicted invalidate the
    updates. `step()` detects it, and while it happens often updates run at `step()`.
    """

    def __init__(
        self, updater: Updater, is_last: Callable[[], bool], retained: RetainedGradients
    ) -> None:
        super().__init__(updater, is_last)
        self._retained = retained
        self._backings: dict[int, tuple[torch.Tensor, GradientBacking]] = {}
        self._done: dict[int, AheadUpdate] = {}
        self._prediction = ScalingPrediction()
        self._requested_norms: set[float] = set()
        #: Whether another backward came after the one that was said to be the last.
        self._accumulates = False

    def set_subgroups(self, subgroups: Sequence[Subgroup]) -> None:
        """See `BackwardOverlap.set_subgroups`."""
        super().set_subgroups(subgroups)
        self._updater.reserve_new_weights(subgroups)

    def _runs_ahead(self) -> bool:
        return self._prediction.is_worthwhile

    def _begin_backward(self) -> None:
        # In a second backward before step() gradients go on accumulating: drop what ran ahead.
        self._accumulates = bool(self._backings)
        self._drop_all()
        super()._begin_backward()

    def _collect(self, parameter: torch.Tensor) -> bool:
        gradient = self._gradient_of(parameter)
        if gradient is None:
            return False
        offloaded = OffloadedGradient.of(gradient, gradient)
        for order in self._requested_norms:
            offloaded.backing.cache_norm(order, norm_of(gradient, order))
        self._set_gradient(parameter, offloaded)
        self._backings[id(parameter)] = (parameter, offloaded.backing)
        del gradient
        if self._prediction.is_worthwhile and not self._accumulates:
            return True
        self._retained.retain(offloaded.backing)
        return False

    def _update(self, subgroup: Subgroup) -> None:
        gradients = self._predicted_gradients(subgroup)
        self._done[id(subgroup)] = self._updater.update_ahead(subgroup, gradients)
        gradients.clear()
        for key in {id(subgroup.slices[index].parameter) for index in subgroup.ready}:
            # A sliced parameter may have slices in subgroups that are still to be updated.
            if all(id(other) in self._done for other, _ in self._subgroups_of[key]):
                self._retained.retain(self._backings[key][1])

    def _predicted_gradients(self, subgroup: Subgroup) -> dict[int, torch.Tensor]:
        """The gradients of the slices that have one, as they are predicted to be at `step()`."""
        edits = self._prediction.predicted
        gradients = {}
        for index, param_slice in enumerate(subgroup.slices):
            if index in subgroup.ready:
                _, backing = self._backings[id(param_slice.parameter)]
                gradient = param_slice.of(backing.raw())
                if edits:
                    gradient = edits.apply_(gradient.clone())
                gradients[index] = gradient
        return gradients

    def finish(self) -> list[AheadUpdate]:
        """Return the updates that are still valid for the gradients as they are; drop the rest."""
        scalings = {self._scaling(key) for key in self._backings}
        done, valid = self._done, []
        for ahead_update in done.values():
            if self._may_be_valid(ahead_update):
                valid.append(ahead_update)
            else:
                self._updater.drop(ahead_update)
        if self._backings:
            scaling = scalings.pop() if len(scalings) == 1 and not self._accumulates else None
            self._prediction.record(scaling)
            requested = (backing.requested_norms for _, backing in self._backings.values())
            self._requested_norms = set().union(*requested)
        self._ran_ahead = len(done)
        self._done = {}
        self.reset()
        return valid

    def _scaling(self, key: int) -> EditHistory | None:
        """The scaling of a gradient since backward; None for any other change."""
        parameter, backing = self._backings[key]
        gradient = None if parameter.grad is None else local_tensor(parameter.grad)
        in_place = isinstance(gradient, OffloadedGradient) and gradient.backing is backing
        return backing.history if in_place and not backing.edited else None

    def _may_be_valid(self, ahead_update: AheadUpdate) -> bool:
        predicted = self._prediction.predicted
        return all(
            self._scaling(id(parameter)) == predicted for parameter in ahead_update.parameters()
        ) and ahead_update.may_be_valid(self._updater.group_of(ahead_update.subgroup))

    def reset(self) -> None:
        """See `BackwardOverlap.reset`."""
        self._drop_all()
        self._accumulates = False
        self._backward = -1

    def _drop_all(self) -> None:
        for ahead_update in self._done.values():
            self._updater.drop(ahead_update)
        self._done = {}
        self._backings.clear()
        self._retained.clear()
        self._expect_all()
