"""When the gradients of a data-parallel backward pass are final.

[Note: final gradients]
A parameter's own hook sees the gradient of this rank alone. `DistributedDataParallel` gathers them
in buckets, reduces each as soon as it is full, and puts the results into `p.grad` in a callback at
the end of the pass. So there are two times at which gradients are final:

- When a bucket is reduced, which a communication hook of ours learns from the second pass on, they
  are in the bucket. The hook does what DDP does without one, to the last bit. Where hooks cannot
  be, because there is one already or because it is not known before the end who has gradients at
  all, this is left out.
- At the end of the pass they are in `p.grad`. A callback that a callback has queued runs after
  DDP's, whatever that queued itself.

The end of a pass within the pass (a reentrant checkpoint) counts only if all buckets were reduced
before it. Reductions end on threads of the transport, and are reported on the thread that runs
backward when it computes its next gradient.
"""

from __future__ import annotations

import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap, BackwardPasses
from offload_strategy.optimizer.ranks.data_parallel_group import DataParallelGroup

#: A static graph's first pass reduces in a callback, which queues the one that ends the reduction.
_CALLBACKS_BEHIND = 3

#: Parameters of a bucket with their gradients.
_Bucket = list[tuple[torch.Tensor, torch.Tensor]]


class GradientReductions:
    """Tells an overlap when a backward pass begins and when its gradients are final."""

    def __init__(self, dp_group: DataParallelGroup, overlap: BackwardOverlap) -> None:
        self._dp_group = dp_group
        self._overlap = overlap
        self._passes = BackwardPasses()
        self._reduced_all = False
        self._reducing: deque[tuple[torch.futures.Future[Any], _Bucket]] = deque()

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Handle a gradient of this rank that is not reduced yet."""
        module = self._dp_group.module()
        # Not within `no_sync`. DDP notes it in the forward pass, which decides, not backward.
        if module is None or not module.require_forward_param_sync:
            return
        task = self._passes.task
        if self._passes.begins(parameter):
            self._reduced_all = False
            self._reducing.clear()  # of a pass that broke off
            self._overlap.backward_begins()
        if self._passes.task != task:
            self._queue(_CALLBACKS_BEHIND, self._passes.nested)
        self._report_finished()

    def add(self, future: torch.futures.Future[Any], bucket: _Bucket, last: bool) -> None:
        """Add a bucket whose reduction has begun, maybe the last one."""
        if self._passes.running:
            self._reducing.append((future, bucket))
            self._reduced_all = last

    def _report_finished(self) -> None:
        while self._reducing and self._reducing[0][0].done():
            future, bucket = self._reducing.popleft()
            # On an accelerator a future is done when the reduction is queued, and the current
            # stream waits for its end.
            with self._overlap.streams.reduced(bucket[0][1].device):
                future.wait()
                for parameter, gradient in bucket:
                    # Where it lies otherwise in memory than its parameter, it is taken at the end.
                    if parameter.is_contiguous() and id(parameter) in self._passes.parameters:
                        self._overlap.gradient_reduced(parameter, gradient)

    def _queue(self, behind: int, nested: bool) -> None:
        def callback() -> None:
            if behind:
                self._queue(behind - 1, nested)
            elif self._passes.running and (self._reduced_all or not nested):
                self._end()

        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _end(self) -> None:
        seen = self._passes.parameters
        self._passes.end()
        self._reducing.clear()
        module = self._dp_group.module()
        if module is not None and module.find_unused_parameters:
            # What this rank has not used may have got a gradient from others.
            seen |= {id(p): p for p in module.parameters() if p.requires_grad}
        elif module is not None:
            self._listen(module)
        self._overlap.backward_over(list(seen.values()))

    def _listen(self, module: DistributedDataParallel) -> None:
        """Listen to every bucket, if the module allows a hook.

        Not within a pass: of its buckets some would be scaled by DDP, and some by us.
        """
        for hook, state in module._comm_hooks:
            if hook is _all_reduce:
                state.listeners.add(self)  # type: ignore[attr-defined]
                return
        odd = module.static_graph or module.mixed_precision or self._dp_group.size == 1
        sparse = any(getattr(each, "sparse", False) is True for each in module.modules())
        if odd or sparse or module._comm_hooks:
            return
        # A module keeps its hook for ever, and with it the group, but no listener.
        state = SimpleNamespace(
            process_group=self._dp_group.process_group,
            size=self._dp_group.size,
            listeners=weakref.WeakSet([self]),
        )
        module.register_comm_hook(state, _all_reduce)


def _all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """Average a bucket over all ranks, as DDP does by itself: scaled first, then summed."""
    buffer = bucket.buffer().mul_(1.0 / state.size)
    future = dist.all_reduce(buffer, group=state.process_group, async_op=True).get_future()
    pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    for listener in state.listeners:
        listener.add(future, pairs, bucket.is_last())
    return future.then(lambda done: done.value()[0])
