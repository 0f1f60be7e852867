"""``overlap: commit``: updates run ahead of `step()`, which makes them visible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload_strategy.optimizer.gradients.gradient_backing import norm_of
from offload_strategy.optimizer.gradients.gradient_sources import Held
from offload_strategy.optimizer.gradients.offloaded_gradient import GradientStandIn
from offload_strategy.optimizer.gradients.recorded_edits import Recipe
from offload_strategy.optimizer.gradients.retained_gradients import WaitingGradients
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.overlap.clipping_prediction import Prediction
from offload_strategy.optimizer.states.dtensor_shards import local_part
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Speculation, Updater


class CommittedUpdates(BackwardOverlap):
    """``overlap: commit``: updates run ahead on copies, and `step()` makes them current.

    Clipping or scaling gradients after backward makes what ran ahead worthless, unless it was
    foreseen. It is noticed at `step()`, and while it happens often updates run at `step()`.

    Args:
        updater: runs the updates.
        is_last: whether the backward that runs is the last before `step()`.
        waiting: where gradients are that `step()` may still need.
    """

    def __init__(
        self, updater: Updater, is_last: Callable[[], bool], waiting: WaitingGradients
    ) -> None:
        super().__init__(updater, is_last)
        self._gradients = waiting
        self._stand_ins: dict[int, tuple[torch.Tensor, GradientStandIn]] = {}
        self._done: dict[int, Speculation] = {}
        self._prediction: Prediction[Recipe] = Prediction(Recipe())
        self._asked: set[tuple[Recipe, float]] = set()
        self._disturbed = False
        self._ran_ahead = 0
        self.redone_steps = 0
        self.speculated_steps = 0

    def watch(self, subgroups: Sequence[Subgroup]) -> None:
        """See `BackwardOverlap.watch`."""
        super().watch(subgroups)
        self._updater.expect(subgroups)

    def _runs_ahead(self) -> bool:
        return self._prediction.pays

    def _begin_backward(self) -> None:
        # A second backward before step(): gradients go on accumulating, although the last one was
        # said to be the last. What ran ahead is void.
        self._disturbed = bool(self._stand_ins)
        self._forget_ahead()
        super()._begin_backward()

    def _collect(self, parameter: torch.Tensor) -> bool:
        gradient = self._gradient_of(parameter)
        if gradient is None:
            return False
        stand_in = GradientStandIn.of(Held(gradient), gradient)
        for recipe, order in self._asked:
            if recipe == Recipe():
                stand_in.note_norm(recipe, order, norm_of(gradient, order))
        self._place(parameter, stand_in)
        self._stand_ins[id(parameter)] = (parameter, stand_in)
        del gradient
        if self._prediction.pays and not self._disturbed:
            return True
        self._gradients.put(stand_in)
        return False

    def _update(self, subgroup: Subgroup) -> None:
        gradients = self._expected_gradients(subgroup)
        self._done[id(subgroup)] = self._updater.speculate(subgroup, gradients)
        gradients.clear()
        for key in {id(subgroup.pieces[index].parameter) for index in subgroup.ready}:
            # A parameter that was cut may have pieces in subgroups that are still to be updated.
            if all(id(home) in self._done for home, _ in self._homes[key]):
                self._gradients.put(self._stand_ins[key][1])

    def _expected_gradients(self, subgroup: Subgroup) -> dict[int, torch.Tensor]:
        """The gradients of the pieces that have one, as they will be at `step()`."""
        recipe = self._prediction.expected
        gradients = {}
        for index, piece in enumerate(subgroup.pieces):
            if index in subgroup.ready:
                _, stand_in = self._stand_ins[id(piece.parameter)]
                gradient = piece.of(stand_in.raw())
                if recipe != Recipe():
                    gradient = gradient.clone()
                    recipe.apply_(gradient)
                gradients[index] = gradient
        return gradients

    def finish(self) -> list[Speculation]:
        """What ran ahead with the gradients as they are; everything else is dropped."""
        recipes = {self._scaling(key) for key in self._stand_ins}
        done, right = self._done, []
        for speculation in done.values():
            if self._may_hold(speculation):
                right.append(speculation)
            else:
                self._updater.drop(speculation)
        if self._stand_ins:
            scaling = recipes.pop() if len(recipes) == 1 and not self._disturbed else None
            self._prediction.note(scaling)
            self._asked = set()
            for _, stand_in in self._stand_ins.values():
                self._asked.update(stand_in.asked_norms)
        self._ran_ahead = len(done)
        self._done = {}
        self.forget()
        return right

    def settled(self, committed: int) -> None:
        """See `BackwardOverlap.settled`."""
        self.speculated_steps += self._ran_ahead > 0
        self.redone_steps += committed < self._ran_ahead
        self._ran_ahead = 0

    def _scaling(self, key: int) -> Recipe | None:
        """What was done to a gradient since backward; None for what cannot be foreseen."""
        parameter, stand_in = self._stand_ins[key]
        gradient = parameter.grad
        there = gradient is not None and local_part(gradient) is stand_in
        untouched = there and not stand_in.edited
        return stand_in.recipe if untouched else None

    def _may_hold(self, speculation: Speculation) -> bool:
        pieces = speculation.subgroup.pieces
        expected = self._prediction.expected
        return all(
            self._scaling(id(pieces[index].parameter)) == expected for index in speculation.indices
        ) and speculation.may_hold(self._updater.group_of(speculation.subgroup))

    def forget(self) -> None:
        """Drop everything that ran ahead or waits to; the next backward starts anew."""
        self._forget_ahead()
        self._disturbed = False
        self._backward = -1

    def _forget_ahead(self) -> None:
        for speculation in self._done.values():
            self._updater.drop(speculation)
        self._done = {}
        self._stand_ins.clear()
        self._gradients.start_over()
        self._start_over()
