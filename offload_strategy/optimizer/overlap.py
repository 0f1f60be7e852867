"""Updates during backward: which subgroups are complete, and what is done with them.

Updates run on the thread that runs backward, between two of its nodes: on the CPU both would share
the same cores anyway, and on an accelerator they are launched, not executed, there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.heap import TicketState
from offload_strategy.optimizer.gradients import (
    Consumed,
    GradientStandIn,
    Held,
    Recipe,
    norm_of,
)
from offload_strategy.optimizer.layout import packable
from offload_strategy.optimizer.prediction import Prediction
from offload_strategy.optimizer.subgroups import Subgroup
from offload_strategy.optimizer.updates import Speculation, Updater

#: Subgroups whose states are loaded ahead of their update.
PREFETCHED_SUBGROUPS = 2
#: Complete subgroups that may wait for their states before backward waits for them as well.
_LAG = 2


class BackwardOverlap(ABC):
    """Collects subgroups whose gradients are final, and has them updated while backward goes on.

    States are loaded in the order in which the last backward completed the subgroups.

    Args:
        updater: runs the updates.
        is_last: whether the backward that runs is the last before `step()`.
    """

    def __init__(self, updater: Updater, is_last: Callable[[], bool]) -> None:
        self._updater = updater
        self._is_last = is_last
        self._order: list[Subgroup] = []
        self._homes: dict[int, list[tuple[Subgroup, int]]] = {}
        self._upcoming: list[Subgroup] = []
        self._waiting: deque[Subgroup] = deque()
        self._completed: list[Subgroup] = []
        self._backward = -1

    def watch(self, subgroups: Sequence[Subgroup]) -> None:
        """Work on these subgroups from now on."""
        self._order = list(subgroups)
        self._homes = {}
        for subgroup in subgroups:
            for index, piece in enumerate(subgroup.pieces):
                self._homes.setdefault(id(piece.parameter), []).append((subgroup, index))

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete for this backward."""
        homes = self._homes.get(id(parameter))
        if homes is None or not self._is_last():
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._begin_backward()
        if not self._collect(parameter):
            return
        for subgroup, index in homes:
            subgroup.ready.add(index)
            if len(subgroup.ready) >= subgroup.waits_for():
                self._complete(subgroup)
        self._advance()

    def _complete(self, subgroup: Subgroup) -> None:
        self._updater.fetch(subgroup)
        self._waiting.append(subgroup)
        self._completed.append(subgroup)
        self._upcoming = [other for other in self._upcoming if other is not subgroup]

    def _fetch_upcoming(self) -> None:
        for early in islice(self._upcoming, PREFETCHED_SUBGROUPS):
            self._updater.fetch(early)

    def _advance(self) -> None:
        while self._waiting:
            subgroup = self._waiting[0]
            ticket = subgroup.states.ticket
            arrived = ticket is None or ticket.state not in (
                TicketState.STORED,
                TicketState.LOADING,
            )
            if not arrived and len(self._waiting) <= _LAG:
                return
            self._waiting.popleft()
            self._update(subgroup)
            self._fetch_upcoming()

    def _start_over(self) -> None:
        """Expect every subgroup again."""
        if self._completed:
            done = set(map(id, self._completed))
            self._order = self._completed + [s for s in self._order if id(s) not in done]
        self._completed = []
        self._waiting.clear()
        for subgroup in self._order:
            subgroup.ready.clear()

    def _begin_backward(self) -> None:
        self._upcoming = list(self._order)
        if self._runs_ahead():
            self._fetch_upcoming()

    @abstractmethod
    def _runs_ahead(self) -> bool:
        """Whether subgroups are updated in this backward."""

    @abstractmethod
    def _collect(self, parameter: torch.Tensor) -> bool:
        """Take notice of a gradient; whether its subgroup is to be updated when complete."""

    @abstractmethod
    def _update(self, subgroup: Subgroup) -> None:
        """Update a subgroup of which every gradient was collected."""

    @abstractmethod
    def finish(self) -> list[Speculation]:
        """End the step's part during backward; what ran ahead and is to be committed."""

    @abstractmethod
    def forget(self) -> None:
        """Drop everything that ran ahead or waits to; the next backward starts anew."""

    def cleared(self) -> None:
        """The gradients are about to be cleared, before `step()` or after it."""
        self.forget()


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
        gradient = parameter.grad
        if gradient is None or not packable(parameter):
            return False
        if isinstance(gradient, GradientStandIn):
            gradient = gradient.values()
        if not packable(gradient):
            return False
        self._gradients[id(parameter)] = (gradient, len(self._homes[id(parameter)]))
        what = f"a gradient of shape {tuple(parameter.shape)}"
        parameter.grad = GradientStandIn.of(Consumed(what), gradient)
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


