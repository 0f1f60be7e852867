"""Updates during backward: which subgroups are complete, and when they are updated.

[Note: nested backward passes]
A reentrant checkpoint runs the backward pass of its region inside a node of the outer pass, and
torch counts it as a pass of its own. All of them, and what follows them in the outer pass, count as
one pass here, unless a parameter gets a gradient that already had one in the pass.

Updates run on the thread that runs backward, between two of its nodes: on the CPU both would share
the same cores anyway, and on an accelerator they are only launched there, on a stream of their own.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from traceback import walk_stack

import torch

from offload_strategy.optimizer.gradients.gradient_backing import GradientBacking
from offload_strategy.optimizer.gradients.offloaded_gradient import (
    OffloadedGradient,
    gradient_values,
)
from offload_strategy.optimizer.overlap.ahead_update import AheadUpdate
from offload_strategy.optimizer.states.subgroups import Subgroup, packable
from offload_strategy.optimizer.subgroup_update import Updater
from offload_strategy.store.ticket import TicketState
from offload_strategy.torch_support.dtensors import local_tensor, wrap_like

#: Subgroups whose states are prefetched ahead of their update.
PREFETCHED_SUBGROUPS = 2
#: Complete subgroups that may wait for their states before backward waits for them as well. Those
#: of one large parameter are complete at once, hold one gradient together, and count as one.
_MAX_WAITING = 2
_NODE_CODE = torch.autograd.function.BackwardCFunction.apply.__code__


class BackwardPasses:
    """Tells which gradients are the first of a pass; see [Note: nested backward passes]."""

    def __init__(self) -> None:
        #: torch's id of the latest pass, which may be nested.
        self.task = -1
        self.nested = self.running = False
        self._outermost = -1  # the id of the pass that is not nested, if it has had a gradient
        #: What has got a gradient in the pass, by id.
        self.parameters: dict[int, torch.Tensor] = {}

    def begins(self, parameter: torch.Tensor) -> bool:
        """Note a gradient of the running pass; return whether it is the first one."""
        task = torch._C._current_graph_task_id()
        first = False
        if task != self.task:
            self.task = task
            frames = walk_stack(sys._getframe())  # a node of another pass has begun a nested one
            self.nested = any(frame.f_code is _NODE_CODE for frame, _ in frames)
            another = not self.nested and self._outermost not in (-1, task)
            first = not self.running or another or id(parameter) in self.parameters
            if first:
                self.running, self._outermost = True, -1
                self.parameters = {}
            if not self.nested:
                self._outermost = task
        self.parameters[id(parameter)] = parameter
        return first

    def end(self) -> None:
        """The next gradient is the first of another pass."""
        self.task, self.running, self.parameters = -1, False, {}


class BackwardOverlap(ABC):
    """Collects subgroups whose gradients are final, and updates them during backward.

    States are prefetched in the order in which the last backward completed the subgroups.
    """

    def __init__(
        self, updater: Updater, is_last: Callable[[], bool], is_ready: Callable[[], bool]
    ) -> None:
        self._updater = updater
        self._is_last = is_last
        self._is_ready = is_ready
        # Whether the groups were those of the subgroups when the pass began. If not, gradients stay
        # where they are until `step()`, which plans again.
        self._updates = True
        self._passes = BackwardPasses()
        self.streams = updater.streams
        self._order: list[Subgroup] = []
        #: Parameter id -> its subgroups, each with the index of the parameter's slice.
        self._subgroups_of: dict[int, list[tuple[Subgroup, int]]] = {}
        #: What stands for the gradients of this backward that were taken, by parameter.
        self._taken: dict[torch.Tensor, GradientBacking] = {}
        self._finished_early = False
        self._waiting: deque[Subgroup] = deque()
        #: In the order of completion, as keys.
        self._completed: dict[Subgroup, None] = {}
        #: Gradients of an earlier pass, and what has their memory since this one.
        self._succeeded: list[tuple[weakref.ref[GradientBacking], GradientBacking]] = []
        #: The parameter whose gradient data-parallel ranks compare at `step()`.
        self.compared: torch.Tensor | None = None
        #: Updates ahead of the next step, and steps that had some or had to repeat some.
        self._ran_ahead = self.speculated_steps = self.redone_steps = 0

    def set_subgroups(self, subgroups: Sequence[Subgroup]) -> None:
        """Update these subgroups from now on."""
        self._order = list(subgroups)
        self._subgroups_of = {}
        for subgroup in subgroups:
            for index, param_slice in enumerate(subgroup.slices):
                entries = self._subgroups_of.setdefault(id(param_slice.parameter), [])
                entries.append((subgroup, index))

    # ------------------------------------------------------------------ gradients
    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Handle a parameter's gradient that is complete for this backward."""
        if id(parameter) not in self._subgroups_of or not self._is_last():
            return
        if self._passes.begins(parameter):
            self._begin_backward()
        self._take(parameter)

    def backward_begins(self) -> None:
        """Handle the start of a backward pass whose end `backward_over` tells."""
        if self._is_last():
            self._begin_backward()

    def gradient_reduced(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Handle a final gradient that will only be in `p.grad` when the pass is over.

        Its values stay where they are until another pass begins.
        """
        if self._is_last():
            self._take(parameter, gradient)

    def backward_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """Handle the end of a backward pass: all gradients are final and in `p.grad`.

        The parameters are those that got a gradient, also those of `gradient_reduced`.
        """
        if self._is_last():
            for parameter in parameters:
                backing = self._taken.get(parameter)
                if backing is None:
                    self._take(parameter)
                else:  # DDP has written there meanwhile
                    parameter.grad = OffloadedGradient.over(backing, backing.metadata)

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Take a final gradient, that in `p.grad` unless another is given."""
        subgroups = self._subgroups_of.get(id(parameter))
        if subgroups is None or not self._updates:
            return
        deferred = gradient is not None
        earlier = None
        if gradient is None:
            if parameter.grad is None or not packable(local_tensor(parameter)):
                return
            before = local_tensor(parameter.grad)
            if isinstance(before, OffloadedGradient):  # accumulated into: it has its values
                earlier = weakref.ref(before.backing)
            del before
            gradient = gradient_values(parameter)
            # It cannot be stored and sliced, or is itself part of a graph.
            if not packable(gradient) or gradient.requires_grad:
                return
        offloaded = self._collect(parameter, gradient)
        self._taken[parameter] = offloaded.backing
        if not deferred:
            parameter.grad = wrap_like(parameter.grad, offloaded)
        del gradient
        if earlier is not None:
            if not self._succeeded:
                torch.autograd.Variable._execution_engine.queue_callback(self._materialize_kept)
            self._succeeded.append((earlier, offloaded.backing))
        elif not deferred:
            offloaded.backing.materialize_if_held()
        if not self._runs_ahead():
            self._keep(offloaded.backing)
            return
        for subgroup, index in subgroups:
            subgroup.ready.add(index)
            if len(subgroup.ready) >= sum(s.parameter.requires_grad for s in subgroup.slices):
                self._updater.prefetch_states(subgroup)
                self._waiting.append(subgroup)
                self._completed[subgroup] = None
        self._advance()

    def _materialize_kept(self) -> None:
        """Find out whether somebody keeps the gradient of an earlier pass, with the same memory.

        When the pass ends, as autograd keeps it until then.
        """
        for earlier, backing in self._succeeded:
            if earlier() is not None or not backing.is_alone:
                backing.materialize()  # its memory may be changed unnoticed
        self._succeeded.clear()

    # ------------------------------------------------------------------ updates
    def _prefetch_upcoming(self) -> None:
        for subgroup in islice(self._incomplete(), PREFETCHED_SUBGROUPS):
            self._updater.prefetch_states(subgroup)

    def _advance(self) -> None:
        while self._waiting:
            ticket = self._waiting[0].states.ticket
            if ticket is not None and ticket.state in (TicketState.STORED, TicketState.LOADING):
                parameters = {id(waiting.slices[0].parameter) for waiting in self._waiting}
                if len(parameters) <= _MAX_WAITING:
                    return
            subgroup = self._waiting.popleft()
            with self._updater.autocast_of_step(subgroup):
                self._update(subgroup)
            self._prefetch_upcoming()

    def _incomplete(self) -> Iterator[Subgroup]:
        return (subgroup for subgroup in self._order if subgroup not in self._completed)

    def _drop_all(self) -> None:
        """Drop what was collected, and expect the gradients of every subgroup again."""
        self.streams.join()  # a pass that raised has not done it
        self._succeeded.clear()
        self._taken.clear()
        self._order = [*self._completed, *self._incomplete()]
        self._completed = {}
        self._finished_early = False
        self._waiting.clear()
        for subgroup in self._order:
            subgroup.ready.clear()

    def _begin_backward(self) -> None:
        # What an earlier backward left that raised, or whose gradients were cleared; or, of one
        # before the same step(), what ran ahead: gradients go on accumulating.
        self._drop_all()
        self._updates = self._is_ready()
        if self._updates and self._runs_ahead():
            self._prefetch_upcoming()

    def finish_early(self) -> list[AheadUpdate]:
        """Do what `finish` does, before other subgroups are planned, if there is anything to do."""
        has_taken = bool(self._taken)
        ahead_updates = self.finish() if has_taken else []
        self._finished_early = has_taken
        return ahead_updates

    def _runs_ahead(self) -> bool:
        """Whether subgroups are updated during this backward."""
        return True

    @abstractmethod
    def _collect(self, parameter: torch.Tensor, gradient: torch.Tensor) -> OffloadedGradient:
        """Take a final gradient; return what stands in `p.grad` for it."""

    def _keep(self, backing: GradientBacking) -> None:
        """Keep a gradient, which no update during backward needs, until `step()`."""
        raise AssertionError("every gradient is used during backward")

    @abstractmethod
    def _update(self, subgroup: Subgroup) -> None:
        """Update a subgroup whose gradients have all been collected."""

    @abstractmethod
    def finish(self) -> list[AheadUpdate]:
        """End the updates during backward; return those that `step()` may commit."""

    def note_commits(self, count: int) -> None:
        """Count a step of which so many updates ahead of it were still valid and are committed."""
        self.speculated_steps += self._ran_ahead > 0
        self.redone_steps += count < self._ran_ahead
        self._ran_ahead = 0

    def check_saveable(self) -> None:
        """Raise `OffloadError` if some weights and states are of this step, and others are not."""
        return

    def reset(self) -> None:
        """Drop every update ahead of `step()` and all collected gradients."""
        self._drop_all()
        self._passes.end()

    def gradients_cleared(self) -> None:
        """Handle `zero_grad`, before `step()` or after it."""
        self.reset()

    def states_replaced(self) -> None:
        """Handle other states between backward and `step()`; `commit` finds them in `finish`."""
        return
