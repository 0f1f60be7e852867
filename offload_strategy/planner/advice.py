"""What to change first: each line says what limits, and what a change would give.

Changes are tried out on the same equations, so a line never promises more than they do.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from offload_strategy.planner.hardware import Drives
from offload_strategy.planner.step_estimate import Fit, StepEstimate
from offload_strategy.units import format_size

#: A gain below this is not worth a line.
_WORTH = 1.02
#: Steps that are longer by less count as equally fast.
_AS_FAST = 1.01
#: Drives are tried up to so many.
_MOST_DRIVES = 64
#: Drives that last less than this are worth a line.
_WANTED_YEARS = 3.0


def advise(run: StepEstimate, rated_years: float | None) -> Iterator[str]:
    """Say what to change, what does not fit first.

    `rated_years` is the life of the drives by their maker's rating, None if it is not known.
    """
    for fit in run.fits:
        if not fit.ok:
            yield _make_room(run, fit)
    backward, forward = run.swap.limit("backward"), run.swap.limit("forward")
    limits = run.swap.time.resource_seconds
    if backward == "update":
        twice = _with(run, update_rate=2 * run.request.updates)
        yield (
            f"the update on the host limits the backward pass by "
            f"{_over(limits, 'update', 'backward'):.2f}x: faster or more cores "
            f"({run.seconds / twice.seconds:.2f}x with twice the rate)"
        )
    enough = _enough_drives(run)
    slow = [
        f"the {stage} pass by {_over(limits, name, stage):.2f}x"
        for name, stage in ((backward, "backward"), (forward, "forward"))
        if name.endswith("paths")
    ]
    if slow:
        count = run.request.drives.count
        one_more, many = (_with_drives(run, number).seconds for number in (count + 1, enough))
        yield (
            f"the drives limit {' and '.join(slow)}: one more makes the step "
            f"{run.seconds / one_more:.2f}x as fast, {enough} in all {run.seconds / many:.2f}x, "
            f"and more than that no faster"
        )
    for name in (backward, forward):
        if name.endswith("link"):
            yield (
                f"the link between host and device limits the step ({name} {limits[name]:.1f} s): "
                f"a wider one, or a smaller model"
            )
    if backward.endswith("computation"):
        yield (
            "the device limits the step, "
            f"{run.swap.flops / run.seconds / run.request.flops:.0%} busy: only a faster one, or "
            "several, makes it shorter"
        )
    else:
        yield from _larger_batch(run)
    yield from _drive_count(run, enough, rated_years)


def _make_room(run: StepEstimate, fit: Fit) -> str:
    missing = format_size(fit.needed_bytes - fit.available_bytes)
    if fit.what == "disk":
        each = run.request.drives.drive.capacity_bytes
        return (
            f"disk is {missing} too small: take {math.ceil(fit.needed_bytes / each)} of the drives"
        )
    if fit.what == "host memory":
        return f"host memory is {missing} too small: add as much, or take a smaller vocabulary"
    batch = _largest_batch(run)
    if batch:
        return f"device memory is {missing} too small: a batch of {batch} fits"
    return f"device memory is {missing} too small even for a batch of 1: take a larger device"


def _largest_batch(run: StepEstimate) -> int:
    """Return the largest batch below the one asked for that fits on the device, or 0."""
    memory = run.request.device.memory_bytes
    batches = range(1, run.request.work.batch)
    return bisect.bisect_right(
        batches, memory, key=lambda batch: _with_batch(run, batch).device_bytes(streams=True)
    )


def _over(limits: dict[str, float], name: str, stage: str) -> float:
    """Return by how much something takes longer than the next slowest of its stage."""
    others = [
        seconds
        for other, seconds in limits.items()
        if other != name and other.startswith("forward") == (stage == "forward")
    ]
    return limits[name] / max(others)


def _larger_batch(run: StepEstimate) -> Iterator[str]:
    """Propose a batch that hides states behind computation, if the device has memory for one."""
    best = None
    for factor in (2, 4, 8):
        larger = _with_batch(run, factor * run.request.work.batch)
        if not larger.fits[0].ok:
            break
        gain = larger.tokens_per_second / run.tokens_per_second
        if best is None or gain > best[1] * _WORTH:
            best = larger.request.work.batch, gain
    if best is not None and best[1] >= _WORTH:
        yield (
            f"the batch is too small to hide the states: one of {best[0]} gives {best[1]:.2f} "
            f"times the tokens per second"
        )


def _enough_drives(run: StepEstimate) -> int:
    """Return the fewest drives that are as fast as any number of them, to 1 %."""
    ideal = _with_drives(run, _MOST_DRIVES).seconds
    # More drives are never slower.
    return 1 + bisect.bisect_left(
        range(1, _MOST_DRIVES),
        True,
        key=lambda count: _with_drives(run, count).seconds <= _AS_FAST * ideal,
    )


def _drive_count(run: StepEstimate, enough: int, rated_years: float | None) -> Iterator[str]:
    """Say whether fewer drives are as fast, and how many last long enough."""
    count = run.request.drives.count
    if enough < count:
        slower = _with_drives(run, enough).seconds / run.seconds
        yield (
            f"{enough} of the {count} drives are as fast ({slower - 1:+.1%} of the step); the "
            f"others add space and life"
        )
    if rated_years is not None and rated_years < _WANTED_YEARS:
        yield (
            f"by their rating the drives last {rated_years:.2g} years of training without a pause: "
            f"for {_WANTED_YEARS:g} years take {math.ceil(count * _WANTED_YEARS / rated_years)} of "
            f"them, or drives that are rated for {_WANTED_YEARS / rated_years:.0f} times the bytes"
        )


def _with(run: StepEstimate, **changes: Any) -> StepEstimate:
    return StepEstimate(dataclasses.replace(run.request, **changes))


def _with_drives(run: StepEstimate, count: int) -> StepEstimate:
    return _with(run, drives=Drives(run.request.drives.drive, count))


def _with_batch(run: StepEstimate, batch: int) -> StepEstimate:
    return _with(run, work=dataclasses.replace(run.request.work, batch=batch))
