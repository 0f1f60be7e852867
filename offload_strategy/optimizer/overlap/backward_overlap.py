"""Updates during backward: which subgroups are complete, and what is done with them.

[Note: passes within passes]
A reentrant checkpoint runs the backward pass of its region inside of a node of the outer one, and
torch counts it as a pass of its own. All of them, and what comes after them in the outer one, are
one pass here, unless a gradient comes that has been there already.

Updates run on the thread that runs backward, between two of its nodes: on the CPU both would share
the same cores anyway, and on an accelerator they are launched, not executed, there.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import FrameType

import torch

from offload_strategy.optimizer.gradients.gradient_access import values_of
from offload_strategy.optimizer.gradients.gradient_sources import Held
from offload_strategy.optimizer.gradients.offloaded_gradient import GradientStandIn
from offload_strategy.optimizer.states.dtensor_shards import in_place_of, local_part
from offload_strategy.optimizer.states.flat_layout import packable
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Speculation, Updater
from offload_strategy.store.ticket import TicketState

#: Subgroups whose states are loaded ahead of their update.
PREFETCHED_SUBGROUPS = 2
#: Complete subgroups that may wait for their states before backward waits for them as well. Those
#: of one large parameter are complete at once, hold one gradient together, and count as one.
_LAG = 2
#: Of a pass that was noticed first inside of a node of another.
_WITHIN = -2


def is_within_another() -> bool:
    """Whether the backward pass that runs was begun by a node of another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NODE_CODE:
            return True
        frame = frame.f_back
    return False


_NODE_CODE = torch.autograd.function.BackwardCFunction.apply.__code__


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
        self._seen: set[int] = set()
        # Of `gradient_reduced`: what it gives, and what is to be put into `p.grad` after the pass.
        self._ahead_of_time: torch.Tensor | None = None
        self._unplaced: list[tuple[torch.Tensor, GradientStandIn]] = []

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
        if self._is_new_backward(parameter):
            self._seen.clear()
            self._begin_backward()
        self._seen.add(id(parameter))
        self._take(parameter)

    def backward_begins(self) -> None:
        """A backward pass begins whose end is told: see `backward_over`."""
        self._unplaced.clear()
        if self._is_last():
            self._begin_backward()

    def gradient_reduced(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient is final, but will only be in `p.grad` when the pass is over.

        Args:
            parameter: whose it is.
            gradient: its values, which stay there until another pass begins.
        """
        if self._is_last():
            self._ahead_of_time = gradient
            try:
                self._take(parameter)
            finally:
                self._ahead_of_time = None

    def backward_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """The gradients of a backward pass are final, and in their places.

        Args:
            parameters: that got one, but for those of `gradient_reduced`.
        """
        for parameter, stand_in in self._unplaced:
            gradient = parameter.grad
            if gradient is not None and not isinstance(gradient, GradientStandIn):
                stand_in.relocate(lambda _, own=gradient: Held(own))  # type: ignore[misc]
            parameter.grad = stand_in
        self._unplaced.clear()
        if self._is_last():
            for parameter in parameters:
                self._take(parameter)

    def _place(self, parameter: torch.Tensor, stand_in: GradientStandIn) -> None:
        """Put a stand-in into `p.grad`, as soon as nobody else writes there any more."""
        if self._ahead_of_time is None:
            parameter.grad = in_place_of(parameter.grad, stand_in)
        else:
            self._unplaced.append((parameter, stand_in))

    def _take(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is final."""
        homes = self._homes.get(id(parameter))
        if homes is None or not self._collect(parameter):
            return
        for subgroup, index in homes:
            subgroup.ready.add(index)
            if len(subgroup.ready) >= subgroup.waits_for():
                self._complete(subgroup)
        self._advance()

    def _is_new_backward(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient is the first of a backward pass; see [Note: passes within passes]."""
        backward, before = torch._C._current_graph_task_id(), self._backward
        if backward == before:
            return False
        if before != -1 and id(parameter) not in self._seen:
            if is_within_another():
                return False
            if before == _WITHIN:
                self._backward = backward
                return False
        self._backward = _WITHIN if is_within_another() else backward
        return True

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
            if not arrived and self._lag() <= _LAG:
                return
            self._waiting.popleft()
            self._update(subgroup)
            self._fetch_upcoming()

    def _lag(self) -> int:
        return len({id(subgroup.pieces[0].parameter) for subgroup in self._waiting})

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

    def _gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A parameter's gradient as a plain tensor, if it can be held and cut; None otherwise."""
        if self._ahead_of_time is not None:
            return self._ahead_of_time
        if parameter.grad is None or not packable(local_part(parameter)):
            return None
        gradient = values_of(parameter)
        return gradient if packable(gradient) else None

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
        """End the step's part during backward; what ran ahead and may be committed."""

    def settled(self, committed: int) -> None:  # noqa: B027
        """Learn how many of what `finish` gave did hold, and were committed."""

    @abstractmethod
    def forget(self) -> None:
        """Drop everything that ran ahead or waits to; the next backward starts anew."""

    def cleared(self) -> None:
        """The gradients are about to be cleared, before `step()` or after it."""
        self.forget()
