"""Gathers the figures of an engine's steps to compare them with their prediction."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.engine.resources import Resources
from offload_strategy.io.bandwidth.measured_paths import RateComparison
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.plan_runtime.predicted_and_measured import (
    PathComparison,
    PredictionComparison,
    StepFigures,
    compare_prediction,
    predict_figures,
)
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.store.ticket import Tier
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.torch_support.modules import WeakHook
from offload_strategy.units import format_size

#: Steps that are looked at: the middle one of the last counts, as some step is always disturbed.
_STEPS = 5
#: Whole steps that it takes at least; the one before them is warming up.
_LEAST_STEPS = 2
_MOVED = ("activations", "optimizer")


class _Mark(NamedTuple):
    """Sums of a run at the end of a step; seconds and bytes."""

    at: float
    passes: int
    updating: float
    read_waits: float
    room_waits: float
    update_waits: float
    weight_waits: float
    read_bytes: int
    written_bytes: int


class StepLog:
    """Notes the sums of a run at the end of each step.

    A step ends with `optimizer.step()`; where no optimizer is swapped, before the forward pass that
    comes after one that was hinted to be the last.

    Args:
        recorder: of the engine.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._marks: deque[_Mark] = deque(maxlen=_STEPS + 1)
        self._optimizers: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._passes = 0
        self._was_last = False

    def follow(self, optimizer: Optimizer | None) -> None:
        """Let steps end with those of an optimizer, if its states are swapped."""
        if isinstance(optimizer, OffloadedOptimizer):
            self._optimizers.add(optimizer)
            # The hook lies on the user's own optimizer, which may live longer.
            over = WeakHook(self._step_over)
            self._handles.append(optimizer.register_step_post_hook(lambda *_: over()))

    def pass_begins(self, *, last: bool) -> None:
        """A forward pass begins.

        Args:
            last: whether it is hinted to be the last of its step.
        """
        if self._was_last and not self._optimizers:
            self._step_over()
        self._was_last = last
        self._passes += 1

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def middle_step(self) -> tuple[StepFigures, int] | None:
        """The last steps' middle one, by its time, and its passes; None if there were too few."""
        steps = sorted(zip(self._marks, list(self._marks)[1:], strict=False), key=_seconds)
        if len(steps) < _LEAST_STEPS:
            return None
        begin, end = steps[(len(steps) - 1) // 2]

        def gone(figure: str) -> float:
            return max(0.0, float(getattr(end, figure) - getattr(begin, figure)))

        seconds, update_waits = end.at - begin.at, gone("update_waits")
        # Updates wait as well, within their time.
        updating = max(0.0, gone("updating") - update_waits)
        waits = gone("read_waits") + gone("room_waits") + gone("weight_waits") + update_waits
        figures = StepFigures(
            step_seconds=seconds,
            computing_seconds=max(0.0, seconds - updating - waits),
            update_seconds=updating,
            read_wait_seconds=gone("read_waits"),
            room_wait_seconds=gone("room_waits"),
            update_wait_seconds=update_waits,
            read_bytes=gone("read_bytes"),
            written_bytes=gone("written_bytes"),
            other_wait_seconds=gone("weight_waits"),
        )
        return figures, end.passes - begin.passes

    def _step_over(self) -> None:
        if self._marks and self._marks[-1].passes == self._passes:
            self._marks.pop()  # several optimizers, one after the other
        recorder = self._recorder
        reads = recorder.read_stall_seconds("activations")
        self._marks.append(
            _Mark(
                at=time.perf_counter(),
                passes=self._passes,
                updating=sum(optimizer.timings.seconds for optimizer in self._optimizers),
                read_waits=reads,
                room_waits=recorder.stall_seconds("activations") - reads,
                update_waits=recorder.stall_seconds("optimizer"),
                weight_waits=recorder.stall_seconds("parameters"),
                read_bytes=sum(recorder.client_bytes(one, "read") for one in _MOVED),
                written_bytes=sum(recorder.client_bytes(one, "written") for one in _MOVED),
            )
        )


def compare_step(
    profile: Profile,
    activations: ActivationOffload,
    optimizers: Sequence[OffloadedOptimizer],
    resources: Resources,
    log: StepLog,
) -> PredictionComparison | None:
    """See `OffloadEngine.compare_prediction`.

    Args:
        profile: of the last step.
        activations: of the engine.
        optimizers: likewise.
        resources: likewise.
        log: of its steps.

    Returns:
        None if there were too few steps.
    """
    seen = log.middle_step()
    if seen is None:
        return None
    observed, passes = seen
    figures = activations.figures()
    host_states, host_room = _host_room(resources, sum(one.state_bytes for one in optimizers))
    queues = _queues(resources)
    rates, known = _rates_before(resources, profile)
    profile = replace(
        profile,
        paths=(rates,) if queues else (),
        updates=tuple(
            replace(
                update,
                read_bytes=int(update.read_bytes * (1 - host_states)),
                written_bytes=int(update.written_bytes * (1 - host_states)),
            )
            for update in profile.updates
        ),
    )
    plan = None if activations.planned is None else activations.planned.plan
    if plan is None:
        # In the order of saving, as a budget has it; what is saved last stays in host memory.
        left = int(figures["step_left_bytes"]) - host_room
        predicted = predict_figures(profile, leaving=_first(profile, left), passes=passes)
    else:
        predicted = predict_figures(profile, limit=plan.limit, passes=passes)
        observed = replace(observed, peak_bytes=int(figures["plan_peak_bytes"]))
    remarks = []
    if not known:
        remarks.append(
            "Of some path nothing was known before this run: the step is predicted with what the "
            "run itself has seen of it."
        )
    if observed.other_wait_seconds:
        remarks.append("Weights are streamed, of which nothing is predicted here.")
    return compare_prediction(
        profile,
        predicted,
        observed,
        [_path(comparison) for comparison in resources.measured_paths.comparisons()],
        remarks=remarks,
        about={"passes_in_a_step": passes},
    )


def _seconds(step: tuple[_Mark, _Mark]) -> float:
    return step[1].at - step[0].at


def _first(profile: Profile, nbytes: int) -> list[int]:
    """Numbers of the tensors that leave, if so many bytes do."""
    found = []
    for number, tensor in enumerate(profile.tensors):
        if tensor.nbytes <= nbytes:
            nbytes -= tensor.nbytes
            found.append(number)
    return found


def _queues(resources: Resources) -> list[PathQueue]:
    """Of the paths that a profile is about: those of activations."""
    tiers = resources.clients.get("activations", [])
    return [queue for tier in tiers for queue in tier.queues]


def _rates_before(resources: Resources, profile: Profile) -> tuple[PathRates, bool]:
    """What all paths together were known to carry before the run, and whether all of it was.

    A direction of which nothing was known is as the run itself has seen it.
    """
    queues, known = _queues(resources), True
    seen = profile.paths[0]
    rates = {Direction.READ: seen.read, Direction.WRITE: seen.write}
    for direction in Direction:
        found = [resources.measured_paths.expected(queue, direction) for queue in queues]
        some = [rate for rate in found if rate]
        known = known and len(some) == len(found)
        if some:
            rates[direction] = sum(some) * len(found) / len(some)
    return replace(seen, read=rates[Direction.READ], write=rates[Direction.WRITE]), known


def _host_room(resources: Resources, state_bytes: int) -> tuple[float, int]:
    """How host tiers will be used: the share of states that is there, and bytes for activations.

    States are there all the time, and come first.
    """
    states = _host_tiers(resources.clients.get("optimizer", []))
    capacity = sum(tier.capacity for tier in states)
    share = min(1.0, capacity / state_bytes) if state_bytes else 0.0
    tiers = _host_tiers(resources.clients.get("activations", []))
    taken = int(share * state_bytes) if any(tier in states for tier in tiers) else 0
    return share, max(0, sum(tier.capacity for tier in tiers) - taken)


def _host_tiers(tiers: Sequence[Tier]) -> list[Tier]:
    """Those before any path."""
    found = []
    for tier in tiers:
        if not tier.is_host_memory:
            break
        found.append(tier)
    return found


def _path(comparison: RateComparison) -> PathComparison:
    before, observed = comparison.expected, comparison.observed
    if before is None:
        origin = "nothing was known of it"
    elif before.source == "probe":
        origin = "predicted by the probe at the start"
    else:
        origin = f"predicted by {before.runs} earlier run{'s' if before.runs > 1 else ''}"
    over = (
        "was too rarely busy to tell"
        if observed is None
        else f"seen over {format_size(observed.nbytes)}"
    )
    return PathComparison(
        f"{comparison.path} {comparison.direction}",
        None if before is None else before.rate,
        None if observed is None else observed.rate,
        f"{origin}; {over}",
    )