class CommittedUpdates(BackwardOverlap):
    """``overlap: commit``: updates run ahead on copies, and `step()` makes them current.

    Clipping or scaling gradients after backward makes what ran ahead worthless, unless it was
    foreseen. It is noticed at `step()`, and while it happens often updates run at `step()`.
    """

    def __init__(self, updater: Updater, is_last: Callable[[], bool]) -> None:
        super().__init__(updater, is_last)
        self._stand_ins: dict[int, tuple[torch.Tensor, GradientStandIn]] = {}
        self._done: dict[int, Speculation] = {}
        self._prediction: Prediction[Recipe] = Prediction(Recipe())
        self._asked: set[tuple[Recipe, float]] = set()
        self._disturbed = False
        self.redone_steps = 0
        self.speculated_steps = 0

    def _runs_ahead(self) -> bool:
        return self._prediction.pays

    def _begin_backward(self) -> None:
        # A second backward before step(): gradients go on accumulating, although the last one was
        # said to be the last. What ran ahead is void.
        self._disturbed = bool(self._stand_ins)
        self._forget_ahead()
        super()._begin_backward()

    def _collect(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        if isinstance(gradient, GradientStandIn):
            gradient = gradient.values()
        if gradient is None or not (packable(parameter) and packable(gradient)):
            return False
        stand_in = GradientStandIn.of(Held(gradient), gradient)
        for recipe, order in self._asked:
            if recipe == Recipe():
                stand_in.note_norm(recipe, order, norm_of(gradient, order))
        parameter.grad = stand_in
        self._stand_ins[id(parameter)] = (parameter, stand_in)
        return self._prediction.pays and not self._disturbed

    def _update(self, subgroup: Subgroup) -> None:
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
        self._done[id(subgroup)] = self._updater.speculate(subgroup, gradients)

    def finish(self) -> list[Speculation]:
        """What ran ahead and still holds; everything else is dropped."""
        recipes = {self._scaling(key) for key in self._stand_ins}
        done = list(self._done.values())
        holding = [s for s in done if self._holds(s)]
        for speculation in done:
            if speculation not in holding:
                self._updater.drop(speculation)
        if self._stand_ins:
            scaling = recipes.pop() if len(recipes) == 1 and not self._disturbed else None
            self._prediction.note(scaling)
            self._asked = set()
            for _, stand_in in self._stand_ins.values():
                self._asked.update(stand_in.asked_norms)
        if done:
            self.speculated_steps += 1
            self.redone_steps += len(holding) < len(done)
        self._done = {}
        self.forget()
        return holding

    def _scaling(self, key: int) -> Recipe | None:
        """What was done to a gradient since backward; None for what cannot be foreseen."""
        parameter, stand_in = self._stand_ins[key]
        untouched = parameter.grad is stand_in and not stand_in.edited
        return stand_in.recipe if untouched else None

    def _holds(self, speculation: Speculation) -> bool:
        pieces = speculation.subgroup.pieces
        expected = self._prediction.expected
        return all(
            self._scaling(id(pieces[index].parameter)) == expected for index in speculation.indices
        ) and speculation.holds(self._updater.group_of(speculation.subgroup))

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
        self._start_over()
