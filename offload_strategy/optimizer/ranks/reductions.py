"""When the gradients of a data-parallel backward pass are final.

[Note: final gradients]
A parameter's own hook sees the gradient of this rank alone: `DistributedDataParallel` reduces it
after that, bucket by bucket, and puts the result into `p.grad` in a callback at the end of the
pass. A callback that a callback has queued runs after it, whatever it queued itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload_strategy.optimizer.ranks.team import Team

#: A static graph's first pass reduces in a callback, which queues the one that ends the reduction.
_CALLBACKS_BEHIND = 3


class ReducedBackward:
    """Tells when a backward pass begins, and when the gradients that it gave are final.

    Args:
        team: reduces them.
        begins: called at the pass's first gradient.
        over: called at its end, with the parameters that got one.
    """

    def __init__(
        self,
        team: Team,
        begins: Callable[[], None],
        over: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        self._team = team
        self._begins = begins
        self._over = over
        self._pass = -1
        self._seen: dict[int, torch.Tensor] = {}

    def notice(self, parameter: torch.Tensor) -> None:
        """A parameter got a gradient of this rank's."""
        if not self._team.reduces:
            return
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._pass:
            self._pass = graph_task
            self._seen.clear()
            self._begins()
            self._queue(_CALLBACKS_BEHIND)
        self._seen[id(parameter)] = parameter

    def _queue(self, behind: int) -> None:
        def callback() -> None:
            if behind:
                self._queue(behind - 1)
            else:
                self._end()

        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _end(self) -> None:
        seen = self._seen
        for parameter in self._team.late_parameters():
            seen.setdefault(id(parameter), parameter)
        self._pass, self._seen = -1, {}
        self._over(list(seen.values()))
