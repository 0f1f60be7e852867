"""Updates during backward: which subgroups are ready, and whether running ahead pays."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from offload_strategy.heap import TicketState
from offload_strategy.optimizer.marks import InputsMark, can_be_marked
from offload_strategy.optimizer.subgroups import Subgroup
from offload_strategy.optimizer.updates import Speculation, Updater

#: Subgroups whose states are loaded ahead of their update.
PREFETCHED_SUBGROUPS = 2
#: Ready subgroups that may wait for their states before backward waits for them as well.
_LAG = 2
#: Steps with untouched gradients after which running ahead is tried again.
_CLEAN_STEPS = 2


class BackwardOverlap:
    """Collects subgroups whose gradients are final, and updates them while backward goes on.

    Updates run on the thread that runs backward, between two of its nodes: on the CPU both would
    share the same cores anyway, and on an accelerator they are launched, not executed, there.

    Clipping or scaling gradients after backward makes what ran ahead worthless. It is noticed at
    `step()`, and then updates run at `step()` until gradients stay untouched again.

    Args:
        updater: runs the updates.
        is_last: whether the backward that runs is the last before `step()`.
    """

    def __init__(self, updater: Updater, is_last: Callable[[], bool]) -> None:
        self._updater = updater
        self._is_last = is_last
        self._subgroups: Sequence[Subgroup] = ()
        self._home: dict[int, tuple[Subgroup, int]] = {}
        self._waiting: deque[Subgroup] = deque()
        self._done: dict[int, Speculation] = {}
        self._sample: tuple[weakref.ref[torch.Tensor], InputsMark] | None = None
        self._clean_steps = _CLEAN_STEPS
        self._backward = -1
        self.redone_steps = 0

    def watch(self, subgroups: Sequence[Subgroup]) -> None:
        """Work on these subgroups from now on."""
        self._subgroups = subgroups
        self._home = {
            id(parameter): (subgroup, index)
            for subgroup in subgroups
            for index, parameter in enumerate(subgroup.parameters)
        }

    @property
    def _runs_ahead(self) -> bool:
        return self._clean_steps >= _CLEAN_STEPS

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete for this backward."""
        home = self._home.get(id(parameter))
        if home is None or not self._is_last():
            return
        self._notice_new_backward()
        if not self._runs_ahead:
            if self._sample is None and can_be_marked(parameter):
                self._sample = (weakref.ref(parameter), InputsMark([parameter]))
            return
        subgroup, index = home
        subgroup.ready.add(index)
        if len(subgroup.ready) >= subgroup.waits_for():
            self._updater.fetch(subgroup)
            self._waiting.append(subgroup)
            self._advance()

    def _notice_new_backward(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        if self._done:
            # A second backward before step(): gradients go on accumulating, although the last one
            # was said to be the last. What ran ahead is void, and will be in the next steps too.
            self._clean_steps = 0
            self._forget_ahead()
        if self._runs_ahead:
            for early in self._subgroups[:PREFETCHED_SUBGROUPS]:
                self._updater.fetch(early)

    def finish(self) -> list[Speculation]:
        """What ran ahead and still holds, for `step()` to commit; everything else is dropped."""
        done = list(self._done.values())
        holding = [s for s in done if s.holds(self._updater.group_of(s.subgroup))]
        for speculation in done:
            if speculation not in holding:
                self._updater.drop(speculation)
        if done:
            if len(holding) < len(done):
                self.redone_steps += 1
                self._clean_steps = 0
        elif self._sample is not None:
            reference, mark = self._sample
            parameter = reference()
            untouched = parameter is not None and mark.holds([parameter])
            self._clean_steps = self._clean_steps + 1 if untouched else 0
        self._done = {}
        self.forget()
        return holding

    def forget(self) -> None:
        """Drop everything that ran ahead or waits to; the next backward starts anew."""
        self._forget_ahead()
        self._sample = None
        self._backward = -1

    def _forget_ahead(self) -> None:
        for speculation in self._done.values():
            self._updater.drop(speculation)
        self._done = {}
        self._waiting.clear()
        for subgroup in self._subgroups:
            subgroup.ready.clear()

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
            speculation = self._updater.speculate(subgroup)
            if speculation is not None:
                self._done[id(subgroup)] = speculation
