"""The last step as numbers: what activations and the optimizer did, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from offload_strategy.activations.saved_tensor_hooks import ActivationOffload
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.optimizer.subgroup_update import UpdateTiming
from offload_strategy.plan_runtime.profile import Profile, Update


def profile_step(
    activations: ActivationOffload, optimizers: Iterable[OffloadedOptimizer], *, shared_cores: bool
) -> Profile | None:
    """See `OffloadEngine.profile`.

    Args:
        activations: of the engine.
        optimizers: likewise.
        shared_cores: whether updates are computed on the cores that run the model.

    Returns:
        None if nothing is known yet.
    """
    start = activations.latest_pass_started_at()
    if start is None:
        return None
    timings = sorted(
        (timing for optimizer in optimizers for timing in optimizer.timings.since(start)),
        key=lambda timing: timing.begin,
    )
    # Updates run between the nodes of backward: their time is not the model's.
    profile = activations.profile([(timing.begin, timing.end) for timing in timings])
    if profile is None:
        return None
    updates = tuple(_update(timing, start, timings, profile) for timing in timings)
    return replace(profile, updates=updates, shared_cores=shared_cores)


def _update(
    timing: UpdateTiming, start: float, timings: Sequence[UpdateTiming], profile: Profile
) -> Update:
    before = sum(other.end - other.begin for other in timings if other.end <= timing.begin)
    ready = timing.begin - start - before
    return Update(
        # What `step()` does comes after all that is computed.
        ready_at=min(max(ready, profile.forward_seconds), profile.step_seconds),
        seconds=timing.end - timing.begin - timing.waited,
        read_bytes=timing.read_bytes,
        written_bytes=timing.written_bytes,
    )
