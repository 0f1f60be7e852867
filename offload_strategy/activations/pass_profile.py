"""The profile of a pass, derived from its trace: names of items, lives, rates, and overhead.

[Note: overhead of I/O]
Hooks, copies in the operating system and its drivers take time from the cores that compute, or from
the thread that launches kernels. It is estimated from passes of the same kind that move different
amounts: the slope of computing time over moved bytes, by the estimator of Theil and Sen (the median
of the slopes between every two of them), as a disturbed pass is off by much.
"""

from __future__ import annotations

import itertools
import statistics
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offload_strategy.activations.baseline_memory import BEGIN, BaselineMemory
from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.tier_writes import TierWrites
from offload_strategy.plan_runtime.profile import PathRates, Profile, TensorLife
from offload_strategy.torch_support.modules import running_calls

#: Kinds of items whose names are remembered.
_MOST_NAMES = 65536
#: Kinds of passes that are remembered, and passes of each after the first, which warms caches up.
_MOST_KINDS, _PASSES = 8, 12
#: Two passes count only if their moved bytes differ by this share of what they save.
_LEAST_DIFFERENCE = 0.15
#: Largest plausible seconds per byte; more is a disturbance.
_MOST_OVERHEAD = 3e-9


class SavedTensorNames:
    """Names of items for people: the module on the call stack that saved them, dtype and shape."""

    def __init__(self) -> None:
        self._modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._names: dict[int, str] = {}

    def add_modules(self, model: nn.Module) -> None:
        """Register the modules of a model under their names in it."""
        for name, module in model.named_modules():
            self._modules.setdefault(module, name or type(module).__name__)

    def note(self, prefix: int, tensor: torch.Tensor) -> None:
        """Name a saved tensor with its `Trace.prefix_with` after the module that runs now."""
        if prefix in self._names:
            return
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        _, module = next(running_calls(), (0, None))
        name = "" if module is None else self._modules.get(module, type(module).__name__)
        looks = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        self._names[prefix] = f"{name} {looks}".strip()

    def of(self, prefix: int) -> str | None:
        """Return the name of an item, or None."""
        return self._names.get(prefix)


class IoOverhead:
    """See [Note: overhead of I/O]."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, deque[tuple[int, float]]] = OrderedDict()
        #: Seconds per byte that is written or read.
        self.per_byte = 0.0

    def observe(self, trace: Trace) -> None:
        """Learn from a pass whose backward has ended."""
        passes = self._seen.get(trace.signature)
        if passes is None:  # the first of its kind does not count
            self._seen[trace.signature] = deque(maxlen=_PASSES)
            if len(self._seen) > _MOST_KINDS:
                self._seen.popitem(last=False)
            return
        self._seen.move_to_end(trace.signature)
        passes.append((2 * trace.left_bytes, trace.computing_seconds))
        least = max(1.0, _LEAST_DIFFERENCE * 2 * trace.saved_bytes)
        slopes = [
            (seconds - other_seconds) / (moved - other_moved)
            for (moved, seconds), (other_moved, other_seconds) in itertools.combinations(passes, 2)
            if abs(moved - other_moved) >= least
        ]
        if slopes:
            self.per_byte = min(max(0.0, statistics.median(slopes)), _MOST_OVERHEAD)

    def seconds(self, trace: Trace) -> float:
        """Return the overhead of a pass in seconds."""
        return min(2 * self.per_byte * trace.left_bytes, 0.5 * trace.computing_seconds)


def use_event(trace: Trace, place: int) -> int:
    """Return the event of a use (`BaselineMemory`): its place among the uses of such a pass."""
    return hash((trace.signature, place))


@dataclass
class PassProfiler:
    """Makes profiles of passes, with what is known besides their traces."""

    writes: TierWrites
    names: SavedTensorNames = field(default_factory=SavedTensorNames)
    #: Is subtracted from all times.
    io_overhead: IoOverhead = field(default_factory=IoOverhead)
    baseline: BaselineMemory | None = None
    #: Seconds from the start of the pass until which others reference an item, by its prefix.
    held_until: dict[int, float] = field(default_factory=dict)

    def profile(
        self, trace: Trace, ended_at: float, busy: Sequence[tuple[float, float]] = ()
    ) -> Profile:
        """Return the profile of a pass, of which backward has used an item, without its waits.

        `ended_at` is when all that follows its last use was over (`time.perf_counter`).
        `busy` has spans in which something else ran on its thread, which do not count.
        """

        def computed(at: float, waited: float) -> float:
            before = sum(min(end, at) - begin for begin, end in busy if begin < at)
            return pace * (at - trace.started_at - waited - before)

        pace = 1.0 - self.io_overhead.seconds(trace) / max(trace.seconds, 1e-9)
        used = {number: computed(at, trace.held + waited) for number, at, waited in trace.uses}
        last_use = used[trace.uses[-1][0]]
        step = max(last_use, computed(ended_at, trace.held + trace.waited))
        tensors, made = [], []
        for number, (nbytes, prefix) in enumerate(zip(trace.sizes, trace.prefixes, strict=True)):
            at = trace.saved_at[number] - trace.started_at - trace.held_at[number]
            made.append(max(0.0, pace * at))
            # An item that backward has not used exists until its end.
            life = (made[-1], max(made[-1], used.get(number, last_use)))
            held = pace * self.held_until.get(prefix, 0.0)
            name = self.names.of(prefix) or f"item {number}"
            tensors.append(TensorLife(name, nbytes, life, held_until=held))
        others = []
        if self.baseline is not None:
            events = [(0.0, BEGIN), *zip(made, trace.prefixes, strict=True)]
            events += [(at, use_event(trace, place)) for place, at in enumerate(used.values())]
            events.sort(key=lambda one: one[0])
            others = [(at, self.baseline.after(event)) for at, event in events]
        # A path that was never busy moves at least what is offloaded in a pass.
        least = max(1.0, 2 * trace.left_bytes / max(step, 1e-6))
        link = self.writes.copy_rate() if self.writes.has_room_in_memory(trace.left_bytes) else None
        read, write = (link or self.writes.rate(write=write) or least for write in (False, True))
        return Profile(
            forward_seconds=min(max(0.0, min(used.values())), step),
            step_seconds=step,
            tensors=tuple(tensors),
            other_bytes=max((nbytes for _, nbytes in others), default=0),
            others=tuple(others),
            paths=(PathRates("tiers", read=read, write=write),),
            io_overhead=self.io_overhead.per_byte,
            keeps_freed=self.baseline is not None and self.baseline.meter.counts_freed,
        )
