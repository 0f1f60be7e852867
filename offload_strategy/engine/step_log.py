"""The figures of an engine's steps, and their comparison with a prediction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise, starmap, takewhile
from timeit import default_timer as perf_counter

from torch.optim import Optimizer

from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.engine.attached_optimizers import AttachedOptimizers
from offload_strategy.engine.resources import Resources
from offload_strategy.io.bandwidth.history import MeasuredRate
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.plan_runtime.predicted_and_measured import (
    PEAK,
    ComparedFigure,
    PredictedStep,
    PredictionComparison,
    StepFigures,
    compare_prediction,
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
_WEIGHTS = "waiting for weights"


class StepLog:
    """Notes the sums of a run at the end of each step.

    A step ends with `optimizer.step()`; where no optimizer is offloaded, before the forward pass
    that comes after one that was hinted to be the last.
    """

    def __init__(
        self, recorder: Recorder, optimizers: AttachedOptimizers, on_step: Callable[[], None]
    ) -> None:
        self._recorder = recorder
        self._optimizers = optimizers
        self._on_step = on_step
        # Forward passes and sums of the run at the end of each step.
        self._sums: deque[tuple[int, StepFigures]] = deque(maxlen=_STEPS + 1)
        self._hooks = ExitStack()  # by which they are removed
        #: How often optimizers have stepped, and the number of forward passes.
        self.steps = self.passes = 0
        self._was_last = False

    def follow(self, optimizer: Optimizer | None) -> None:
        """Let steps end with those of an optimizer, if its states are offloaded."""
        if hasattr(optimizer, "_optimizer_step_post_hooks"):  # wrappers of frameworks have none
            assert optimizer is not None
            # The hook lies on the user's own optimizer, which may live longer.
            self._hooks.callback(optimizer.register_step_post_hook(WeakHook(self._stepped)).remove)

    def pass_begins(self, *, last: bool) -> None:
        """Note a forward pass, which is hinted to be the last of its step or not."""
        if self._was_last and not self._optimizers:
            self._step_over()
        self._was_last = last
        self.passes += 1

    def close(self) -> None:
        """Take the hooks off."""
        self._hooks.close()

    def middle_step(self) -> tuple[StepFigures, int] | None:
        """Return the middle one of the last steps by its time, and its passes; None if too few."""
        steps = [
            ({part: max(0.0, end[part] - begin[part]) for part in end}, after - before)
            for (before, begin), (after, end) in pairwise(self._sums)
        ]
        if len(steps) < _LEAST_STEPS:
            return None
        step, passes = sorted(steps, key=lambda step: step[0]["step"])[(len(steps) - 1) // 2]
        # Updates wait as well, within their time.
        step["updates"] = max(0.0, step["updates"] - step["waiting for updates"])
        if not step[_WEIGHTS]:
            del step[_WEIGHTS]
        waits = sum(seconds for part, seconds in step.items() if part.startswith("waiting"))
        return {**step, "computing": max(0.0, step["step"] - step["updates"] - waits)}, passes

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        self.steps += 1
        if self._optimizers.stream is not None:
            self._optimizers.stream.end_step()
        if isinstance(optimizer, OffloadedOptimizer):
            self._step_over()

    def _step_over(self) -> None:
        self._on_step()
        if self._sums and self._sums[-1][0] == self.passes:
            self._sums.pop()  # several optimizers, one after the other
        recorder = self._recorder
        reads = recorder.read_stall_seconds["activations"]
        sums = {
            "step": perf_counter(),
            "updates": recorder.update_seconds,
            "waiting for reads": reads,
            "waiting for room": recorder.stall_seconds["activations"] - reads,
            "waiting for updates": recorder.stall_seconds["optimizer"],
            _WEIGHTS: recorder.stall_seconds["parameters"],
        }
        for verb in ("read", "written"):
            moved = sum(recorder.client_bytes[client, verb] for client in _MOVED)
            sums[f"{verb} in a step"] = float(moved)
        self._sums.append((self.passes, sums))


def compare_step(
    profile: Profile,
    activations: ActivationOffload,
    resources: Resources,
    state_bytes: int,
    seen: tuple[StepFigures, int] | None,
) -> tuple[PredictedStep, PredictionComparison | None]:
    """Predict a step by what was known before the run; compare it with the middle step, `seen`."""
    observed, passes = seen or (None, 1)
    figures = activations.figures()
    host_states, host_room = _host_room(resources, state_bytes)
    queues = [queue for tier in resources.clients["activations"] for queue in tier.queues]
    rates, known = _rates_before(resources, queues, profile.paths[0])
    updates = tuple(
        replace(
            update,
            read_bytes=int(update.read_bytes * (1 - host_states)),
            written_bytes=int(update.written_bytes * (1 - host_states)),
        )
        for update in profile.updates
    )
    profile = replace(profile, paths=(rates,) if queues else (), updates=updates)
    plan = None if activations.planned is None else activations.planned.plan
    # In the order of saving, as a budget has it; what is saved last stays in host memory.
    leaving, left = [], int(figures["step_left_bytes"]) - host_room
    for number, tensor in enumerate(profile.tensors):
        if tensor.nbytes <= left:
            left -= tensor.nbytes
            leaving.append(number)
    step = PredictedStep(profile, leaving, None if plan is None else plan.limit, passes)
    if observed is None:
        return step, None
    if plan is not None:
        observed = {**observed, PEAK: figures["plan_peak_bytes"]}
    remarks = []
    if not known:
        remarks.append(
            "Of some path nothing was known before this run: the step is predicted with what the "
            "run itself has seen of it."
        )
    if _WEIGHTS in observed:
        remarks.append("Weights are streamed, of which nothing is predicted here.")
    paths = starmap(compared_path, resources.measured_paths.comparisons())
    predicted = step.figures()
    if plan is not None:
        # What the plan needs, and memory of freed tensors that yields to it near the limit.
        predicted = {**predicted, PEAK: predicted[PEAK] + figures["plan_kept_bytes"]}
    return step, compare_prediction(predicted, observed, paths, remarks)


def _rates_before(
    resources: Resources, queues: Sequence[PathQueue], seen: PathRates
) -> tuple[PathRates, bool]:
    """Return what paths together were known to carry before the run, and whether all of it was.

    A direction of which nothing was known is as the run itself has seen it.
    """
    known, rates = True, {Direction.READ: seen.read, Direction.WRITE: seen.write}
    for direction in Direction:
        found = [resources.measured_paths.expected(queue, direction) for queue in queues]
        some = [rate for rate in found if rate]
        known = known and len(some) == len(found)
        if some:
            rates[direction] = sum(some) * len(found) / len(some)
    return replace(seen, read=rates[Direction.READ], write=rates[Direction.WRITE]), known


def _host_room(resources: Resources, state_bytes: int) -> tuple[float, int]:
    """Return the share of states in host tiers, and the bytes of these for activations.

    States are there all the time, and come first.
    """
    states = _memory_tiers(resources.clients.get("optimizer", []))
    share = min(1.0, sum(tier.capacity for tier in states) / state_bytes) if state_bytes else 0.0
    tiers = _memory_tiers(resources.clients["activations"])
    taken = int(share * state_bytes) if any(tier in states for tier in tiers) else 0
    return share, max(0, sum(tier.capacity for tier in tiers) - taken)


def _memory_tiers(tiers: Sequence[Tier]) -> list[Tier]:
    """Return those before any path."""
    return list(takewhile(lambda tier: not tier.queues, tiers))


def compared_path(
    part: str, before: MeasuredRate | None, observed: MeasuredRate | None
) -> ComparedFigure:
    """Compare what was known of a direction of a path with what the run has seen."""
    if before is None:
        origin = "nothing was known of it"
    elif before.source == "probe":
        origin = "predicted by a probe"
    else:
        origin = f"predicted by {before.runs} earlier run{'s' if before.runs > 1 else ''}"
    seen = "was too rarely busy to tell"
    if observed is not None:
        seen = f"seen over {format_size(observed.nbytes)}"
    return ComparedFigure(
        part,
        None if before is None else before.rate,
        None if observed is None else observed.rate,
        "B/s",
        f"{origin}; {seen}",
    )
